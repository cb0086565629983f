//! Running commands: whole answers and streams.

use std::collections::VecDeque;
use std::time::Duration;

use coppice_api::{ExecReply, ExecRequest, StreamChunk, StreamError, StreamExit};
use reqwest::{Method, Response};
use serde::de::DeserializeOwned;

use crate::error::mentions_timeout;
use crate::sse::{Event, Parser};
use crate::{Client, ClientError};

const ACTION: &str = "run the command";
/// Beyond the command's own deadline.
const GRACE: Duration = Duration::from_secs(60);

/// One thing that a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// It wrote to standard output.
    Stdout(String),
    /// It wrote to standard error.
    Stderr(String),
    /// It ended; nothing follows.
    Exit(StreamExit),
}

impl Client {
    /// Runs a command and gives all that it wrote. A deadline that passes is an error for which
    /// [`ClientError::is_timeout`] holds.
    pub async fn exec(&self, id: &str, request: &ExecRequest) -> Result<ExecReply, ClientError> {
        let mut call = self.v1(Method::POST, &["sandboxes", id, "exec"]).json(request);
        if let Some(timeout) = request.timeout_seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) {
            call = call.timeout(timeout.saturating_add(GRACE));
        }
        self.json(ACTION, call).await
    }

    /// Runs a command and gives what it writes as it comes. Dropping the stream ends the command.
    pub async fn exec_stream(&self, id: &str, request: &ExecRequest) -> Result<ExecStream, ClientError> {
        let call = self.v1(Method::POST, &["sandboxes", id, "exec", "stream"]);
        let call = call.header(reqwest::header::ACCEPT, "text/event-stream").json(request);
        let response = self.send(ACTION, call).await?;
        Ok(ExecStream { events: EventStream::new(self.clone(), ACTION, response), ended: false })
    }
}

/// What a command does, as it does it.
#[derive(Debug)]
pub struct ExecStream {
    events: EventStream,
    ended: bool,
}

impl ExecStream {
    /// The next thing; `None` after the exit or an error.
    pub async fn next(&mut self) -> Option<Result<ExecEvent, ClientError>> {
        if self.ended {
            return None;
        }
        let event = self.read().await;
        self.ended = !matches!(event, Ok(ExecEvent::Stdout(_) | ExecEvent::Stderr(_)));
        Some(event)
    }

    async fn read(&mut self) -> Result<ExecEvent, ClientError> {
        while let Some(event) = self.events.next().await? {
            match event.name.as_str() {
                "stdout" => return Ok(ExecEvent::Stdout(parse::<StreamChunk>(&event)?.chunk)),
                "stderr" => return Ok(ExecEvent::Stderr(parse::<StreamChunk>(&event)?.chunk)),
                "exit" => return parse(&event).map(ExecEvent::Exit),
                "error" => {
                    let message = parse::<StreamError>(&event)?.error;
                    return Err(ClientError::Exec { timed_out: mentions_timeout(&message), message });
                }
                _ => {}
            }
        }
        Err(ClientError::Interrupted)
    }
}

fn parse<T: DeserializeOwned>(event: &Event) -> Result<T, ClientError> {
    serde_json::from_str(&event.data)
        .map_err(|error| ClientError::Decode { action: ACTION, reason: format!("event {}: {error}", event.name) })
}

/// The server-sent events of one answer.
#[derive(Debug)]
pub(crate) struct EventStream {
    client: Client,
    action: &'static str,
    response: Response,
    parser: Parser,
    ready: VecDeque<Event>,
}

impl EventStream {
    pub(crate) fn new(client: Client, action: &'static str, response: Response) -> Self {
        Self { client, action, response, parser: Parser::default(), ready: VecDeque::new() }
    }

    /// The next event; `None` at the end of the answer.
    pub(crate) async fn next(&mut self) -> Result<Option<Event>, ClientError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let chunk = self.response.chunk().await.map_err(|error| self.client.transport(self.action, error))?;
            let Some(chunk) = chunk else { return Ok(None) };
            let events = self.parser.push(&chunk);
            let action = self.action;
            self.ready.extend(events.map_err(|error| ClientError::Decode { action, reason: error.to_string() })?);
        }
    }
}
