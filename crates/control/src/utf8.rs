//! Bytes that arrive in pieces, as text that is never cut inside a character.
//!
//! Invalid bytes become U+FFFD, exactly where `String::from_utf8_lossy` over the whole would put it. It knows nothing
//! of lines or frames.

/// Decodes one stream. Holds back at most three bytes.
#[derive(Debug, Default)]
pub(crate) struct Utf8Decoder {
    tail: Vec<u8>,
}

impl Utf8Decoder {
    /// The text that is complete after these bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        let joined;
        let mut rest = if self.tail.is_empty() {
            bytes
        } else {
            self.tail.extend_from_slice(bytes);
            joined = std::mem::take(&mut self.tail);
            &joined[..]
        };
        let mut text = String::with_capacity(rest.len());
        loop {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    return text;
                }
                Err(error) => error,
            };
            let (valid, bad) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            let Some(length) = error.error_len() else {
                self.tail = bad.to_vec();
                return text;
            };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = bad.get(length..).unwrap_or_default();
        }
    }

    /// What an incomplete character at the end of the stream comes to.
    pub(crate) fn finish(&mut self) -> String {
        let tail = std::mem::take(&mut self.tail);
        String::from_utf8_lossy(&tail).into_owned()
    }
}

/// Cuts text into pieces of at most `most` bytes, between characters.
pub(crate) fn pieces(text: &str, most: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let at = if rest.len() <= most { rest.len() } else { rest.floor_char_boundary(most.max(4)) };
        let (piece, tail) = rest.split_at(at);
        rest = tail;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            any::<u8>().prop_map(|b| vec![b]),
            any::<char>().prop_map(|c| c.to_string().into_bytes().into_iter().take(2).collect()),
        ];
        prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn pieces_come_to_the_whole(bytes in bytes(), cuts in prop::collection::vec(1_usize..6, 1..60)) {
            let mut decoder = Utf8Decoder::default();
            let (mut text, mut rest) = (String::new(), &bytes[..]);
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                text.push_str(&decoder.push(now));
                prop_assert!(decoder.tail.len() <= 3);
                rest = later;
            }
            text.push_str(&decoder.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn pieces_are_bounded_and_complete(text in any::<String>(), most in 4_usize..20) {
            prop_assert!(pieces(&text, most).all(|p| !p.is_empty() && p.len() <= most));
            prop_assert_eq!(pieces(&text, most).collect::<String>(), text);
        }
    }
}
