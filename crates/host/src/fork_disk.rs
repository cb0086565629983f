//! Plain fork: N children with the parent's flushed disk, which boot.
//!
//! The guest flushes and freezes its file system, the disk is cloned once in a pause, every child gets a clone of the
//! clone. Processes and memory are not inherited.

use std::sync::Arc;

use coppice_api::Fork;
use jiff::Timestamp;
use tracing::info;

use crate::actor::{DiskCapture, Op};
use crate::api::ForkSpec;
use crate::entry::Entry;
use crate::fork::{ForkError, Forked, Order, check};
use crate::fork_tree::disk_clone_word;
use crate::host::Shared;
use crate::launch::{Origin, millis};
use crate::record::ForkKind;
use crate::undo::Undo;

const INHERITED: &str = "Each child has the parent's disk, including what was not yet flushed. It does not have: running \
                         processes, memory, /run, /dev/shm or anything else that is not on the disk; it has booted \
                         afresh.";
const INHERITED_UNFLUSHED: &str = "Each child has the parent's disk AS IT WAS ON THE HOST: the parent's guest did not \
                                   answer, so recent writes that it had not flushed may be missing. It does not have: \
                                   running processes, memory, /run, /dev/shm; it has booted afresh.";

pub(crate) async fn fork_disk(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    spec: ForkSpec,
) -> Result<Fork, ForkError> {
    let parent = shared.entry(workspace, id)?;
    let order = check(shared, &parent, spec)?;
    let shared = Arc::clone(shared);
    let forked = tokio::spawn(async move {
        let mut undo = Undo::default();
        let forked = run(&shared, &parent, order, &mut undo).await;
        // The common clone is needed only until every child has its own.
        undo.unwind().await;
        forked
    })
    .await;
    Ok(forked.map_err(|_| ForkError::Interrupted)??.claim())
}

async fn run(shared: &Arc<Shared>, parent: &Arc<Entry>, order: Order, undo: &mut Undo) -> Result<Forked, ForkError> {
    let _in_use = parent.in_use();
    let mut room = order.admit(shared, ForkKind::Disk).await?;
    // Locked for as long as it is needed: others clean up there, `coppice template build` for one.
    let data = shared.data.clone();
    let staged = tokio::task::spawn_blocking(move || data.stage("fork")).await;
    let common = staged.map_err(|_| ForkError::Interrupted)??;
    let disk = common.path().join(coppice_snapshot::DISK_FILE);
    undo.push("common clone of the disk", async move { drop(tokio::task::spawn_blocking(|| drop(common)).await) });
    coppice_fault::point!("fork-disk.staged");
    let at = Timestamp::now();
    let DiskCapture { clone, flushed, machine } = parent.ask(|reply| Op::CloneDisk(disk.clone(), reply)).await?;

    coppice_fault::point!("fork-disk.cloned");
    let records = order.children(ForkKind::Disk, None);
    let (children, errors) = order.start(shared, records, &Origin::Disk { disk, machine }, &mut room).await?;
    coppice_fault::point!("fork-disk.started");
    let parent_paused_ms = millis(clone.paused);
    info!(count = order.count, failed = errors.len(), parent_paused_ms, flushed, "disk fork");
    let answer = Fork {
        children: Vec::new(),
        errors,
        parent_id: order.parent.id.to_string(),
        snapshot_id: None,
        tree_id: order.tree_id.to_string(),
        at: at.to_string(),
        parent_paused_ms,
        disk_clone: disk_clone_word(clone.kind),
        flushed,
        mode: "disk".into(),
        inherited: if flushed { INHERITED } else { INHERITED_UNFLUSHED }.into(),
        memory_bytes: 0,
        memory_written_bytes: 0,
        capture: None,
    };
    Ok(Forked { children, answer })
}
