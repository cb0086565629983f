//! What happens when a host starts: take over what runs, finish or undo what was half-done, reclaim what is left.
//!
//! Only what is ours is touched: processes that hold a socket bound under this data directory's `run/`, and directories
//! named as ours are that no record knows.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coppice_api::SandboxStatus;
use coppice_engine::{AdoptError, Vm, VmRecord, VmState};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tracing::{info, warn};
use uuid::Uuid;

use crate::HostError;
use crate::actor::{Actor, mailbox};
use crate::dead_vm::DeadVm;
use crate::entry::Entry;
use crate::host::{Shared, StartError};
use crate::record::SandboxRecord;
use crate::store::StoreError;

pub(crate) async fn run(shared: &Arc<Shared>) -> Result<(), StartError> {
    let (mut adopted, mut undone, mut failed) = (0, 0, 0);
    let mut keep = HashSet::new();
    let mut half_done = Vec::new();
    for record in shared.store.sandboxes().await? {
        match record.status {
            SandboxStatus::Creating | SandboxStatus::Stopping => half_done.push(record.id),
            _ => {
                keep.insert(record.id);
                if recover(shared, record).await? {
                    adopted += 1;
                } else {
                    failed += 1;
                }
            }
        }
    }
    // Processes before files: what is still running may write.
    end_orphans(shared.data.run_dir(), keep.clone()).await?;
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
    if adopted + undone + failed > 0 {
        info!(adopted, undone, failed, "what an earlier run left");
    }
    Ok(())
}

/// Brings a recorded sandbox back; answers whether its VM runs.
async fn recover(shared: &Arc<Shared>, mut record: SandboxRecord) -> Result<bool, StoreError> {
    let id = record.id;
    let Some(vm_record) = record.vm.clone() else {
        // It was acknowledged, and so had a VM; without its record it can't be spoken to.
        record.status = SandboxStatus::Failed;
        record.error = Some("its VM was not recorded".into());
        let placeholder = unknown_vm(shared, id, &record);
        let vm = DeadVm::vm(placeholder, "its VM was not recorded".into());
        attach(shared, record, vm).await?;
        return Ok(false);
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
            (DeadVm::vm(vm_record, reason), false)
        }
    };
    // A daemon that was killed in the middle of a capture leaves the machine paused: the capture is undone, it goes on.
    let paused = *vm.state().borrow() == VmState::Paused;
    if alive && record.status == SandboxStatus::Running && paused {
        info!(%id, "was paused by a capture that did not end; it goes on");
        if let Err(e) = vm.resume().await {
            warn!(%id, error = %e, "can't go on");
        }
    }
    attach(shared, record, vm).await?;
    Ok(alive)
}

async fn attach(shared: &Arc<Shared>, record: SandboxRecord, vm: Arc<dyn Vm>) -> Result<(), StoreError> {
    shared.store.update_sandbox(&record).await?;
    let (sender, receiver) = mailbox();
    let entry = Entry::new(record, None, sender);
    shared.insert(Arc::clone(&entry));
    Actor::spawn(Arc::clone(shared), entry, vm, receiver);
    Ok(())
}

fn unknown_vm(shared: &Shared, id: Uuid, record: &SandboxRecord) -> VmRecord {
    let dir = shared.sandbox_dir(id);
    VmRecord {
        place: coppice_engine::VmPlace {
            id,
            run_dir: shared.vm_dir(id),
            disk: dir.join(coppice_snapshot::DISK_FILE),
            console_log: dir.join("console.log"),
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

/// Ends VM processes of this data directory that belong to no sandbox, and waits until they are gone.
async fn end_orphans(run_dir: PathBuf, keep: HashSet<Uuid>) -> Result<(), StartError> {
    let ended = tokio::task::spawn_blocking(move || {
        let sockets = vm_sockets(&std::fs::read_to_string("/proc/net/unix")?, &run_dir);
        for pid in pids()? {
            if let Some(id) = vm_of(pid, &sockets).filter(|id| !keep.contains(id)) {
                end(pid, id, &sockets)?;
            }
        }
        Ok::<_, io::Error>(())
    })
    .await;
    let failed = |source| StartError::Reclaim { path: PathBuf::from("/proc"), source };
    ended.map_err(|e| failed(io::Error::other(e)))?.map_err(failed)
}

/// Which VM a socket belongs to, by inode: sockets are bound to `RUN_DIR/ID/…` by us and inherited by the VMM, so that
/// whoever holds one is our VMM, whatever its command line says.
fn vm_sockets(table: &str, run_dir: &Path) -> HashMap<u64, Uuid> {
    let ours = |line: &str| {
        let mut fields = line.split_whitespace();
        let inode = fields.nth(6)?.parse().ok()?;
        let path = Path::new(fields.next()?).strip_prefix(run_dir).ok()?;
        Some((inode, path.components().next()?.as_os_str().to_str()?.parse().ok()?))
    };
    table.lines().filter_map(ours).collect()
}

fn pids() -> io::Result<Vec<i32>> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let all = std::fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(all.filter(|pid| *pid != own).collect())
}

/// Which VM a process is, by a socket that it holds.
fn vm_of(pid: i32, sockets: &HashMap<u64, Uuid>) -> Option<Uuid> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok()).find_map(|target| {
        let inode = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
        sockets.get(&inode).copied()
    })
}

/// By pidfd, and looked at again after it is open: the pid can't be another process's any more.
fn end(pid: i32, id: Uuid, sockets: &HashMap<u64, Uuid>) -> io::Result<()> {
    let Some(target) = Pid::from_raw(pid) else { return Ok(()) };
    let fd = match pidfd_open(target, PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(e) => return Err(e.into()),
    };
    if vm_of(pid, sockets) != Some(id) {
        return Ok(());
    }
    info!(%id, pid, "ending a VM that belongs to no sandbox");
    match pidfd_send_signal(&fd, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(e) => return Err(e.into()),
    }
    let mut exited = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let patience = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
    rustix::event::poll(&mut exited, Some(&patience))?;
    Ok(())
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

    #[test]
    fn a_process_that_holds_a_socket_of_a_vm_is_that_vm_and_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let id = Uuid::new_v4();
        std::fs::create_dir(dir.path().join(id.to_string())).unwrap();
        let socket = std::os::unix::net::UnixListener::bind(dir.path().join(id.to_string()).join("qmp.sock")).unwrap();
        let table = || std::fs::read_to_string("/proc/net/unix").unwrap();
        let sockets = vm_sockets(&table(), dir.path());
        assert_eq!(sockets.values().collect::<Vec<_>>(), [&id]);
        assert!(vm_sockets(&table(), &dir.path().join("other")).is_empty());

        let mut holder =
            std::process::Command::new("sleep").arg("60").stdin(std::os::fd::OwnedFd::from(socket)).spawn().unwrap();
        let pid = i32::try_from(holder.id()).unwrap();
        assert_eq!(vm_of(pid, &sockets), Some(id));
        end(pid, Uuid::new_v4(), &sockets).unwrap();
        assert!(holder.try_wait().unwrap().is_none(), "it was ended although it is another VM");
        end(pid, id, &sockets).unwrap();
        assert!(!holder.wait().unwrap().success());
    }

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
