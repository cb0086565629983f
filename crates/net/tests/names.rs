//! Names and rules together: a guest asks the proxy, and reaches what it was told and nothing else. Real packets, through the
//! real rules, in namespaces that the test made.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;
#[path = "dns/upstream.rs"]
mod upstream;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::guest::{Guest, ipv4, udp};
use common::{Lab, NEVER, OTHER, OTHER_PORT, PORT, SERVER, SOON, root};
use coppice_net::dns::{Directory, DnsConfig, DnsProxy, TrackedSlots};
use coppice_net::{Egress, GATEWAY, Slots};
use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{RData, RecordType};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::runtime::Runtime;
use upstream::{Asked, Upstream, a, alias, name, reply};

/// Before each frame of a TAP.
const VNET: usize = 10;

fn at(address: Ipv4Addr, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(address, port)
}

fn question(text: &str) -> String {
    let mut message = Message::query();
    // What a guest of these tests sends is text; so is this, with an id that is.
    message.metadata.id = 7;
    message.metadata.recursion_desired = true;
    message.queries.push(Query::query(name(text), RecordType::A));
    String::from_utf8(message.to_vec().unwrap()).unwrap()
}

/// The next datagram from the proxy.
fn answer(guest: &Guest, patience: Duration) -> Option<Message> {
    let until = Instant::now() + patience;
    let mut buffer = [0_u8; 4096];
    loop {
        match rustix::io::read(&*guest.tap, &mut buffer) {
            Ok(length) => {
                let frame = &buffer[VNET..length];
                let (kind, packet) = (&frame[12..14], &frame[14..]);
                let from_proxy = kind == [8, 0] && packet[9] == 17 && packet[12..16] == GATEWAY.octets();
                if from_proxy && packet[20..22] == [0, 53] {
                    return Some(Message::from_vec(&packet[28..]).unwrap());
                }
            }
            Err(rustix::io::Errno::AGAIN) => {
                let left = until.checked_duration_since(Instant::now())?;
                let left = Timespec::try_from(left).unwrap();
                poll(&mut [PollFd::new(&*guest.tap, PollFlags::IN)], Some(&left)).unwrap();
            }
            Err(error) => panic!("reading the TAP: {error}"),
        }
    }
}

/// Code and addresses of the answer to a question.
fn ask(guest: &Guest, text: &str) -> (ResponseCode, Vec<Ipv4Addr>) {
    guest.send(5300, at(GATEWAY, 53), &question(text));
    let message = answer(guest, SOON).unwrap();
    let address = |data: &RData| if let RData::A(a) = data { Some(a.0) } else { None };
    (message.metadata.response_code, message.answers.iter().filter_map(|record| address(&record.data)).collect())
}

fn script(asked: &Asked) -> Vec<Message> {
    let owner = asked.query.name.to_ascii();
    vec![reply(
        asked,
        match owner.as_str() {
            "web.example.org." => {
                vec![alias(&owner, 60, "cdn.example.net."), a("cdn.example.net.", 60, SERVER.octets())]
            }
            "rebound.example.org." => vec![a(&owner, 60, [10, 1, 2, 3]), a(&owner, 60, [169, 254, 169, 254])],
            _ => vec![a(&owner, 60, OTHER.octets())],
        },
    )]
}

#[test]
fn a_flood_of_questions_leaves_room_for_those_of_others() {
    if !root() {
        return;
    }
    let lab = Lab::new(4, 2, None);
    let [flooder, other] = [(); 2].map(|()| Guest::new(&lab.network().take(&Egress::Open).unwrap()));
    // Nobody reads meanwhile: what is in the socket is what the rules let through.
    let (udp, _tcp) = lab.network().dns_sockets().unwrap();
    let start = Instant::now();
    for _ in 0..5000 {
        flooder.send(5300, at(GATEWAY, 53), "flood");
    }
    other.send(5300, at(GATEWAY, 53), "other");
    let allowed = 200 + 200 * (start.elapsed().as_secs() + 1);
    let socket = std::net::UdpSocket::from(udp);
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let (mut flood, mut buffer) = (0, [0; 64]);
    loop {
        let (length, from) = socket.recv_from(&mut buffer).expect("the other guest's question");
        if from.ip() == other.address {
            assert_eq!(&buffer[..length], b"other");
            break;
        }
        flood += 1;
    }
    assert!((1..=allowed).contains(&flood), "{flood} questions of 5000, {allowed} allowed");
}

#[test]
fn a_guest_reaches_what_an_allowed_name_resolves_to_and_nothing_else() {
    if !root() {
        return;
    }
    let lab = Lab::new(4, 2, None);
    let runtime = Runtime::new().unwrap();
    let upstream = runtime.block_on(Upstream::start(script));
    let slots = TrackedSlots::new(lab.instance.shared());
    let allow = Egress::allow(&["*.example.org:7000"]).unwrap();
    let slot = slots.take(&allow).unwrap();
    let (guest, other) = (Guest::new(&slot), Guest::new(&slots.take(&allow).unwrap()));
    let proxy = {
        let _entered = runtime.enter();
        let config = DnsConfig::new(vec![upstream.address]);
        DnsProxy::start(config, slots.dns_sockets().unwrap(), Arc::clone(&slots) as Arc<dyn Directory>).unwrap()
    };

    guest.send(5000, at(SERVER, PORT), "before");
    assert_eq!(guest.stray(), None, "an address that no name resolved to");
    assert_eq!(ask(&guest, "web.example.org."), (ResponseCode::NoError, vec![SERVER]));
    // Its first packet after the answer: nothing is sent again.
    assert!(guest.reaches(5001, at(SERVER, PORT), "after"));
    guest.send(5002, at(SERVER, OTHER_PORT), "another port");
    other.send(5002, at(SERVER, PORT), "another guest");
    assert_eq!((guest.stray(), other.stray()), (None, None));

    assert_eq!(ask(&guest, "other.example.net."), (ResponseCode::Refused, vec![]));
    guest.send(5003, at(OTHER, PORT), "not allowed");
    assert_eq!(ask(&guest, "rebound.example.org."), (ResponseCode::Refused, vec![]));
    guest.send(5004, at(Ipv4Addr::new(10, 1, 2, 3), PORT), "rebound");
    // Who asks in another's name is not heard, and does not open anything for it.
    let packet = ipv4(other.address, GATEWAY, 17, &udp(5300, 53, &question("web.example.org.")));
    guest.forge(guest.mac, &packet);
    assert!(answer(&other, NEVER).is_none());
    other.send(5005, at(SERVER, PORT), "forged");
    assert_eq!((guest.stray(), other.stray()), (None, None));

    slots.set_egress(slot.index, &Egress::Open).unwrap();
    assert_eq!(ask(&guest, "other.example.net."), (ResponseCode::NoError, vec![OTHER]));
    assert!(guest.reaches(5006, at(OTHER, PORT), "open"));
    slots.set_egress(slot.index, &Egress::None).unwrap();
    assert_eq!(ask(&guest, "web.example.org."), (ResponseCode::Refused, vec![]));
    guest.send(5007, at(SERVER, PORT), "none");
    assert_eq!(guest.stray(), None);
    // The same policy again: what a name had opened under it before is closed.
    slots.set_egress(slot.index, &allow).unwrap();
    guest.send(5008, at(SERVER, PORT), "again");
    assert_eq!(guest.stray(), None);
    assert_eq!(ask(&guest, "web.example.org."), (ResponseCode::NoError, vec![SERVER]));
    assert!(guest.reaches(5009, at(SERVER, PORT), "asked again"));

    let mut heard: Vec<String> = lab.servers.heard().into_iter().map(|heard| heard.text).collect();
    heard.sort();
    assert_eq!(heard, ["after", "asked again", "open"]);
    let asked = ["web.example.org.", "rebound.example.org.", "other.example.net.", "web.example.org."];
    assert_eq!(upstream.names(), asked, "what is refused never left the host");
    drop(proxy);
}
