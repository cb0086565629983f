//! Places on the network: taken when a sandbox starts, given back when its machine is gone, kept across a restart.
//!
//! The network itself (namespaces, links, rules) is [`coppice_net`]; its calls block, so they run on threads of their own.

use std::sync::Arc;

use coppice_net::{Egress, NetError, Seat, Slot, SlotRecord, Slots};
use tracing::warn;

use crate::host::Shared;
use crate::undo::Undo;

/// Runs a blocking call of the network.
pub(crate) async fn call<T: Send + 'static>(
    shared: &Shared,
    work: impl FnOnce(&dyn Slots) -> Result<T, NetError> + Send + 'static,
) -> Result<T, NetError> {
    let slots = Arc::clone(&shared.slots);
    let done = tokio::task::spawn_blocking(move || work(slots.as_ref())).await;
    done.unwrap_or_else(|panicked| Err(NetError::Remote { message: panicked.to_string() }))
}

/// Takes a place whose policy is in force.
pub(crate) async fn take(shared: &Arc<Shared>, egress: &Egress, undo: &mut Undo) -> Result<Slot, NetError> {
    let egress = egress.clone();
    let slot = call(shared, move |slots| slots.take(&egress)).await?;
    let (give_back, index) = (Arc::clone(shared), slot.index);
    undo.push("network slot", async move { put(&give_back, index).await });
    Ok(slot)
}

/// Changes what a place may reach; in force when this answers.
pub(crate) async fn set_egress(shared: &Shared, index: u32, egress: &Egress) -> Result<(), NetError> {
    let egress = egress.clone();
    call(shared, move |slots| slots.set_egress(index, &egress)).await
}

/// The other seat of a place, to which it leads once the first one is taken away.
pub(crate) async fn reseat(shared: &Shared, index: u32) -> Result<Slot, NetError> {
    call(shared, move |slots| slots.reseat(index)).await
}

/// Takes a seat away whose machine is gone. One that stays all the same goes with the slot, or at the next start.
pub(crate) async fn unseat(shared: &Shared, index: u32, seat: Seat) {
    if let Err(e) = call(shared, move |slots| slots.unseat(index, seat)).await {
        warn!(index, error = &e as &dyn std::error::Error, "a seat of a network slot can't be taken away");
    }
}

/// Gives a place back. What can't be given back is reclaimed at the next start.
pub(crate) async fn put(shared: &Shared, index: u32) {
    if let Err(e) = call(shared, move |slots| slots.put(index)).await {
        warn!(index, error = &e as &dyn std::error::Error, "a network slot can't be given back");
    }
}

/// What is recorded of a place.
pub(crate) fn record(slot: &Slot, egress: &Egress) -> SlotRecord {
    let Slot { index, seat, mac, address, .. } = *slot;
    SlotRecord { index, mac, address, egress: egress.clone(), seat }
}

/// After a start: these are in use, everything else that an earlier run left goes.
pub(crate) async fn reclaim(shared: &Shared, keep: Vec<SlotRecord>) -> Result<(), NetError> {
    call(shared, move |slots| slots.reclaim(&keep)).await
}

/// Shows what the network dropped. What can't be read is shown as it was.
pub(crate) async fn observe(shared: &Shared) {
    match call(shared, |slots| slots.counters()).await {
        Ok(counters) => {
            let all =
                [("spoofed", counters.spoofed), ("refused", counters.refused), ("host_refused", counters.host_refused)];
            for (reason, packets) in all {
                metrics::counter!("coppice_network_dropped_packets_total", "reason" => reason).absolute(packets);
            }
        }
        Err(e) => warn!(error = &e as &dyn std::error::Error, "the network's counters can't be read"),
    }
    let Ok((taken, limit)) = call(shared, |slots| Ok(slots.capacity())).await else { return };
    metrics::gauge!("coppice_network_slots", "state" => "taken").set(taken);
    metrics::gauge!("coppice_network_slots", "state" => "limit").set(limit);
}
