//! Plain fork: N children with the parent's flushed disk, which boot.
//!
//! The guest flushes and freezes its file system, the disk is cloned once in a pause, every child gets a clone of the
//! clone. Processes and memory are not inherited.

use std::sync::Arc;

use coppice_api::{BootMode, Fork};
use coppice_snapshot::MachineSpec;
use jiff::Timestamp;
use tracing::info;
use uuid::Uuid;

use crate::actor::{DiskCapture, Op, OpError};
use crate::api::ForkSpec;
use crate::entry::{AccessError, Entry};
use crate::fork::{ForkError, Forked, Order, check};
use crate::fork_tree::disk_clone_word;
use crate::host::{Shared, remove_tree};
use crate::launch::{Origin, millis};
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
    let order = check(shared, &parent, spec).await?;
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
    let _reservation = shared.admission.reserve(u64::from(order.count), shared.count())?;
    let machine = machine_of(&order)?;
    let common = shared.data.staging_dir().join(format!("fork-{}", Uuid::new_v4()));
    tokio::fs::create_dir(&common)
        .await
        .map_err(|source| coppice_snapshot::CreateImageError::Write { path: common.clone(), source })?;
    undo.push("common clone of the disk", remove_tree(common.clone()));
    let disk = common.join(coppice_snapshot::DISK_FILE);
    let at = Timestamp::now();
    let DiskCapture { clone, flushed } = parent.ask(|reply| Op::CloneDisk(disk.clone(), reply)).await?;

    let records = order.children(BootMode::Cold, None);
    let (children, errors) = order.start(shared, records, &Origin::Disk { disk, machine }).await?;
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
        capture: None,
    };
    Ok(Forked { children, answer })
}

/// The parent's shape. A sandbox that runs has a VM, and so a record of it.
fn machine_of(order: &Order) -> Result<MachineSpec, ForkError> {
    let id = order.parent.id;
    let vm = order.parent.vm.as_ref().ok_or(OpError::Access(AccessError::NoSession(id)))?;
    Ok(vm.machine.clone())
}
