//! The machine's network interface: up since the boot, and given its MAC and address by the handshake.
//!
//! The gateway is the same for all sandboxes and reached on-link, so that a copy of a machine changes its MAC and address
//! and keeps its route: one batch of netlink messages with one answer. What is right already is left alone, by what the last
//! handshake set and not by asking the kernel. It does not do IPv6, which sandboxes don't have, except on loopback, nor DNS,
//! which is a file.

use std::{fs, io, net::Ipv4Addr, path::Path};

use coppice_guest_proto::v1;
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, netdevice},
};

use crate::netlink::{Batch, NLM_F_CREATE, NLM_F_REPLACE, Refused, Socket};

/// Every machine has one interface, and no udev to rename it.
const INTERFACE: &str = "eth0";

// include/uapi/linux/rtnetlink.h, if_link.h, if_addr.h
const RTM_NEWLINK: u16 = 16;
const RTM_SETLINK: u16 = 19;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_NEWROUTE: u16 = 24;
const IFLA_ADDRESS: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const AF_INET: u8 = 2;
const IFF_UP: u32 = 1;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RTN_UNICAST: u8 = 1;
const RTNH_F_ONLINK: u32 = 4;

/// What a machine is on the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkConfig {
    /// Of the interface.
    pub mac: [u8; 6],
    /// The machine's only address.
    pub address: Ipv4Addr,
    /// Length of its prefix.
    pub prefix: u8,
    /// Where everything is sent. Need not be within the prefix.
    pub gateway: Ipv4Addr,
    /// For `/etc/resolv.conf`.
    pub dns: Vec<Ipv4Addr>,
}

impl TryFrom<&v1::Network> for NetworkConfig {
    /// What is wrong with it.
    type Error = String;

    fn try_from(net: &v1::Network) -> Result<Self, String> {
        let address = |text: &str| {
            let parsed: Option<Ipv4Addr> = text.parse().ok();
            parsed
                .filter(|address| !address.is_unspecified() && !address.is_broadcast() && !address.is_multicast())
                .ok_or_else(|| format!("{text:?} is not the IPv4 address of a machine"))
        };
        let prefix = u8::try_from(net.prefix).ok().filter(|prefix| (1..=32).contains(prefix));
        Ok(Self {
            mac: mac(&net.mac).ok_or_else(|| format!("{:?} is not the MAC address of a machine", net.mac))?,
            address: address(&net.ip)?,
            prefix: prefix.ok_or_else(|| format!("{} is not the length of an IPv4 prefix", net.prefix))?,
            gateway: address(&net.gateway)?,
            dns: net.dns.iter().map(|server| address(server)).collect::<Result<_, _>>()?,
        })
    }
}

/// Six bytes in hex with colons, of one machine (not a group).
fn mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next().filter(|part| part.len() == 2 && !part.starts_with('+'))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    (parts.next().is_none() && mac.first()? & 1 == 0 && mac != [0; 6]).then_some(mac)
}

/// The interface, and the socket that changes it, which stays open: its code has run before a machine is captured.
#[derive(Debug)]
pub(crate) struct Interface {
    index: u32,
    route: Socket,
}

impl Interface {
    /// Finds it. `NotFound` when the machine has none.
    pub(crate) fn find() -> io::Result<Self> {
        let any = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        let index = netdevice::name_to_index(&any, INTERFACE).map_err(|errno| match errno {
            Errno::NODEV => io::Error::new(io::ErrorKind::NotFound, format!("there is no {INTERFACE}")),
            other => other.into(),
        })?;
        Ok(Self { index, route: Socket::route()? })
    }

    /// Brings it up, without IPv6. Off on the interface and not by the kernel command line (`ipv6.disable_ipv6=1`), which
    /// takes `::1` away as well; and off before it is up, so that the kernel never makes a link-local address and asks
    /// around whether it is free.
    pub(crate) fn bring_up(&mut self) -> io::Result<()> {
        let switch = Path::new("/proc/sys/net/ipv6/conf").join(INTERFACE).join("disable_ipv6");
        match fs::write(&switch, "1") {
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result?,
        }
        let mut batch = self.route.batch();
        batch.push(RTM_NEWLINK, 0, &ifinfomsg(self.index, IFF_UP), &[]);
        match self.route.run(batch)?.first() {
            Some(refused) => Err(failed("bringing the interface up", *refused)),
            None => Ok(()),
        }
    }

    /// Makes it `new`, from what was set before.
    pub(crate) fn set(&mut self, old: Option<&NetworkConfig>, new: &NetworkConfig) -> io::Result<()> {
        let mut batch = self.route.batch();
        let steps = plan(&mut batch, self.index, old, new);
        for refused in self.route.run(batch)? {
            let step = steps.iter().zip(0..).find(|(_, index)| *index == refused.index).map(|(step, _)| *step);
            match step {
                // Whoever removed it, it is gone.
                Some(Step::RemoveAddress) if refused.errno == Errno::ADDRNOTAVAIL => {}
                step => return Err(failed(step.map_or("netlink", Step::what), refused)),
            }
        }
        Ok(())
    }
}

fn failed(what: &str, refused: Refused) -> io::Error {
    let error = io::Error::from(refused.errno);
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// One message of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    SetMac,
    AddAddress,
    SetRoute,
    RemoveAddress,
}

impl Step {
    fn what(self) -> &'static str {
        match self {
            Self::SetMac => "setting the MAC address",
            Self::AddAddress => "adding the address",
            Self::SetRoute => "setting the default route",
            Self::RemoveAddress => "removing the old address",
        }
    }
}

/// The messages from `old` to `new`. The MAC first: nothing leaves the machine with the new address and the old MAC. The old
/// address last: with an interface's last address the kernel removes its routes. Each may be repeated, since a handshake may.
fn plan(batch: &mut Batch, index: u32, old: Option<&NetworkConfig>, new: &NetworkConfig) -> Vec<Step> {
    let mut steps = Vec::with_capacity(4);
    let differs = |same: fn(&NetworkConfig, &NetworkConfig) -> bool| !old.is_some_and(|old| same(old, new));
    if differs(|old, new| old.mac == new.mac) {
        batch.push(RTM_SETLINK, 0, &ifinfomsg(index, 0), &[(IFLA_ADDRESS, &new.mac)]);
        steps.push(Step::SetMac);
    }
    let moves = differs(|old, new| old.address == new.address && old.prefix == new.prefix);
    if moves {
        let address = new.address.octets();
        let attributes: [(u16, &[u8]); 2] = [(IFA_LOCAL, &address), (IFA_ADDRESS, &address)];
        batch.push(RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, &ifaddrmsg(index, new.prefix), &attributes);
        steps.push(Step::AddAddress);
    }
    if differs(|old, new| old.gateway == new.gateway) {
        let (gateway, interface) = (new.gateway.octets(), index.to_ne_bytes());
        let attributes: [(u16, &[u8]); 2] = [(RTA_GATEWAY, &gateway), (RTA_OIF, &interface)];
        batch.push(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, &default_route(), &attributes);
        steps.push(Step::SetRoute);
    }
    if let Some(old) = old.filter(|_| moves) {
        batch.push(RTM_DELADDR, 0, &ifaddrmsg(index, old.prefix), &[(IFA_LOCAL, &old.address.octets())]);
        steps.push(Step::RemoveAddress);
    }
    steps
}

/// `struct ifinfomsg`: family, padding, type, index, flags, and which flags are meant.
fn ifinfomsg(index: u32, up: u32) -> [u8; 16] {
    let mut message = [0; 16];
    message[4..8].copy_from_slice(&index.to_ne_bytes());
    message[8..12].copy_from_slice(&up.to_ne_bytes());
    message[12..].copy_from_slice(&up.to_ne_bytes());
    message
}

/// `struct ifaddrmsg`: family, prefix length, flags, scope, index.
fn ifaddrmsg(index: u32, prefix: u8) -> [u8; 8] {
    let [a, b, c, d] = index.to_ne_bytes();
    [AF_INET, prefix, 0, 0, a, b, c, d]
}

/// `struct rtmsg`: family, lengths of destination and source, tos, table, protocol, scope (0: everywhere), type, flags.
/// On-link: the gateway is in no prefix of ours.
fn default_route() -> [u8; 12] {
    let [a, b, c, d] = RTNH_F_ONLINK.to_ne_bytes();
    [AF_INET, 0, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, 0, RTN_UNICAST, a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> NetworkConfig {
        NetworkConfig {
            mac: [2, 0x63, 1, 2, 3, 4],
            address: Ipv4Addr::new(10, 203, 1, 5),
            prefix: 32,
            gateway: Ipv4Addr::new(10, 203, 0, 1),
            dns: vec![Ipv4Addr::new(10, 203, 0, 1)],
        }
    }

    fn steps(old: Option<&NetworkConfig>, new: &NetworkConfig) -> Vec<Step> {
        let socket = Socket::route().unwrap();
        let mut batch = socket.batch();
        let steps = plan(&mut batch, 2, old, new);
        assert_eq!(usize::try_from(batch.len()).unwrap(), steps.len());
        steps
    }

    #[test]
    fn only_what_differs_is_sent_and_the_old_address_goes_last() {
        use Step::{AddAddress, RemoveAddress, SetMac, SetRoute};
        let old = config();
        assert_eq!(steps(None, &old), [SetMac, AddAddress, SetRoute]);
        assert_eq!(steps(Some(&old), &old), []);
        let child = NetworkConfig { mac: [2, 0x63, 9, 9, 9, 9], address: Ipv4Addr::new(10, 203, 1, 6), ..config() };
        assert_eq!(steps(Some(&old), &child), [SetMac, AddAddress, RemoveAddress]);
        let routed = NetworkConfig { gateway: Ipv4Addr::new(10, 203, 0, 2), ..config() };
        assert_eq!(steps(Some(&old), &routed), [SetRoute]);
    }

    #[test]
    fn what_is_no_network_is_refused() {
        let good = v1::Network {
            mac: "02:63:01:02:03:04".into(),
            ip: "10.203.1.5".into(),
            prefix: 32,
            gateway: "10.203.0.1".into(),
            dns: vec!["10.203.0.1".into()],
        };
        assert_eq!(NetworkConfig::try_from(&good), Ok(config()));
        for mac in [
            "",
            "02:63:01:02:03",
            "02:63:01:02:03:04:05",
            "03:63:01:02:03:04",
            "+2:63:01:02:03:04",
            "0:0:0:0:0:0",
            "00:00:00:00:00:00",
        ] {
            assert!(NetworkConfig::try_from(&v1::Network { mac: mac.into(), ..good.clone() }).is_err(), "{mac}");
        }
        for ip in ["", "0.0.0.0", "10.203.1", "::1", "224.0.0.1", "10.0.0.1\nnameserver 1.1.1.1"] {
            assert!(NetworkConfig::try_from(&v1::Network { ip: ip.into(), ..good.clone() }).is_err(), "{ip}");
            assert!(NetworkConfig::try_from(&v1::Network { gateway: ip.into(), ..good.clone() }).is_err(), "{ip}");
            assert!(NetworkConfig::try_from(&v1::Network { dns: vec![ip.into()], ..good.clone() }).is_err(), "{ip}");
        }
        for prefix in [0, 33, 300] {
            assert!(NetworkConfig::try_from(&v1::Network { prefix, ..good.clone() }).is_err(), "{prefix}");
        }
    }
}
