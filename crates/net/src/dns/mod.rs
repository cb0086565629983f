//! The DNS proxy of a host: the only resolver that guests can reach.
//!
//! | module | does |
//! |---|---|
//! | `message` | what was asked, whether it may, what is told; pure |
//! | `policy` | whose question it is, what each sandbox may ask for, what is open for it |
//! | `switch` | slots, with the policy of each remembered |
//! | `upstream` | asking the resolvers of the host |
//! | `resolv` | which those are |
//!
//! A sandbox with an allow-list gets answers for the names on it, and the addresses in an answer are open before the guest
//! has it. Other names are refused without asking anybody, so that no name carries data out. Addresses that no sandbox may
//! reach are left out of every answer, whatever the policy. The guest is hostile: what can't be read is dropped, what comes
//! too fast too.
//!
//! It keeps no cache (the host's resolver does), speaks no DNSSEC and no IPv6 to guests, and does not decide what may be
//! reached: the rules of the kernel do.

mod message;
mod policy;
mod resolv;
mod switch;
mod upstream;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use hickory_proto::op::{Message, ResponseCode};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tracing::{debug, warn};

use self::message::{Received, Request, Verdict};
use self::upstream::Upstreams;

pub use self::policy::{Directory, MAX_OPEN, OpenError, Policy};
pub use self::resolv::{RESOLV_CONF, parse_resolv_conf, parse_server, system_upstreams};
pub use self::switch::TrackedSlots;

/// Largest question that is read. One name fits into 255 bytes.
const MAX_QUESTION: usize = 4096;
/// How long a connection may be silent, and how long a message or its answer may take on it.
const TCP_PATIENCE: Duration = Duration::from_secs(10);
/// Rest after the kernel refused to receive or accept, so that a lasting failure doesn't spin.
const REST: Duration = Duration::from_millis(100);

/// How the proxy works.
#[derive(Debug, Clone)]
pub struct DnsConfig {
    /// Resolvers to ask, in this order. None: every question that may be asked is answered with SERVFAIL.
    pub upstreams: Vec<SocketAddr>,
    /// How long one of them may take.
    pub patience: Duration,
    /// Most questions of all sandboxes that are answered at a time.
    pub in_flight: usize,
    /// Most connections of all sandboxes.
    pub connections: usize,
}

impl DnsConfig {
    /// The defaults, with whom to ask.
    #[must_use]
    pub fn new(upstreams: Vec<SocketAddr>) -> Self {
        // Guests give up after 5 seconds: two of ours may be silent before that.
        Self { upstreams, patience: Duration::from_millis(1500), in_flight: 512, connections: 256 }
    }
}

/// The proxy while it runs. Dropping it ends it, with what is being answered.
#[derive(Debug)]
pub struct DnsProxy {
    tasks: [JoinHandle<()>; 2],
}

impl Drop for DnsProxy {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl DnsProxy {
    /// Starts to answer on these sockets: a bound UDP socket and a listening TCP socket, as
    /// [`crate::Slots::dns_sockets`] gives them. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// When the sockets can't be watched.
    pub fn start(config: DnsConfig, (udp, tcp): (OwnedFd, OwnedFd), directory: Arc<dyn Directory>) -> io::Result<Self> {
        let (udp, tcp) = (std::net::UdpSocket::from(udp), std::net::TcpListener::from(tcp));
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        let (udp, tcp) = (Arc::new(UdpSocket::from_std(udp)?), TcpListener::from_std(tcp)?);
        if config.upstreams.is_empty() {
            warn!("no upstream resolver is known: sandboxes can't resolve names");
        }
        let server = Arc::new(Server {
            directory,
            upstreams: Upstreams::new(config.upstreams, config.patience),
            in_flight: Arc::new(Semaphore::new(config.in_flight)),
            connections: Arc::new(Semaphore::new(config.connections)),
        });
        let datagrams = tokio::spawn(serve_udp(Arc::clone(&server), udp));
        Ok(Self { tasks: [datagrams, tokio::spawn(serve_tcp(server, tcp))] })
    }
}

/// What became of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Answered,
    /// Not allowed by the policy.
    Refused,
    /// All its addresses are ones that no sandbox may reach.
    Private,
    /// Too many addresses are open already.
    TooManyOpen,
    /// No upstream helped, or the addresses could not be opened.
    Failed,
    /// Not readable as a question.
    Garbage,
    /// From an address that is no sandbox's.
    Unknown,
    /// Asked faster than a sandbox may.
    TooFast,
    /// Too many are being answered.
    Busy,
}

impl Outcome {
    fn count(self) {
        let outcome = match self {
            Self::Answered => "answered",
            Self::Refused => "refused",
            Self::Private => "private",
            Self::TooManyOpen => "too_many_open",
            Self::Failed => "failed",
            Self::Garbage => "garbage",
            Self::Unknown => "unknown",
            Self::TooFast => "too_fast",
            Self::Busy => "busy",
        };
        metrics::counter!("coppice_dns_questions_total", "outcome" => outcome).increment(1);
    }
}

#[derive(Debug)]
struct Server {
    directory: Arc<dyn Directory>,
    upstreams: Upstreams,
    in_flight: Arc<Semaphore>,
    connections: Arc<Semaphore>,
}

/// A question that is let in; room for it is held until it is dropped.
struct Admitted {
    policy: Arc<Policy>,
    _room: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

impl Server {
    /// Whether a question from this address is looked at. What isn't is dropped: an answer would be work, too.
    fn admit(&self, from: SocketAddr) -> Result<Admitted, Outcome> {
        let policy = self.policy(from).ok_or(Outcome::Unknown)?;
        if !policy.may_ask() {
            return Err(Outcome::TooFast);
        }
        let all = Arc::clone(&self.in_flight).try_acquire_owned().map_err(|_| Outcome::Busy)?;
        let own = policy.enter().ok_or(Outcome::Busy)?;
        Ok(Admitted { policy, _room: (all, own) })
    }

    fn policy(&self, from: SocketAddr) -> Option<Arc<Policy>> {
        match from.ip() {
            IpAddr::V4(address) => self.directory.policy(address),
            IpAddr::V6(_) => None,
        }
    }

    /// The answer to a guest's bytes, if there is one.
    async fn answer(&self, policy: &Arc<Policy>, bytes: &[u8]) -> Option<(Box<Request>, Message)> {
        let (request, message, outcome) = match message::read(bytes) {
            Received::Garbage => {
                Outcome::Garbage.count();
                return None;
            }
            Received::Faulty(request, code) => {
                let message = request.reply(code);
                (request, message, Outcome::Garbage)
            }
            Received::Question(request) => {
                let (message, outcome) = self.resolve(policy, &request).await;
                (request, message, outcome)
            }
        };
        outcome.count();
        Some((request, message))
    }

    async fn resolve(&self, policy: &Arc<Policy>, request: &Request) -> (Message, Outcome) {
        let ports = match message::judge(request, policy.egress()) {
            Verdict::Ask(ports) => ports,
            Verdict::Refuse => return (request.reply(ResponseCode::Refused), Outcome::Refused),
            Verdict::Nothing => return (request.reply(ResponseCode::NoError), Outcome::Answered),
            Verdict::NoSuchName => return (request.reply(ResponseCode::NXDomain), Outcome::Answered),
        };
        let failed = || (request.reply(ResponseCode::ServFail), Outcome::Failed);
        let reply = match self.upstreams.ask(request.query()).await {
            Ok(reply) => reply,
            Err(error) => {
                debug!(slot = policy.slot(), error = &error as &dyn std::error::Error, "a name was not resolved");
                return failed();
            }
        };
        let Some(shaped) = message::shape(request, reply) else { return failed() };
        if shaped.withheld > 0 {
            metrics::counter!("coppice_dns_private_addresses_total").increment(shaped.withheld as u64);
        }
        let outcome =
            if shaped.withheld > 0 && shaped.addresses.is_empty() { Outcome::Private } else { Outcome::Answered };
        if let Some(ports) = ports
            && !shaped.addresses.is_empty()
        {
            let ttl = Duration::from_secs(shaped.ttl.into());
            match policy.open(&self.directory, &shaped.addresses, &ports, ttl).await {
                Ok(()) => {}
                Err(OpenError::TooMany) => return (request.reply(ResponseCode::Refused), Outcome::TooManyOpen),
                Err(error) => {
                    debug!(slot = policy.slot(), error = &error as &dyn std::error::Error, "a name opened nothing");
                    return failed();
                }
            }
        }
        (shaped.message, outcome)
    }
}

async fn serve_udp(server: Arc<Server>, socket: Arc<UdpSocket>) {
    let mut buffer = vec![0; MAX_QUESTION];
    // Its tasks end with it.
    let mut tasks = JoinSet::new();
    loop {
        let received = tokio::select! {
            received = socket.recv_from(&mut buffer) => received,
            Some(_) = tasks.join_next() => continue,
        };
        let (length, from) = match received {
            Ok(received) => received,
            Err(error) => {
                debug!(%error, "no datagram could be received");
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let admitted = match server.admit(from) {
            Ok(admitted) => admitted,
            Err(outcome) => {
                outcome.count();
                continue;
            }
        };
        let bytes = buffer.get(..length).unwrap_or_default().to_vec();
        let (server, socket) = (Arc::clone(&server), Arc::clone(&socket));
        tasks.spawn(async move {
            // All of it: a block captures only the fields that it names.
            let Admitted { policy, _room } = admitted;
            let Some((request, message)) = server.answer(&policy, &bytes).await else { return };
            let Some(bytes) = request.datagram(&message) else { return };
            if let Err(error) = socket.send_to(&bytes, from).await {
                debug!(%error, "an answer could not be sent");
            }
        });
    }
}

async fn serve_tcp(server: Arc<Server>, listener: TcpListener) {
    let mut tasks = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = tasks.join_next() => continue,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                debug!(%error, "no connection could be accepted");
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let own = server.policy(from).and_then(|policy| policy.connect());
        let all = Arc::clone(&server.connections).try_acquire_owned();
        let (Some(own), Ok(all)) = (own, all) else {
            Outcome::Busy.count();
            continue;
        };
        let server = Arc::clone(&server);
        tasks.spawn(async move {
            converse(&server, stream, from).await;
            drop((own, all));
        });
    }
}

/// Answers one question after the other until the guest says nothing more.
async fn converse(server: &Server, mut stream: TcpStream, from: SocketAddr) {
    while let Some(bytes) = next_question(&mut stream).await {
        // Asked for anew each time: the policy may have changed, the slot may have another owner.
        let admitted = match server.admit(from) {
            Ok(admitted) => admitted,
            Err(outcome) => return outcome.count(),
        };
        let Some((_, message)) = server.answer(&admitted.policy, &bytes).await else { return };
        let Ok(bytes) = message.to_vec() else { return };
        match timeout(TCP_PATIENCE, upstream::write_framed(&mut stream, &bytes)).await {
            Ok(Ok(())) => {}
            _ => return,
        }
    }
}

async fn next_question(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let read = async {
        let length = usize::from(stream.read_u16().await?);
        if length > MAX_QUESTION {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = vec![0; length];
        stream.read_exact(&mut bytes).await?;
        Ok::<_, io::Error>(bytes)
    };
    timeout(TCP_PATIENCE, read).await.ok()?.ok()
}
