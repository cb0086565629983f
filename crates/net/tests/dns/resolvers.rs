//! What resolvers may do to the proxy.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use coppice_net::Egress;
use coppice_net::dns::DnsConfig;
use hickory_proto::op::{Message, MessageType, ResponseCode};
use hickory_proto::rr::RecordType;

use crate::upstream::{Asked, Upstream, a, reply};
use crate::world::{World, addresses, allow, question, with_edns};

const GOOD: [u8; 4] = [203, 0, 113, 7];
const BAD: [u8; 4] = [203, 0, 113, 66];

fn with_address(asked: &Asked, address: [u8; 4]) -> Message {
    reply(asked, vec![a(&asked.query.name.to_ascii(), 60, address)])
}

async fn impatient(upstreams: &[SocketAddr]) -> World {
    World::with(DnsConfig { patience: Duration::from_secs(1), ..DnsConfig::new(upstreams.to_vec()) }).await
}

#[tokio::test]
async fn what_does_not_answer_the_question_is_not_looked_at() {
    let upstream = Upstream::start(|asked: &Asked| {
        let mut wrong_id = with_address(asked, BAD);
        wrong_id.metadata.id = asked.id.wrapping_add(1);
        let mut wrong_name = with_address(asked, BAD);
        wrong_name.queries[0].name = crate::upstream::name("other.example.");
        let mut wrong_type = with_address(asked, BAD);
        wrong_type.queries[0].query_type = RecordType::TXT;
        let mut no_question = with_address(asked, BAD);
        no_question.queries.clear();
        let mut no_answer = with_address(asked, BAD);
        no_answer.metadata.message_type = MessageType::Query;
        let mut good = with_address(asked, GOOD);
        good.queries[0].name = crate::upstream::name(&asked.query.name.to_ascii().to_uppercase());
        vec![wrong_id, wrong_name, wrong_type, no_question, no_answer, good]
    })
    .await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["example.org"])).await;
    assert_eq!(addresses(&guest.ask("example.org.", RecordType::A).await), [Ipv4Addr::from(GOOD)]);
    assert_eq!(world.directory.addresses(), [(GOOD.into(), None)]);
}

#[tokio::test]
async fn ports_and_ids_are_new_for_each_question_and_nothing_else_of_the_guest_s_is_passed_on() {
    let upstream = Upstream::start(|asked: &Asked| vec![with_address(asked, GOOD)]).await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, Egress::Open).await;
    for _ in 0..30 {
        let mut asked = with_edns(question("ExAmple.org.", RecordType::A), 4096);
        let option = hickory_proto::rr::rdata::opt::EdnsOption::Unknown(65_001, b"smuggled".to_vec());
        asked.edns.as_mut().unwrap().options_mut().insert(option);
        asked.additionals.push(a("smuggled.example.", 1, BAD));
        asked.metadata.id = 7;
        assert_eq!(addresses(&guest.exchange(&asked).await), [Ipv4Addr::from(GOOD)]);
    }
    let asked = upstream.asked();
    let ids: BTreeSet<u16> = asked.iter().map(|asked| asked.id).collect();
    let ports: BTreeSet<u16> = asked.iter().map(|asked| asked.from.port()).collect();
    assert!(ids.len() > 25 && ports.len() > 25, "{ids:?} {ports:?}");
    for asked in asked {
        assert!(asked.message.additionals.is_empty() && asked.message.answers.is_empty());
        assert!(asked.message.edns.unwrap().options().as_ref().is_empty());
        assert_eq!(asked.query.name.to_ascii(), "example.org.");
    }
}

#[tokio::test]
async fn a_cut_answer_is_asked_for_again_over_tcp() {
    let upstream = Upstream::start(|asked: &Asked| {
        let mut message = with_address(asked, if asked.tcp { GOOD } else { BAD });
        message.metadata.truncation = !asked.tcp;
        vec![message]
    })
    .await;
    let world = World::start(&[upstream.address]).await;
    let guest = world.guest(2, allow(&["example.org"])).await;
    assert_eq!(addresses(&guest.ask("example.org.", RecordType::A).await), [Ipv4Addr::from(GOOD)]);
    assert_eq!(upstream.asked().iter().map(|asked| asked.tcp).collect::<Vec<_>>(), [false, true]);
    assert_eq!(world.directory.addresses(), [(GOOD.into(), None)]);
}

#[tokio::test]
async fn the_second_resolver_is_asked_when_the_first_does_not_help() {
    let silent = Upstream::start(|_: &Asked| Vec::new()).await;
    let failing = Upstream::start(|asked: &Asked| {
        let mut message = reply(asked, Vec::new());
        message.metadata.response_code = ResponseCode::ServFail;
        vec![message]
    })
    .await;
    let good = Upstream::start(|asked: &Asked| vec![with_address(asked, GOOD)]).await;
    let nobody = {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.local_addr().unwrap()
    };
    for first in [silent.address, failing.address, nobody] {
        let world = impatient(&[first, good.address]).await;
        let guest = world.guest(2, Egress::Open).await;
        assert_eq!(addresses(&guest.ask("example.org.", RecordType::A).await), [Ipv4Addr::from(GOOD)]);
        // From now on the one that helps is asked first.
        silent.asked();
        guest.ask("example.org.", RecordType::A).await;
        assert!(silent.asked().is_empty());
    }
}

#[tokio::test]
async fn without_help_the_answer_is_servfail() {
    let silent = Upstream::start(|_: &Asked| Vec::new()).await;
    let odd = Upstream::start(|asked: &Asked| {
        let mut message = with_address(asked, GOOD);
        message.metadata.response_code = ResponseCode::Refused;
        vec![message]
    })
    .await;
    for upstreams in [vec![], vec![silent.address], vec![odd.address, silent.address]] {
        let world = impatient(&upstreams).await;
        let guest = world.guest(2, allow(&["example.org"])).await;
        let answer = guest.ask("example.org.", RecordType::A).await;
        assert_eq!((answer.metadata.response_code, answer.answers.len()), (ResponseCode::ServFail, 0));
        assert_eq!(guest.ask("other.org.", RecordType::A).await.metadata.response_code, ResponseCode::Refused);
        assert!(world.directory.opened().is_empty());
    }
}
