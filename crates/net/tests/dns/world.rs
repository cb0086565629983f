//! A proxy on loopback sockets, guests with loopback addresses, and a directory that records what is opened.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use coppice_net::dns::{Directory, DnsConfig, DnsProxy, OpenError, Policy};
use coppice_net::{Egress, NetError, Opening};
use hickory_proto::op::{Edns, Message, Query};
use hickory_proto::rr::RecordType;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};

use crate::upstream::name;

/// Longest that an answer may take.
pub const LONG: Duration = Duration::from_secs(20);

/// Who has which address, and what was opened.
#[derive(Debug, Default)]
pub struct Fake {
    policies: Mutex<HashMap<Ipv4Addr, Arc<Policy>>>,
    opened: Mutex<Vec<(u32, Opening)>>,
    pub fail: AtomicBool,
    /// Told when something is about to be opened; goes on when it is let.
    gate: Mutex<Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>>,
}

impl Fake {
    pub fn set(&self, guest: Ipv4Addr, egress: Egress) {
        let policy = Policy::new(u32::from(guest.octets()[3]), egress);
        self.policies.lock().unwrap().insert(guest, policy);
    }

    pub fn opened(&self) -> Vec<(u32, Opening)> {
        std::mem::take(&mut *self.opened.lock().unwrap())
    }

    /// Addresses with their ports that were opened since the last call, sorted.
    pub fn addresses(&self) -> Vec<(Ipv4Addr, Option<u16>)> {
        let mut all: Vec<_> = self.opened().into_iter().map(|(_, o)| (o.address, o.port)).collect();
        all.sort_unstable();
        all
    }

    pub fn hold(&self) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((told, entered), (go, wait)) = (mpsc::channel(), mpsc::channel());
        *self.gate.lock().unwrap() = Some((told, wait));
        (entered, go)
    }
}

impl Directory for Fake {
    fn policy(&self, guest: Ipv4Addr) -> Option<Arc<Policy>> {
        self.policies.lock().unwrap().get(&guest).cloned()
    }

    fn open_names(&self, policy: &Arc<Policy>, openings: &[Opening]) -> Result<(), OpenError> {
        if let Some((told, wait)) = self.gate.lock().unwrap().take() {
            told.send(()).unwrap();
            wait.recv_timeout(LONG).unwrap();
        }
        if self.fail.load(Ordering::SeqCst) {
            return Err(NetError::UnknownSlot { index: policy.slot() }.into());
        }
        let policies = self.policies.lock().unwrap();
        if !policies.values().any(|current| Arc::ptr_eq(current, policy)) {
            return Err(OpenError::Stale);
        }
        self.opened.lock().unwrap().extend(openings.iter().map(|opening| (policy.slot(), opening.clone())));
        Ok(())
    }
}

pub struct World {
    pub directory: Arc<Fake>,
    pub address: SocketAddr,
    _proxy: DnsProxy,
}

impl World {
    pub async fn start(upstreams: &[SocketAddr]) -> Self {
        Self::with(DnsConfig::new(upstreams.to_vec())).await
    }

    pub async fn with(config: DnsConfig) -> Self {
        let (udp, tcp) = loop {
            let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            if let Ok(tcp) = std::net::TcpListener::bind(udp.local_addr().unwrap()) {
                break (udp, tcp);
            }
        };
        let address = udp.local_addr().unwrap();
        let directory = Arc::new(Fake::default());
        let sockets = (OwnedFd::from(udp), OwnedFd::from(tcp));
        let proxy = DnsProxy::start(config, sockets, Arc::clone(&directory) as Arc<dyn Directory>).unwrap();
        Self { directory, address, _proxy: proxy }
    }

    /// A guest with an address and a policy of its own.
    pub async fn guest(&self, last: u8, egress: Egress) -> Guest {
        let address = Ipv4Addr::new(127, 0, 0, last);
        self.directory.set(address, egress);
        self.stranger(last).await
    }

    /// Somebody whom the directory doesn't know.
    pub async fn stranger(&self, last: u8) -> Guest {
        let address = Ipv4Addr::new(127, 0, 0, last);
        let socket = UdpSocket::bind((address, 0)).await.unwrap();
        socket.connect(self.address).await.unwrap();
        Guest { socket, proxy: self.address, address }
    }
}

pub struct Guest {
    pub socket: UdpSocket,
    pub proxy: SocketAddr,
    pub address: Ipv4Addr,
}

pub fn question(text: &str, kind: RecordType) -> Message {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.queries.push(Query::query(name(text), kind));
    message
}

pub fn with_edns(mut message: Message, payload: u16) -> Message {
    let mut edns = Edns::new();
    edns.set_max_payload(payload);
    message.edns = Some(edns);
    message
}

impl Guest {
    /// One question, one answer.
    pub async fn ask(&self, text: &str, kind: RecordType) -> Message {
        self.exchange(&question(text, kind)).await
    }

    pub async fn exchange(&self, question: &Message) -> Message {
        self.socket.send(&question.to_vec().unwrap()).await.unwrap();
        let reply = self.receive().await;
        assert_eq!(reply.metadata.id, question.metadata.id);
        assert_eq!(reply.queries, question.queries);
        assert!(reply.metadata.recursion_available);
        assert_eq!(reply.edns.is_some(), question.edns.is_some());
        reply
    }

    pub async fn receive(&self) -> Message {
        let mut buffer = vec![0; 4096];
        let length = tokio::time::timeout(LONG, self.socket.recv(&mut buffer)).await.unwrap().unwrap();
        Message::from_vec(&buffer[..length]).unwrap()
    }

    /// Nothing came, and nothing comes for a while.
    pub async fn hears_nothing(&self) {
        let mut buffer = vec![0; 4096];
        let heard = tokio::time::timeout(Duration::from_millis(200), self.socket.recv(&mut buffer)).await;
        assert!(heard.is_err(), "an answer");
    }

    pub async fn connect(&self) -> TcpStream {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((self.address, 0).into()).unwrap();
        socket.connect(self.proxy).await.unwrap()
    }
}

pub async fn over_tcp(stream: &mut TcpStream, question: &Message) -> Option<Message> {
    let bytes = question.to_vec().unwrap();
    stream.write_u16(u16::try_from(bytes.len()).unwrap()).await.ok()?;
    stream.write_all(&bytes).await.ok()?;
    let read = async {
        let length = usize::from(stream.read_u16().await.ok()?);
        let mut buffer = vec![0; length];
        stream.read_exact(&mut buffer).await.ok()?;
        Some(Message::from_vec(&buffer).unwrap())
    };
    tokio::time::timeout(LONG, read).await.unwrap()
}

pub fn allow(entries: &[&str]) -> Egress {
    Egress::allow(entries).unwrap()
}

/// The addresses in an answer, sorted.
pub fn addresses(message: &Message) -> Vec<Ipv4Addr> {
    let mut all: Vec<Ipv4Addr> = message
        .answers
        .iter()
        .filter_map(|record| match &record.data {
            hickory_proto::rr::RData::A(a) => Some(a.0),
            _ => None,
        })
        .collect();
    all.sort_unstable();
    all
}
