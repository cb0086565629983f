//! The console log of a sandbox.

use bytes::Bytes;
use reqwest::Method;

use crate::exec::EventStream;
use crate::transport::QUICK;
use crate::{Client, ClientError};

const ACTION: &str = "read the log";
/// Hosts bound the log far below this.
const MAX_LOG: usize = 64 << 20;

impl Client {
    /// The log so far.
    pub async fn logs(&self, id: &str) -> Result<Bytes, ClientError> {
        let request = self.v1(Method::GET, &["sandboxes", id, "logs"]).query(&[("follow", "false")]).timeout(QUICK);
        let response = self.send(ACTION, request).await?;
        self.body(ACTION, response, MAX_LOG).await
    }

    /// Its last lines, and then what comes.
    pub async fn follow_logs(&self, id: &str) -> Result<LogStream, ClientError> {
        let request = self.v1(Method::GET, &["sandboxes", id, "logs"]).query(&[("follow", "true")]);
        let request = request.header(reqwest::header::ACCEPT, "text/event-stream");
        let response = self.send(ACTION, request).await?;
        Ok(LogStream { events: EventStream::new(self.clone(), ACTION, response) })
    }
}

/// A log being followed.
#[derive(Debug)]
pub struct LogStream {
    events: EventStream,
}

impl LogStream {
    /// The next line, with its line end if it has one; `None` when the sandbox has ended.
    pub async fn next(&mut self) -> Result<Option<String>, ClientError> {
        #[derive(serde::Deserialize)]
        struct Line {
            line: String,
        }
        while let Some(event) = self.events.next().await? {
            if let Ok(Line { line }) = serde_json::from_str(&event.data) {
                return Ok(Some(line));
            }
        }
        Ok(None)
    }
}
