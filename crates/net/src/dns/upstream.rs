//! Asking the resolvers of the host, from the host's own network namespace.
//!
//! Every question has a socket, a port and an id of its own, all chosen by chance; what doesn't come from the resolver that
//! was asked, or doesn't repeat id and question, is not looked at.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hickory_proto::op::{Message, Query, ResponseCode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;
use tracing::debug;

use super::message;

/// Most tries for one question, over all resolvers.
const TRIES: usize = 3;
/// Largest datagram that is read: more than we say that we take.
const DATAGRAM: usize = 4096;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum UpstreamError {
    /// Nobody to ask.
    #[error("no upstream resolver is known")]
    None,
    /// It did not answer in time.
    #[error("the resolver did not answer in time")]
    Silent,
    /// It can't be reached.
    #[error("the resolver can't be reached")]
    Io(#[from] io::Error),
    /// It could not help.
    #[error("the resolver answered {0}")]
    Failed(ResponseCode),
    /// What came is no answer.
    #[error("the resolver's answer makes no sense")]
    Garbage,
}

/// The resolvers of the host.
#[derive(Debug)]
pub(super) struct Upstreams {
    servers: Vec<SocketAddr>,
    /// Which is asked first: the one that answered last.
    first: AtomicUsize,
    /// How long one try may take.
    patience: Duration,
}

impl Upstreams {
    pub(super) fn new(servers: Vec<SocketAddr>, patience: Duration) -> Self {
        Self { servers, first: AtomicUsize::new(0), patience }
    }

    /// The first useful answer.
    pub(super) async fn ask(&self, query: &Query) -> Result<Message, UpstreamError> {
        let first = self.first.load(Ordering::Relaxed);
        let mut error = UpstreamError::None;
        for turn in 0..TRIES.min(self.servers.len().max(1) * 2) {
            let index = first.wrapping_add(turn).checked_rem(self.servers.len()).unwrap_or(0);
            let Some(server) = self.servers.get(index) else { break };
            match self.try_one(*server, query).await {
                Ok(message) => {
                    self.first.store(index, Ordering::Relaxed);
                    return Ok(message);
                }
                Err(e) => {
                    debug!(%server, error = &e as &dyn std::error::Error, "a resolver did not help");
                    error = e;
                }
            }
        }
        Err(error)
    }

    async fn try_one(&self, server: SocketAddr, query: &Query) -> Result<Message, UpstreamError> {
        let question = message::question(query);
        let bytes = question.to_vec().map_err(|_| UpstreamError::Garbage)?;
        let within = |reply| timeout(self.patience, reply);
        let mut reply = within(by_udp(server, &question, &bytes)).await.map_err(|_| UpstreamError::Silent)??;
        if reply.metadata.truncation {
            let whole = timeout(self.patience, by_tcp(server, &question, &bytes)).await;
            reply = whole.map_err(|_| UpstreamError::Silent)??;
        }
        match reply.metadata.response_code {
            ResponseCode::NoError | ResponseCode::NXDomain => Ok(reply),
            code => Err(UpstreamError::Failed(code)),
        }
    }
}

async fn by_udp(server: SocketAddr, question: &Message, bytes: &[u8]) -> Result<Message, UpstreamError> {
    let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // Port 0: the kernel chooses one by chance. Connected: nobody else's datagrams come in.
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(bytes).await?;
    let mut buffer = vec![0; DATAGRAM];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let reply = buffer.get(..length).and_then(|bytes| Message::from_vec(bytes).ok());
        if let Some(reply) = reply.filter(|reply| message::answers(reply, question)) {
            return Ok(reply);
        }
    }
}

async fn by_tcp(server: SocketAddr, question: &Message, bytes: &[u8]) -> Result<Message, UpstreamError> {
    let mut stream = TcpStream::connect(server).await?;
    write_framed(&mut stream, bytes).await?;
    let length = stream.read_u16().await?;
    let mut buffer = vec![0; usize::from(length)];
    stream.read_exact(&mut buffer).await?;
    let reply = Message::from_vec(&buffer).map_err(|_| UpstreamError::Garbage)?;
    if message::answers(&reply, question) { Ok(reply) } else { Err(UpstreamError::Garbage) }
}

/// A message on a stream: its length, then itself, in one write.
pub(super) async fn write_framed(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    let mut framed = Vec::with_capacity(bytes.len() + 2);
    framed.extend_from_slice(&length.to_be_bytes());
    framed.extend_from_slice(bytes);
    stream.write_all(&framed).await
}
