//! What the guest is told when its machine starts, is restored, wakes or goes on.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use coppice_engine::{GuestError, GuestSession};
use coppice_guest_proto::v1::{ForkIdentity, Network, ResumeReason, ResumeRequest};
use coppice_net::{GATEWAY, PREFIX, SlotRecord};
use uuid::Uuid;

use crate::record::SandboxRecord;

/// How long a guest may take to acknowledge. Bounded hooks may run for several seconds of it.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// A clock that was set by a message which may have been on its way for longer is set again.
const CLOCK_SLACK: Duration = Duration::from_millis(15);

/// How often it is, at most: a host that is so busy makes the next message no quicker.
const CLOCK_TRIES: usize = 6;

/// Entropy given at every resume, bytes. The protocol wants 64 or more.
const ENTROPY: usize = 128;

/// A new machine, or a copy of one: it gets an identity of its own. One that wakes is told the same identity again: names
/// follow from the sandbox's id.
pub(crate) fn fresh(
    record: &SandboxRecord,
    reason: ResumeReason,
    fork: Option<ForkIdentity>,
) -> std::io::Result<ResumeRequest> {
    Ok(ResumeRequest {
        hostname: hostname(record.id),
        machine_id: record.id.simple().to_string(),
        net: record.network.as_ref().map(network),
        fork,
        ..base(record, reason)?
    })
}

/// A place on the network, as the guest is told. Gateway and resolver are the same for every sandbox.
fn network(slot: &SlotRecord) -> Network {
    let mac = slot.mac.map(|byte| format!("{byte:02x}")).join(":");
    let gateway = GATEWAY.to_string();
    let prefix = u32::from(PREFIX);
    Network { mac, ip: slot.address.to_string(), prefix, gateway: gateway.clone(), dns: vec![gateway] }
}

/// The same machine goes on: only its clock is stepped.
pub(crate) fn unpause(record: &SandboxRecord) -> std::io::Result<ResumeRequest> {
    base(record, ResumeReason::Unpause)
}

/// The handshake, and what it takes until the guest's clock is known to be right: it is behind by as long as the message was
/// on its way, which on a busy host, and in a machine that runs this code for the first time, can be a tenth of a second.
pub(crate) async fn perform(
    session: &GuestSession,
    record: &SandboxRecord,
    request: ResumeRequest,
    deadline: Instant,
) -> Result<(), GuestError> {
    let mut sent = Instant::now();
    let mut reply = session.resume(request, deadline).await?;
    for _ in 0..CLOCK_TRIES {
        if on_its_way(sent.elapsed(), reply.took_us) <= CLOCK_SLACK {
            break;
        }
        // Entropy is no part of it: without it the clock stays as it is.
        let Ok(again) = unpause(record) else { break };
        sent = Instant::now();
        reply = session.resume(again, deadline).await?;
    }
    Ok(())
}

/// How long a request and its answer were neither here nor at work in the guest.
fn on_its_way(round_trip: Duration, took_us: u64) -> Duration {
    round_trip.saturating_sub(Duration::from_micros(took_us))
}

fn base(record: &SandboxRecord, reason: ResumeReason) -> std::io::Result<ResumeRequest> {
    let entropy = entropy()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(ResumeRequest {
        generation: Uuid::new_v4().into_bytes().to_vec(),
        reason: reason.into(),
        wall_clock_unix_ns: i64::try_from(now.as_nanos()).unwrap_or(i64::MAX),
        entropy,
        sandbox_id: record.id.to_string(),
        ..ResumeRequest::default()
    })
}

/// From the host kernel's CSPRNG. Without it no machine is resumed.
fn entropy() -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; ENTROPY];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// `sb-` and the first group of the id: unique enough for a prompt, short enough to read.
fn hostname(id: Uuid) -> String {
    let text = id.simple().to_string();
    format!("sb-{}", text.get(..12).unwrap_or(&text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use coppice_guest_proto::limits::MIN_ENTROPY;

    #[test]
    fn entropy_is_long_enough_and_new_each_time() {
        let (a, b) = (entropy().unwrap(), entropy().unwrap());
        assert!(a.len() >= MIN_ENTROPY);
        assert_ne!(a, b);
    }

    #[test]
    fn a_guest_is_told_its_address_and_that_of_its_gateway() {
        let address = coppice_net::address_of(0).unwrap();
        let (mac, egress, seat) = ([2, 0x63, 0, 0xab, 1, 255], Default::default(), Default::default());
        let slot = SlotRecord { index: 0, mac, address, egress, seat };
        let told = network(&slot);
        assert_eq!((told.mac.as_str(), told.ip.as_str(), told.prefix), ("02:63:00:ab:01:ff", "10.203.1.0", 32));
        assert_eq!((told.gateway.as_str(), told.dns), ("10.203.0.1", vec!["10.203.0.1".to_owned()]));
    }

    #[test]
    fn what_a_guest_spent_on_its_handshake_was_not_on_its_way() {
        assert_eq!(on_its_way(Duration::from_millis(90), 80_000), Duration::from_millis(10));
        // What a guest says is not believed beyond what is possible.
        assert_eq!(on_its_way(Duration::from_millis(90), u64::MAX), Duration::ZERO);
    }

    #[test]
    fn a_hostname_is_one_label() {
        let name = hostname(Uuid::nil());
        assert_eq!(name, "sb-000000000000");
    }
}
