//! What a command writes, as a JSON reply or as server-sent events.
//!
//! Both follow one stream of the host's and drop it when they are dropped, which kills the command: so a client that
//! hangs up leaves nothing running. Both stop waiting a little after the command's own timeout, should the guest not
//! keep it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coppice_api::{ErrorClass, ExecReply, StreamChunk, StreamError, StreamExit};
use coppice_host::{ExecEvent, ExecExit, ExecStream, HostError};
use futures::{Stream, StreamExt as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::ApiError;
use crate::sse;
use crate::utf8::{Utf8Decoder, pieces};

/// Exit code of a reply whose command ran into its timeout after the status was sent; as timeout(1) has it.
const EXIT_TIMEOUT: i32 = 124;
/// Exit code of a reply whose command was killed for its output after the status was sent: 128 + SIGKILL.
const EXIT_KILLED: i32 = 137;
/// Most text of one event, bytes.
const MOST_PER_FRAME: usize = 64 << 10;

/// How a command is followed.
#[derive(Debug, Clone)]
pub(crate) struct Follow {
    /// The command's own.
    pub(crate) timeout: Duration,
    /// What the guest may take on top of it.
    pub(crate) grace: Duration,
    /// The server ends.
    pub(crate) stop: CancellationToken,
}

impl Follow {
    fn timed_out(&self) -> ApiError {
        ApiError::new(ErrorClass::Timeout, "exec_timeout", format!("command timeout after {}", seconds(self.timeout)))
    }

    async fn next(&self, stream: &mut ExecStream, deadline: Instant) -> Step {
        // Looked at first, so that a command which never pauses can't outlive them.
        if self.stop.is_cancelled() {
            return Step::Failed(interrupted("the server is shutting down"));
        }
        if Instant::now() >= deadline {
            return Step::Failed(self.timed_out());
        }
        tokio::select! {
            biased;
            item = stream.next() => match item {
                Some(Ok(ExecEvent::Stdout(bytes))) => Step::Stdout(bytes),
                Some(Ok(ExecEvent::Stderr(bytes))) => Step::Stderr(bytes),
                Some(Ok(ExecEvent::Exit(exit))) if exit.timed_out => Step::Failed(self.timed_out()),
                Some(Ok(ExecEvent::Exit(exit))) => Step::Exit(exit),
                Some(Err(error)) => Step::Failed(broken(error)),
                None => Step::Failed(interrupted("its output ended before its exit was known")),
            },
            () = self.stop.cancelled() => Step::Failed(interrupted("the server is shutting down")),
            () = tokio::time::sleep_until(deadline) => Step::Failed(self.timed_out()),
        }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout + self.grace
    }
}

/// One thing that a command did; the last two end it.
enum Step {
    Stdout(Bytes),
    Stderr(Bytes),
    Exit(ExecExit),
    Failed(ApiError),
}

fn interrupted(why: &str) -> ApiError {
    ApiError::new(ErrorClass::Internal, "exec_interrupted", format!("the command was interrupted: {why}"))
}

/// Errors after the start never say that nothing was started, whatever the host calls them: no client may repeat a
/// command.
fn broken(error: HostError) -> ApiError {
    match error.class() {
        ErrorClass::Transient | ErrorClass::Capacity => {
            ApiError::new(ErrorClass::Internal, error.code(), error.chain())
        }
        _ => error.into(),
    }
}

/// `2s`, `2.5s`.
fn seconds(duration: Duration) -> String {
    format!("{}s", duration.as_secs_f64())
}

/// Bounds of a buffered output.
#[derive(Debug, Clone)]
pub(crate) struct Bounds {
    /// Of each of the two streams, bytes.
    pub(crate) each: usize,
    /// Shared by all commands, KiB.
    pub(crate) total: Arc<Semaphore>,
}

/// What a command wrote until it ended, one way or another.
#[derive(Debug)]
pub(crate) struct Outcome {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    end: End,
    held: Option<OwnedSemaphorePermit>,
}

#[derive(Debug)]
enum End {
    Exit(ExecExit),
    TooLarge(String),
    Failed(ApiError),
}

/// A reply's JSON, which gives its share of the buffers back when it is sent or dropped.
struct Held {
    json: Vec<u8>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

impl Outcome {
    /// A command that did not start.
    pub(crate) fn not_started(error: HostError) -> Self {
        Self { stdout: Vec::new(), stderr: Vec::new(), end: End::Failed(error.into()), held: None }
    }

    /// The reply's JSON while the status is open.
    pub(crate) fn early(self) -> Result<Bytes, ApiError> {
        match self.end {
            End::Exit(exit) => Self::reply(self.stdout, self.stderr, exit.exit_code, exit.duration, self.held),
            End::TooLarge(why) => Err(ApiError::new(ErrorClass::TooLarge, "exec_output_too_large", why)
                .hint("use exec/stream, or let the command write to a file and read that")),
            End::Failed(error) => Err(error),
        }
    }

    /// The reply's JSON after the status was sent: a timeout is exit code 124, too much output 137, each with the
    /// reason in stderr. `None` for a failure that can't be told in a reply.
    pub(crate) fn late(self, took: Duration) -> Option<Bytes> {
        let (code, why) = match &self.end {
            End::Exit(_) => return self.early().ok(),
            End::TooLarge(why) => (EXIT_KILLED, why.clone()),
            End::Failed(error) if error.code() == "exec_timeout" => (EXIT_TIMEOUT, error.message().to_owned()),
            End::Failed(error) => {
                tracing::error!(error = error.message(), "an exec failed after its status was sent");
                return None;
            }
        };
        let mut stderr = self.stderr;
        if stderr.last().is_some_and(|last| *last != b'\n') {
            stderr.push(b'\n');
        }
        stderr.extend_from_slice(why.as_bytes());
        stderr.push(b'\n');
        Self::reply(self.stdout, stderr, code, took, self.held).ok()
    }

    fn reply(
        stdout: Vec<u8>,
        stderr: Vec<u8>,
        exit_code: i32,
        took: Duration,
        held: Option<OwnedSemaphorePermit>,
    ) -> Result<Bytes, ApiError> {
        let duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let reply = ExecReply { stdout: text(stdout), stderr: text(stderr), exit_code, duration_ms };
        let json = serde_json::to_vec(&reply)
            .map_err(|error| ApiError::new(ErrorClass::Internal, "internal", error.to_string()))?;
        Ok(Bytes::from_owner(Held { json, _permit: held }))
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// Follows a command to its end. The stream is dropped then, so a command that wrote too much is killed.
pub(crate) async fn collect(mut stream: ExecStream, follow: Follow, bounds: Bounds) -> Outcome {
    let deadline = follow.deadline();
    let mut outcome = Outcome { stdout: Vec::new(), stderr: Vec::new(), end: interrupted_end(), held: None };
    loop {
        let (into, bytes, name) = match follow.next(&mut stream, deadline).await {
            Step::Stdout(bytes) => (&mut outcome.stdout, bytes, "stdout"),
            Step::Stderr(bytes) => (&mut outcome.stderr, bytes, "stderr"),
            Step::Exit(exit) => {
                outcome.end = End::Exit(exit);
                return outcome;
            }
            Step::Failed(error) => {
                outcome.end = End::Failed(error);
                return outcome;
            }
        };
        let room = bounds.each.saturating_sub(into.len());
        let kept = bytes.get(..room).unwrap_or(&bytes);
        if !reserve(&mut outcome.held, into.len(), kept.len(), &bounds.total) {
            outcome.end = End::TooLarge("the server's buffers for command output are full: command killed".into());
            return outcome;
        }
        into.extend_from_slice(kept);
        if kept.len() < bytes.len() {
            outcome.end = End::TooLarge(format!("{name} is more than {} bytes: command killed", bounds.each));
            return outcome;
        }
    }
}

fn interrupted_end() -> End {
    End::Failed(interrupted("it was not followed"))
}

/// Takes the KiB that a buffer grows by from what all share.
fn reserve(held: &mut Option<OwnedSemaphorePermit>, have: usize, more: usize, total: &Arc<Semaphore>) -> bool {
    let grown = (have + more).div_ceil(1024) - have.div_ceil(1024);
    let Ok(kib) = u32::try_from(grown) else {
        return false;
    };
    if kib == 0 {
        return true;
    }
    match Arc::clone(total).try_acquire_many_owned(kib) {
        Ok(permit) => {
            match held {
                Some(held) => held.merge(permit),
                None => *held = Some(permit),
            }
            true
        }
        Err(_) => false,
    }
}

/// The events `stdout`, `stderr`, and `exit` or `error` as the last.
pub(crate) fn frames(stream: ExecStream, follow: Follow) -> impl Stream<Item = Bytes> + Send + 'static {
    let deadline = follow.deadline();
    let state = Frames {
        stream: Some(stream),
        follow,
        deadline,
        stdout: Utf8Decoder::default(),
        stderr: Utf8Decoder::default(),
        ready: VecDeque::new(),
    };
    futures::stream::unfold(state, |mut state| async move { state.next().await.map(|frame| (frame, state)) })
}

struct Frames {
    stream: Option<ExecStream>,
    follow: Follow,
    deadline: Instant,
    stdout: Utf8Decoder,
    stderr: Utf8Decoder,
    ready: VecDeque<Bytes>,
}

impl Frames {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            let stream = self.stream.as_mut()?;
            match self.follow.next(stream, self.deadline).await {
                Step::Stdout(bytes) => {
                    let text = self.stdout.push(&bytes);
                    self.chunks("stdout", &text);
                }
                Step::Stderr(bytes) => {
                    let text = self.stderr.push(&bytes);
                    self.chunks("stderr", &text);
                }
                Step::Exit(exit) => {
                    let duration_ms = u64::try_from(exit.duration.as_millis()).unwrap_or(u64::MAX);
                    self.end(sse::frame("exit", &StreamExit { exit_code: exit.exit_code, duration_ms }));
                }
                Step::Failed(error) => {
                    self.end(sse::frame("error", &StreamError { error: error.message().to_owned() }));
                }
            }
        }
    }

    fn chunks(&mut self, event: &str, text: &str) {
        let frames =
            pieces(text, MOST_PER_FRAME).map(|piece| sse::frame(event, &StreamChunk { chunk: piece.to_owned() }));
        self.ready.extend(frames);
    }

    fn end(&mut self, last: Bytes) {
        self.stream = None;
        let (stdout, stderr) = (self.stdout.finish(), self.stderr.finish());
        self.chunks("stdout", &stdout);
        self.chunks("stderr", &stderr);
        self.ready.push_back(last);
    }
}
