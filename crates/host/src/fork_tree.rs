//! Fork-tree: N children with the parent's memory, processes and disk, all of one instant.
//!
//! One capture of the running parent, N restores of it in parallel. The parent is paused only for the capture and is not
//! touched by anything that goes wrong with the children.

use std::sync::Arc;

use coppice_api::Fork;
use coppice_engine::CapturePlan;
use coppice_snapshot::{MachineImage, PendingImage};
use tracing::info;
use uuid::Uuid;

use crate::actor::Op;
use crate::api::ForkSpec;
use crate::entry::Entry;
use crate::fork::{ForkError, Forked, Order, check};
use crate::host::{Shared, remove_tree};
use crate::launch::{Origin, millis};
use crate::record::{ForkKind, SnapshotKind};
use crate::snapshots;
use crate::store::StoreError;

/// What children of a live fork have, and what they don't.
const INHERITED: &str = "Each child has the parent's memory, running processes, open files and disk as of that instant, \
                         written to disk or not. It does not have: the parent's sandbox id, hostname, machine-id, network \
                         address, connections to other machines (they end with an error), random state of the kernel, \
                         TTL (its own applies), or a share in anything written by the parent or a sibling afterwards.";

pub(crate) async fn fork_tree(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    spec: ForkSpec,
) -> Result<Fork, ForkError> {
    let parent = shared.entry(workspace, id)?;
    let order = check(shared, &parent, spec)?;
    let shared = Arc::clone(shared);
    // In a task of its own: a caller that hangs up must not stop it between two steps.
    let forked = tokio::spawn(async move { run(&shared, &parent, order).await }).await;
    Ok(forked.map_err(|_| ForkError::Interrupted)??.claim())
}

async fn run(shared: &Arc<Shared>, parent: &Arc<Entry>, order: Order) -> Result<Forked, ForkError> {
    let _in_use = parent.in_use();
    let mut room = order.admit(shared, ForkKind::Tree).await?;
    let snapshot_id = Uuid::new_v4();
    let image = PendingImage::create(&shared.snapshot_dir(snapshot_id))?;
    coppice_fault::point!("fork-tree.image");
    let plan = CapturePlan { image, id: snapshot_id, durable: false, hold: None };
    let captured = parent.ask(|reply| Op::Capture(Box::new(plan), reply)).await?;

    coppice_fault::point!("fork-tree.captured");
    let records = order.children(ForkKind::Tree, Some(snapshot_id));
    let origin = Origin::Image(Arc::new(captured.image));
    let started = order.start(shared, records, &origin, &mut room).await;
    let Origin::Image(image) = origin else { return Err(ForkError::Interrupted) };
    if started.is_err() {
        remove_tree(image.dir().to_owned()).await;
    }
    let (children, errors) = started?;
    coppice_fault::point!("fork-tree.started");
    record(shared, &order, &image).await?;
    if children.iter().any(|child| !child.is_there(shared)) {
        // Children can be seen before they are answered. If all were deleted before the record, nobody else drops it.
        shared.drop_unreferenced_snapshots().await?;
    }
    coppice_fault::point!("fork-tree.recorded");
    let parent_paused_ms = millis(captured.timings.paused);
    info!(
        count = order.count,
        failed = errors.len(),
        parent_paused_ms,
        memory_bytes = captured.memory_bytes,
        memory_written_bytes = captured.memory_written_bytes,
        took_ms = millis(order.requested.elapsed()),
        "fork-tree"
    );
    metrics::histogram!("coppice_fork_paused_seconds").record(captured.timings.paused.as_secs_f64());
    metrics::histogram!("coppice_fork_seconds").record(order.requested.elapsed().as_secs_f64());
    let answer = Fork {
        children: Vec::new(),
        errors,
        parent_id: order.parent.id.to_string(),
        snapshot_id: Some(snapshot_id.to_string()),
        tree_id: order.tree_id.to_string(),
        at: image.manifest().captured_at.to_string(),
        parent_paused_ms,
        disk_clone: disk_clone_word(captured.disk_clone),
        flushed: true,
        mode: "fork-tree".into(),
        inherited: INHERITED.into(),
        memory_bytes: captured.memory_bytes,
        memory_written_bytes: captured.memory_written_bytes,
        capture: Some(breakdown(&captured.timings)),
    };
    Ok(Forked { children, answer })
}

/// After the children, whose records refer to it: a snapshot that nothing refers to may be removed at any time. A crash
/// before this leaves a directory without a record, which the next start removes; VMs go on reading the unlinked file.
async fn record(shared: &Shared, order: &Order, image: &MachineImage) -> Result<(), StoreError> {
    let record = snapshots::record_of(&order.parent, image, SnapshotKind::Fork).await;
    let stored = shared.store.put_snapshot(&record).await;
    if stored.is_err() {
        remove_tree(image.dir().to_owned()).await;
    }
    stored
}

pub(crate) fn disk_clone_word(kind: coppice_disk::CloneKind) -> String {
    match kind {
        coppice_disk::CloneKind::Reflink => "reflink".into(),
        coppice_disk::CloneKind::Copy => "copy".into(),
    }
}

pub(crate) fn breakdown(timings: &coppice_engine::CaptureTimings) -> coppice_api::CaptureBreakdown {
    coppice_api::CaptureBreakdown {
        stop: millis(timings.stop),
        devices: millis(timings.devices),
        disk: millis(timings.disk),
        memory: millis(timings.memory),
        publish: millis(timings.publish),
    }
}
