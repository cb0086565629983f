//! The QEMU monitor: commands with replies matched by id, events in order, file descriptors handed over.
//!
//! One task owns the socket. Everything is bounded: the length of a line, the number of open commands, the time that a
//! reply may take. It does not know what the commands mean.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Deserialize;
use serde_json::Value;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use crate::VmError;

/// Longest line that is read from the monitor, bytes. Its longest regular answers have a few KiB.
const MAX_LINE: usize = 1 << 20;
/// Most commands that wait to be sent.
const QUEUE: usize = 64;

/// An event of the monitor.
#[derive(Debug, Deserialize)]
pub(crate) struct Event {
    /// Name, e.g. `STOP`.
    #[serde(rename = "event")]
    pub name: String,
    /// Its fields.
    #[serde(default)]
    pub data: Value,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Message {
    Event(Event),
    Error { id: Option<u64>, error: MonitorError },
    Return { id: Option<u64>, r#return: Value },
    Other(#[expect(dead_code, reason = "the greeting; only its arrival counts")] Value),
}

#[derive(Debug, Deserialize)]
struct MonitorError {
    desc: String,
}

type Reply = oneshot::Sender<Result<Value, String>>;

struct Request {
    command: &'static str,
    arguments: Value,
    fd: Option<OwnedFd>,
    reply: Reply,
}

/// The client. When the last clone is dropped the connection is closed.
#[derive(Debug, Clone)]
pub(crate) struct Qmp {
    requests: mpsc::Sender<Request>,
}

impl Qmp {
    /// Serves a connected monitor socket. `on_event` is called for each event, before any later reply is delivered.
    pub fn new(stream: UnixStream, on_event: impl FnMut(Event) + Send + 'static) -> Self {
        let (requests, queue) = mpsc::channel(QUEUE);
        tokio::spawn(serve(stream, queue, on_event));
        Self { requests }
    }

    /// Runs one command.
    pub async fn execute(&self, command: &'static str, arguments: Value, timeout: Duration) -> Result<Value, VmError> {
        self.request(command, arguments, None, timeout).await
    }

    /// Runs one command that takes a file descriptor with it.
    pub async fn execute_with_fd(
        &self,
        command: &'static str,
        arguments: Value,
        fd: OwnedFd,
        timeout: Duration,
    ) -> Result<Value, VmError> {
        self.request(command, arguments, Some(fd), timeout).await
    }

    async fn request(
        &self,
        command: &'static str,
        arguments: Value,
        fd: Option<OwnedFd>,
        timeout: Duration,
    ) -> Result<Value, VmError> {
        let gone = || VmError::Dead { reason: "its monitor is closed".to_owned() };
        let (reply, answer) = oneshot::channel();
        let call = async {
            self.requests.send(Request { command, arguments, fd, reply }).await.map_err(|_closed| gone())?;
            answer.await.map_err(|_closed| gone())?.map_err(|reason| refusal(command, reason))
        };
        tokio::time::timeout(timeout, call)
            .await
            .unwrap_or_else(|_elapsed| Err(VmError::Timeout { command: command.to_owned(), after: timeout }))
    }
}

fn refusal(command: &'static str, reason: String) -> VmError {
    // What QEMU says is the C library's text: there is no code to go by.
    if reason.contains("No space left on device") {
        return VmError::NoSpace;
    }
    VmError::Refused { command: command.to_owned(), reason }
}

async fn serve(stream: UnixStream, mut queue: mpsc::Receiver<Request>, mut on_event: impl FnMut(Event)) {
    let mut open: HashMap<u64, Reply> = HashMap::new();
    let mut next_id = 0u64;
    let mut lines = Lines::default();
    let (mut reader, writer) = stream.into_split();
    let result: io::Result<()> = async {
        loop {
            tokio::select! {
                request = queue.recv() => {
                    let Some(request) = request else { return Ok(()) };
                    next_id += 1;
                    let line = serde_json::json!({"execute": request.command, "arguments": request.arguments, "id": next_id});
                    open.retain(|_, reply| !reply.is_closed());
                    open.insert(next_id, request.reply);
                    send(writer.as_ref(), format!("{line}\n").as_bytes(), request.fd).await?;
                }
                read = reader.read_buf(&mut lines.buffer) => {
                    if read? == 0 { return Ok(()); }
                    while let Some(line) = lines.next()? {
                        match serde_json::from_slice(&line) {
                            Ok(Message::Event(event)) => on_event(event),
                            Ok(Message::Return { id: Some(id), r#return }) => answer(&mut open, id, Ok(r#return)),
                            Ok(Message::Error { id: Some(id), error }) => answer(&mut open, id, Err(error.desc)),
                            Ok(Message::Other(_) | Message::Return { .. }) => {}
                            Ok(Message::Error { error, .. }) => tracing::warn!(error = error.desc, "monitor error without id"),
                            Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
                        }
                    }
                }
            }
        }
    }
    .await;
    if let Err(error) = result {
        tracing::debug!(%error, "the monitor's connection broke");
    }
}

fn answer(open: &mut HashMap<u64, Reply>, id: u64, result: Result<Value, String>) {
    if let Some(reply) = open.remove(&id) {
        // Who asked may have given up.
        drop(reply.send(result));
    }
}

/// Sends a line; the descriptor travels with its first byte.
async fn send(stream: &UnixStream, mut line: &[u8], mut fd: Option<OwnedFd>) -> io::Result<()> {
    while !line.is_empty() {
        stream.writable().await?;
        let sent = stream.try_io(Interest::WRITABLE, || {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = fd.as_ref().map(AsFd::as_fd);
            if let Some(fd) = &fds {
                control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
            }
            Ok(rustix::net::sendmsg(stream, &[IoSlice::new(line)], &mut control, SendFlags::NOSIGNAL)?)
        });
        match sent {
            Ok(sent) => {
                fd = None;
                line = line.get(sent..).unwrap_or_default();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Splits what was read into lines, with a bound.
#[derive(Default)]
struct Lines {
    buffer: bytes::BytesMut,
    searched: usize,
}

impl Lines {
    fn next(&mut self) -> io::Result<Option<bytes::BytesMut>> {
        let found = self.buffer.iter().skip(self.searched).position(|b| *b == b'\n');
        let Some(at) = found else {
            self.searched = self.buffer.len();
            if self.searched > MAX_LINE {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a line of the monitor is too long"));
            }
            return Ok(None);
        };
        let line = self.buffer.split_to(self.searched + at + 1);
        self.searched = 0;
        Ok(Some(line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    const SECOND: Duration = Duration::from_secs(1);

    fn client() -> (Qmp, UnixStream, mpsc::UnboundedReceiver<String>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (events, seen) = mpsc::unbounded_channel();
        (Qmp::new(ours, move |e| events.send(e.name).unwrap()), theirs, seen)
    }

    #[tokio::test]
    async fn replies_find_their_command_and_events_come_before_them() {
        let (qmp, theirs, mut events) = client();
        let server = tokio::spawn(async move {
            let (read, mut write) = theirs.into_split();
            let mut lines = BufReader::new(read).lines();
            let a: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
            let b: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
            let text = format!(
                "{}\n{}\n{}\n{}\n",
                json!({"QMP": {}}),
                json!({"event": "STOP", "timestamp": {}}),
                json!({"error": {"class": "GenericError", "desc": "no"}, "id": b["id"]}),
                json!({"return": {"x": 1}, "id": a["id"]})
            );
            write.write_all(text.as_bytes()).await.unwrap();
            write
        });
        let (first, second) = tokio::join!(qmp.execute("a", json!({}), SECOND), qmp.execute("b", json!({}), SECOND));
        assert_eq!(first.unwrap(), json!({"x": 1}));
        assert!(matches!(second, Err(VmError::Refused { command, reason }) if command == "b" && reason == "no"));
        assert_eq!(events.recv().await.unwrap(), "STOP");
        server.await.unwrap();
    }

    #[tokio::test]
    async fn a_silent_monitor_times_out_and_a_closed_one_is_dead() {
        let (qmp, theirs, _events) = client();
        let short = Duration::from_millis(10);
        assert!(matches!(qmp.execute("stop", json!({}), short).await, Err(VmError::Timeout { .. })));
        drop(theirs);
        assert!(matches!(qmp.execute("stop", json!({}), SECOND).await, Err(VmError::Dead { .. })));
    }

    #[tokio::test]
    async fn junk_and_endless_lines_end_the_connection() {
        for junk in [b"{]\n".to_vec(), vec![b'x'; MAX_LINE + 2]] {
            let (qmp, mut theirs, _events) = client();
            // The client may hang up before all was taken.
            drop(theirs.write_all(&junk).await);
            assert!(matches!(qmp.execute("stop", json!({}), SECOND).await, Err(VmError::Dead { .. })));
        }
    }

    #[tokio::test]
    async fn a_descriptor_arrives_with_its_command() {
        let (qmp, theirs, _events) = client();
        let file = tempfile::tempfile().unwrap();
        let call = tokio::spawn(async move { qmp.execute_with_fd("add-fd", json!({}), file.into(), SECOND).await });
        theirs.readable().await.unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let mut data = [0; 256];
        let flags = rustix::net::RecvFlags::CMSG_CLOEXEC;
        rustix::net::recvmsg(&theirs, &mut [io::IoSliceMut::new(&mut data)], &mut control, flags).unwrap();
        assert_eq!(control.drain().count(), 1);
        drop(theirs);
        call.await.unwrap().unwrap_err();
    }
}
