//! Links, addresses, routes and neighbours by rtnetlink: the few requests that the network needs, each acknowledged.

use std::ffi::CString;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};

/// `VETH_INFO_PEER` of linux/veth.h
const VETH_INFO_PEER: u16 = 1;

/// The length of a netlink message's header.
const HEADER: usize = 16;

/// `AF_INET` and `NLMSG_ERROR` as wide as messages have them.
const INET: u8 = 2;
const ERROR: u16 = 2;
const _: () = assert!(INET as i32 == libc::AF_INET && ERROR as i32 == libc::NLMSG_ERROR);

const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const REPLACE: u16 = 0x100;
const EXCLUSIVE: u16 = 0x200;
const CREATE: u16 = 0x400;

/// A request under construction.
#[derive(Debug)]
pub(crate) struct Request(Vec<u8>);

impl Request {
    fn new(kind: u16, flags: u16, body: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&(REQUEST | ACK | flags).to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(body);
        Self(bytes)
    }

    fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        // Every value here is a few bytes long; a length that didn't fit would be refused by the kernel.
        let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    fn name(self, kind: u16, name: &str) -> Self {
        let mut value = name.as_bytes().to_vec();
        value.push(0);
        self.attribute(kind, &value)
    }

    /// The attributes of a nested message: what follows its header.
    fn nested(self, kind: u16, inner: &Self) -> Self {
        let inner = inner.0.get(HEADER..).unwrap_or_default().to_vec();
        self.attribute(kind, &inner)
    }
}

fn link_message(index: i32, flags: u32, change: u32) -> Vec<u8> {
    let mut body = vec![0; 4];
    body.extend_from_slice(&index.to_ne_bytes());
    body.extend_from_slice(&flags.to_ne_bytes());
    body.extend_from_slice(&change.to_ne_bytes());
    body
}

const UP: u32 = 1;

/// Brings a link up, with a MAC address if one is given.
pub(crate) fn link_up(name: &str, mac: Option<[u8; 6]>) -> Request {
    let request = Request::new(libc::RTM_NEWLINK, 0, &link_message(0, UP, UP)).name(libc::IFLA_IFNAME, name);
    match mac {
        Some(mac) => request.attribute(libc::IFLA_ADDRESS, &mac),
        None => request,
    }
}

/// Makes a pair of links, one of them in another namespace.
pub(crate) fn veth(name: &str, peer: &str, peer_netns: BorrowedFd<'_>) -> Request {
    let other = Request::new(0, 0, &link_message(0, 0, 0))
        .name(libc::IFLA_IFNAME, peer)
        .attribute(libc::IFLA_NET_NS_FD, &peer_netns.as_raw_fd().to_ne_bytes());
    let data = Request::new(0, 0, &[]).nested(VETH_INFO_PEER, &other);
    let info = Request::new(0, 0, &[]).name(libc::IFLA_INFO_KIND, "veth").nested(libc::IFLA_INFO_DATA, &data);
    Request::new(libc::RTM_NEWLINK, CREATE | EXCLUSIVE, &link_message(0, 0, 0))
        .name(libc::IFLA_IFNAME, name)
        .nested(libc::IFLA_LINKINFO, &info)
}

/// Removes a link.
pub(crate) fn delete_link(name: &str) -> Request {
    Request::new(libc::RTM_DELLINK, 0, &link_message(0, 0, 0)).name(libc::IFLA_IFNAME, name)
}

/// Puts a link into a group.
pub(crate) fn link_group(name: &str, group: u32) -> Request {
    Request::new(libc::RTM_NEWLINK, 0, &link_message(0, 0, 0))
        .name(libc::IFLA_IFNAME, name)
        .attribute(libc::IFLA_GROUP, &group.to_ne_bytes())
}

/// Removes every link of a group: at the price of one.
pub(crate) fn delete_group(group: u32) -> Request {
    Request::new(libc::RTM_DELLINK, 0, &link_message(0, 0, 0)).attribute(libc::IFLA_GROUP, &group.to_ne_bytes())
}

/// Gives a link an address.
pub(crate) fn address(index: u32, address: Ipv4Addr, prefix: u8) -> Request {
    let mut body = vec![INET, prefix, 0, 0];
    body.extend_from_slice(&index.to_ne_bytes());
    Request::new(libc::RTM_NEWADDR, CREATE | REPLACE, &body)
        .attribute(libc::IFA_LOCAL, &address.octets())
        .attribute(libc::IFA_ADDRESS, &address.octets())
}

fn route_message(prefix: u8, scope: u8) -> Vec<u8> {
    let mut body = vec![INET, prefix, 0, 0, libc::RT_TABLE_MAIN, libc::RTPROT_STATIC, scope, libc::RTN_UNICAST];
    body.extend_from_slice(&[0; 4]);
    body
}

/// The route to everything that has no other.
pub(crate) fn default_route(via: Ipv4Addr) -> Request {
    Request::new(libc::RTM_NEWROUTE, CREATE | REPLACE, &route_message(0, libc::RT_SCOPE_UNIVERSE))
        .attribute(libc::RTA_GATEWAY, &via.octets())
}

/// The route to one address on a link.
pub(crate) fn host_route(address: Ipv4Addr, index: u32) -> Request {
    Request::new(libc::RTM_NEWROUTE, CREATE | REPLACE, &route_message(32, libc::RT_SCOPE_LINK))
        .attribute(libc::RTA_DST, &address.octets())
        .attribute(libc::RTA_OIF, &index.to_ne_bytes())
}

/// Who has an address on a link, for good: the neighbour is never asked.
pub(crate) fn neighbour(address: Ipv4Addr, index: u32, mac: [u8; 6]) -> Request {
    let mut body = vec![INET, 0, 0, 0];
    body.extend_from_slice(&index.to_ne_bytes());
    body.extend_from_slice(&libc::NUD_PERMANENT.to_ne_bytes());
    body.extend_from_slice(&[0; 2]);
    Request::new(libc::RTM_NEWNEIGH, CREATE | REPLACE, &body)
        .attribute(libc::NDA_DST, &address.octets())
        .attribute(libc::NDA_LLADDR, &mac)
}

/// The index of a link in the calling thread's namespace.
pub(crate) fn index_of(name: &str) -> io::Result<u32> {
    let name = CString::new(name)?;
    // SAFETY: the name is terminated and outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 { Err(io::Error::last_os_error()) } else { Ok(index) }
}

/// A socket that asks the kernel, in the namespace of the thread that made it.
#[derive(Debug)]
pub(crate) struct Rtnl {
    socket: OwnedFd,
    sequence: u32,
}

impl Rtnl {
    pub(crate) fn new() -> io::Result<Self> {
        // Protocol 0 of netlink is rtnetlink.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends requests and waits for all of them; the first that failed is the error.
    pub(crate) fn ask(&mut self, requests: Vec<Request>) -> io::Result<()> {
        self.ask_each(requests).into_iter().collect()
    }

    /// Sends requests one after the other, whatever becomes of each.
    pub(crate) fn ask_each(&mut self, requests: Vec<Request>) -> Vec<io::Result<()>> {
        requests.into_iter().map(|request| self.ask_one(request.0)).collect()
    }

    fn ask_one(&mut self, mut bytes: Vec<u8>) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        if let Some(slot) = bytes.get_mut(..4) {
            slot.copy_from_slice(&length.to_ne_bytes());
        }
        if let Some(slot) = bytes.get_mut(8..12) {
            slot.copy_from_slice(&self.sequence.to_ne_bytes());
        }
        send(&self.socket, &bytes, SendFlags::empty())?;
        let mut buffer = [0_u8; 8192];
        loop {
            let (received, _) = match recv(&self.socket, &mut buffer, RecvFlags::empty()) {
                Err(Errno::INTR) => continue,
                other => other?,
            };
            if let Some(result) = acknowledgement(buffer.get(..received).unwrap_or_default(), self.sequence) {
                return result;
            }
        }
    }
}

/// The kernel's answer to the request with a sequence number, if it is among these messages.
fn acknowledgement(mut messages: &[u8], sequence: u32) -> Option<io::Result<()>> {
    let word = |bytes: &[u8], at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes);
    while let Some(length) = word(messages, 0).and_then(|length| usize::try_from(length).ok()) {
        let kind = messages.get(4..6).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes);
        if kind == Some(ERROR) && word(messages, 8) == Some(sequence) {
            let code = word(messages, HEADER).map_or(-libc::EPROTO, u32::cast_signed);
            return Some(if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-code)) });
        }
        messages = messages.get(length.max(HEADER).next_multiple_of(4)..)?;
    }
    None
}
