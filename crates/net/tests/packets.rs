//! What leaves a slot and what reaches it: real packets, through the real rules, in namespaces that the test made.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use common::guest::{Guest, Packet, SYN, SYN_ACK, ipv4, udp};
use common::{HOST, Lab, NEVER, OTHER, OTHER_PORT, PORT, PRIVATE, SERVER, SOON, link_address, root};
use coppice_net::{Egress, GATEWAY, NetError, Opening, Seat, Slot, SlotRecord, Slots};

fn at(address: Ipv4Addr, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(address, port)
}

fn allow(entries: &[&str]) -> Egress {
    Egress::allow(entries).unwrap()
}

fn texts(lab: &Lab) -> HashSet<String> {
    lab.servers.heard().into_iter().chain(lab.services.heard()).map(|heard| heard.text).collect()
}

#[test]
fn an_open_slot_reaches_the_outside_by_nat_and_nothing_private() {
    if !root() {
        return;
    }
    let lab = Lab::new(4, 2, None);
    let [one, two] = [(); 2].map(|()| Guest::new(&lab.network().take(&Egress::Open).unwrap()));
    assert!(one.reaches(5000, at(SERVER, PORT), "out"));
    assert!(two.reaches(5000, at(OTHER, OTHER_PORT), "out too"));
    let heard = lab.servers.wait_for("out").unwrap();
    assert_eq!(*heard.from.ip(), HOST, "the server sees the host, not the guest");

    let link = link_address(&lab.host, &lab.instance.config.id);
    let router = Ipv4Addr::from_bits(link.to_bits() + 1);
    let before = lab.network().counters().unwrap();
    // What the host itself can reach, so that silence means something.
    let direct = lab.host.run(|| std::net::UdpSocket::bind("0.0.0.0:0")).unwrap();
    for address in PRIVATE {
        direct.send_to(format!("host {address}").as_bytes(), at(address, PORT)).unwrap();
        assert!(lab.servers.wait_for(&format!("host {address}")).is_some());
        one.send(5001, at(address, PORT), &format!("private {address}"));
    }
    for address in [HOST, link, router, GATEWAY, Ipv4Addr::LOCALHOST, two.address, Ipv4Addr::BROADCAST] {
        one.send(5002, at(address, PORT), &format!("host {address} from a guest"));
        one.connect(5003, at(address, PORT));
    }
    one.send_ipv6();
    // What was sent before it has been dealt with when this is back.
    assert!(one.reaches(5004, at(SERVER, PORT), "last"));
    assert_eq!(two.stray(), None);
    assert_eq!(one.stray(), None, "nobody answers, not even with a reset");
    let strays: Vec<_> =
        texts(&lab).into_iter().filter(|text| text.contains("private") || text.contains("guest")).collect();
    assert_eq!(strays, Vec::<String>::new());
    let after = lab.network().counters().unwrap();
    assert!(after.refused >= before.refused + 5, "{before:?} {after:?}");
    assert!(after.host_refused >= before.host_refused + 2, "{before:?} {after:?}");
    assert_eq!(after.spoofed, before.spoofed + 2, "the packets of IPv6: {before:?} {after:?}");
}

#[test]
fn the_outside_reaches_no_slot_on_its_own() {
    if !root() {
        return;
    }
    let lab = Lab::new(2, 1, None);
    let guest = Guest::new(&lab.network().take(&Egress::Open).unwrap());
    let link = link_address(&lab.host, &lab.instance.config.id);
    let router = Ipv4Addr::from_bits(link.to_bits() + 1);
    let address = guest.address;
    lab.outside.run(move || {
        common::ip(&format!("route add {address}/32 via {HOST}"));
    });
    lab.host.run(move || common::ip(&format!("route add {address}/32 via {router}")));
    for to in [router, guest.address] {
        lab.servers.push(at(SERVER, PORT), at(to, 5000), "unasked");
    }
    assert_eq!(guest.stray(), None);
    assert!(lab.network().counters().unwrap().host_refused >= 2);
}

#[test]
fn who_pretends_to_be_another_is_dropped_and_counted() {
    if !root() {
        return;
    }
    let lab = Lab::new(4, 2, None);
    let [one, two] = [(); 2].map(|()| Guest::new(&lab.network().take(&Egress::Open).unwrap()));
    let spoofed = || lab.network().counters().unwrap().spoofed;
    let before = spoofed();
    let server = udp(5000, PORT, "forged");
    one.forge(one.mac, &ipv4(two.address, SERVER, 17, &server));
    one.forge(one.mac, &ipv4(Ipv4Addr::new(203, 0, 113, 77), SERVER, 17, &server));
    one.forge(one.mac, &ipv4(Ipv4Addr::UNSPECIFIED, SERVER, 17, &server));
    one.forge(two.mac, &ipv4(one.address, SERVER, 17, &server));
    one.forge([2, 0, 0, 0, 0, 9], &ipv4(one.address, SERVER, 17, &server));
    one.forge(two.mac, &ipv4(two.address, SERVER, 17, &server));
    assert!(one.reaches(5001, at(SERVER, PORT), "honest"));
    assert_eq!(spoofed(), before + 6);
    // The router answers no question that is asked in another's name, and no question for what is not the gateway.
    assert_eq!(one.resolve(two.address, GATEWAY, NEVER), None);
    assert_eq!(one.resolve(one.address, two.address, NEVER), None);
    assert_eq!(one.resolve(one.address, link_address(&lab.host, &lab.instance.config.id), NEVER), None);
    assert_eq!(spoofed(), before + 7);
    let neighbours = lab.instance.inside("ip neigh show");
    let wrong: Vec<_> =
        neighbours.lines().filter(|line| line.contains("dev t") && !line.contains("PERMANENT")).collect();
    assert_eq!(wrong, Vec::<&str>::new(), "a guest makes the router remember nothing");
    assert!(!texts(&lab).contains("forged"));
}

#[test]
fn a_policy_lets_through_what_it_lists() {
    if !root() {
        return;
    }
    let lab = Lab::new(8, 2, None);
    let none = Guest::new(&lab.network().take(&Egress::None).unwrap());
    none.send(5000, at(SERVER, PORT), "none");
    none.connect(5000, at(SERVER, PORT));
    assert_eq!(none.stray(), None);

    let net = Guest::new(&lab.network().take(&allow(&["198.51.100.0/30", "198.51.100.0/24:9"])).unwrap());
    assert!(net.reaches(5000, at(SERVER, PORT), "listed net"));
    net.send(5001, at(OTHER, PORT), "unlisted net");

    let port = Guest::new(&lab.network().take(&allow(&["198.51.100.2:7001", "203.0.113.0/24:7000"])).unwrap());
    assert!(port.reaches(5000, at(SERVER, OTHER_PORT), "listed port"));
    port.send(5001, at(SERVER, PORT), "unlisted port");
    assert!(port.reaches(5002, at(OTHER, PORT), "another listed port"));
    port.send(5003, at(OTHER, OTHER_PORT), "another unlisted port");

    // A list that is wider than the private ranges doesn't open them.
    let all = Guest::new(&lab.network().take(&allow(&["0.0.0.0/0"])).unwrap());
    assert!(all.reaches(5000, at(OTHER, PORT), "everything"));
    for address in PRIVATE.into_iter().chain([HOST, none.address]) {
        all.send(5001, at(address, PORT), "private though listed");
    }
    assert!(all.reaches(5002, at(OTHER, PORT), "everything still"));
    assert_eq!(none.stray(), None);
    let wrong = ["none", "unlisted net", "unlisted port", "another unlisted port", "private though listed"];
    assert!(texts(&lab).is_disjoint(&wrong.map(str::to_owned).into()), "{:?}", texts(&lab));
}

#[test]
fn what_a_name_resolved_to_is_open_for_its_time() {
    if !root() {
        return;
    }
    let lab = Lab::new(4, 2, None);
    let slot = lab.network().take(&allow(&["a.example:7000", "*.b.example"])).unwrap();
    let other = Guest::new(&lab.network().take(&allow(&["a.example"])).unwrap());
    let guest = Guest::new(&slot);
    let opening = |address, port, ttl| Opening { address, port, ttl: Duration::from_secs(ttl) };
    guest.send(5000, at(SERVER, PORT), "before the name");
    let short = [opening(SERVER, Some(PORT), 1), opening(OTHER, None, 600), opening(PRIVATE[1], None, 600)];
    lab.network().open_names(slot.index, &short).unwrap();
    assert!(guest.reaches(5001, at(SERVER, PORT), "by name"));
    assert!(guest.reaches(5002, at(OTHER, OTHER_PORT), "by name at any port"));
    guest.send(5003, at(SERVER, OTHER_PORT), "by name at a wrong port");
    guest.send(5003, at(PRIVATE[1], PORT), "rebound to a private address");
    other.send(5004, at(SERVER, PORT), "by another's name");

    #[expect(clippy::disallowed_methods, reason = "what is waited for is the kernel's clock")]
    std::thread::sleep(Duration::from_millis(1500));
    guest.send(5005, at(SERVER, PORT), "after its time");
    assert!(guest.reaches(5001, at(SERVER, PORT), "on an old connection"));
    // The next answer opens it again, and one that came sooner than it expired makes it last longer.
    lab.network().open_names(slot.index, &[opening(SERVER, Some(PORT), 1)]).unwrap();
    lab.network().open_names(slot.index, &[opening(SERVER, Some(PORT), 600)]).unwrap();
    #[expect(clippy::disallowed_methods, reason = "what is waited for is the kernel's clock")]
    std::thread::sleep(Duration::from_millis(1500));
    assert!(guest.reaches(5006, at(SERVER, PORT), "longer"));

    // A list with the same names keeps what they resolved to, another one doesn't.
    lab.network().set_egress(slot.index, &allow(&["*.b.example", "a.example:7000", "192.0.2.1"])).unwrap();
    assert!(guest.reaches(5007, at(OTHER, PORT), "the same names"));
    lab.network().set_egress(slot.index, &allow(&["a.example:7000"])).unwrap();
    guest.send(5008, at(OTHER, PORT), "another name");
    assert_eq!(guest.stray(), None);
    let wrong = [
        "before the name",
        "by name at a wrong port",
        "rebound to a private address",
        "by another's name",
        "after its time",
        "another name",
    ];
    assert!(texts(&lab).is_disjoint(&wrong.map(str::to_owned).into()), "{:?}", texts(&lab));
}

#[test]
fn a_new_policy_cuts_what_it_does_not_allow() {
    if !root() {
        return;
    }
    let lab = Lab::new(2, 1, None);
    let slot = lab.network().take(&Egress::Open).unwrap();
    let guest = Guest::new(&slot);
    assert!(guest.reaches(5000, at(SERVER, PORT), "first"));
    assert!(guest.reaches(5001, at(OTHER, PORT), "other"));
    let back = |address, text: &str| Packet::Udp {
        from: at(address, PORT),
        to: at(guest.address, 5000),
        text: text.to_owned(),
    };
    let seen = lab.servers.wait_for("first").unwrap().from;
    lab.servers.push(at(SERVER, PORT), seen, "pushed");
    assert!(guest.receives(SOON, &back(SERVER, "pushed")), "an established connection works both ways");

    lab.network().set_egress(slot.index, &allow(&["203.0.113.0/24"])).unwrap();
    lab.servers.push(at(SERVER, PORT), seen, "pushed after");
    guest.send(5000, at(SERVER, PORT), "sent after");
    assert_eq!(guest.stray(), None);
    assert!(guest.reaches(5001, at(OTHER, PORT), "still allowed, on the same connection"));

    lab.network().set_egress(slot.index, &Egress::None).unwrap();
    guest.send(5001, at(OTHER, PORT), "sent after all");
    assert_eq!(guest.stray(), None);
    lab.network().set_egress(slot.index, &Egress::Open).unwrap();
    assert!(guest.reaches(5000, at(SERVER, PORT), "open again"));
    let wrong = ["sent after", "sent after all"];
    assert!(texts(&lab).is_disjoint(&wrong.map(str::to_owned).into()));
}

#[test]
fn a_new_owner_inherits_nothing() {
    if !root() {
        return;
    }
    let lab = Lab::new(1, 1, None);
    let slot = lab.network().take(&allow(&["0.0.0.0/0", "a.example"])).unwrap();
    lab.network().open_names(slot.index, &[Opening { address: SERVER, port: None, ttl: SOON }]).unwrap();
    let old = Guest::new(&slot);
    assert!(old.reaches(5000, at(SERVER, PORT), "first"));
    let seen = lab.servers.wait_for("first").unwrap().from;
    // Frames that nobody reads.
    for _ in 0..50 {
        lab.servers.push(at(SERVER, PORT), seen, "stale");
    }
    assert!(old.next(SOON, |packet| matches!(packet, Packet::Udp { text, .. } if text == "stale")).is_some());
    lab.network().put(slot.index).unwrap();
    lab.network().put(slot.index).unwrap();

    let slot = lab.network().take(&Egress::Open).unwrap();
    assert_eq!((slot.index, slot.address), (0, old.address));
    assert_ne!(slot.mac, old.mac);
    lab.servers.push(at(SERVER, PORT), seen, "late answer");
    let new = Guest::silent(&slot);
    assert_eq!(new.stray(), None, "neither what was queued nor what comes late");
    // A VMM that didn't end has a TAP that is not one any more.
    assert!(common::is_gone(&old_write(&old)));
    assert!(new.reaches(5000, at(SERVER, PORT), "its own, from the same port"));
    lab.network().set_egress(slot.index, &Egress::None).unwrap();
    new.send(5001, at(SERVER, PORT), "what the former owner might");
    assert_eq!(new.stray(), None);
}

#[test]
fn who_takes_a_machines_place_has_its_address_and_its_connections() {
    if !root() {
        return;
    }
    let mut lab = Lab::new(4, 1, Some(1 << 20));
    let egress = allow(&["a.example", "203.0.113.9:7001"]);
    let slot = lab.network().take(&egress).unwrap();
    lab.network().open_names(slot.index, &[Opening { address: SERVER, port: None, ttl: 60 * SOON }]).unwrap();
    let back = |guest: &Guest, text: &str| {
        guest
            .receives(SOON, &Packet::Udp { from: at(SERVER, PORT), to: at(guest.address, 5000), text: text.to_owned() })
    };
    let mut guest = Guest::new(&slot);
    assert!(guest.reaches(5000, at(SERVER, PORT), "before"));
    let seen = lab.servers.wait_for("before").unwrap().from;

    // One that fails leaves everything as it was.
    let failed = lab.network().reseat(slot.index).unwrap();
    assert_eq!((failed.index, failed.mac, failed.address), (slot.index, slot.mac, slot.address));
    assert_eq!((slot.seat, failed.seat), (Seat::First, Seat::Second));
    assert!(matches!(lab.network().reseat(slot.index), Err(NetError::Seats { index }) if index == slot.index));
    lab.servers.push(at(SERVER, PORT), seen, "while nobody knows");
    assert_eq!(Guest::silent(&failed).stray(), None, "it would be lost if it failed");
    lab.network().unseat(slot.index, failed.seat).unwrap();
    lab.network().unseat(slot.index, failed.seat).unwrap();
    assert!(common::is_gone(&old_write(&Guest::silent(&failed))));
    assert!(back(&guest, "while nobody knows"));

    // Each successor is in the other seat, and so on, also when the daemon is another one by then.
    for round in 0..3 {
        let next = lab.network().reseat(slot.index).unwrap();
        assert_eq!((next.mac, next.address, next.seat == Seat::Second), (slot.mac, slot.address, round % 2 == 0));
        let successor = Guest::silent(&next);
        successor.send(5000, at(SERVER, PORT), &format!("of its own before that {round}"));
        assert_eq!(lab.servers.wait_for(&format!("of its own before that {round}")).unwrap().from, seen);
        lab.network().unseat(slot.index, next.seat.other()).unwrap();
        lab.servers.push(at(SERVER, PORT), seen, "on the connection of the first");
        assert!(back(&successor, "on the connection of the first"));
        assert!(common::is_gone(&old_write(&guest)), "its predecessor has left");
        assert!(successor.reaches(5000, at(SERVER, PORT), &format!("the same connection {round}")));
        assert_eq!(lab.servers.wait_for(&format!("the same connection {round}")).unwrap().from, seen);
        assert!(successor.reaches(5001, at(SERVER, PORT), &format!("by the old answer {round}")));
        assert!(successor.reaches(5002, at(OTHER, OTHER_PORT), &format!("by the list {round}")));
        successor.send(5003, at(OTHER, PORT), "not listed");
        assert_eq!(successor.stray(), None);
        guest = successor;
        lab.instance.crash();
        lab.instance.restart(&[record(&next, &egress)]);
        assert_eq!(lab.network().capacity(), (1, 4));
    }
    // A crash between the two: whoever is recorded has the slot alone.
    let next = lab.network().reseat(slot.index).unwrap();
    let (successor, seat) = (Guest::silent(&next), next.seat.other());
    drop(next);
    lab.instance.crash();
    lab.instance.restart(&[SlotRecord { seat, ..record(&slot, &egress) }]);
    assert!(common::is_gone(&old_write(&successor)));
    lab.servers.push(at(SERVER, PORT), seen, "as if nothing had been");
    assert!(back(&guest, "as if nothing had been"));
    // Given back while there are two, nothing of either is left.
    let next = lab.network().reseat(slot.index).unwrap();
    lab.network().put(slot.index).unwrap();
    assert!(lab.network().settle(SOON));
    for seat in [&guest, &Guest::silent(&next)] {
        assert!(common::is_gone(&old_write(seat)));
    }
    lab.network().unseat(slot.index, next.seat).unwrap();
    assert_eq!(lab.instance.elements("set inet coppice slots"), 1, "the one that is kept ready");
}

fn record(slot: &Slot, egress: &Egress) -> SlotRecord {
    let Slot { index, mac, address, seat, .. } = *slot;
    SlotRecord { index, mac, address, egress: egress.clone(), seat }
}

fn old_write(old: &Guest) -> std::io::Error {
    old.frame([0xff; 6], old.mac, 0x0806, &[0; 28]).unwrap_err()
}

#[test]
fn a_machine_that_outlives_the_daemon_keeps_its_connections() {
    if !root() {
        return;
    }
    let mut lab = Lab::new(4, 1, None);
    let egress = allow(&["a.example", "203.0.113.9:7001"]);
    let slot = lab.network().take(&egress).unwrap();
    let gone = lab.network().take(&Egress::Open).unwrap();
    lab.network().open_names(slot.index, &[Opening { address: SERVER, port: None, ttl: 60 * SOON }]).unwrap();
    let guest = Guest::new(&slot);
    assert!(guest.reaches(5000, at(SERVER, PORT), "before"));
    let seen = lab.servers.wait_for("before").unwrap().from;
    let record = record(&slot, &egress);
    drop(slot);
    lab.instance.crash();
    lab.servers.push(at(SERVER, PORT), seen, "without a daemon");
    let back = |text: &str| Packet::Udp { from: at(SERVER, PORT), to: at(guest.address, 5000), text: text.to_owned() };
    assert!(guest.receives(SOON, &back("without a daemon")));

    lab.instance.restart(std::slice::from_ref(&record));
    assert_eq!(lab.network().capacity(), (1, 4));
    lab.servers.push(at(SERVER, PORT), seen, "after the restart");
    assert!(guest.receives(SOON, &back("after the restart")));
    assert!(guest.reaches(5001, at(SERVER, PORT), "a new connection by the old answer"));
    assert!(guest.reaches(5002, at(OTHER, OTHER_PORT), "a new connection by the list"));
    guest.send(5003, at(OTHER, PORT), "not listed");
    assert_eq!(guest.stray(), None);
    // The TAP of a machine that is not kept is gone; its slot may have another by now.
    assert!(common::is_gone(&rustix::io::write(&*gone.tap, &[0; 64]).unwrap_err().into()));

    lab.network().put(record.index).unwrap();
    assert!(lab.network().settle(SOON));
    assert!(common::is_gone(&old_write(&guest)), "its TAP goes, whoever holds it");
}

#[test]
fn the_daemon_reaches_guests_and_answers_their_questions() {
    if !root() {
        return;
    }
    let lab = Lab::new(2, 1, None);
    let slot = lab.network().take(&Egress::None).unwrap();
    let guest = Guest::new(&slot);
    let socket = lab.network().guest_socket().unwrap();
    let target = std::net::SocketAddr::from((slot.address, 80));
    assert_eq!(rustix::net::connect(&socket, &target).unwrap_err(), rustix::io::Errno::INPROGRESS);
    let syn = guest.next(SOON, |packet| matches!(packet, Packet::Tcp { flags: SYN, .. }));
    assert!(
        matches!(syn, Some(Packet::Tcp { from, to, .. }) if *from.ip() == GATEWAY && to == at(guest.address, 80)),
        "{syn:?}"
    );

    let (udp_socket, _tcp) = lab.network().dns_sockets().unwrap();
    let udp_socket = std::net::UdpSocket::from(udp_socket);
    udp_socket.set_nonblocking(false).unwrap();
    udp_socket.set_read_timeout(Some(SOON)).unwrap();
    guest.send(5353, at(GATEWAY, 53), "question");
    let mut buffer = [0; 64];
    let (length, from) = udp_socket.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..length], from), (&b"question"[..], (guest.address, 5353).into()));
    assert_eq!(lab.network().slot_of(guest.address), Some(slot.index), "whose question it is");
    udp_socket.send_to(b"answer", from).unwrap();
    let answer = Packet::Udp { from: at(GATEWAY, 53), to: at(guest.address, 5353), text: "answer".to_owned() };
    assert!(guest.receives(SOON, &answer));
    guest.connect(5354, at(GATEWAY, 53));
    assert!(guest.next(SOON, |packet| matches!(packet, Packet::Tcp { flags: SYN_ACK, .. })).is_some());
    guest.connect(5355, at(GATEWAY, 54));
    // The connection to port 53 is repeated by the router until it is answered; that to port 54 is met with silence.
    assert_eq!(guest.next(NEVER, |packet| matches!(packet, Packet::Tcp { from, .. } if from.port() == 54)), None);
}

#[test]
fn bandwidth_is_limited_in_both_directions_for_each_slot_alone() {
    if !root() {
        return;
    }
    // The burst is at least 256 KiB.
    let lab = Lab::new(4, 2, Some(10_000));
    let [one, two] = [(); 2].map(|()| Guest::new(&lab.network().take(&Egress::Open).unwrap()));
    let text = "x".repeat(1400);
    for _ in 0..600 {
        one.send(5000, at(SERVER, PORT), &text);
    }
    assert!(two.reaches(5001, at(SERVER, PORT), "another slot is not slowed"));
    let passed = lab.servers.heard().iter().filter(|heard| heard.text == text).count();
    assert!((100..250).contains(&passed), "{passed} of 600 datagrams of 1400 bytes");

    let seen = lab.servers.wait_for("another slot is not slowed").unwrap().from;
    for _ in 0..600 {
        lab.servers.push(at(SERVER, PORT), seen, &text);
    }
    let mut received = 0;
    while two.next(NEVER, |packet| matches!(packet, Packet::Udp { text: t, .. } if *t == text)).is_some() {
        received += 1;
    }
    assert!((100..250).contains(&received), "{received} of 600 datagrams of 1400 bytes");
}

#[test]
fn a_slot_has_so_many_connections_and_takes_none_from_others() {
    if !root() {
        return;
    }
    let lab = Lab::new(4, 2, None);
    let [one, two] = [(); 2].map(|()| Guest::new(&lab.network().take(&Egress::Open).unwrap()));
    let (_udp, _tcp) = lab.network().dns_sockets().unwrap();
    for port in 1000..6000 {
        one.send(port, at(SERVER, PORT), &port.to_string());
        one.send(port, at(GATEWAY, 53), "a question");
        // No queue on the way holds thousands of packets.
        if port % 50 == 0 && port < 5050 {
            assert!(lab.servers.wait_for(&port.to_string()).is_some(), "{port}");
            while one.next(Duration::ZERO, |_| true).is_some() {}
        }
    }
    assert!(two.reaches(5000, at(SERVER, PORT), "last"));
    let passed = lab.servers.heard().len() - 1;
    assert!((4090..=4096).contains(&passed), "{passed} connections");
    let remembered: usize =
        lab.instance.inside("cat /proc/sys/net/netfilter/nf_conntrack_count").trim().parse().unwrap();
    assert!(remembered <= 4096 + 10, "{remembered} connections are remembered");
    // A connection that it has goes on.
    assert!(one.reaches(1000, at(SERVER, PORT), "an old one"));
}

#[test]
fn a_firewall_that_is_loaded_on_the_host_does_not_open_it() {
    if !root() {
        return;
    }
    let lab = Lab::new(2, 1, None);
    let guest = Guest::new(&lab.network().take(&Egress::Open).unwrap());
    assert!(guest.reaches(5000, at(SERVER, PORT), "before"));
    let table = format!("inet coppice_{}", lab.instance.config.id);
    let rules = {
        let table = table.clone();
        move || {
            let output =
                std::process::Command::new("nft").args(["list", "table"]).args(table.split(' ')).output().unwrap();
            String::from_utf8(output.stdout).unwrap().matches("host_refused\" drop").count()
        }
    };
    let own = lab.host.run(rules.clone());
    assert!(own > 4);
    for command in ["flush ruleset".to_owned(), format!("delete table {table}"), format!("flush chain {table} input")] {
        let ran = command.clone();
        let done =
            lab.host.run(move || std::process::Command::new("nft").args(ran.split(' ')).status().unwrap().success());
        assert!(done, "{command}");
        let until = std::time::Instant::now() + SOON;
        while lab.host.run(rules.clone()) != own {
            assert!(std::time::Instant::now() < until, "{command}: the rules are not back");
        }
        guest.send(5001, at(HOST, PORT), "to the host");
        assert!(guest.reaches(5002, at(OTHER, PORT), "after"), "{command}");
        assert!(!texts(&lab).contains("to the host"), "{command}");
    }
}
