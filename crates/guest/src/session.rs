//! Sessions on one byte stream: waits for a [`Hello`], answers it, and serves HTTP/2 until the session ends.
//!
//! A stream can hold left-over bytes of an earlier peer, and a session can break in the middle of a frame. So what is
//! not a hello is skipped until one is found ([`find_hello`]), and the last bytes that a broken session read are searched
//! too: they can be the hello of the host that has taken over.
//!
//! **Cancelled or lost?** A call that the host cancels kills its command; a session that is lost must not. The handlers
//! of a session are therefore polled by the session's own task, always after the connection itself, and the session's
//! token is cancelled before any of them is dropped: a handler that is dropped while the token is not cancelled was
//! cancelled by the host. Handlers do no blocking work in this task.
//!
//! It does not know what the stream is (a virtio-serial port, a unix socket, a duplex in a test).

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BytesMut};
use coppice_guest_proto::{
    limits,
    session::{Hello, PREAMBLE_LEN, PreambleError, Welcome},
    v1::guest_server::GuestServer,
};
use futures::{
    future::BoxFuture,
    stream::{FuturesUnordered, StreamExt},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;
use tonic::codegen::Service as _;
use uuid::Uuid;

use crate::service::GuestService;

/// Start of the HTTP/2 client preface (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI ";
/// Bytes without a hello in them after which a stream is given up: more than one session can have had in flight.
const MAX_GARBAGE: usize = limits::CONNECTION_WINDOW as usize + 2 * limits::MAX_MESSAGE;
const READ_SIZE: usize = 16 << 10;

/// Why a stream is not served any more, other than by its end.
#[derive(Debug)]
pub enum ServeError {
    /// Reading or writing failed.
    Io(io::Error),
    /// The host speaks another version of the protocol.
    Preamble(PreambleError),
    /// Too much that is not the start of a session.
    Garbage,
}

impl std::fmt::Display for ServeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => write!(f, "the stream failed: {error}"),
            Self::Preamble(error) => error.fmt(f),
            Self::Garbage => write!(f, "{MAX_GARBAGE} bytes without the start of a session"),
        }
    }
}

impl std::error::Error for ServeError {}

impl From<io::Error> for ServeError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Serves session after session on a stream, until it ends.
///
/// The start of a session on one stream of a service ends the session on any other, and the serving of its stream.
pub async fn serve<S>(stream: S, service: &GuestService) -> Result<(), ServeError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let mut link = Link { stream, read_ahead: BytesMut::new(), tail: Tail::default(), token: None, ended: false };
    loop {
        let Some(hello) = link.hello().await? else { return Ok(()) };
        let token = service.begin_session();
        link.token = Some(token.clone());
        link.write_all(&Welcome { session: hello.session }.encode()).await?;
        link.flush().await?;
        match link.starts_http2().await? {
            None => return Ok(()),
            // Not HTTP/2: another hello, or garbage before one. It is still there to be read.
            Some(false) => continue,
            Some(true) => {}
        }
        let ended = serve_http2(&mut link, service, &token, hello.session).await;
        if link.ended || ended == Ended::Superseded {
            return Ok(());
        }
        link.resynchronize();
    }
}

/// How a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// Another one has started.
    Superseded,
    /// The host has closed it.
    Closed,
    /// The stream has ended or failed, or what came was not HTTP/2.
    Broken,
}

/// Serves one HTTP/2 connection until it ends, fails, or is superseded. Cancels `token` before any handler is dropped.
async fn serve_http2<S>(link: &mut Link<S>, service: &GuestService, token: &CancellationToken, id: Uuid) -> Ended
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let server = GuestServer::new(service.for_session(token.clone()))
        .max_decoding_message_size(limits::MAX_MESSAGE)
        .max_encoding_message_size(limits::MAX_MESSAGE);
    let handler = hyper::service::service_fn(move |request| server.clone().call(request));
    let (spawn, mut spawned) = mpsc::unbounded_channel();
    let mut http2 = hyper::server::conn::http2::Builder::new(SessionExecutor(spawn));
    http2
        .timer(TokioTimer::new())
        .initial_stream_window_size(limits::STREAM_WINDOW)
        .initial_connection_window_size(limits::CONNECTION_WINDOW)
        .max_concurrent_streams(limits::MAX_STREAMS)
        // A host may cancel any number of calls at once.
        .max_pending_accept_reset_streams(usize::try_from(limits::MAX_STREAMS).ok())
        .max_send_buf_size(limits::CHUNK);
    let mut connection = std::pin::pin!(http2.serve_connection(TokioIo::new(link), handler));
    let mut handlers = FuturesUnordered::new();
    let ended = loop {
        tokio::select! {
            biased;
            () = token.cancelled() => break Ended::Superseded,
            result = &mut connection => break match result {
                Ok(()) => Ended::Closed,
                Err(error) => {
                    tracing::debug!("session {id}: {error}");
                    Ended::Broken
                }
            },
            Some(handler) = spawned.recv() => handlers.push(handler),
            Some(()) = handlers.next(), if !handlers.is_empty() => {}
        }
    };
    token.cancel();
    tracing::debug!("session {id} ended: {ended:?}");
    ended
}

/// Hands hyper's tasks to the session, which polls them itself.
#[derive(Clone)]
struct SessionExecutor(mpsc::UnboundedSender<BoxFuture<'static, ()>>);

impl<F> hyper::rt::Executor<F> for SessionExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        // The receiver is gone only when the session is, and its handlers with it. The number of them is bounded by
        // MAX_STREAMS.
        self.0.send(Box::pin(future)).ok();
    }
}

/// The last bytes that were read, enough for a hello.
#[derive(Default)]
struct Tail {
    bytes: [u8; PREAMBLE_LEN],
    len: usize,
}

impl Tail {
    fn push(&mut self, read: &[u8]) {
        let read = &read[read.len().saturating_sub(PREAMBLE_LEN)..];
        let keep = self.len.min(PREAMBLE_LEN - read.len());
        self.bytes.copy_within(self.len - keep..self.len, 0);
        self.bytes[keep..keep + read.len()].copy_from_slice(read);
        self.len = keep + read.len();
    }

    fn take(&mut self) -> ([u8; PREAMBLE_LEN], usize) {
        (self.bytes, std::mem::take(&mut self.len))
    }
}

/// A stream with what was read ahead of a session, and with the mark on the session that it has ended.
struct Link<S> {
    stream: S,
    /// Read from the stream, not yet consumed.
    read_ahead: BytesMut,
    tail: Tail,
    /// Of the session that is being served.
    token: Option<CancellationToken>,
    /// The stream has come to its end, or failed.
    ended: bool,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Link<S> {
    /// The next hello; the last one of those that have arrived, since the host has given up the others. `None`: end of stream.
    async fn hello(&mut self) -> Result<Option<Hello>, ServeError> {
        let mut garbage = 0;
        loop {
            let found = find_hello(&self.read_ahead);
            garbage += found.skip;
            self.read_ahead.advance(found.skip);
            match found.hello {
                Some(Ok(hello)) => {
                    self.read_ahead.advance(PREAMBLE_LEN);
                    return Ok(Some(hello));
                }
                Some(Err(error)) => {
                    self.read_ahead.advance(PREAMBLE_LEN);
                    return Err(ServeError::Preamble(error));
                }
                None if garbage > MAX_GARBAGE => return Err(ServeError::Garbage),
                None => {}
            }
            if !self.fill().await? {
                return Ok(None);
            }
        }
    }

    /// Whether what comes next is HTTP/2. `None`: end of stream.
    async fn starts_http2(&mut self) -> io::Result<Option<bool>> {
        while self.read_ahead.len() < PREFACE.len() {
            if !self.fill().await? {
                return Ok(None);
            }
        }
        Ok(Some(self.read_ahead.starts_with(PREFACE)))
    }

    /// Reads some more. False at the end of the stream.
    async fn fill(&mut self) -> io::Result<bool> {
        self.read_ahead.reserve(READ_SIZE);
        Ok(self.stream.read_buf(&mut self.read_ahead).await? > 0)
    }

    /// After a broken session: what it read last is looked at again.
    fn resynchronize(&mut self) {
        self.token = None;
        let (bytes, len) = self.tail.take();
        let rest = std::mem::take(&mut self.read_ahead);
        self.read_ahead.extend_from_slice(&bytes[..len]);
        self.read_ahead.extend_from_slice(&rest);
    }

    fn end(&mut self) {
        self.ended = true;
        if let Some(token) = &self.token {
            token.cancel();
        }
    }

    fn note_write<T>(&mut self, result: io::Result<T>) -> Poll<io::Result<T>> {
        if result.is_err() {
            self.end();
        }
        Poll::Ready(result)
    }
}

/// What a buffer that should hold a hello holds.
struct Found {
    /// Bytes before it, or that can't be part of one.
    skip: usize,
    hello: Option<Result<Hello, PreambleError>>,
}

/// Looks for the last complete hello; failing that, for one of another version, or for where an incomplete one may start.
fn find_hello(bytes: &[u8]) -> Found {
    let mut other = None;
    let windows = (bytes.len() + 1).saturating_sub(PREAMBLE_LEN);
    for at in (0..windows).rev() {
        let Some((window, _)) = bytes[at..].split_first_chunk::<PREAMBLE_LEN>() else { continue };
        match Hello::decode(window) {
            Ok(hello) => return Found { skip: at, hello: Some(Ok(hello)) },
            Err(PreambleError::Magic) => {}
            Err(error) => other = Some(Found { skip: at, hello: Some(Err(error)) }),
        }
    }
    other.unwrap_or(Found { skip: windows, hello: None })
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Link<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        if this.read_ahead.is_empty() {
            let result = ready!(Pin::new(&mut this.stream).poll_read(cx, buf));
            if result.is_err() || buf.filled().len() == before {
                this.end();
            }
            result?;
        } else {
            let n = this.read_ahead.len().min(buf.remaining());
            buf.put_slice(&this.read_ahead[..n]);
            this.read_ahead.advance(n);
        }
        this.tail.push(&buf.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Link<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.stream).poll_write(cx, buf));
        self.note_write(result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = ready!(Pin::new(&mut self.stream).poll_flush(cx));
        self.note_write(result)
    }

    /// A session that ends does not close the stream: the next one comes on it.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_last_hello_is_found_in_any_garbage(
            before in proptest::collection::vec(prop_oneof![Just(b'C'), any::<u8>()], 0..200),
            rest in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let hello = Hello { session: Uuid::new_v4() };
            let mut bytes = before.clone();
            bytes.extend(Hello { session: Uuid::new_v4() }.encode());
            bytes.extend(hello.encode());
            bytes.extend(rest);
            let found = find_hello(&bytes);
            prop_assert_eq!(found.skip, before.len() + PREAMBLE_LEN);
            prop_assert_eq!(found.hello, Some(Ok(hello)));
        }

        #[test]
        fn a_hello_in_pieces_is_never_skipped(before in proptest::collection::vec(any::<u8>(), 0..100), cut in 0..PREAMBLE_LEN) {
            let mut bytes = before.clone();
            bytes.extend(&Hello { session: Uuid::new_v4() }.encode()[..cut]);
            let found = find_hello(&bytes);
            prop_assert!(found.hello.is_none());
            prop_assert!(found.skip <= before.len());
        }

        #[test]
        fn the_tail_is_the_last_bytes(pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..50), 0..8)) {
            let mut tail = Tail::default();
            pieces.iter().for_each(|piece| tail.push(piece));
            let all = pieces.concat();
            let (bytes, len) = tail.take();
            prop_assert_eq!(&bytes[..len], &all[all.len().saturating_sub(PREAMBLE_LEN)..]);
        }
    }
}
