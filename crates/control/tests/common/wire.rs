//! Bytes as they are on the wire.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A connection.
pub struct Wire {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// A response: head and body, chunks joined.
#[derive(Debug)]
pub struct Raw {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
    /// The sizes of the chunks, if it was chunked.
    pub chunks: Vec<usize>,
    /// Whether the body ended as HTTP says that it must.
    pub complete: bool,
}

impl Raw {
    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .find_map(|(key, value)| key.eq_ignore_ascii_case(name).then_some(value.trim_end()))
    }
}

impl Wire {
    pub async fn connect(address: SocketAddr) -> Self {
        Self { stream: TcpStream::connect(address).await.unwrap(), buffer: Vec::new() }
    }

    pub async fn send(&mut self, text: impl AsRef<[u8]>) {
        self.stream.write_all(text.as_ref()).await.unwrap();
    }

    /// False at the end of the stream.
    async fn fill(&mut self) -> bool {
        let read =
            timeout(Duration::from_secs(20), self.stream.read_buf(&mut self.buffer)).await.expect("silent for 20 s");
        matches!(read, Ok(length) if length > 0)
    }

    /// So many bytes.
    pub async fn exactly(&mut self, length: usize) -> Vec<u8> {
        while self.buffer.len() < length {
            assert!(self.fill().await, "ended after {:?}", String::from_utf8_lossy(&self.buffer));
        }
        self.buffer.drain(..length).collect()
    }

    /// Says that nothing more is sent.
    pub async fn finish(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// What is left until the other side closes.
    pub async fn until_closed(&mut self) -> Vec<u8> {
        while self.fill().await {}
        std::mem::take(&mut self.buffer)
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(at) = self.buffer.windows(2).position(|two| two == b"\r\n") {
                let line = self.buffer.drain(..at + 2).take(at).collect();
                return Some(String::from_utf8(line).unwrap());
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    pub async fn response_head(&mut self) -> (u16, String) {
        let mut head = String::new();
        while let Some(line) = self.line().await {
            if line.is_empty() {
                break;
            }
            head += &line;
            head.push('\n');
        }
        let status = head.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {head:?}")).parse().unwrap();
        (status, head)
    }

    /// The next chunk; `Some` of nothing is the last; `None` is a broken body.
    pub async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = usize::from_str_radix(&self.line().await?, 16).unwrap();
        while self.buffer.len() < size + 2 {
            if !self.fill().await {
                return None;
            }
        }
        let chunk = self.buffer.drain(..size).collect();
        self.buffer.drain(..2);
        Some(chunk)
    }

    pub async fn response(&mut self) -> Raw {
        let (status, head) = self.response_head().await;
        let mut raw = Raw { status, head, body: Vec::new(), chunks: Vec::new(), complete: false };
        if let Some(length) = raw.header("content-length") {
            let length: usize = length.parse().unwrap();
            while self.buffer.len() < length && self.fill().await {}
            raw.complete = self.buffer.len() >= length;
            raw.body = self.buffer.drain(..length.min(self.buffer.len())).collect();
            return raw;
        }
        if raw.header("transfer-encoding").is_none() {
            raw.complete = true;
            return raw;
        }
        while let Some(chunk) = self.chunk().await {
            if chunk.is_empty() {
                raw.complete = true;
                break;
            }
            raw.chunks.push(chunk.len());
            raw.body.extend(chunk);
        }
        raw
    }
}
