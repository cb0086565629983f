//! What guests are told, and what is opened for them.

use std::net::Ipv4Addr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use coppice_net::Egress;
use coppice_net::dns::DnsConfig;
use hickory_proto::op::{Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::rdata::svcb::{IpHint, SVCB, SvcParamKey, SvcParamValue};
use hickory_proto::rr::rdata::{A, HTTPS, SOA, TXT};
use hickory_proto::rr::{DNSClass, RData, Record, RecordType};
use tokio::io::AsyncWriteExt as _;

use crate::upstream::{Asked, Upstream, a, alias, name, reply};
use crate::world::{World, addresses, allow, over_tcp, question, with_edns};

const WEB: [u8; 4] = [203, 0, 113, 7];

/// Every name has the address [`WEB`].
fn web(asked: &Asked) -> Vec<Message> {
    vec![reply(asked, vec![a(&asked.query.name.to_ascii(), 60, WEB)])]
}

#[tokio::test]
async fn allowed_names_work_and_others_are_refused_without_asking_anybody() {
    let upstream = Upstream::start(web).await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["example.org:443", "*.example.net", "203.0.113.0/24"])).await;
    for allowed in ["example.org.", "EXAMPLE.org.", "a.example.net.", "b.a.Example.NET."] {
        let answer = guest.ask(allowed, RecordType::A).await;
        assert_eq!((answer.metadata.response_code, addresses(&answer)), (ResponseCode::NoError, vec![WEB.into()]));
        assert!(answer.queries[0].name.eq_case(&name(allowed)) && answer.answers[0].name.eq_case(&name(allowed)));
    }
    let asked = ["example.org.", "example.org.", "a.example.net.", "b.a.example.net."];
    assert_eq!(upstream.names(), asked);
    // The second question for a name that is open opens nothing again; a name without a port opens all ports.
    assert_eq!(world.directory.addresses(), [(WEB.into(), None), (WEB.into(), Some(443))]);
    for other in ["example.net.", "a.example.org.", "badexample.net.", "example.org.evil.com.", "com.", ".", "x."] {
        for kind in [RecordType::A, RecordType::AAAA, RecordType::TXT, RecordType::MX, RecordType::NULL] {
            let answer = guest.ask(other, kind).await;
            assert_eq!(answer.metadata.response_code, ResponseCode::Refused, "{other}");
            assert!(answer.answers.is_empty() && answer.authorities.is_empty());
        }
    }
    let none = world.guest(3, Egress::None).await;
    assert_eq!(none.ask("example.org.", RecordType::A).await.metadata.response_code, ResponseCode::Refused);
    assert!(upstream.asked().is_empty(), "a name that is not allowed left the host");
    assert!(world.directory.opened().is_empty());
}

#[tokio::test]
async fn a_label_with_a_dot_in_it_is_no_allowed_name() {
    let upstream = Upstream::start(web).await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["*.example.org", "example.org"])).await;
    for labels in [vec![&b"a.example"[..], b"org"], vec![b"a", b"example.org"], vec![b"\\", b"example", b"org"]] {
        let mut asked = question("x.", RecordType::A);
        asked.queries[0].name = hickory_proto::rr::Name::from_labels(labels).unwrap();
        asked.queries[0].name.set_fqdn(true);
        assert_eq!(guest.exchange(&asked).await.metadata.response_code, ResponseCode::Refused);
    }
    assert!(upstream.asked().is_empty());
}

#[tokio::test]
async fn open_sandboxes_may_ask_for_everything_and_open_nothing() {
    let upstream = Upstream::start(|asked: &Asked| {
        let owner = asked.query.name.clone();
        let data = match asked.query.query_type {
            RecordType::A => RData::A(A(WEB.into())),
            _ => RData::TXT(TXT::new(vec!["text".into()])),
        };
        vec![reply(asked, vec![Record::from_rdata(owner, 60, data)])]
    })
    .await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, Egress::Open).await;
    assert_eq!(addresses(&guest.ask("a.", RecordType::A).await), [Ipv4Addr::from(WEB)]);
    assert_eq!(guest.ask("any.thing.example.", RecordType::TXT).await.answers.len(), 1);
    assert_eq!(upstream.asked().len(), 2);
    // Guests have no IPv6: known without asking. So is what the host's own network is called.
    let none = guest.ask("a.", RecordType::AAAA).await;
    assert_eq!((none.metadata.response_code, none.answers.len()), (ResponseCode::NoError, 0));
    for private in ["1.0.203.10.in-addr.arpa.", "254.169.254.169.in-addr.arpa.", "10.in-addr.arpa."] {
        assert_eq!(guest.ask(private, RecordType::PTR).await.metadata.response_code, ResponseCode::NXDomain);
    }
    for meta in [RecordType::ANY, RecordType::AXFR, RecordType::IXFR] {
        assert_eq!(guest.ask("a.", meta).await.metadata.response_code, ResponseCode::Refused);
    }
    let mut chaos = question("version.bind.", RecordType::TXT);
    chaos.queries[0].query_class = DNSClass::CH;
    assert_eq!(guest.exchange(&chaos).await.metadata.response_code, ResponseCode::Refused);
    assert!(upstream.asked().is_empty());
    assert!(world.directory.opened().is_empty());
}

#[tokio::test]
async fn the_addresses_are_open_before_the_guest_has_the_answer() {
    let upstream = Upstream::start(web).await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["example.org"])).await;
    let (entered, go) = world.directory.hold();
    guest.socket.send(&question("example.org.", RecordType::A).to_vec().unwrap()).await.unwrap();
    tokio::task::spawn_blocking(move || entered.recv_timeout(crate::world::LONG)).await.unwrap().unwrap();
    guest.hears_nothing().await;
    go.send(()).unwrap();
    assert_eq!(addresses(&guest.receive().await), [Ipv4Addr::from(WEB)]);
    assert_eq!(world.directory.addresses(), [(WEB.into(), None)]);

    world.directory.fail.store(true, Ordering::SeqCst);
    let other = world.guest(3, allow(&["example.org"])).await;
    let answer = other.ask("example.org.", RecordType::A).await;
    assert_eq!((answer.metadata.response_code, answer.answers.len()), (ResponseCode::ServFail, 0));
}

#[tokio::test]
async fn a_policy_that_was_replaced_while_a_name_was_resolved_opens_nothing() {
    let upstream = Upstream::start(web).await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["example.org"])).await;
    let (entered, go) = world.directory.hold();
    guest.socket.send(&question("example.org.", RecordType::A).to_vec().unwrap()).await.unwrap();
    tokio::task::spawn_blocking(move || entered.recv_timeout(crate::world::LONG)).await.unwrap().unwrap();
    world.directory.set(guest.address, Egress::None);
    go.send(()).unwrap();
    assert_eq!(guest.receive().await.metadata.response_code, ResponseCode::ServFail);
    assert!(world.directory.opened().is_empty());
    assert_eq!(guest.ask("example.org.", RecordType::A).await.metadata.response_code, ResponseCode::Refused);
}

#[tokio::test]
async fn what_is_open_lives_as_long_as_the_guest_is_told_within_bounds() {
    let upstream = Upstream::start(|asked: &Asked| {
        let owner = asked.query.name.to_ascii();
        let ttl = owner.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
        // The shortest of a chain counts.
        let target = format!("target.{owner}");
        vec![reply(asked, vec![alias(&owner, ttl, &target), a(&target, 50_000, WEB)])]
    })
    .await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["*.org:1", "*.net:2", "*.com:3", "*.dev:4"])).await;
    for (asked, told) in [("t0.org.", 5), ("t77.net.", 77), ("t86400.com.", 3600), ("t4294967295.dev.", 3600)] {
        let answer = guest.ask(asked, RecordType::A).await;
        assert!(answer.answers.len() == 2 && answer.answers.iter().all(|record| record.ttl == told), "{answer:?}");
        let opened = world.directory.opened();
        assert_eq!(opened.len(), 1, "{asked}");
        let (told, lasts) = (Duration::from_secs(told.into()), opened[0].1.ttl);
        assert!(lasts >= told && lasts <= told + Duration::from_secs(30), "{asked}: {lasts:?}");
    }
    // Asked for again, with a longer life than what is open has left: opened again.
    guest.ask("t0.org.", RecordType::A).await;
    assert_eq!(world.directory.opened().len(), 0);
    guest.ask("t60.org.", RecordType::A).await;
    assert_eq!(world.directory.opened().len(), 1);
}

#[tokio::test]
async fn aliases_are_followed_and_what_else_is_sent_along_is_not_opened() {
    let upstream = Upstream::start(|asked: &Asked| {
        let mut message = match asked.query.name.to_ascii().as_str() {
            "www.example.org." => reply(
                asked,
                vec![
                    // Out of order, in other letters, with an address of a name that nobody asked for.
                    a("C.cdn.net.", 60, [203, 0, 113, 2]),
                    a("other.example.", 60, [203, 0, 113, 99]),
                    alias("b.cdn.NET.", 60, "c.cdn.net."),
                    a("c.cdn.net.", 60, [203, 0, 113, 1]),
                    alias("WWW.example.org.", 60, "b.cdn.net."),
                    alias("unrelated.example.", 60, "c.cdn.net."),
                ],
            ),
            "loop.example.org." => reply(
                asked,
                vec![
                    alias("loop.example.org.", 60, "l2.example.org."),
                    alias("l2.example.org.", 60, "loop.example.org."),
                ],
            ),
            "long.example.org." => {
                let link = |i: usize| if i == 0 { "long.example.org.".to_owned() } else { format!("l{i}.org.") };
                reply(asked, (0..40).map(|i| alias(&link(i), 60, &link(i + 1))).collect())
            }
            _ => reply(asked, vec![alias(&asked.query.name.to_ascii(), 60, "nowhere.example.")]),
        };
        message.additionals.push(a("extra.example.", 60, [203, 0, 113, 98]));
        message.authorities.push(a("extra.example.", 60, [203, 0, 113, 97]));
        vec![message]
    })
    .await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["*.example.org:443"])).await;
    let answer = guest.ask("www.example.org.", RecordType::A).await;
    let both = [Ipv4Addr::new(203, 0, 113, 1), Ipv4Addr::new(203, 0, 113, 2)];
    assert_eq!(addresses(&answer), both);
    let kinds: Vec<_> = answer.answers.iter().map(Record::record_type).collect();
    assert_eq!(kinds, [RecordType::CNAME, RecordType::CNAME, RecordType::A, RecordType::A]);
    assert!(answer.additionals.is_empty() && answer.authorities.is_empty());
    assert_eq!(world.directory.addresses(), both.map(|address| (address, Some(443))));
    // A chain that closes on itself has no record at its end; one that does not end is of no use.
    assert!(addresses(&guest.ask("loop.example.org.", RecordType::A).await).is_empty());
    assert_eq!(guest.ask("long.example.org.", RecordType::A).await.metadata.response_code, ResponseCode::ServFail);
    assert_eq!(guest.ask("dangling.example.org.", RecordType::A).await.answers.len(), 1);
    assert!(world.directory.opened().is_empty());
}

#[tokio::test]
async fn private_addresses_are_left_out_whatever_the_policy() {
    let upstream = Upstream::start(|asked: &Asked| {
        let owner = asked.query.name.to_ascii();
        let private = [
            [10, 203, 1, 0],
            [10, 0, 0, 1],
            [127, 0, 0, 1],
            [169, 254, 169, 254],
            [192, 168, 1, 1],
            [172, 31, 0, 1],
            [100, 64, 0, 1],
            [0, 0, 0, 0],
            [224, 0, 0, 1],
            [255, 255, 255, 255],
            [198, 18, 0, 1],
            [192, 0, 0, 8],
        ];
        let mut records: Vec<Record> = private.iter().map(|address| a(&owner, 60, *address)).collect();
        if owner.starts_with("mixed") {
            records.insert(3, a(&owner, 60, WEB));
        }
        vec![reply(asked, records)]
    })
    .await;
    let world = World::start(&[upstream.address]).await;
    for (last, egress) in [(2, Egress::Open), (3, allow(&["*.example.org"]))] {
        let guest = world.guest(last, egress).await;
        let rebound = guest.ask("rebound.example.org.", RecordType::A).await;
        assert_eq!((rebound.metadata.response_code, rebound.answers.len()), (ResponseCode::Refused, 0));
        assert!(world.directory.opened().is_empty());
        let mixed = guest.ask("mixed.example.org.", RecordType::A).await;
        assert_eq!((mixed.metadata.response_code, addresses(&mixed)), (ResponseCode::NoError, vec![WEB.into()]));
    }
    assert_eq!(world.directory.addresses(), [(WEB.into(), None)]);
}

#[tokio::test]
async fn hints_of_service_records_are_left_out() {
    let upstream = Upstream::start(|asked: &Asked| {
        let hint = SvcParamValue::Ipv4Hint(IpHint(vec![A([10, 0, 0, 1].into()), A(WEB.into())]));
        let service = SVCB::new(
            1,
            name("."),
            vec![(SvcParamKey::Port, SvcParamValue::Port(8443)), (SvcParamKey::Ipv4Hint, hint)],
        );
        vec![reply(asked, vec![Record::from_rdata(asked.query.name.clone(), 60, RData::HTTPS(HTTPS(service)))])]
    })
    .await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["example.org"])).await;
    let answer = guest.ask("example.org.", RecordType::HTTPS).await;
    let RData::HTTPS(service) = &answer.answers[0].data else { panic!("{answer:?}") };
    assert_eq!(service.0.svc_params, [(SvcParamKey::Port, SvcParamValue::Port(8443))]);
    assert!(world.directory.opened().is_empty());
}

#[tokio::test]
async fn that_there_is_nothing_is_passed_on_with_how_long_it_holds() {
    let upstream = Upstream::start(|asked: &Asked| {
        let mut message = reply(asked, Vec::new());
        message.metadata.response_code = ResponseCode::NXDomain;
        let soa = SOA::new(name("ns.example."), name("root.example."), 1, 2, 3, 4, 5);
        message.authorities.push(Record::from_rdata(name("example.org."), 90_000, RData::SOA(soa)));
        vec![message]
    })
    .await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["*.example.org"])).await;
    let answer = guest.ask("nothing.example.org.", RecordType::A).await;
    assert_eq!((answer.metadata.response_code, answer.answers.len()), (ResponseCode::NXDomain, 0));
    assert_eq!((answer.authorities.len(), answer.authorities[0].ttl), (1, 3600));
}

#[tokio::test]
async fn what_is_no_question_of_a_sandbox_gets_no_answer() {
    let upstream = Upstream::start(web).await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, Egress::Open).await;
    let stranger = world.stranger(9).await;
    stranger.socket.send(&question("example.org.", RecordType::A).to_vec().unwrap()).await.unwrap();
    let mut response = question("example.org.", RecordType::A);
    response.metadata.message_type = MessageType::Response;
    let mut two = question("example.org.", RecordType::A);
    two.queries.push(two.queries[0].clone());
    let zero = Message::query();
    for bytes in
        [vec![], vec![0; 11], vec![255; 600], response.to_vec().unwrap(), two.to_vec().unwrap(), zero.to_vec().unwrap()]
    {
        guest.socket.send(&bytes).await.unwrap();
    }
    guest.hears_nothing().await;
    stranger.hears_nothing().await;
    assert!(upstream.asked().is_empty());
    let mut update = question("example.org.", RecordType::SOA);
    update.metadata.op_code = OpCode::Notify;
    assert_eq!(guest.exchange(&update).await.metadata.response_code, ResponseCode::NotImp);
    let mut newer = with_edns(question("example.org.", RecordType::A), 1232);
    newer.edns.as_mut().unwrap().set_version(1);
    let answer = guest.exchange(&newer).await;
    assert_eq!(answer.edns.unwrap().rcode_high(), 1);
    assert!(upstream.asked().is_empty());
    assert_eq!(guest.ask("example.org.", RecordType::A).await.answers.len(), 1);

    let mut connection = stranger.connect().await;
    assert_eq!(over_tcp(&mut connection, &question("example.org.", RecordType::A)).await, None);
    let mut connection = guest.connect().await;
    connection.write_all(&[255, 255, 0]).await.unwrap();
    assert_eq!(over_tcp(&mut connection, &question("example.org.", RecordType::A)).await, None);
}

#[tokio::test]
async fn answers_that_are_too_large_are_asked_for_over_tcp() {
    let upstream = Upstream::start(|asked: &Asked| {
        let text = |i: usize| RData::TXT(TXT::new(vec![format!("{i:0>100}")]));
        let records = (0..20).map(|i| Record::from_rdata(asked.query.name.clone(), 60, text(i))).collect();
        vec![reply(asked, records)]
    })
    .await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, Egress::Open).await;
    let asked = question("example.org.", RecordType::TXT);
    for payload in [None, Some(512), Some(1232), Some(65_535)] {
        let asked = payload.map_or_else(|| asked.clone(), |payload| with_edns(asked.clone(), payload));
        let cut = guest.exchange(&asked).await;
        assert!(cut.metadata.truncation && cut.answers.is_empty());
    }
    let mut connection = guest.connect().await;
    for _ in 0..3 {
        assert_eq!(over_tcp(&mut connection, &asked).await.unwrap().answers.len(), 20);
    }
}

#[tokio::test]
async fn a_flood_is_bounded_and_harms_only_who_floods() {
    let upstream = Upstream::start(|asked: &Asked| {
        // Who floods is never answered: its questions stay in flight.
        if asked.query.name.to_ascii().starts_with("flood") { Vec::new() } else { web(asked) }
    })
    .await;
    // So long that none of them is given up, asked again or makes room for the next while this runs.
    let patience = Duration::from_secs(600);
    let world = World::with(DnsConfig { patience, ..DnsConfig::new(vec![upstream.address]) }).await;
    let (flooder, other) = (world.guest(2, Egress::Open).await, world.guest(3, Egress::Open).await);
    for i in 0..400 {
        let bytes = question(&format!("flood{i}.example."), RecordType::A).to_vec().unwrap();
        flooder.socket.send(&bytes).await.unwrap();
        // As fast as the proxy reads: what the kernel's buffer loses before that is not what this is about.
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    // Answered while the flood waits.
    assert_eq!(other.ask("example.org.", RecordType::A).await.answers.len(), 1);
    let asked = upstream.asked().iter().filter(|asked| asked.query.name.to_ascii().starts_with("flood")).count();
    assert!(asked <= 32, "{asked} questions of one sandbox at a time");

    let mut connections = Vec::new();
    for _ in 0..20 {
        connections.push(flooder.connect().await);
    }
    let asked = question("example.org.", RecordType::AAAA);
    let mut served = 0;
    for connection in &mut connections {
        served += usize::from(over_tcp(connection, &asked).await.is_some());
    }
    assert!(served <= 8, "{served} connections of one sandbox at a time");
    assert!(over_tcp(&mut other.connect().await, &asked).await.is_some());
}

#[tokio::test]
async fn a_name_with_ever_new_addresses_can_not_fill_the_rules() {
    let upstream = Upstream::start(|asked: &Asked| {
        let owner = asked.query.name.to_ascii();
        let number: u8 = owner.split('.').next().unwrap().parse().unwrap();
        vec![reply(asked, (0..100).map(|i| a(&owner, 3600, [203, number, 0, i])).collect())]
    })
    .await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["*.example.org"])).await;
    let mut opened = 0;
    for number in 0..30 {
        let answer = guest.exchange(&with_edns(question(&format!("{number}.example.org."), RecordType::A), 1232)).await;
        let now = world.directory.opened().len();
        if answer.metadata.response_code == ResponseCode::Refused {
            assert_eq!(now, 0);
        }
        opened += now;
    }
    assert_eq!(opened, coppice_net::dns::MAX_OPEN);
}
