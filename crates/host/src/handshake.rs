//! What the guest is told when its machine starts, is restored, wakes or goes on.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coppice_guest_proto::v1::{ForkIdentity, Network, ResumeReason, ResumeRequest};
use coppice_net::{GATEWAY, PREFIX, SlotRecord};
use uuid::Uuid;

use crate::record::SandboxRecord;

/// How long a guest may take to acknowledge. Bounded hooks may run for several seconds of it.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

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
        let slot = SlotRecord { index: 0, mac: [2, 0x63, 0, 0xab, 1, 255], address, egress: Default::default() };
        let told = network(&slot);
        assert_eq!((told.mac.as_str(), told.ip.as_str(), told.prefix), ("02:63:00:ab:01:ff", "10.203.1.0", 32));
        assert_eq!((told.gateway.as_str(), told.dns), ("10.203.0.1", vec!["10.203.0.1".to_owned()]));
    }

    #[test]
    fn a_hostname_is_one_label() {
        let name = hostname(Uuid::nil());
        assert_eq!(name, "sb-000000000000");
    }
}
