//! The console log of a sandbox, whole or as it grows.

use std::collections::VecDeque;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use coppice_host::{ByteStream, HostError};
use futures::{Stream, StreamExt as _};
use http::header::CONTENT_TYPE;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::Answer;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::input::{Params, SandboxId};
use crate::openapi::{OfSandbox, Reads};
use crate::utf8::Utf8Decoder;
use crate::{Control, sse};

/// A line longer than this is cut, bytes.
const MAX_LINE: usize = 64 << 10;

/// A sandbox's console log.
///
/// As text, or with `follow` as server-sent events `line` with `{"line":"...\n"}`: the last few KiB first, then what
/// comes, until the sandbox ends. A comment is sent every 15 s of silence. There is one log: `stream` is accepted and
/// changes nothing.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/logs", tag = "exec", params(OfSandbox,
        ("follow" = Option<String>, Query, description = "`1`, `true` or `yes`"),
        ("tail" = Option<u64>, Query, description = "Only so many lines from the end; not with `follow`"),
        ("stream" = Option<String>, Query, description = "`both`, `stdout` or `stderr`: all the same log")),
    responses((status = 200, description = "The log.", content(
        (String = "text/plain"),
        (String = "text/event-stream", example = "event: line\ndata: {\"line\":\"login: \\n\"}\n\n"))), Reads))]
pub(crate) async fn logs(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    params: Params,
) -> Answer<Response> {
    let tail = tail(params.get("tail"))?;
    if follow(params.get("follow"))? {
        let stream = control.host().follow_logs(caller.workspace(), &id).await?;
        let frames = frames(stream, control.stop().soon.clone());
        return Ok(sse::response(frames, control.config().timing.keepalive));
    }
    let bytes = control.host().logs(caller.workspace(), &id, None).await?;
    let text = String::from_utf8_lossy(&bytes);
    let text = tail.map_or(&*text, |lines| last_lines(&text, lines)).to_owned();
    Ok(([(CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response())
}

fn follow(value: Option<&str>) -> Answer<bool> {
    match value.map(str::to_ascii_lowercase).as_deref() {
        Some("1" | "true" | "yes") => Ok(true),
        None | Some("" | "0" | "false" | "no") => Ok(false),
        Some(_) => Err(ApiError::invalid("invalid_follow", "follow must be `true` or `false`")),
    }
}

fn tail(value: Option<&str>) -> Answer<Option<usize>> {
    value
        .filter(|text| !text.is_empty())
        .map(|text| text.parse().map_err(|_| ApiError::invalid("invalid_tail", "tail must be a number of lines")))
        .transpose()
}

fn last_lines(text: &str, lines: usize) -> &str {
    let Some(before) = lines.checked_sub(1) else {
        return "";
    };
    let body = text.strip_suffix('\n').unwrap_or(text);
    body.rmatch_indices('\n').nth(before).map_or(text, |(at, _)| text.get(at + 1..).unwrap_or_default())
}

#[derive(Debug, Serialize)]
struct Line<'a> {
    line: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// The lines as they come. A break is told as a line too, since published clients show nothing else.
fn frames(stream: ByteStream, stop: CancellationToken) -> impl Stream<Item = Bytes> + Send + 'static {
    let state = Frames { stream: Some(stream), stop, lines: Lines::default(), ready: VecDeque::new() };
    futures::stream::unfold(state, |mut state| async move { state.next().await.map(|frame| (frame, state)) })
}

struct Frames {
    stream: Option<ByteStream>,
    stop: CancellationToken,
    lines: Lines,
    ready: VecDeque<Bytes>,
}

impl Frames {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            let stream = self.stream.as_mut()?;
            let item = tokio::select! {
                biased;
                () = self.stop.cancelled() => Some(Err("the server is shutting down".to_owned())),
                item = stream.next() => item.map(|item| item.map_err(told)),
            };
            match item {
                Some(Ok(bytes)) => {
                    let lines = self.lines.push(&bytes);
                    self.ready.extend(lines.iter().map(|line| sse::frame("line", &Line { line, error: None })));
                }
                end => {
                    self.stream = None;
                    let rest = self.lines.finish();
                    self.ready.extend(rest.map(|line| sse::frame("line", &Line { line: &line, error: None })));
                    if let Some(Err(error)) = end {
                        let line = format!("[coppice: the log is not followed any more: {error}]\n");
                        self.ready.push_back(sse::frame("error", &Line { line: &line, error: Some(&error) }));
                    }
                }
            }
        }
    }
}

fn told(error: HostError) -> String {
    ApiError::from(error).message().to_owned()
}

/// Bytes of a console as lines, each with its `\n`, without what a reader could take for the end of a line.
#[derive(Debug, Default)]
struct Lines {
    decoder: Utf8Decoder,
    partial: String,
}

impl Lines {
    fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let text = self.decoder.push(bytes);
        self.add(&text)
    }

    fn add(&mut self, text: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for character in text.chars() {
            match character {
                '\n' => {
                    // Consoles end lines with CR LF.
                    let length = self.partial.trim_end_matches('\r').len();
                    self.partial.truncate(length);
                    self.partial.push('\n');
                    lines.push(std::mem::take(&mut self.partial));
                }
                '\x0b' | '\x0c' | '\x1c'..='\x1e' => {}
                other => self.partial.push(other),
            }
            if self.partial.len() >= MAX_LINE {
                lines.push(std::mem::take(&mut self.partial));
            }
        }
        lines
    }

    fn finish(&mut self) -> Option<String> {
        let text = self.decoder.finish();
        self.partial.push_str(&text);
        Some(std::mem::take(&mut self.partial)).filter(|line| !line.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails() {
        assert_eq!(last_lines("a\nb\nc\n", 2), "b\nc\n");
        assert_eq!(last_lines("a\nb\nc", 2), "b\nc");
        assert_eq!(last_lines("a\n", 5), "a\n");
        assert_eq!(last_lines("a\nb\n", 0), "");
        assert_eq!(last_lines("", 3), "");
    }

    #[test]
    fn lines_are_whole_and_bounded() {
        let mut lines = Lines::default();
        assert!(lines.push(b"a\x0bb\xc3").is_empty());
        assert_eq!(lines.push(b"\xa9\r\n\x1c42\nlog"), ["ab\u{e9}\n", "42\n"]);
        assert_eq!(lines.finish().as_deref(), Some("log"));
        assert_eq!(lines.finish(), None);
        let long = lines.push(&vec![b'x'; MAX_LINE * 2 + 1]);
        assert_eq!(long.iter().map(String::len).collect::<Vec<_>>(), [MAX_LINE, MAX_LINE]);
    }
}
