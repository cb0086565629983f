//! Messages to the kernel over netlink: batches of requests, and dumps.
//!
//! Made by hand, since the agent needs six kinds of message and every block of code that runs for the first time in a
//! restored machine costs. A batch goes out in one send, and only its last message is acknowledged: the kernel works on all
//! of them before the send returns, and reports errors without being asked. So an answer is there already or never, and
//! nothing here waits.

use std::{io, os::fd::OwnedFd};

use rustix::{
    io::Errno,
    net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink},
};

/// Bytes of `struct nlmsghdr` (include/uapi/linux/netlink.h): length, type, flags, sequence number, port.
const HEADER: usize = 16;
/// Bytes of `struct nlattr`: length, type.
const ATTRIBUTE: usize = 4;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;
/// The request makes what is not there.
pub(crate) const NLM_F_CREATE: u16 = 0x400;
/// The request replaces what is there.
pub(crate) const NLM_F_REPLACE: u16 = 0x100;
/// The kernel fits its answers to the buffer of the last receive, and the first ones to a page.
const BUFFER: usize = 8192;

/// Requests that are sent together ([`Socket::batch`]).
#[derive(Debug)]
pub(crate) struct Batch {
    bytes: Vec<u8>,
    /// Sequence number of the first message.
    first: u32,
    /// Where the last message begins.
    last: usize,
    count: u32,
}

impl Batch {
    fn new(first: u32) -> Self {
        Self { bytes: Vec::with_capacity(256), first, last: 0, count: 0 }
    }

    /// Adds a message: its fixed part, then attributes.
    pub(crate) fn push(&mut self, kind: u16, flags: u16, fixed: &[u8], attributes: &[(u16, &[u8])]) {
        self.last = self.bytes.len();
        let end =
            attributes.iter().fold(HEADER + pad(fixed.len()), |end, (_, value)| end + ATTRIBUTE + pad(value.len()));
        self.bytes.extend(length32(end).to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        self.bytes.extend(self.first.wrapping_add(self.count).to_ne_bytes());
        self.bytes.extend(0_u32.to_ne_bytes());
        self.padded(fixed);
        for (kind, value) in attributes {
            self.bytes.extend(length16(ATTRIBUTE + value.len()).to_ne_bytes());
            self.bytes.extend(kind.to_ne_bytes());
            self.padded(value);
        }
        self.count += 1;
    }

    /// Messages in it.
    #[cfg(test)]
    pub(crate) fn len(&self) -> u32 {
        self.count
    }

    fn padded(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(self.bytes.len() + pad(bytes.len()) - bytes.len(), 0);
    }

    /// Sets flags of the last message.
    fn flag_last(&mut self, flags: u16) {
        if let Some([a, b]) = self.bytes.get_mut(self.last + 6..self.last + 8) {
            let [c, d] = flags.to_ne_bytes();
            (*a, *b) = (*a | c, *b | d);
        }
    }
}

/// A request that the kernel refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused {
    /// Which message of the batch.
    pub index: u32,
    /// Why.
    pub errno: Errno,
}

/// A netlink socket. It belongs to the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    /// Links, addresses, routes.
    pub(crate) fn route() -> io::Result<Self> {
        Self::open(None)
    }

    /// Sockets.
    pub(crate) fn sock_diag() -> io::Result<Self> {
        Self::open(Some(netlink::SOCK_DIAG))
    }

    fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?;
        Ok(Self { fd, sequence: 1 })
    }

    /// Starts a batch.
    pub(crate) fn batch(&self) -> Batch {
        Batch::new(self.sequence)
    }

    /// Sends a batch. Returns what was refused; the rest is done.
    pub(crate) fn run(&mut self, mut batch: Batch) -> io::Result<Vec<Refused>> {
        let mut refused = Vec::new();
        if batch.count == 0 {
            return Ok(refused);
        }
        batch.flag_last(NLM_F_ACK);
        self.send(&batch)?;
        let last = batch.count - 1;
        let mut buffer = [0; BUFFER];
        loop {
            for message in messages(self.receive(&mut buffer)?) {
                let index = message.sequence.wrapping_sub(batch.first);
                if message.kind != NLMSG_ERROR || index > last {
                    // Of a batch that was given up.
                    continue;
                }
                if let Some(errno) = message.errno()? {
                    refused.push(Refused { index, errno });
                }
                if index == last {
                    return Ok(refused);
                }
            }
        }
    }

    /// Asks for a list, and hands over the fixed part and attributes of each entry.
    pub(crate) fn dump(&mut self, kind: u16, fixed: &[u8], mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let mut batch = self.batch();
        batch.push(kind, NLM_F_DUMP, fixed, &[]);
        self.send(&batch)?;
        let mut buffer = [0; BUFFER];
        loop {
            for message in messages(self.receive(&mut buffer)?).filter(|message| message.sequence == batch.first) {
                match message.kind {
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => return Err(message.errno()?.unwrap_or(Errno::PROTO).into()),
                    _ => each(message.body),
                }
            }
        }
    }

    fn send(&mut self, batch: &Batch) -> io::Result<()> {
        self.sequence = batch.first.wrapping_add(batch.count);
        // A netlink socket that is not connected sends to the kernel.
        let sent = rustix::net::send(&self.fd, &batch.bytes, SendFlags::empty())?;
        if sent == batch.bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    fn receive<'b>(&self, buffer: &'b mut [u8; BUFFER]) -> io::Result<&'b [u8]> {
        let (_, length) = rustix::net::recv(&self.fd, &mut buffer[..], RecvFlags::TRUNC | RecvFlags::DONTWAIT)?;
        buffer.get(..length).ok_or_else(|| io::Error::other("an answer of netlink is too long"))
    }
}

struct Message<'b> {
    kind: u16,
    sequence: u32,
    body: &'b [u8],
}

impl Message<'_> {
    /// What an `NLMSG_ERROR` says: 0 is the acknowledgement.
    fn errno(&self) -> io::Result<Option<Errno>> {
        let code = u32_at(self.body, 0).ok_or(io::ErrorKind::InvalidData)?.cast_signed();
        Ok((code != 0).then(|| Errno::from_raw_os_error(code.wrapping_neg())))
    }
}

/// The messages of a datagram. What is damaged ends it.
fn messages(mut rest: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32_at(rest, 0)?).ok()?;
        let body = rest.get(HEADER..length)?;
        let (kind, sequence) = (u16_at(rest, 4)?, u32_at(rest, 8)?);
        rest = rest.get(pad(length)..).unwrap_or_default();
        Some(Message { kind, sequence, body })
    })
}

/// Messages and attributes begin at multiples of four.
const fn pad(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// Messages are made here, of parts of a few bytes.
fn length32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

fn length16(length: usize) -> u16 {
    u16::try_from(length).unwrap_or(u16::MAX)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().copied().map(u16::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_batch_is_padded_numbered_and_acknowledged_once() {
        let mut batch = Batch::new(7);
        batch.push(19, 0, &[1; 16], &[(1, &[2; 6])]);
        batch.push(20, NLM_F_CREATE, &[3; 5], &[]);
        batch.flag_last(NLM_F_ACK);
        let first = HEADER + 16 + ATTRIBUTE + 8;
        assert_eq!(batch.bytes.len(), first + HEADER + 8);
        assert_eq!(batch.bytes[first - 8..first], [2, 2, 2, 2, 2, 2, 0, 0]);
        let parsed: Vec<_> = messages(&batch.bytes).map(|m| (m.kind, m.sequence, m.body.len())).collect();
        assert_eq!(parsed, [(19, 7, 28), (20, 8, 8)]);
        assert_eq!(u16_at(&batch.bytes, 6), Some(NLM_F_REQUEST));
        assert_eq!(u16_at(&batch.bytes, first + 6), Some(NLM_F_REQUEST | NLM_F_CREATE | NLM_F_ACK));
    }

    proptest! {
        #[test]
        fn no_answer_panics_or_loops(bytes in proptest::collection::vec(prop_oneof![0..40_u8, any::<u8>()], 0..200)) {
            let walked: usize = messages(&bytes).map(|m| m.body.len() + HEADER).sum();
            prop_assert!(walked <= bytes.len());
        }
    }
}
