//! What happens when a host starts: take over what runs, finish or undo what was half-done, reclaim what is left.
//!
//! Only what is ours is touched: VMs of this instance that no record knows or that can't be taken over, and directories
//! named as ours are that no record knows.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use coppice_api::SandboxStatus;
use coppice_engine::{AdoptError, Vm, VmRecord, VmState};
use tracing::{info, warn};
use uuid::Uuid;

use crate::HostError;
use crate::actor::{Actor, Begin, mailbox};
use crate::dead_vm::DeadVm;
use crate::entry::Entry;
use crate::fork_warm::{SUCCEEDED, keep_log_only};
use crate::hibernate::{NO_MACHINE, remove_files};
use crate::host::{Shared, StartError};
use crate::launch::CONSOLE_LOG;
use crate::record::SandboxRecord;
use crate::slots;
use crate::store::StoreError;

pub(crate) async fn run(shared: &Arc<Shared>) -> Result<(), StartError> {
    let (mut adopted, mut undone, mut failed) = (0, 0, 0);
    let mut keep = HashSet::new();
    let (mut kept, mut running) = (Vec::new(), Vec::new());
    let (mut half_done, mut without_machine, mut stopped, mut stood_still) = (vec![], vec![], vec![], vec![]);
    for record in shared.store.sandboxes().await? {
        match record.status {
            SandboxStatus::Creating | SandboxStatus::Stopping => half_done.push(record.id),
            SandboxStatus::Hibernated | SandboxStatus::Stopped => {
                keep.insert(record.id);
                // It is in its image, or in its successor, and has no machine. One that it left just before a crash is a stray.
                let why = if record.status == SandboxStatus::Stopped { SUCCEEDED } else { NO_MACHINE };
                let vm = DeadVm::vm(unknown_vm(shared, record.id, &record), why.into());
                if record.status == SandboxStatus::Stopped {
                    stopped.push(record.id);
                }
                without_machine.push(record.id);
                attach(shared, record, vm, Begin::AsItIs).await?;
            }
            _ => {
                keep.insert(record.id);
                let (slot, vm) = (record.network.clone(), record.vm.clone());
                let recovered = recover(shared, record).await?;
                if let Recovered::Failed = recovered {
                    failed += 1;
                    continue;
                }
                kept.extend(slot);
                running.extend(vm);
                adopted += 1;
                if let Recovered::StoodStill(record, vm) = recovered {
                    stood_still.push((record, vm));
                }
            }
        }
    }
    // Processes before files: what is still running may write.
    let strays = shared.engine.end_strays(&running).await?;
    slots::reclaim(shared, kept).await?;
    // Not before the strays are gone and the network is as it was: a successor that was not recorded may have run in its place.
    for (record, vm) in stood_still {
        attach(shared, *record, vm, Begin::GoOn).await?;
    }
    for id in &without_machine {
        remove_files(shared, *id).await;
    }
    for id in stopped {
        keep_log_only(shared, id).await;
    }
    for id in half_done {
        shared.forget(id).await?;
        undone += 1;
    }
    shared.drop_unreferenced_snapshots().await?;
    let snapshots: HashSet<Uuid> = shared.store.snapshots().await?.into_iter().map(|s| s.id).collect();
    let (run, sandboxes) = (shared.data.run_dir(), shared.data.sandboxes_dir());
    for (dir, known) in [(run, &keep), (sandboxes, &keep), (shared.data.snapshots_dir(), &snapshots)] {
        reclaim(&dir, known).await?;
    }
    let without_machine = without_machine.len();
    if adopted + without_machine + undone + failed + strays > 0 {
        info!(adopted, without_machine, undone, failed, strays, "what an earlier run left");
    }
    Ok(())
}

/// What became of a recorded sandbox.
enum Recovered {
    /// Its VM was taken over.
    Adopted,
    /// Its VM is there, and stands still because of a capture that did not end. It has no actor yet.
    StoodStill(Box<SandboxRecord>, Arc<dyn Vm>),
    /// It is shown as failed.
    Failed,
}

/// Brings a recorded sandbox back.
async fn recover(shared: &Arc<Shared>, mut record: SandboxRecord) -> Result<Recovered, StoreError> {
    let id = record.id;
    let Some(vm_record) = record.vm.clone() else {
        record.network = None;
        // It was acknowledged, and so had a VM; without its record it can't be spoken to.
        record.status = SandboxStatus::Failed;
        record.error = Some("its VM was not recorded".into());
        let placeholder = unknown_vm(shared, id, &record);
        let vm = DeadVm::vm(placeholder, "its VM was not recorded".into());
        attach(shared, record, vm, Begin::AsItIs).await?;
        return Ok(Recovered::Failed);
    };
    let (vm, alive) = match shared.engine.adopt(vm_record.clone()).await {
        Ok(vm) => (vm, true),
        Err(e) => {
            let reason = match &e {
                AdoptError::Gone => "its VM did not outlive the host daemon (was the host restarted?)".to_owned(),
                AdoptError::Vm(_) => HostError::from(AdoptFailed(e)).chain(),
            };
            warn!(%id, reason, "can't be taken over");
            record.status = SandboxStatus::Failed;
            record.error = Some(reason.clone());
            record.network = None;
            (DeadVm::vm(vm_record, reason), false)
        }
    };
    // A daemon that was killed in the middle of a capture leaves the machine paused: the capture is undone, it goes on.
    let paused = *vm.state().borrow() == VmState::Paused;
    if alive && record.status == SandboxStatus::Running && paused {
        info!(%id, "was paused by a capture that did not end; it goes on");
        return Ok(Recovered::StoodStill(Box::new(record), vm));
    }
    attach(shared, record, vm, Begin::AsItIs).await?;
    Ok(if alive { Recovered::Adopted } else { Recovered::Failed })
}

async fn attach(shared: &Arc<Shared>, record: SandboxRecord, vm: Arc<dyn Vm>, begin: Begin) -> Result<(), StoreError> {
    shared.store.update_sandbox(&record).await?;
    shared.store.put_network(&record).await?;
    let (sender, receiver) = mailbox();
    let entry = Entry::new(record, None, sender);
    shared.insert(Arc::clone(&entry));
    Actor::spawn(Arc::clone(shared), entry, vm, receiver, begin);
    Ok(())
}

fn unknown_vm(shared: &Shared, id: Uuid, record: &SandboxRecord) -> VmRecord {
    let dir = shared.sandbox_dir(id);
    VmRecord {
        place: coppice_engine::VmPlace {
            id,
            run_dir: shared.vm_dir(id),
            disk: dir.join(coppice_snapshot::DISK_FILE),
            console_log: dir.join(CONSOLE_LOG),
        },
        machine: coppice_snapshot::MachineSpec {
            cpus: record.cpus,
            memory_mib: record.memory_mib,
            kernel: String::new(),
            initramfs: String::new(),
            cmdline: String::new(),
        },
        pid: 0,
        pid_start: 0,
        boot_id: String::new(),
        channel_port: 0,
        memory_base: None,
        restore: None,
    }
}

/// An [`AdoptError`] with a code, for its chain.
#[derive(Debug, thiserror::Error)]
#[error("its VM could not be taken over")]
struct AdoptFailed(#[source] AdoptError);

impl crate::Coded for AdoptFailed {
    fn code(&self) -> &'static str {
        "adopt_failed"
    }

    fn class(&self) -> coppice_api::ErrorClass {
        coppice_api::ErrorClass::Internal
    }
}

/// Removes what no record knows.
async fn reclaim(dir: &Path, known: &HashSet<Uuid>) -> Result<(), StartError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| StartError::Reclaim { path, source }
    };
    let mut entries = tokio::fs::read_dir(dir).await.map_err(failed(dir))?;
    while let Some(entry) = entries.next_entry().await.map_err(failed(dir))? {
        let id = entry.file_name().to_str().and_then(|name| name.parse::<Uuid>().ok());
        // Only directories that are named as ours are.
        let Some(id) = id.filter(|id| !known.contains(id)) else { continue };
        info!(%id, path = %entry.path().display(), "removing what belongs to nothing");
        tokio::fs::remove_dir_all(entry.path()).await.map_err(failed(&entry.path()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_unknown_directories_with_our_kind_of_name_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (known, unknown) = (Uuid::new_v4(), Uuid::new_v4());
        for name in [known.to_string(), unknown.to_string(), "something-else".into()] {
            std::fs::create_dir(dir.path().join(&name)).unwrap();
        }
        reclaim(dir.path(), &HashSet::from([known])).await.unwrap();
        assert!(dir.path().join(known.to_string()).exists());
        assert!(!dir.path().join(unknown.to_string()).exists());
        assert!(dir.path().join("something-else").exists());
    }
}
