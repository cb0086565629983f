//! A resolver that answers what a test says, over UDP and TCP.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::rdata::{A, CNAME};
use hickory_proto::rr::{Name, RData, Record};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};

/// What came in.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    pub query: Query,
    pub tcp: bool,
    pub from: SocketAddr,
    pub id: u16,
    /// Whole message, as decoded.
    pub message: Message,
}

/// Everything that is sent back to one question, in order; nothing: silence.
pub type Script = Arc<dyn Fn(&Asked) -> Vec<Message> + Send + Sync>;

pub struct Upstream {
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Drop for Upstream {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Upstream {
    pub async fn start(script: impl Fn(&Asked) -> Vec<Message> + Send + Sync + 'static) -> Self {
        let script: Script = Arc::new(script);
        let (udp, tcp) = loop {
            let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            // The same port may be taken for TCP.
            if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
                break (udp, tcp);
            }
        };
        let address = udp.local_addr().unwrap();
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let datagrams = tokio::spawn(by_udp(udp, Arc::clone(&asked), Arc::clone(&script)));
        let streams = tokio::spawn(by_tcp(tcp, Arc::clone(&asked), script));
        Self { address, asked, tasks: vec![datagrams, streams] }
    }

    /// What it was asked since the last call.
    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    /// The names that it was asked for since the last call.
    pub fn names(&self) -> Vec<String> {
        self.asked().into_iter().map(|asked| asked.query.name.to_ascii()).collect()
    }
}

async fn by_udp(socket: UdpSocket, log: Arc<Mutex<Vec<Asked>>>, script: Script) {
    let mut buffer = vec![0; 4096];
    loop {
        let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
        let message = Message::from_vec(&buffer[..length]).unwrap();
        let asked = Asked { query: message.queries[0].clone(), tcp: false, from, id: message.metadata.id, message };
        log.lock().unwrap().push(asked.clone());
        for reply in script(&asked) {
            socket.send_to(&reply.to_vec().unwrap(), from).await.unwrap();
        }
    }
}

async fn by_tcp(listener: TcpListener, log: Arc<Mutex<Vec<Asked>>>, script: Script) {
    loop {
        let (mut stream, from) = listener.accept().await.unwrap();
        let length = usize::from(stream.read_u16().await.unwrap());
        let mut buffer = vec![0; length];
        stream.read_exact(&mut buffer).await.unwrap();
        let message = Message::from_vec(&buffer).unwrap();
        let asked = Asked { query: message.queries[0].clone(), tcp: true, from, id: message.metadata.id, message };
        log.lock().unwrap().push(asked.clone());
        for reply in script(&asked) {
            let bytes = reply.to_vec().unwrap();
            stream.write_u16(u16::try_from(bytes.len()).unwrap()).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
        }
    }
}

/// An answer to a question, with records.
pub fn reply(asked: &Asked, records: Vec<Record>) -> Message {
    let mut message = Message::new(asked.id, MessageType::Response, OpCode::Query);
    message.metadata.recursion_available = true;
    message.queries.push(asked.query.clone());
    message.answers = records;
    message
}

pub fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

pub fn a(owner: &str, ttl: u32, address: [u8; 4]) -> Record {
    Record::from_rdata(name(owner), ttl, RData::A(A(Ipv4Addr::from(address))))
}

pub fn alias(owner: &str, ttl: u32, target: &str) -> Record {
    Record::from_rdata(name(owner), ttl, RData::CNAME(CNAME(name(target))))
}
