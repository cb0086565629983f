//! The network stack of a guest, as far as tests need it: Ethernet, ARP, IPv4, UDP and the first segment of TCP, frame by frame.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_net::{GATEWAY, Slot};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{NEVER, SOON};

/// The header before each frame: nothing is left to the other end.
const VNET: usize = 10;

const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;

/// A datagram, or the flags of a TCP segment.
#[derive(Debug, Clone, PartialEq)]
pub enum Packet {
    Udp { from: SocketAddrV4, to: SocketAddrV4, text: String },
    Tcp { from: SocketAddrV4, to: SocketAddrV4, flags: u8 },
}

/// A guest that sits at a TAP.
pub struct Guest {
    pub tap: Arc<OwnedFd>,
    pub mac: [u8; 6],
    pub address: Ipv4Addr,
    gateway: [u8; 6],
}

fn sum(bytes: &[u8], start: u32) -> u32 {
    bytes.chunks(2).fold(start, |sum, pair| sum + u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])))
}

fn checksum(sum: u32) -> [u8; 2] {
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    (!u16::try_from(folded).unwrap()).to_be_bytes()
}

/// An IPv4 packet.
pub fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(20 + payload.len()).unwrap().to_be_bytes();
    let mut packet = vec![0x45, 0, length[0], length[1], 0, 0, 0x40, 0, 64, protocol, 0, 0];
    packet.extend_from_slice(&from.octets());
    packet.extend_from_slice(&to.octets());
    let check = checksum(sum(&packet, 0));
    packet[10..12].copy_from_slice(&check);
    packet.extend_from_slice(payload);
    packet
}

/// A UDP datagram without a checksum, as IPv4 allows.
pub fn udp(from: u16, to: u16, text: &str) -> Vec<u8> {
    let length = u16::try_from(8 + text.len()).unwrap();
    let mut datagram = [from, to, length, 0].map(u16::to_be_bytes).concat();
    datagram.extend_from_slice(text.as_bytes());
    datagram
}

pub const SYN: u8 = 2;
pub const SYN_ACK: u8 = 0x12;

fn tcp(from: SocketAddrV4, to: SocketAddrV4, flags: u8) -> Vec<u8> {
    let mut segment =
        [from.port(), to.port(), 0, 1, 0, 0, 0x5000 | u16::from(flags), 0xffff, 0, 0].map(u16::to_be_bytes).concat();
    let pseudo = [&from.ip().octets()[..], &to.ip().octets()[..], &[0, 6, 0, 20]].concat();
    let check = checksum(sum(&segment, sum(&pseudo, 0)));
    segment[16..18].copy_from_slice(&check);
    segment
}

impl Guest {
    /// Moves in without a word: it knows who the gateway is.
    pub fn silent(slot: &Slot) -> Self {
        Self { tap: Arc::clone(&slot.tap), mac: slot.mac, address: slot.address, gateway: coppice_net::GATEWAY_MAC }
    }

    /// Moves in, and asks who the gateway is.
    pub fn new(slot: &Slot) -> Self {
        let mut guest = Self::silent(slot);
        guest.gateway = guest.resolve(guest.address, GATEWAY, SOON).expect("the gateway does not answer");
        guest
    }

    /// Asks by ARP, in the name of an address, for the MAC of another.
    pub fn resolve(&self, own: Ipv4Addr, wanted: Ipv4Addr, patience: Duration) -> Option<[u8; 6]> {
        let mut question = vec![0, 1, 8, 0, 6, 4, 0, 1];
        question.extend_from_slice(&self.mac);
        question.extend_from_slice(&own.octets());
        question.extend_from_slice(&[0; 6]);
        question.extend_from_slice(&wanted.octets());
        self.frame([0xff; 6], self.mac, ARP, &question).unwrap();
        self.until(patience, |kind, payload| {
            let answer = kind == ARP && payload[7] == 2 && payload[14..18] == wanted.octets();
            answer.then(|| payload[8..14].try_into().unwrap())
        })
    }

    pub fn frame(&self, to: [u8; 6], from: [u8; 6], kind: u16, payload: &[u8]) -> io::Result<()> {
        let mut bytes = vec![0; VNET];
        bytes.extend_from_slice(&to);
        bytes.extend_from_slice(&from);
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(payload);
        rustix::io::write(&*self.tap, &bytes)?;
        Ok(())
    }

    /// Sends a packet as somebody else.
    pub fn forge(&self, mac: [u8; 6], packet: &[u8]) {
        self.frame(self.gateway, mac, IPV4, packet).unwrap();
    }

    /// Sends a datagram by IPv6 to all nodes, and one to an address outside.
    pub fn send_ipv6(&self) {
        for destination in [
            [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
            [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9],
        ] {
            let body = udp(5000, 7000, "six");
            let mut packet = vec![0x60, 0, 0, 0, 0, u8::try_from(body.len()).unwrap(), 17, 64];
            packet.extend_from_slice(&[0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5]);
            packet.extend_from_slice(&destination);
            packet.extend_from_slice(&body);
            self.frame(self.gateway, self.mac, IPV6, &packet).unwrap();
        }
    }

    pub fn send(&self, from: u16, to: SocketAddrV4, text: &str) {
        self.forge(self.mac, &ipv4(self.address, *to.ip(), 17, &udp(from, to.port(), text)));
    }

    /// Sends the first segment of a connection.
    pub fn connect(&self, from: u16, to: SocketAddrV4) {
        let own = SocketAddrV4::new(self.address, from);
        self.forge(self.mac, &ipv4(self.address, *to.ip(), 6, &tcp(own, to, SYN)));
    }

    /// Sends a datagram and waits for it to come back.
    pub fn reaches(&self, from: u16, to: SocketAddrV4, text: &str) -> bool {
        self.send(from, to, text);
        let back = Packet::Udp { from: to, to: SocketAddrV4::new(self.address, from), text: text.to_owned() };
        self.receives(SOON, &back)
    }

    pub fn receives(&self, patience: Duration, wanted: &Packet) -> bool {
        self.next(patience, |packet| packet == wanted).is_some()
    }

    /// The next packet of a kind.
    pub fn next(&self, patience: Duration, wanted: impl Fn(&Packet) -> bool) -> Option<Packet> {
        self.until(patience, |kind, payload| if kind == IPV4 { parse(payload).filter(&wanted) } else { None })
    }

    /// What arrives within a short while: nothing, if all is well.
    pub fn stray(&self) -> Option<Packet> {
        self.next(NEVER, |_| true)
    }

    /// Reads frames until one of them is what is wanted.
    fn until<R>(&self, patience: Duration, wanted: impl Fn(u16, &[u8]) -> Option<R>) -> Option<R> {
        let until = Instant::now() + patience;
        let mut buffer = [0_u8; 70_000];
        loop {
            match rustix::io::read(&*self.tap, &mut buffer) {
                Ok(length) => {
                    let frame = &buffer[VNET..length];
                    let found = wanted(u16::from_be_bytes([frame[12], frame[13]]), &frame[14..]);
                    if found.is_some() {
                        return found;
                    }
                }
                Err(rustix::io::Errno::AGAIN) => {
                    let left = until.checked_duration_since(Instant::now())?;
                    let left = Timespec::try_from(left).unwrap();
                    poll(&mut [PollFd::new(&*self.tap, PollFlags::IN)], Some(&left)).unwrap();
                }
                Err(error) => panic!("reading the TAP: {error}"),
            }
        }
    }
}

fn parse(packet: &[u8]) -> Option<Packet> {
    let address = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&packet[at..at + 4]).unwrap());
    let body = &packet[usize::from(packet[0] & 15) * 4..];
    let port = |at: usize| u16::from_be_bytes([body[at], body[at + 1]]);
    let (from, to) = (SocketAddrV4::new(address(12), port(0)), SocketAddrV4::new(address(16), port(2)));
    match packet[9] {
        17 => {
            Some(Packet::Udp { from, to, text: String::from_utf8_lossy(&body[8..usize::from(port(4))]).into_owned() })
        }
        6 => Some(Packet::Tcp { from, to, flags: body[13] }),
        _ => None,
    }
}
