//! Losers die: sandboxes that were idle for their TTL are deleted, whatever became of their clients.
//!
//! Idle is counted from the last use, which is written down, so that it goes on across restarts.

use std::sync::Arc;
use std::time::Duration;

use coppice_api::ErrorClass;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use uuid::Uuid;

use crate::Coded;
use crate::actor::Op;
use crate::host::Shared;

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
        for entry in shared.all() {
            let expired = |at: Timestamp| at <= now;
            if !entry.record().expires_at(entry.last_used()).is_some_and(expired) {
                continue;
            }
            info!(id = %entry.id, "idle for its TTL");
            // Not awaited: one machine that takes long to end must not keep the others alive.
            drop(tokio::spawn(async move {
                match entry.ask(Op::Delete).await {
                    // Gone by an earlier round that took longer than one.
                    Err(e) if e.class() == ErrorClass::NotFound => {}
                    Err(e) => warn!(id = %entry.id, error = %e, "can't be reaped; it will be tried again"),
                    Ok(()) => metrics::counter!("coppice_reaped_total").increment(1),
                }
            }));
        }
    }
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
