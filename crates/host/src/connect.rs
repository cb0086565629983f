//! Connections to TCP ports of a guest: its own services, reached through the sandbox network.
//!
//! Any number at once, past the actor. It carries bytes; what they mean is the caller's business.

use std::fmt;
use std::io;
use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use coppice_api::{ErrorClass, SandboxStatus};
use coppice_net::NetError;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use uuid::Uuid;

use crate::Coded;
use crate::entry::{AccessError, Entry, InUse};
use crate::host::Shared;
use crate::slots;

/// How long a guest may take to accept a connection. A kernel answers at once; one that doesn't drops packets.
const CONNECT: Duration = Duration::from_secs(5);

/// Why there is no connection to a port of a guest.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The sandbox can't be used.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// It has no address.
    #[error("sandbox {0} has no network")]
    NoNetwork(Uuid),
    /// The host's side of the network failed.
    #[error("the sandbox network can't be used")]
    Network(#[from] NetError),
    /// Nothing listens there.
    #[error("nothing in the sandbox accepts connections on port {0}")]
    Refused(u16),
    /// Nothing answered.
    #[error("the sandbox did not answer on port {0} within {CONNECT:?}")]
    Silent(u16),
    /// Anything else.
    #[error("port {port} of the sandbox can't be reached")]
    Io {
        /// Of the guest.
        port: u16,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Coded for ConnectError {
    fn code(&self) -> &'static str {
        match self {
            Self::Access(e) => e.code(),
            Self::NoNetwork(_) => "sandbox_without_network",
            Self::Network(_) => "network_failed",
            Self::Refused(_) => "port_refused",
            Self::Silent(_) => "port_silent",
            Self::Io { .. } => "port_unreachable",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Access(e) => e.class(),
            Self::NoNetwork(_) => ErrorClass::Conflict,
            Self::Network(_) => ErrorClass::Internal,
            Self::Refused(_) | Self::Silent(_) | Self::Io { .. } => ErrorClass::Upstream,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Access(e) => e.hint(),
            Self::Refused(port) => {
                Some(format!("start the service in the sandbox and let it listen on 0.0.0.0:{port}, not on 127.0.0.1"))
            }
            Self::Silent(_) => Some("a firewall in the sandbox may drop what comes to that port".into()),
            _ => None,
        }
    }
}

pub(crate) async fn connect(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    port: u16,
) -> Result<GuestStream, ConnectError> {
    let entry = shared.entry(workspace, id)?;
    let in_use = entry.in_use();
    entry.running(|_| true).await?;
    let slot = entry.record().network.ok_or(ConnectError::NoNetwork(entry.id))?;
    let socket = slots::call(shared, |slots| slots.guest_socket()).await?;
    let stream = open(socket, SocketAddrV4::new(slot.address, port)).await.map_err(|source| match source.kind() {
        io::ErrorKind::ConnectionRefused => ConnectError::Refused(port),
        io::ErrorKind::TimedOut => ConnectError::Silent(port),
        _ => ConnectError::Io { port, source },
    })?;
    metrics::counter!("coppice_guest_connections_total").increment(1);
    Ok(GuestStream { stream, gone: gone(entry).boxed(), _in_use: Some(in_use) })
}

/// Connects an unconnected non-blocking socket.
async fn open(socket: OwnedFd, to: SocketAddrV4) -> io::Result<TcpStream> {
    let socket = TcpSocket::from_std_stream(std::net::TcpStream::from(socket));
    let stream = match tokio::time::timeout(CONNECT, socket.connect(SocketAddr::V4(to))).await {
        Ok(connected) => connected?,
        Err(_) => return Err(io::ErrorKind::TimedOut.into()),
    };
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Completes when the machine has ended. One that is paused has not.
async fn gone(entry: Arc<Entry>) {
    let mut watch = entry.watch();
    let ended = |status| !matches!(status, SandboxStatus::Creating | SandboxStatus::Running | SandboxStatus::Paused);
    // Told before it happens: it may still be refused, and then the machine goes on.
    let asleep = || entry.record().status == SandboxStatus::Hibernated;
    // An error means that nobody will ever change it again, which is an end, too.
    drop(watch.wait_for(|live| ended(live.status) && (live.status != SandboxStatus::Hibernated || asleep())).await);
}

/// A connection to a port of a guest. Bytes both ways; shutting down one way leaves the other open.
///
/// While it exists, the sandbox counts as used. It breaks when the machine ends: a TAP that is gone sends no reset.
pub struct GuestStream {
    stream: TcpStream,
    gone: BoxFuture<'static, ()>,
    _in_use: Option<InUse>,
}

impl fmt::Debug for GuestStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestStream").field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// A connection that belongs to no machine, for hosts that have none.
impl From<TcpStream> for GuestStream {
    fn from(stream: TcpStream) -> Self {
        Self { stream, gone: std::future::pending().boxed(), _in_use: None }
    }
}

impl GuestStream {
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.gone.as_mut().poll(context) {
            Poll::Pending => Ok(()),
            Poll::Ready(()) => {
                self.gone = std::future::ready(()).boxed();
                Err(io::Error::new(io::ErrorKind::ConnectionReset, "the sandbox has ended"))
            }
        }
    }
}

impl AsyncRead for GuestStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl AsyncWrite for GuestStream {
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

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    fn unconnected() -> OwnedFd {
        socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
            .unwrap()
    }

    fn v4(address: SocketAddr) -> SocketAddrV4 {
        let SocketAddr::V4(address) = address else { panic!("not IPv4: {address}") };
        address
    }

    #[tokio::test]
    async fn a_socket_is_connected_or_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = v4(listener.local_addr().unwrap());
        let mut ours = GuestStream::from(open(unconnected(), address).await.unwrap());
        let (mut theirs, _) = listener.accept().await.unwrap();
        ours.write_all(b"hello").await.unwrap();
        ours.shutdown().await.unwrap();
        let mut heard = String::new();
        theirs.read_to_string(&mut heard).await.unwrap();
        theirs.write_all(b"late answer").await.unwrap();
        drop(theirs);
        let mut answer = String::new();
        ours.read_to_string(&mut answer).await.unwrap();
        assert_eq!((heard.as_str(), answer.as_str()), ("hello", "late answer"));
        drop(listener);
        assert_eq!(open(unconnected(), address).await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test]
    async fn a_connection_breaks_when_its_machine_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = v4(listener.local_addr().unwrap());
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let stream = open(unconnected(), address).await.unwrap();
        let gone = async move { ended.await.unwrap_or_default() };
        let mut stream = GuestStream { stream, gone: gone.boxed(), _in_use: None };
        let reading = tokio::spawn(async move {
            let mut byte = [0];
            let first = stream.read(&mut byte).await;
            (first.unwrap_err().kind(), stream.read(&mut byte).await.unwrap_err().kind())
        });
        tokio::task::yield_now().await;
        drop(end);
        assert_eq!(reading.await.unwrap(), (io::ErrorKind::ConnectionReset, io::ErrorKind::ConnectionReset));
    }
}
