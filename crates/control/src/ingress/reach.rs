//! A connection to a port of a sandbox: bounded in number and in how long it may be silent; or the right refusal.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use coppice_api::ErrorClass;
use coppice_host::{GuestStream, HostError};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use super::{Passed, Target};
use crate::Control;
use crate::error::ApiError;

/// What a guest may take to say on what it listens, once nothing accepted a connection.
const LOOK: Duration = Duration::from_secs(2);

/// Connects.
pub(crate) async fn reach(control: &Control, target: &Target) -> Result<Reached, ApiError> {
    let passed = control.gate().enter(&target.sandbox)?;
    match control.host().connect(&target.workspace, &target.sandbox, target.port).await {
        Ok(stream) => Ok(Reached::new(stream, passed, control.config().timing.port_idle)),
        Err(error) => Err(refusal(control, target, error).await),
    }
}

/// Not reachable is 503 here, not a conflict: what asks may be a browser. And what listens on a loopback address of the
/// guest's is a mistake that looks like nothing listening.
async fn refusal(control: &Control, target: &Target, error: HostError) -> ApiError {
    if error.class() == ErrorClass::NotFound {
        forget(control, &target.sandbox).await;
    }
    if error.class() == ErrorClass::Conflict {
        return ApiError::from(error).unavailable();
    }
    let port = target.port;
    if error.code() == "port_refused" {
        let look = tokio::time::timeout(LOOK, control.host().ports(&target.workspace, &target.sandbox)).await;
        let listens =
            |ports: &Vec<coppice_host::DetectedPort>| ports.iter().any(|one| one.port == port && one.loopback_only);
        if matches!(look, Ok(Ok(ports)) if listens(&ports)) {
            let message = format!("what listens on port {port} does so on the sandbox's loopback address only");
            return ApiError::new(ErrorClass::Upstream, "port_loopback_only", message)
                .hint(format!("let it listen on 0.0.0.0:{port}"));
        }
    }
    ApiError::from(error)
}

/// What was remembered of a sandbox that is gone.
pub(crate) async fn forget(control: &Control, sandbox: &str) {
    if let Err(error) = control.config().ingress.store.forget(sandbox).await {
        tracing::warn!(error = &error as &dyn std::error::Error, "ports and links of a sandbox that is gone stay");
    }
}

/// The connection. It breaks when nothing went over it for too long.
#[derive(Debug)]
pub(crate) struct Reached {
    stream: GuestStream,
    idle: Duration,
    timer: Pin<Box<Sleep>>,
    _passed: Passed,
}

impl Reached {
    fn new(stream: GuestStream, passed: Passed, idle: Duration) -> Self {
        Self { stream, idle, timer: Box::pin(sleep(idle)), _passed: passed }
    }

    fn progress(&mut self) {
        self.timer.as_mut().reset(Instant::now() + self.idle);
    }
}

impl AsyncRead for Reached {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(context, buf);
        if polled.is_ready() {
            self.progress();
            return polled;
        }
        // Whoever holds a connection reads from it all the time, so this is the place to watch the clock.
        match self.timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncWrite for Reached {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        if polled.is_ready() {
            self.progress();
        }
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        if polled.is_ready() {
            self.progress();
        }
        polled
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
