//! Losers die: sandboxes that were idle for their TTL are deleted or hibernated, as they say themselves, whatever became of
//! their clients.
//!
//! Idle is counted from the last use, which is written down, so that it goes on across restarts. What is in progress is use.
//! One that hibernates is left alone: it holds no memory, and counts for its workspace's quotas until it is deleted.

use std::sync::Arc;
use std::time::Duration;

use coppice_api::ErrorClass;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use uuid::Uuid;

use crate::Coded;
use crate::actor::{Expired, Op};
use crate::entry::Entry;
use crate::host::Shared;

/// How long one that could not be ended is left alone: a try may pause its machine.
const END_AGAIN: Duration = Duration::from_secs(30);

pub(crate) async fn run(shared: Arc<Shared>, interval: Duration, stop: CancellationToken) {
    let mut tick = tokio::time::interval(interval.max(Duration::from_millis(100)));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        save_last_used(&shared).await;
        let now = Timestamp::now();
        for entry in shared.all().into_iter().filter(|entry| entry.is_due(now)) {
            // Not awaited: one machine that takes long to end must not keep the others alive.
            drop(tokio::spawn(end(entry)));
        }
    }
}

async fn end(entry: Arc<Entry>) {
    // Until this has ended or failed, no later round need ask again.
    entry.end_again_after(END_AGAIN);
    match entry.ask(Op::Expire).await {
        Ok(Expired::Stays) => entry.end_again_after(Duration::ZERO),
        Ok(Expired::Deleted) => ended(&entry, "deleted"),
        Ok(Expired::Hibernated) => ended(&entry, "hibernated"),
        // Deleted meanwhile.
        Err(e) if e.class() == ErrorClass::NotFound => {}
        Err(e) => {
            entry.end_again_after(END_AGAIN);
            warn!(id = %entry.id, error = crate::HostError::from(e).chain(), again_in = ?END_AGAIN, "can't be ended");
        }
    }
}

fn ended(entry: &Entry, how: &'static str) {
    info!(id = %entry.id, how, "it was idle for its TTL");
    metrics::counter!("coppice_reaped_total", "how" => how).increment(1);
}

/// Writes down when the sandboxes that were used since the last time were used.
pub(crate) async fn save_last_used(shared: &Shared) {
    let used: Vec<(Uuid, Timestamp)> =
        shared.all().iter().filter_map(|entry| Some((entry.id, entry.take_unsaved_last_used()?))).collect();
    if used.is_empty() {
        return;
    }
    if let Err(e) = shared.store.put_last_used(&used).await {
        warn!(error = %e, "the times of last use can't be written down");
    }
}
