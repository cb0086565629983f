//! Server-sent events, as the WHATWG standard parses them: any line end, data of several lines, comments, fields of other
//! names. Pure: bytes in, events out, however the bytes were split. Bounded: an event beyond the limit is an error.

/// Largest event that is held: the pending line and its data.
pub const MAX_EVENT_BYTES: usize = 8 << 20;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Its name; `message` where the stream gives none.
    pub name: String,
    /// Its data lines, joined by line feeds.
    pub data: String,
}

/// The stream sent an event larger than [`MAX_EVENT_BYTES`], or than the limit given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is larger than {limit} bytes")]
pub struct TooLarge {
    /// Bytes.
    pub limit: usize,
}

/// Parser state between two pieces of a stream.
#[derive(Debug)]
pub struct Parser {
    limit: usize,
    line: Vec<u8>,
    name: String,
    data: String,
    has_data: bool,
    after_cr: bool,
    first_line: bool,
}

impl Default for Parser {
    fn default() -> Self {
        Self::with_limit(MAX_EVENT_BYTES)
    }
}

impl Parser {
    /// A parser that holds at most `limit` bytes.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self {
            limit,
            line: Vec::new(),
            name: String::new(),
            data: String::new(),
            has_data: false,
            after_cr: false,
            first_line: true,
        }
    }

    /// Takes the next piece of the stream; gives the events that it completes. An event that the stream's end cuts off is
    /// never given.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<Vec<Event>, TooLarge> {
        let mut events = Vec::new();
        while let Some((&first, rest)) = bytes.split_first() {
            if std::mem::take(&mut self.after_cr) && first == b'\n' {
                bytes = rest;
                continue;
            }
            let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.extend_line(bytes)?;
                break;
            };
            let (text, tail) = bytes.split_at(end);
            self.extend_line(text)?;
            self.after_cr = tail.first() == Some(&b'\r');
            bytes = tail.get(1..).unwrap_or_default();
            events.extend(self.end_line());
        }
        Ok(events)
    }

    fn extend_line(&mut self, text: &[u8]) -> Result<(), TooLarge> {
        let held = self.line.len() + self.data.len() + self.name.len();
        if held.saturating_add(text.len()) > self.limit {
            return Err(TooLarge { limit: self.limit });
        }
        self.line.extend_from_slice(text);
        Ok(())
    }

    fn end_line(&mut self) -> Option<Event> {
        let bytes = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&bytes);
        let line = if std::mem::take(&mut self.first_line) { line.trim_start_matches('\u{feff}') } else { &line };
        if line.is_empty() {
            return self.dispatch();
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.name),
            "data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.data.push('\n');
                }
                self.data.push_str(value);
            }
            // A comment (empty field name), `id`, `retry`, or something newer.
            _ => {}
        }
        None
    }

    fn dispatch(&mut self) -> Option<Event> {
        let name = std::mem::take(&mut self.name);
        let data = std::mem::take(&mut self.data);
        if !std::mem::take(&mut self.has_data) {
            return None;
        }
        Some(Event { name: if name.is_empty() { "message".into() } else { name }, data })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(pieces: &[&[u8]]) -> Vec<Event> {
        let mut parser = Parser::default();
        pieces.iter().flat_map(|piece| parser.push(piece).unwrap()).collect()
    }

    fn event(name: &str, data: &str) -> Event {
        Event { name: name.into(), data: data.into() }
    }

    #[test]
    fn reads_what_the_server_sends() {
        let text = "event: stdout\ndata: {\"chunk\":\"hi\"}\n\n: ping\n\nevent: exit\ndata: {\"exit_code\":3}\n\n";
        assert_eq!(
            parse(&[text.as_bytes()]),
            [event("stdout", "{\"chunk\":\"hi\"}"), event("exit", "{\"exit_code\":3}")]
        );
    }

    #[test]
    fn line_ends_names_and_data_are_those_of_the_standard() {
        let expected = [event("a", "1\n2\n"), event("message", " x")];
        for end in ["\n", "\r\n", "\r"] {
            let text = ["event:a", "data: 1", "data:2", "data", "id: 7", "", "", ":c", "data:  x", "", "data: cut off"];
            assert_eq!(parse(&[text.join(end).as_bytes()]), expected, "{end:?}");
        }
        assert_eq!(parse(&["\u{feff}data: x\n\n".as_bytes()]), [event("message", "x")]);
        assert_eq!(parse(&[b"event: lonely\n\ndata: x\n\n"]), [event("message", "x")]);
        assert_eq!(parse(&[b"data: \xff\n\n"]), [event("message", "\u{fffd}")]);
    }

    #[test]
    fn an_endless_event_is_an_error_and_not_memory() {
        let mut parser = Parser::with_limit(64);
        assert_eq!(parser.push(&[b'x'; 65]), Err(TooLarge { limit: 64 }));
        let mut parser = Parser::with_limit(64);
        let sent = (0..100).try_for_each(|_| parser.push(b"data: xxxxxxxx\n").map(drop));
        assert_eq!(sent, Err(TooLarge { limit: 64 }));
    }

    #[test]
    fn many_small_events_are_no_large_one() {
        let mut parser = Parser::with_limit(64);
        let count: usize = (0..100).map(|_| parser.push(b"data: xxxxxxxx\n\n").unwrap().len()).sum();
        assert_eq!(count, 100);
    }

    /// Lines as a stream might hold them, each with its line end.
    fn stream() -> impl Strategy<Value = Vec<u8>> {
        let line = prop_oneof![
            Just(String::new()),
            "event: ?[a-z]{0,6}",
            "data: ?[a-z\u{e9}\u{2028}:]{0,8}",
            ": ?[a-z]{0,4}",
            "[a-z:]{0,6}",
        ];
        let end = prop_oneof![Just("\n"), Just("\r\n"), Just("\r")];
        proptest::collection::vec((line, end), 0..40)
            .prop_map(|lines| lines.into_iter().flat_map(|(line, end)| (line + end).into_bytes()).collect())
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_events(bytes in stream(), cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..20)) {
            let whole = parse(&[&bytes]);
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let pieces: Vec<&[u8]> = at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(parse(&pieces), whole);
        }

        #[test]
        fn no_bytes_make_it_panic(pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 0..10)) {
            let mut parser = Parser::with_limit(100);
            for piece in &pieces {
                if parser.push(piece).is_err() {
                    break;
                }
            }
        }
    }
}
