//! The rules: one table in the router namespace for all slots, one in the root namespace for the way out.
//!
//! Rules are constant; what is particular to a slot is an element of a set or a map, so that a packet costs the same with one
//! slot and with a thousand. Each use of a slot and each of its policies has an *epoch*, a mark that its connections
//! carry: a connection counts as established only while its epoch is the slot's, so that a new policy or a new owner never
//! inherits one.
//!
//! Every value that goes into a command is a number, an address or a name made here: there is nothing to escape.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use serde_json::Value;

use crate::egress::{Allowed, Egress, Ipv4Cidr, PRIVATE};
use crate::slots::{GATEWAY, Seat};

/// The router's tables; they are alone in their namespace.
const TABLE: &str = "inet coppice";
const ARP_TABLE: &str = "arp coppice";

/// How many connections a slot may have at once: what the kernel remembers of connections is for all slots. Questions to
/// the resolver are not remembered at all.
const MAX_FLOWS: u32 = 4096;

/// How many questions a slot may ask the resolver per second, and at once: its socket's buffer is for all slots. The resolver
/// has limits of its own below this one.
const QUESTIONS: u32 = 200;

/// The router's end of the pair of links.
pub(crate) const UPLINK: &str = "up";

/// The name of a slot's TAP. The rules rely on its first letter.
pub(crate) fn tap_name(index: u32, seat: Seat) -> String {
    match seat {
        Seat::First => format!("t{index}"),
        Seat::Second => format!("t{index}b"),
    }
}

/// Whether a link has the name of a TAP.
pub(crate) fn is_tap_name(name: &str) -> bool {
    let index = name.strip_prefix('t').map(|rest| rest.strip_suffix('b').unwrap_or(rest));
    index.is_some_and(|index| index.parse::<u32>().is_ok())
}

/// Who a slot is at the moment: what the rules know it by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) index: u32,
    pub(crate) seat: Seat,
    pub(crate) mac: [u8; 6],
    pub(crate) address: Ipv4Addr,
    pub(crate) epoch: u32,
}

impl Identity {
    /// The name of its TAP.
    pub(crate) fn tap_name(&self) -> String {
        tap_name(self.index, self.seat)
    }
}

/// An address and a port that names were resolved to, and for how much longer.
pub(crate) type Opened = (Ipv4Addr, Option<u16>, Duration);

/// All that is open for the names of a slot.
pub(crate) type Openings = Vec<Opened>;

fn private() -> String {
    PRIVATE.map(|net| net.to_string()).join(", ")
}

/// The router's tables, without any slot, in place of those that are there.
pub(crate) fn router(bandwidth: bool) -> String {
    let limits = if bandwidth {
        "limit name ip saddr map @limits_out counter name limited drop
         limit name ip daddr map @limits_in counter name limited drop"
    } else {
        ""
    };
    let private = private();
    format!(
        "add table {TABLE}
delete table {TABLE}
add table {ARP_TABLE}
delete table {ARP_TABLE}
table {ARP_TABLE} {{
    counter spoofed {{ }}
    set slots {{ type ifname . ether_addr . ipv4_addr; }}
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname {UPLINK} accept
        iifname . arp saddr ether . arp saddr ip @slots arp daddr ip {GATEWAY} accept
        iifname . arp saddr ether . arp saddr ip @slots drop
        counter name spoofed drop
    }}
}}
table {TABLE} {{
    counter spoofed {{ }}
    counter refused {{ }}
    counter limited {{ }}
    set slots {{ type ifname . ether_addr . ipv4_addr; }}
    set private {{ type ipv4_addr; flags interval; elements = {{ {private} }}; }}
    set epochs {{ type ipv4_addr . mark; }}
    map epoch {{ type ipv4_addr : mark; }}
    map egress {{ type ipv4_addr : verdict; }}
    map limits_out {{ type ipv4_addr : limit; }}
    map limits_in {{ type ipv4_addr : limit; }}
    set nets_any {{ type ipv4_addr . ipv4_addr; flags interval; }}
    set nets_port {{ type ipv4_addr . ipv4_addr . inet_service; flags interval; }}
    set names_any {{ type ipv4_addr . ipv4_addr; flags timeout; }}
    set names_port {{ type ipv4_addr . ipv4_addr . inet_service; flags timeout; }}
    set flows {{ type ipv4_addr; size 65535; flags dynamic; }}
    set askers {{ type ipv4_addr; size 65535; flags dynamic; }}
    chain pass {{
        add @flows {{ ip saddr ct count over {MAX_FLOWS} }} counter name limited drop
        ct mark set ip saddr map @epoch accept
    }}
    chain open {{
        ip daddr @private counter name refused drop
        goto pass
    }}
    chain listed {{
        ip daddr @private counter name refused drop
        ip saddr . ip daddr @nets_any goto pass
        ip saddr . ip daddr @names_any goto pass
        meta l4proto {{ tcp, udp }} ip saddr . ip daddr . th dport @nets_port goto pass
        meta l4proto {{ tcp, udp }} ip saddr . ip daddr . th dport @names_port goto pass
        counter name refused drop
    }}
    chain own {{
        ip daddr {GATEWAY} udp dport 53 notrack
        accept
    }}
    chain source {{
        type filter hook prerouting priority raw; policy drop;
        iifname {{ lo, {UPLINK} }} accept
        iifname . ether saddr . ip saddr @slots goto own
        counter name spoofed drop
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        {limits}
        ip saddr . ct mark @epochs ct state established,related accept
        ip daddr . ct mark @epochs ct state established,related accept
        ip saddr vmap @egress
        counter name refused drop
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname lo accept
        ct state established,related accept
        iifname t* ip daddr {GATEWAY} udp dport 53 add @askers {{ ip saddr limit rate over {QUESTIONS}/second burst {QUESTIONS} packets }} counter name limited drop
        iifname t* ip daddr {GATEWAY} udp dport 53 accept
        iifname t* ip daddr {GATEWAY} tcp dport 53 goto question
        counter name refused drop
    }}
    chain question {{
        add @flows {{ ip saddr ct count over {MAX_FLOWS} }} counter name limited drop
        accept
    }}
    chain answers {{
        type filter hook output priority raw; policy accept;
        ip saddr {GATEWAY} udp sport 53 notrack
    }}
    chain out {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname {UPLINK} masquerade
    }}
}}
"
    )
}

/// The root namespace's table of one instance: what comes over its link goes out by NAT, never to the host, and only answers
/// come back.
pub(crate) fn outside(table: &str, link: &str, router: Ipv4Addr) -> String {
    let private = private();
    format!(
        "add table inet {table}
delete table inet {table}
table inet {table} {{
    counter host_refused {{ }}
    set private {{ type ipv4_addr; flags interval; elements = {{ {private} }}; }}
    chain input {{
        type filter hook input priority filter; policy accept;
        iifname {link} counter name host_refused drop
    }}
    chain forward {{
        type filter hook forward priority filter; policy accept;
        oifname {link} ct state established,related accept
        oifname {link} counter name host_refused drop
        iifname {link} ip saddr != {router} counter name host_refused drop
        iifname {link} ip daddr @private counter name host_refused drop
        iifname {link} meta nfproto != ipv4 counter name host_refused drop
    }}
    chain out {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {router} oifname != {link} masquerade
    }}
}}
"
    )
}

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Commands that belong to one transaction.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    commands: String,
}

impl Batch {
    pub(crate) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    pub(crate) fn into_commands(self) -> String {
        self.commands
    }

    pub(crate) fn raw(&mut self, commands: &str) {
        self.commands.push_str(commands);
    }

    fn line(&mut self, command: &str) {
        self.commands.push_str(command);
        self.commands.push('\n');
    }

    fn element(&mut self, verb: &str, table: &str, set: &str, element: &str) {
        self.line(&format!("{verb} element {table} {set} {{ {element} }}"));
    }

    /// A slot appears: its identity, its limits, its policy.
    pub(crate) fn add_slot(&mut self, slot: &Identity, egress: &Egress, bandwidth: Option<u64>) {
        self.identity("add", slot);
        self.epoch("add", slot);
        if let Some(rate) = bandwidth {
            // A policer drops: the burst must hold what a window of TCP sends at once, or the rate is never reached.
            let burst = (rate / 4).clamp(256 << 10, u64::from(u32::MAX) / 2);
            for direction in ["out", "in"] {
                let (index, address) = (slot.index, slot.address);
                self.line(&format!(
                    "add limit {TABLE} {direction}{index} {{ rate over {rate} bytes/second burst {burst} bytes; }}"
                ));
                self.element(
                    "add",
                    TABLE,
                    &format!("limits_{direction}"),
                    &format!("{address} : \"{direction}{index}\""),
                );
            }
        }
        self.egress("add", slot.address, egress);
    }

    /// A slot goes, with everything that was opened for it.
    pub(crate) fn remove_slot(&mut self, slot: &Identity, egress: &Egress, bandwidth: bool) {
        self.identity("delete", slot);
        self.epoch("delete", slot);
        self.egress("delete", slot.address, egress);
        if bandwidth {
            for direction in ["out", "in"] {
                let (index, address) = (slot.index, slot.address);
                self.element(
                    "delete",
                    TABLE,
                    &format!("limits_{direction}"),
                    &format!("{address} : \"{direction}{index}\""),
                );
                self.line(&format!("delete limit {TABLE} {direction}{index}"));
            }
        }
    }

    /// Lets a seat send in the name of its slot, or no longer.
    pub(crate) fn identity(&mut self, verb: &str, slot: &Identity) {
        let element = format!("\"{}\" . {} . {}", slot.tap_name(), mac_text(slot.mac), slot.address);
        self.element(verb, TABLE, "slots", &element);
        self.element(verb, ARP_TABLE, "slots", &element);
    }

    /// Puts a slot's epoch in force, or out of it.
    pub(crate) fn epoch(&mut self, verb: &str, slot: &Identity) {
        self.element(verb, TABLE, "epochs", &format!("{} . {:#x}", slot.address, slot.epoch));
        self.element(verb, TABLE, "epoch", &format!("{} : {:#x}", slot.address, slot.epoch));
    }

    /// A policy without what its names resolve to.
    pub(crate) fn egress(&mut self, verb: &str, address: Ipv4Addr, egress: &Egress) {
        match egress {
            Egress::Open => self.element(verb, TABLE, "egress", &format!("{address} : jump open")),
            // What has no policy is refused, and counted.
            Egress::None => {}
            Egress::Allow(entries) => {
                self.element(verb, TABLE, "egress", &format!("{address} : jump listed"));
                for (net, port) in disjoint(entries) {
                    match port {
                        None => self.element(verb, TABLE, "nets_any", &format!("{address} . {net}")),
                        Some(port) => self.element(verb, TABLE, "nets_port", &format!("{address} . {net} . {port}")),
                    }
                }
            }
        }
    }

    /// Opens an address for a while; if it is open already, for this while from now on.
    pub(crate) fn open(&mut self, slot: Ipv4Addr, to: Ipv4Addr, port: Option<u16>, ttl: Duration) {
        self.close(slot, to, port);
        let (set, element) = name_element(slot, to, port);
        self.element("add", TABLE, set, &format!("{element} timeout {}s", ttl.as_secs().max(1)));
    }

    /// Closes an address. It may have expired by now, and deleting what isn't there would fail: so it is added first, which does
    /// nothing to what is there.
    pub(crate) fn close(&mut self, slot: Ipv4Addr, to: Ipv4Addr, port: Option<u16>) {
        let (set, element) = name_element(slot, to, port);
        self.element("add", TABLE, set, &element);
        self.element("delete", TABLE, set, &element);
    }
}

fn name_element(slot: Ipv4Addr, to: Ipv4Addr, port: Option<u16>) -> (&'static str, String) {
    match port {
        None => ("names_any", format!("{slot} . {to}")),
        Some(port) => ("names_port", format!("{slot} . {to} . {port}")),
    }
}

/// The ranges of a list without those inside another of the same port: sets of ranges refuse what overlaps.
fn disjoint(entries: &[Allowed]) -> Vec<(Ipv4Cidr, Option<u16>)> {
    let mut nets: Vec<(Ipv4Cidr, Option<u16>)> = entries
        .iter()
        .filter_map(|entry| match entry {
            Allowed::Net { net, port } => Some((*net, *port)),
            Allowed::Name { .. } => None,
        })
        .collect();
    // The wide ones first: each of the others is then inside one that is kept, or apart from all of them.
    nets.sort_unstable_by_key(|(net, port)| (net.prefix(), net.address(), *port));
    let mut kept: Vec<(Ipv4Cidr, Option<u16>)> = Vec::new();
    for (net, port) in nets {
        if !kept.iter().any(|(wide, other)| *other == port && wide.covers(&net)) {
            kept.push((net, port));
        }
    }
    kept
}

/// What the router's table says of slots: what outlives a restart of the daemon.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) epochs: HashMap<Ipv4Addr, u32>,
    pub(crate) openings: HashMap<Ipv4Addr, Openings>,
}

/// The question that [`found`] reads the answer to.
pub(crate) fn list_router() -> String {
    format!("list table {TABLE}")
}

/// Reads the answer to [`list_router`].
pub(crate) fn found(objects: &[Value]) -> Found {
    let mut found = Found::default();
    for object in objects {
        let Some(set) = object.get("set").or_else(|| object.get("map")) else { continue };
        let elements = set.get("elem").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        match set.get("name").and_then(Value::as_str) {
            Some("epoch") => found.epochs.extend(elements.iter().filter_map(epoch_element)),
            Some("names_any" | "names_port") => {
                for (slot, opening) in elements.iter().filter_map(opening_element) {
                    found.openings.entry(slot).or_default().push(opening);
                }
            }
            _ => {}
        }
    }
    found
}

fn address_value(value: &Value) -> Option<Ipv4Addr> {
    value.as_str()?.parse().ok()
}

fn epoch_element(element: &Value) -> Option<(Ipv4Addr, u32)> {
    Some((address_value(element.get(0)?)?, u32::try_from(element.get(1)?.as_u64()?).ok()?))
}

fn opening_element(element: &Value) -> Option<(Ipv4Addr, Opened)> {
    let element = element.get("elem")?;
    let key = element.get("val")?.get("concat")?;
    let port = match key.get(2) {
        Some(port) => Some(u16::try_from(port.as_u64()?).ok()?),
        None => None,
    };
    let left = Duration::from_secs(element.get("expires")?.as_u64()?.max(1));
    Some((address_value(key.get(0)?)?, (address_value(key.get(1)?)?, port, left)))
}

/// Reads packets by counter from the answer to `list counters`.
pub(crate) fn packets(objects: &[Value], table: &str) -> HashMap<String, u64> {
    let mut packets = HashMap::new();
    for counter in objects.iter().filter_map(|object| object.get("counter")) {
        let text = |key: &str| counter.get(key).and_then(Value::as_str);
        if let (Some(name), Some(count)) = (text("name"), counter.get("packets").and_then(Value::as_u64))
            && text("table") == Some(table)
        {
            // Counters of the same name in tables of several families are one to those who ask.
            *packets.entry(name.to_owned()).or_default() += count;
        }
    }
    packets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(entries: &[&str]) -> Vec<String> {
        let Egress::Allow(entries) = Egress::allow(entries).unwrap() else { unreachable!() };
        disjoint(&entries).iter().map(|(net, port)| format!("{net}:{}", port.unwrap_or(0))).collect()
    }

    #[test]
    fn ranges_of_a_list_do_not_overlap() {
        assert_eq!(
            nets(&["1.2.3.4", "1.2.0.0/16", "1.2.3.0/24:80", "1.2.3.4:80", "1.2.3.4", "9.9.9.9"]),
            ["1.2.0.0/16:0", "1.2.3.0/24:80", "9.9.9.9:0"]
        );
        assert_eq!(nets(&["8.8.8.8", "0.0.0.0/0", "example.org"]), ["0.0.0.0/0:0"]);
    }

    #[test]
    fn what_the_kernel_lists_is_read() {
        let answer: Value = serde_json::from_str(
            r#"[{"metainfo":{}},{"map":{"name":"epoch","elem":[["10.203.1.5",305419896],["broken"]]}},
                {"set":{"name":"names_any","elem":[{"elem":{"val":{"concat":["10.203.1.5","1.2.3.4"]},"timeout":90,"expires":89}}]}},
                {"set":{"name":"names_port","elem":[{"elem":{"val":{"concat":["10.203.1.5","1.2.3.4",443]},"timeout":9,"expires":0}}]}},
                {"set":{"name":"slots","elem":[{"concat":["t5","02:63:01:02:03:04","10.203.1.5"]}]}}]"#,
        )
        .unwrap();
        let found = found(answer.as_array().unwrap());
        let slot = Ipv4Addr::new(10, 203, 1, 5);
        let to = Ipv4Addr::new(1, 2, 3, 4);
        assert_eq!(found.epochs, HashMap::from([(slot, 305_419_896)]));
        assert_eq!(
            found.openings[&slot],
            [(to, None, Duration::from_secs(89)), (to, Some(443), Duration::from_secs(1))]
        );
    }
}
