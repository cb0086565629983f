//! Which TCP ports of a guest something listens on.

use std::sync::Arc;
use std::time::Duration;

use coppice_guest_proto::limits::MAX_PORTS;
use coppice_guest_proto::v1::{ListPortsRequest, ListeningPort};

use crate::api::DetectedPort;
use crate::guest_error::GuestCallError;
use crate::host::Shared;

/// How long a guest may take to look.
const LOOK: Duration = Duration::from_secs(10);

/// By number, each once. Looking is no use of the sandbox: nothing is touched, but one that hibernates is woken.
pub(crate) async fn list(shared: &Arc<Shared>, workspace: &str, id: &str) -> Result<Vec<DetectedPort>, GuestCallError> {
    let mut client = shared.entry(workspace, id)?.session().await?.client();
    let asked = tokio::time::timeout(LOOK, client.list_ports(ListPortsRequest {})).await;
    let reply = asked.map_err(|_| GuestCallError::Timeout(LOOK))??.into_inner();
    Ok(checked(reply.ports))
}

/// A guest may say anything.
fn checked(ports: Vec<ListeningPort>) -> Vec<DetectedPort> {
    let plausible = |one: ListeningPort| {
        let port = u16::try_from(one.port).ok().filter(|port| *port != 0)?;
        Some(DetectedPort { port, loopback_only: one.loopback_only })
    };
    let mut ports: Vec<_> = ports.into_iter().filter_map(plausible).take(MAX_PORTS).collect();
    // What is reached from outside on any address is reached.
    ports.sort_by_key(|one| (one.port, one.loopback_only));
    ports.dedup_by_key(|one| one.port);
    ports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_says_is_checked() {
        let said = |port, loopback_only| ListeningPort { port, loopback_only, process: String::new() };
        let found = |port, loopback_only| DetectedPort { port, loopback_only };
        let ports = checked(vec![said(80, true), said(0, false), said(65_536, false), said(22, true), said(80, false)]);
        assert_eq!(ports, [found(22, true), found(80, false)]);
        assert_eq!(checked((1..=60_000).map(|port| said(port, false)).collect()).len(), MAX_PORTS);
    }
}
