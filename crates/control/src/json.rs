//! JSON in ASCII: every character above U+007F as `\uXXXX`.
//!
//! Published clients split server-sent events with `str.splitlines()`, which cuts at U+0085, U+2028 and U+2029, and
//! guess charsets of error bodies. ASCII is safe from both. Ordinary replies need none of this and are plain UTF-8
//! JSON.

use std::io;

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// The value on one line, in ASCII.
///
/// # Errors
/// When the value's own `Serialize` fails, which no wire type's does.
pub(crate) fn ascii<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, serde_json::Error> {
    let mut bytes = Vec::with_capacity(128);
    value.serialize(&mut Serializer::with_formatter(&mut bytes, Ascii))?;
    Ok(bytes)
}

struct Ascii;

impl Formatter for Ascii {
    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let mut rest = fragment;
        while let Some(at) = rest.find(|c: char| !c.is_ascii()) {
            let (plain, tail) = rest.split_at(at);
            writer.write_all(plain.as_bytes())?;
            let mut chars = tail.chars();
            if let Some(character) = chars.next() {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
            rest = chars.as_str();
        }
        writer.write_all(rest.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn is_ascii_and_means_the_same(text in any::<String>()) {
            let bytes = ascii(&text).unwrap();
            prop_assert!(bytes.is_ascii());
            prop_assert!(!bytes.contains(&b'\n'));
            prop_assert_eq!(serde_json::from_slice::<String>(&bytes).unwrap(), text);
        }
    }
}
