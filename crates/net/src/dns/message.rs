//! What a guest asked, whether it may, and what it is told. Pure: no sockets, no clock.
//!
//! A guest's message is read strictly, and nothing of it but name, type and class is passed on; of an upstream's answer
//! only the chain from the name that was asked for to its records is kept, without addresses that no sandbox may reach.

use std::net::Ipv4Addr;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::svcb::{SVCB, SvcParamKey};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use crate::egress::{Egress, is_private};

/// Largest answer that is sent over UDP, and what an upstream is told that it may send: what passes everywhere in one
/// piece.
pub(super) const UDP_PAYLOAD: u16 = 1232;
/// Largest answer over UDP to who does not speak EDNS.
const PLAIN_PAYLOAD: u16 = 512;
/// Longest chain of aliases that is followed.
const MAX_CHAIN: usize = 16;
/// Most records of one answer; what is more is left out.
const MAX_RECORDS: usize = 64;
/// Bounds of the time to live that a guest is told, seconds.
const MIN_TTL: u32 = 5;
const MAX_TTL: u32 = 3600;

/// A question of a guest's.
#[derive(Debug, Clone)]
pub(super) struct Request {
    id: u16,
    op_code: OpCode,
    query: Query,
    recursion_desired: bool,
    checking_disabled: bool,
    /// Whether it speaks EDNS, and the largest UDP answer that it takes.
    edns: bool,
    payload: u16,
}

/// What a guest's bytes are.
#[derive(Debug)]
pub(super) enum Received {
    /// A question.
    Question(Box<Request>),
    /// No question that could be answered, but one that can be told so.
    Faulty(Box<Request>, ResponseCode),
    /// Nothing to answer.
    Garbage,
}

/// Reads a guest's bytes.
pub(super) fn read(bytes: &[u8]) -> Received {
    let Ok(message) = Message::from_vec(bytes) else { return Received::Garbage };
    // Answers that nobody asked for are as good as garbage: two servers must never answer each other.
    let ([query], MessageType::Query) = (message.queries.as_slice(), message.metadata.message_type) else {
        return Received::Garbage;
    };
    let edns = message.edns.as_ref();
    let request = Box::new(Request {
        id: message.metadata.id,
        op_code: message.metadata.op_code,
        query: query.clone(),
        recursion_desired: message.metadata.recursion_desired,
        checking_disabled: message.metadata.checking_disabled,
        edns: edns.is_some(),
        payload: edns.map_or(PLAIN_PAYLOAD, |edns| edns.max_payload().clamp(PLAIN_PAYLOAD, UDP_PAYLOAD)),
    });
    if message.metadata.op_code != OpCode::Query {
        return Received::Faulty(request, ResponseCode::NotImp);
    }
    if edns.is_some_and(|edns| edns.version() != 0) {
        return Received::Faulty(request, ResponseCode::BADVERS);
    }
    Received::Question(request)
}

/// What is done with a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// An upstream is asked, and the addresses of its answer are opened at these ports. None: they need no opening.
    Ask(Option<Vec<Option<u16>>>),
    /// It is answered at once: not allowed.
    Refuse,
    /// It is answered at once: the name has no such records.
    Nothing,
    /// It is answered at once: there is no such name.
    NoSuchName,
}

/// Whether a sandbox with this policy gets an answer.
pub(super) fn judge(request: &Request, egress: &Egress) -> Verdict {
    let query = &request.query;
    if query.query_class != DNSClass::IN || is_meta(query.query_type) {
        return Verdict::Refuse;
    }
    let ports = match egress {
        Egress::None => return Verdict::Refuse,
        Egress::Open => None,
        Egress::Allow(_) => match plain(&query.name).and_then(|name| egress.ports_of_name(&name)) {
            Some(ports) => Some(ports),
            None => return Verdict::Refuse,
        },
    };
    match query.query_type {
        // Guests have no IPv6.
        RecordType::AAAA => Verdict::Nothing,
        // What the host's resolver knows of the host's own network is not the guest's business.
        RecordType::PTR if is_private_reverse(&query.name) => Verdict::NoSuchName,
        _ => Verdict::Ask(ports),
    }
}

/// Types that stand for an operation or for many types at once (RFC 6895: 128 to 255), and OPT.
fn is_meta(kind: RecordType) -> bool {
    let number = u16::from(kind);
    number == 0 || kind == RecordType::OPT || (128..=255).contains(&number)
}

/// A name as policies spell it. None for one that no policy can mean: a label may contain any byte, also a dot.
fn plain(name: &Name) -> Option<String> {
    let mut text = String::with_capacity(name.len());
    for label in name.iter() {
        let usual = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        if label.is_empty() || !label.iter().all(usual) {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(std::str::from_utf8(label).ok()?);
    }
    (!text.is_empty()).then_some(text)
}

/// Whether it is the reverse name of a private address or of part of one.
fn is_private_reverse(name: &Name) -> bool {
    match name.parse_arpa_name() {
        Ok(net) => match net.addr() {
            std::net::IpAddr::V4(address) => is_private(address),
            // There is no IPv6 here whose names could be wanted.
            std::net::IpAddr::V6(_) => true,
        },
        Err(_) => false,
    }
}

impl Request {
    /// What is asked.
    pub(super) fn query(&self) -> &Query {
        &self.query
    }

    /// An answer without records.
    pub(super) fn reply(&self, code: ResponseCode) -> Message {
        let mut message = Message::response(self.id, self.op_code);
        message.metadata.response_code = code;
        message.metadata.recursion_desired = self.recursion_desired;
        message.metadata.recursion_available = true;
        message.metadata.checking_disabled = self.checking_disabled;
        message.queries.push(self.query.clone());
        if self.edns {
            let mut edns = Edns::new();
            edns.set_max_payload(UDP_PAYLOAD);
            message.edns = Some(edns);
        }
        message
    }

    /// The bytes of an answer over UDP: cut to nothing and marked when it is too large, so that the guest asks over TCP.
    pub(super) fn datagram(&self, message: &Message) -> Option<Vec<u8>> {
        let bytes = message.to_vec().ok()?;
        if bytes.len() <= usize::from(self.payload) { Some(bytes) } else { message.truncate().to_vec().ok() }
    }
}

/// The question that an upstream is asked: nothing of the guest's message but name, type and class.
pub(super) fn question(query: &Query) -> Message {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    let mut name = query.name.to_lowercase();
    name.set_fqdn(true);
    message.queries.push(Query::query(name, query.query_type));
    let mut edns = Edns::new();
    edns.set_max_payload(UDP_PAYLOAD);
    message.edns = Some(edns);
    message
}

/// Whether a message is the answer to a question: anything else that comes to the same port is not looked at.
pub(super) fn answers(reply: &Message, question: &Message) -> bool {
    reply.metadata.message_type == MessageType::Response
        && reply.metadata.id == question.metadata.id
        && reply.metadata.op_code == OpCode::Query
        && reply.queries.len() == 1
        && reply.queries == question.queries
}

/// An answer for a guest.
#[derive(Debug)]
pub(super) struct Shaped {
    /// What it is told.
    pub message: Message,
    /// The addresses in it.
    pub addresses: Vec<Ipv4Addr>,
    /// For how long it may use them, seconds.
    pub ttl: u32,
    /// How many addresses were left out, because no sandbox may reach them.
    pub withheld: usize,
}

/// Makes an upstream's answer one for the guest. None: it is of no use.
pub(super) fn shape(request: &Request, reply: Message) -> Option<Shaped> {
    let code = reply.metadata.response_code;
    if !matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) {
        return None;
    }
    let Chain { mut records, mut last } = chain(&request.query, reply.answers)?;
    let mut withheld = 0;
    last.retain(|record| {
        let private = matches!(&record.data, RData::A(address) if is_private(address.0));
        withheld += usize::from(private);
        !private
    });
    last.truncate(MAX_RECORDS);
    let refused = withheld > 0 && last.is_empty();
    if refused {
        records.clear();
    }
    last.iter_mut().for_each(strip_hints);
    let mut addresses: Vec<Ipv4Addr> =
        last.iter().filter_map(|r| if let RData::A(address) = &r.data { Some(address.0) } else { None }).collect();
    addresses.sort_unstable();
    addresses.dedup();
    records.append(&mut last);
    let ttl = records.iter().map(|record| record.ttl).min().unwrap_or(0).clamp(MIN_TTL, MAX_TTL);
    for record in &mut records {
        // One for all: what the guest keeps, it keeps as long as the addresses are open, and no longer.
        record.ttl = ttl;
        // Spelled as it was asked for, which some resolvers insist on.
        if record.name == request.query.name {
            record.name = request.query.name.clone();
        }
    }
    let mut message = request.reply(if refused { ResponseCode::Refused } else { code });
    if records.iter().all(|record| record.record_type() == RecordType::CNAME) && !refused {
        // What tells a resolver for how long there is nothing.
        let soa =
            reply.authorities.into_iter().find(|r| matches!(r.data, RData::SOA(_)) && r.dns_class == DNSClass::IN);
        message.authorities.extend(soa.map(|mut soa| {
            soa.ttl = soa.ttl.clamp(MIN_TTL, MAX_TTL);
            soa
        }));
    }
    message.answers = records;
    Some(Shaped { message, addresses, ttl, withheld })
}

/// The way from a name to its records.
struct Chain {
    /// The aliases, in order.
    records: Vec<Record>,
    /// The records at its end.
    last: Vec<Record>,
}

/// Follows aliases from the name that was asked for. What else an upstream sends along is left out. None: it never ends.
fn chain(query: &Query, answers: Vec<Record>) -> Option<Chain> {
    let mut rest: Vec<Record> = answers.into_iter().filter(|record| record.dns_class == DNSClass::IN).collect();
    let (mut at, mut records) = (query.name.clone(), Vec::new());
    at.set_fqdn(true);
    loop {
        let here = |record: &Record| record.name == at && record.record_type() == query.query_type;
        if rest.iter().any(here) {
            return Some(Chain { records, last: rest.into_iter().filter(here).collect() });
        }
        let alias = |record: &Record| record.name == at && matches!(record.data, RData::CNAME(_));
        let Some(index) = rest.iter().position(alias) else { return Some(Chain { records, last: Vec::new() }) };
        let record = rest.swap_remove(index);
        let next = if let RData::CNAME(target) = &record.data { target.0.clone() } else { return None };
        records.push(record);
        if records.len() > MAX_CHAIN {
            return None;
        }
        at = next;
    }
}

/// Service records may carry addresses, which nothing would open and nothing has looked at: the guest asks for them.
fn strip_hints(record: &mut Record) {
    let strip = |service: &mut SVCB| {
        service.svc_params.retain(|(key, _)| !matches!(key, SvcParamKey::Ipv4Hint | SvcParamKey::Ipv6Hint));
    };
    match &mut record.data {
        RData::HTTPS(https) => strip(&mut https.0),
        RData::SVCB(service) => strip(service),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::rdata::{A, CNAME};
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    fn valid(kind: RecordType) -> Message {
        let mut message = Message::query();
        message.queries.push(Query::query(name("www.example.org."), kind));
        message.edns = Some(Edns::new());
        message
    }

    fn policies() -> [Egress; 3] {
        [Egress::Open, Egress::None, Egress::allow(&["*.example.org", "www.example.org:443"]).unwrap()]
    }

    /// All that is done to a guest's bytes, with an upstream's bytes for an answer.
    fn run(guest: &[u8], upstream: &[u8]) -> Option<Vec<Shaped>> {
        let (Received::Question(request) | Received::Faulty(request, _)) = read(guest) else { return None };
        assert!(request.datagram(&request.reply(ResponseCode::Refused)).is_some_and(|bytes| bytes.len() <= 1232));
        let mut all = Vec::new();
        for egress in policies() {
            judge(&request, &egress);
            let asked = question(request.query());
            asked.to_vec().unwrap();
            let Ok(reply) = Message::from_vec(upstream) else { continue };
            answers(&reply, &asked);
            if let Some(shaped) = shape(&request, reply) {
                let bytes = request.datagram(&shaped.message);
                assert!(bytes.is_none_or(|bytes| bytes.len() <= 1232));
                assert!(shaped.addresses.iter().all(|address| !is_private(*address)));
                assert!((MIN_TTL..=MAX_TTL).contains(&shaped.ttl));
                assert!(shaped.message.answers.iter().all(|record| record.ttl == shaped.ttl));
                all.push(shaped);
            }
        }
        Some(all)
    }

    fn mutated(bytes: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
        let length = bytes.len();
        (proptest::collection::vec((0..length, any::<u8>()), 0..8), 0..=length).prop_map(move |(changes, keep)| {
            let mut bytes = bytes.clone();
            for (at, value) in changes {
                bytes[at] = value;
            }
            bytes.truncate(keep.max(12));
            bytes
        })
    }

    fn upstream_answer() -> Vec<u8> {
        let mut message = Message::response(1, OpCode::Query);
        message.queries.push(Query::query(name("www.example.org."), RecordType::A));
        let alias = RData::CNAME(CNAME(name("cdn.example.net.")));
        message.answers.push(Record::from_rdata(name("www.example.org."), 60, alias));
        for last in 0..4 {
            let address = RData::A(A(Ipv4Addr::new(203, 0, 113, last)));
            message.answers.push(Record::from_rdata(name("cdn.example.net."), 60, address));
        }
        message.to_vec().unwrap()
    }

    #[test]
    fn what_is_valid_gets_through() {
        let shaped = run(&valid(RecordType::A).to_vec().unwrap(), &upstream_answer()).unwrap();
        assert!(shaped.len() == 3 && shaped.iter().all(|shaped| shaped.addresses.len() == 4));
        assert_eq!(plain(&name("A_b-1.Example.ORG.")).as_deref(), Some("A_b-1.Example.ORG"));
        assert_eq!((plain(&Name::root()), plain(&name("b\\.c.org."))), (None, None));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(guest in proptest::collection::vec(any::<u8>(), 0..600), upstream in proptest::collection::vec(any::<u8>(), 0..600)) {
            run(&guest, &upstream);
            run(&valid(RecordType::A).to_vec().unwrap(), &upstream);
            run(&guest, &upstream_answer());
        }

        #[test]
        fn damaged_messages_are_survived(guest in mutated(valid(RecordType::A).to_vec().unwrap()), upstream in mutated(upstream_answer())) {
            run(&guest, &upstream);
            run(&valid(RecordType::A).to_vec().unwrap(), &upstream);
        }

        #[test]
        fn a_name_is_allowed_only_if_its_labels_are(labels in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..8), 1..5)) {
            let mut asked = valid(RecordType::A);
            let mut labels: Vec<&[u8]> = labels.iter().map(Vec::as_slice).collect();
            labels.extend([&b"example"[..], b"org"]);
            asked.queries[0].name = Name::from_labels(labels.clone()).unwrap();
            asked.queries[0].name.set_fqdn(true);
            let Received::Question(request) = read(&asked.to_vec().unwrap()) else { return Ok(()) };
            let verdict = judge(&request, &policies()[2]);
            let usual = labels.iter().all(|label| label.iter().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(b)));
            prop_assert_eq!(verdict != Verdict::Refuse, usual);
        }
    }
}
