//! The listener: HTTP/1.1 connections, bounded in number and in how slowly they may send a request's head, kept open
//! while idle for as long as clients' pools expect, and ended without cutting a response when the server stops.
//!
//! TLS and HTTP/2 are a proxy's business.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use crate::Control;
use crate::config::Timing;
use crate::ingress::sweep;
use crate::observe::Guarded;

/// The other end of the connection that a request came by: a request extension.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// How often metrics are tidied.
const UPKEEP: Duration = Duration::from_secs(5);
/// What streams may take to end after they were told to.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Most bytes of a request's head, and of what is buffered of a connection.
const MAX_BUFFER: usize = 64 << 10;
/// When TCP looks whether a silent client is still there.
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);
/// How long sent bytes may stay unacknowledged before the client counts as gone, milliseconds.
const TCP_USER_TIMEOUT_MS: u32 = 300_000;

impl Control {
    /// Serves until `shutdown` resolves and the connections are done: idle ones end at once, followed logs too, other
    /// requests get [`Timing::shutdown_grace`], and what still streams then ends with an `error` event.
    ///
    /// A `Control` that has been shut down can't serve again.
    ///
    /// # Errors
    /// When the listener has no address any more. Failures of single connections are logged.
    pub async fn serve(self, listener: TcpListener, shutdown: impl Future<Output = ()> + Send) -> io::Result<()> {
        let address = listener.local_addr()?;
        tracing::info!(%address, "listening");
        let tasks = TaskTracker::new();
        let router = self.router();
        let slots = Arc::new(Semaphore::new(self.config().limits.connections.clamp(1, Semaphore::MAX_PERMITS)));
        drop(tokio::spawn(sweep::run(self.clone())));
        let mut shutdown = std::pin::pin!(shutdown);
        let mut upkeep = tokio::time::interval(UPKEEP);
        loop {
            let accept = async {
                // Closed never: the semaphore lives as long as this loop.
                let slot = Arc::clone(&slots).acquire_owned().await.ok();
                (listener.accept().await, slot)
            };
            tokio::select! {
                biased;
                () = &mut shutdown => break,
                _ = upkeep.tick() => self.metrics().run_upkeep(),
                (accepted, slot) = accept => match accepted {
                    Ok((stream, peer)) => {
                        let connection = connection(self.clone(), router.clone(), stream, peer);
                        tasks.spawn(async move {
                            connection.await;
                            drop(slot);
                        });
                    }
                    Err(error) => {
                        // Out of descriptors, mostly: the connection stays in the queue, so don't spin.
                        tracing::warn!(%error, "can't accept a connection");
                        sleep(Duration::from_millis(100)).await;
                    }
                },
            }
        }
        drop(listener);
        self.stop().soon.cancel();
        tasks.close();
        if timeout(self.config().timing.shutdown_grace, tasks.wait()).await.is_err() {
            self.stop().now.cancel();
            if timeout(LAST_WORDS, tasks.wait()).await.is_err() {
                tracing::warn!(connections = tasks.len(), "connections are cut off");
            }
        }
        if let Some(store) = self.store() {
            store.journal.flush().await;
        }
        Ok(())
    }
}

async fn connection(control: Control, router: Router, stream: TcpStream, peer: SocketAddr) {
    if let Err(error) = tune(&stream) {
        tracing::debug!(%error, "can't set socket options");
    }
    let timing = &control.config().timing;
    let heads = Arc::new(Heads::default());
    let io = TokioIo::new(HeadDeadline::new(stream, Arc::clone(&heads), timing));
    let service = hyper::service::service_fn(move |request| {
        let busy = heads.busy();
        answer(router.clone(), request, peer, busy)
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        // In hyper this clock runs on an idle connection too, so it is how long one is kept.
        .header_read_timeout(timing.idle)
        .max_buf_size(MAX_BUFFER)
        .serve_connection(io, service)
        .with_upgrades();
    let mut served = std::pin::pin!(served);
    let stop = control.stop();
    let result = tokio::select! {
        result = served.as_mut() => result,
        () = stop.soon.cancelled() => {
            served.as_mut().graceful_shutdown();
            tokio::select! {
                result = served.as_mut() => result,
                () = async { stop.now.cancelled().await; sleep(LAST_WORDS).await } => return,
            }
        }
    };
    if let Err(error) = result {
        tracing::debug!(%peer, error = &error as &dyn std::error::Error, "connection ended");
    }
}

async fn answer(
    router: Router,
    request: Request<Incoming>,
    peer: SocketAddr,
    busy: Busy,
) -> Result<Response<Body>, Infallible> {
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(Peer(peer));
    let response = router.oneshot(request).await?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        busy.for_good();
    }
    Ok(response.map(|inner| Body::new(Guarded { inner, _guard: busy })))
}

fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, TCP_KEEPALIVE)?;
    sockopt::set_tcp_user_timeout(stream, TCP_USER_TIMEOUT_MS)?;
    Ok(())
}

/// Requests of one connection: how many heads were read, how many responses are not done.
#[derive(Debug, Default)]
struct Heads {
    read: AtomicUsize,
    busy: AtomicUsize,
}

impl Heads {
    fn busy(self: &Arc<Self>) -> Busy {
        self.read.fetch_add(1, Ordering::Relaxed);
        self.busy.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }
}

/// A request whose response is not done.
struct Busy(Arc<Heads>);

impl Busy {
    /// No head will come by this connection any more.
    fn for_good(&self) {
        self.0.busy.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection that fails when a request's head has begun and does not become complete in time.
///
/// hyper has one clock for that and for idleness, and the two need different limits.
struct HeadDeadline {
    stream: TcpStream,
    heads: Arc<Heads>,
    limit: Duration,
    timer: Pin<Box<Sleep>>,
    /// Runs since the first bytes after so many heads.
    since: Option<usize>,
}

impl HeadDeadline {
    fn new(stream: TcpStream, heads: Arc<Heads>, timing: &Timing) -> Self {
        Self { stream, heads, limit: timing.head_read, timer: Box::pin(sleep(timing.head_read)), since: None }
    }
}

impl AsyncRead for HeadDeadline {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let read = this.heads.read.load(Ordering::Relaxed);
        if this.since.is_some_and(|since| since != read) {
            this.since = None;
        }
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(context, buf);
        if this.since.is_none() && buf.filled().len() > before && this.heads.busy.load(Ordering::Relaxed) == 0 {
            this.since = Some(read);
            this.timer.as_mut().reset(Instant::now() + this.limit);
        }
        // Asked whether or not bytes came: one byte a second is slow too.
        if this.since.is_some() && this.timer.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        polled
    }
}

impl AsyncWrite for HeadDeadline {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
