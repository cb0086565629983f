//! A session with the agent in a guest: one HTTP/2 connection over the VM's channel.
//!
//! Cheap to clone; ends with the channel, or when the VM's handle opens another session. The helpers here are what bake
//! and tests need; the host's own exec and file streaming use [`GuestSession::client`]. This module does not choose ports
//! or wait for guests: that is the engine's.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use coppice_guest_proto::limits;
use coppice_guest_proto::session::{Hello, PREAMBLE_LEN, Welcome};
use coppice_guest_proto::v1::guest_client::GuestClient;
use coppice_guest_proto::v1::write_file_input::Input as WriteInput;
use coppice_guest_proto::v1::{
    ExecInput, ExecStart, HoldRequest, ReadFileRequest, ReleaseRequest, ResumeReply, ResumeRequest, WriteFileEnd,
    WriteFileInput, WriteFileStart, exec_input, exec_output,
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::{Channel, Endpoint};
use uuid::Uuid;

use crate::SessionError;

/// Most output of each stream that [`GuestSession::run`] keeps; the rest is dropped.
const MAX_RUN_OUTPUT: usize = 8 << 20;
/// How long a guest may take to answer a word about its processes, beyond what it waits for them.
const HOLD_GRACE: Duration = Duration::from_secs(5);
/// How long after its own timeout a command may take to be reported.
const RUN_GRACE: Duration = Duration::from_secs(10);

/// An open session.
#[derive(Debug, Clone)]
pub struct GuestSession {
    id: Uuid,
    client: GuestClient<Channel>,
    closed: watch::Receiver<bool>,
}

/// Why a call into the guest failed.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The agent answered with an error.
    #[error("the guest answered {code:?}: {message}", code = .0.code(), message = .0.message())]
    Status(Box<tonic::Status>),
    /// The agent did not answer in time.
    #[error("the guest did not answer within {0:?}")]
    Timeout(Duration),
    /// The agent answered something else than was asked.
    #[error("the guest broke the protocol: {0}")]
    Protocol(&'static str),
    /// It sends more than was asked for.
    #[error("the guest sends more than {0} bytes")]
    TooLarge(usize),
}

impl From<tonic::Status> for GuestError {
    fn from(status: tonic::Status) -> Self {
        Self::Status(Box::new(status))
    }
}

/// How a command that was run by [`GuestSession::run`] ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunOutput {
    /// The exit code, or 128 + signal number.
    pub exit_code: i32,
    /// Whether it was killed at its timeout.
    pub timed_out: bool,
    /// What it wrote, at most 8 MiB.
    pub stdout: Vec<u8>,
    /// What it wrote, at most 8 MiB.
    pub stderr: Vec<u8>,
}

impl GuestSession {
    /// Opens a session on a fresh byte stream to the agent: preamble, then HTTP/2. Waits as long as the guest takes; the
    /// caller bounds it. The session ends when `end` is cancelled.
    ///
    /// # Errors
    /// What arrived instead of a welcome.
    pub async fn open<S>(mut stream: S, end: CancellationToken) -> Result<Self, SessionError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let id = Uuid::new_v4();
        stream.write_all(&Hello { session: id }.encode()).await?;
        let mut answer = [0; PREAMBLE_LEN];
        stream.read_exact(&mut answer).await?;
        if Welcome::decode(&answer)?.session != id {
            return Err(SessionError::Preamble(coppice_guest_proto::session::PreambleError::Magic));
        }
        let (alive, closed) = watch::channel(false);
        let stream = Watched { stream, ended: Box::pin(end.cancelled_owned()), alive };
        let channel = http2(stream).await?;
        let client = GuestClient::new(channel)
            .max_decoding_message_size(limits::MAX_MESSAGE)
            .max_encoding_message_size(limits::MAX_MESSAGE);
        Ok(Self { id, client, closed })
    }

    /// Id of the session, new for every one.
    #[must_use]
    pub fn id(&self) -> Uuid {
        self.id
    }

    /// The generated client, with message limits set. Clones share the connection.
    #[must_use]
    pub fn client(&self) -> GuestClient<Channel> {
        self.client.clone()
    }

    /// Resolves when the session has ended: the VM is gone, the guest closed it, or another session took its place.
    pub async fn closed(&self) {
        let mut closed = self.closed.clone();
        // An error says that the sender is gone, and with it the stream.
        drop(closed.wait_for(|ended| *ended).await);
    }

    /// Whether the session has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        *self.closed.borrow() || self.closed.has_changed().is_err()
    }

    /// The resume handshake. Succeeds only when the agent echoes the generation that it was given.
    ///
    /// # Errors
    /// [`GuestError::Protocol`] when it answers with another generation.
    pub async fn resume(&self, request: ResumeRequest, deadline: Instant) -> Result<ResumeReply, GuestError> {
        let generation = request.generation.clone();
        let reply = within(deadline, self.client().resume(request)).await?.into_inner();
        if reply.generation != generation {
            return Err(GuestError::Protocol("the handshake's answer has another generation"));
        }
        Ok(reply)
    }

    /// Holds every process of the guest but its agent: all, or none when it fails.
    ///
    /// # Errors
    /// When the guest can't, or some process did not stand still in time.
    pub async fn hold(&self) -> Result<(), GuestError> {
        let wait = Duration::from_millis(u64::from(limits::MAX_HOLD_WAIT_MS));
        let request = HoldRequest { max_wait_ms: limits::MAX_HOLD_WAIT_MS };
        // Twice the guest's own limit: first for what is being started, then for what runs.
        within(Instant::now() + 2 * wait + HOLD_GRACE, self.client().hold(request)).await.map(drop)
    }

    /// Lets them go on, if they were held.
    ///
    /// # Errors
    /// When the guest did not say that it has.
    pub async fn release(&self) -> Result<(), GuestError> {
        within(Instant::now() + HOLD_GRACE, self.client().release(ReleaseRequest {})).await.map(drop)
    }

    /// Runs one command to its end and keeps a bounded part of its output.
    ///
    /// # Errors
    /// When it could not be run, or its end was not reported in time.
    pub async fn run(&self, argv: &[&str], timeout: Duration) -> Result<RunOutput, GuestError> {
        let start = ExecStart {
            argv: argv.iter().map(|a| (*a).to_owned()).collect(),
            timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            ..ExecStart::default()
        };
        let input = tokio_stream::once(ExecInput { input: Some(exec_input::Input::Start(start)) });
        within(Instant::now() + timeout + RUN_GRACE, async move {
            let mut output = self.client().exec(input).await?.into_inner();
            let mut run = RunOutput { exit_code: 0, timed_out: false, stdout: Vec::new(), stderr: Vec::new() };
            while let Some(message) = output.message().await? {
                match message.output {
                    Some(exec_output::Output::Stdout(data)) => keep(&mut run.stdout, &data),
                    Some(exec_output::Output::Stderr(data)) => keep(&mut run.stderr, &data),
                    Some(exec_output::Output::Exit(exit)) => {
                        run.exit_code = exit.exit_code;
                        run.timed_out = exit.timed_out;
                        return Ok(Ok(run));
                    }
                    Some(exec_output::Output::Started(_)) | None => {}
                }
            }
            Ok(Err(GuestError::Protocol("the output of a command ended without its exit")))
        })
        .await?
    }

    /// Reads one file, of at most `limit` bytes.
    ///
    /// # Errors
    /// [`GuestError::TooLarge`] when it is larger.
    pub async fn read_file(&self, path: &str, limit: usize, deadline: Instant) -> Result<Vec<u8>, GuestError> {
        let request = ReadFileRequest { path: path.to_owned(), offset: 0, length: 0 };
        within(deadline, async {
            let mut chunks = self.client().read_file(request).await?.into_inner();
            let mut data = Vec::new();
            while let Some(chunk) = chunks.message().await? {
                if data.len() + chunk.data.len() > limit {
                    return Ok(Err(GuestError::TooLarge(limit)));
                }
                data.extend_from_slice(&chunk.data);
            }
            Ok(Ok(data))
        })
        .await?
    }

    /// Writes one file; `mode` 0 keeps the mode of what it replaces.
    ///
    /// # Errors
    /// When it could not be written, or the agent wrote another number of bytes.
    pub async fn write_file(&self, path: &str, data: Bytes, mode: u32, deadline: Instant) -> Result<(), GuestError> {
        let expected = data.len();
        let start = WriteInput::Start(WriteFileStart { path: path.to_owned(), mode });
        let chunks = (0..expected)
            .step_by(limits::CHUNK)
            .map(move |at| WriteInput::Data(data.slice(at..expected.min(at.saturating_add(limits::CHUNK))).to_vec()));
        // Without the end the agent takes it for a sender that broke off, and writes nothing.
        let all = std::iter::once(start).chain(chunks).chain([WriteInput::End(WriteFileEnd {})]);
        let input = all.map(|input| WriteFileInput { input: Some(input) });
        let reply = within(deadline, self.client().write_file(tokio_stream::iter(input))).await?.into_inner();
        if usize::try_from(reply.bytes).ok() != Some(expected) {
            return Err(GuestError::Protocol("the guest wrote another number of bytes"));
        }
        Ok(())
    }
}

fn keep(buffer: &mut Vec<u8>, data: &[u8]) {
    let room = MAX_RUN_OUTPUT.saturating_sub(buffer.len()).min(data.len());
    buffer.extend_from_slice(data.get(..room).unwrap_or_default());
}

async fn within<T>(deadline: Instant, call: impl Future<Output = Result<T, tonic::Status>>) -> Result<T, GuestError> {
    let left = deadline.saturating_duration_since(Instant::now());
    match tokio::time::timeout(left, call).await {
        Ok(answer) => Ok(answer?),
        Err(_elapsed) => Err(GuestError::Timeout(left)),
    }
}

/// HTTP/2 over one stream. When it breaks the channel stays broken: the connector has nothing to give a second time.
async fn http2<S>(stream: S) -> Result<Channel, SessionError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let slot = Arc::new(std::sync::Mutex::new(Some(TokioIo::new(stream))));
    let connector = tower::service_fn(move |_uri: tonic::transport::Uri| {
        let stream = slot.lock().ok().and_then(|mut slot| slot.take());
        std::future::ready(stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)))
    });
    Endpoint::from_static("http://guest")
        .initial_stream_window_size(limits::STREAM_WINDOW)
        .initial_connection_window_size(limits::CONNECTION_WINDOW)
        .connect_with_connector(connector)
        .await
        .map_err(|error| SessionError::Io(io::Error::other(error)))
}

/// The stream of a session: ends when told to, and tells when it has.
struct Watched<S> {
    stream: S,
    ended: Pin<Box<WaitForCancellationFutureOwned>>,
    alive: watch::Sender<bool>,
}

impl<S> Watched<S> {
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.ended.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::Error::from(io::ErrorKind::ConnectionAborted)),
            Poll::Pending => Ok(()),
        }
    }
}

impl<S> Drop for Watched<S> {
    fn drop(&mut self) {
        self.alive.send_replace(true);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
