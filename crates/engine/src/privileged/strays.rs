//! VMMs that nobody knows any more: ended at a start, before anything of theirs is given to somebody else.
//!
//! A daemon that dies between the start of a VMM and the record of it leaves one. It is found by its cgroup, which only
//! VMMs of this instance are in; without cgroups by its user together with its program.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid};

use super::local::{Jail, Local, has_ended};
use super::{JailSlot, ProcessId};
use crate::process::{self, start_time};

/// How long all of them together may take to be gone. One may be in the middle of a disk write.
const PATIENCE: Duration = Duration::from_secs(20);

/// Ends those that are not to be kept.
pub(super) fn end(local: &Local, keep: &[ProcessId]) -> io::Result<Vec<ProcessId>> {
    // Without a jail a VMM has nothing by which it could be told from another process of the same user.
    let Some(jail) = &local.jail else { return Ok(Vec::new()) };
    let mut killed = Vec::new();
    for pid in candidates(jail)? {
        let Some((id, pidfd)) = hold(pid)? else { continue };
        // Looked at once it is held: the pid can't be another process's any more.
        // A machine without a slot is a bake's, which another process does.
        let stray = |slot: &JailSlot| !slot.is_unslotted() && !keep.contains(&id);
        let Some(slot) = slot_of(local, jail, pid).filter(stray) else { continue };
        tracing::warn!(pid, slot = slot.index, "ending a VMM that nobody knows");
        match pidfd_send_signal(&pidfd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => killed.push((id, slot, pidfd)),
            Err(errno) => return Err(errno.into()),
        }
    }
    let deadline = Instant::now() + PATIENCE;
    for (id, slot, pidfd) in &killed {
        wait(pidfd, deadline)?;
        // Reaps it where it is our child; the child of an earlier run is init's to reap.
        match waitid(WaitId::PidFd(std::os::fd::AsFd::as_fd(pidfd)), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(_) | Err(rustix::io::Errno::CHILD) => {}
            Err(errno) => return Err(errno.into()),
        }
        local.forget(*id);
        local.remove_group(*slot);
    }
    Ok(killed.into_iter().map(|(id, ..)| id).collect())
}

fn candidates(jail: &Jail) -> io::Result<Vec<i32>> {
    match &jail.cgroups {
        Some(cgroups) => cgroups.members(),
        None => {
            let all = std::fs::read_dir("/proc")?;
            Ok(all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
        }
    }
}

fn hold(pid: i32) -> io::Result<Option<(ProcessId, OwnedFd)>> {
    let Some(target) = Pid::from_raw(pid) else { return Ok(None) };
    match pidfd_open(target, PidfdFlags::NONBLOCK) {
        // Ended since it was listed.
        Err(rustix::io::Errno::SRCH) => Ok(None),
        Err(errno) => Err(errno.into()),
        Ok(pidfd) => match start_time(pid) {
            Ok(start_time) if !has_ended(&pidfd) => Ok(Some((ProcessId { pid, start_time }, pidfd))),
            _ => Ok(None),
        },
    }
}

/// Which slot's VMM of this instance a process is; `None` for any other process.
fn slot_of(local: &Local, jail: &Jail, pid: i32) -> Option<JailSlot> {
    let slot = jail.uids.slot(process::uid(pid).ok()?)?;
    let ours = match &jail.cgroups {
        Some(cgroups) => {
            let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
            cgroups.holds(&groups, &Local::group_name(slot)).is_ok()
        }
        None => {
            let program = std::fs::read_link(format!("/proc/{pid}/exe")).ok();
            program.as_deref().and_then(Path::file_name) == local.program.path.file_name()
        }
    };
    ours.then_some(slot)
}

fn wait(pidfd: &OwnedFd, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(0), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::TimedOut, "a VMM that was killed does not end")),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
