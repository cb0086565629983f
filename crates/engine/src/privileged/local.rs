//! [`Privileged`] in this process, which must be root where VMMs are to have a jail.
//!
//! It knows the VMMs that it spawned or adopted, and does nothing to any other process. Its state is one table; what is
//! slow happens without its lock. It does not need an async runtime.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use coppice_snapshot::Accel;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid};

use super::examine::{self, Program};
use super::memory::{self, Target};
use super::{
    ArenaId, JailReport, JailSlot, MemoryHandle, Privileged, ProcessId, ProcessStats, Range, SpawnFds, SpawnOrder,
    Spawned, VmmFacts, launch, strays,
};
use crate::jail::cgroup::{Cgroups, Group};
use crate::jail::filter::Supervisor;
use crate::jail::spaces::Spaces;
use crate::jail::uids::Uids;
use crate::jail::verify::{self, FileId};
use crate::jail::{CgroupChoice, JailChoice, JailConfig};
use crate::process;
use crate::{EngineError, JailLayer, VmError};

/// Which way to execute guest code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AccelChoice {
    /// KVM where the probe says that it can run a stock kernel, else TCG.
    #[default]
    Auto,
    /// KVM, or an error.
    Kvm,
    /// TCG.
    Tcg,
}

/// Configuration of [`Local`].
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// QEMU's program; a bare name is searched for in the usual places.
    pub program: PathBuf,
    /// Which way to execute guest code.
    pub accel: AccelChoice,
    /// Where the probe of `/dev/kvm` keeps its result for this boot of the host.
    pub probe_cache: Option<PathBuf>,
    /// Bound of TCG's translation cache for each VM, MiB. Only what is used is allocated.
    pub tb_size_mib: u32,
    /// Names the cgroups of this instance, `coppice-ID`: 1 to 32 letters, digits and dashes.
    pub id: String,
    /// What holds VMMs back.
    pub jail: JailChoice,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self {
            program: PathBuf::from("qemu-system-x86_64"),
            accel: AccelChoice::Auto,
            probe_cache: None,
            tb_size_mib: 128,
            id: "default".to_owned(),
            jail: JailChoice::On(JailConfig::default()),
        }
    }
}

/// The privileged side in this process.
#[derive(Debug)]
pub struct Local {
    pub(super) program: Program,
    pub(super) jail: Option<Jail>,
    facts: VmmFacts,
    held: Mutex<HashMap<ProcessId, Held>>,
    arenas: Mutex<HashMap<ArenaId, Arc<Target>>>,
    next_arena: AtomicU64,
}

/// What all VMMs' jails share.
#[derive(Debug)]
pub(super) struct Jail {
    pub spaces: Spaces,
    pub cgroups: Option<Cgroups>,
    pub uids: Uids,
    leave_out: Vec<JailLayer>,
}

impl Jail {
    /// Whether a layer is put on; always, outside of tests.
    pub fn has(&self, layer: JailLayer) -> bool {
        !self.leave_out.contains(&layer)
    }
}

/// A VMM that was spawned or adopted here.
#[derive(Debug)]
pub(super) struct Held {
    pub pidfd: OwnedFd,
    /// Whether it is our child, and so ours to reap.
    pub child: bool,
    pub slot: Option<JailSlot>,
    /// The descriptors of its group's files are not needed any more.
    pub in_group: bool,
    pub supervisor: Option<Supervisor>,
    /// What it may hold once it has started: the memory image first.
    pub files: Vec<FileId>,
    /// Where its memory is mapped, and its length.
    pub memory: Option<(u64, u64)>,
}

impl Local {
    /// Examines the host, and makes what all jails share. Takes up to a few seconds when `/dev/kvm` has to be probed.
    ///
    /// # Errors
    /// Names what is missing.
    pub fn new(config: LocalConfig) -> Result<Self, EngineError> {
        let program = examine::program(&config.program, config.tb_size_mib)?;
        let (accel, accel_reason) = examine::choose_accel(config.accel, config.probe_cache.as_deref())?;
        let program = Program { accel, tsc_khz: examine::tsc_khz(accel), ..program };
        let (jail, report) = match &config.jail {
            JailChoice::Off => (None, JailReport::Off),
            JailChoice::On(jail) => {
                let (jail, missing) = make_jail(jail, &config.id, &program.path)?;
                (Some(jail), JailReport::On { missing })
            }
        };
        let boot_id = process::boot_id().map_err(|source| system("reading the boot id", source))?;
        let facts = VmmFacts { version: program.version_text.clone(), accel, accel_reason, boot_id, jail: report };
        Ok(Self {
            program,
            jail,
            facts,
            held: Mutex::default(),
            arenas: Mutex::default(),
            next_arena: AtomicU64::new(0),
        })
    }

    /// Without a jail, with TCG: for tests of what does not start a VMM.
    #[cfg(test)]
    pub(crate) fn unjailed() -> Result<Self, EngineError> {
        Self::new(LocalConfig { accel: AccelChoice::Tcg, jail: JailChoice::Off, ..LocalConfig::default() })
    }

    pub(super) fn held(&self) -> MutexGuard<'_, HashMap<ProcessId, Held>> {
        // Nothing in the table can be left half-done.
        self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Does something to a VMM of ours.
    fn with<T>(&self, id: ProcessId, work: impl FnOnce(&mut Held) -> io::Result<T>) -> io::Result<T> {
        let mut held = self.held();
        let stranger = || io::Error::new(io::ErrorKind::PermissionDenied, "the process is no VMM of ours");
        work(held.get_mut(&id).ok_or_else(stranger)?)
    }

    /// What to call the group of a slot.
    pub(super) fn group_name(slot: JailSlot) -> String {
        format!("vm-{}", slot.index)
    }

    /// Refuses a slot that another VMM has; two of one user could reach into each other.
    pub(super) fn check_slot(&self, slot: JailSlot) -> Result<(), VmError> {
        let taken = |held: &Held| held.slot == Some(slot) && !has_ended(&held.pidfd);
        let problem = if self.jail.as_ref().is_some_and(|jail| jail.uids.of(slot).is_none()) {
            format!("there is no slot {}", slot.index)
        } else if self.held().values().any(taken) {
            format!("another VMM has the slot {}", slot.index)
        } else {
            return Ok(());
        };
        Err(VmError::Jail { layer: JailLayer::User, problem })
    }

    /// Makes the group of a VMM.
    pub(super) fn make_group(&self, order: &SpawnOrder) -> Result<Option<Group>, VmError> {
        let Some(cgroups) = self.jail.as_ref().and_then(|jail| jail.cgroups.as_ref()) else { return Ok(None) };
        let limits = launch::cgroup_limits(order, self.program.tb_size_mib);
        let made = cgroups.make(&Self::group_name(order.jail), &limits);
        made.map(Some).map_err(|error| VmError::Jail { layer: JailLayer::Cgroup, problem: error.to_string() })
    }

    pub(super) fn remove_group(&self, slot: JailSlot) {
        if let Some(cgroups) = self.jail.as_ref().and_then(|jail| jail.cgroups.as_ref()) {
            cgroups.remove(&Self::group_name(slot));
        }
    }

    /// Checks all layers of a process but the descriptors.
    pub(super) fn verify(&self, pid: i32, slot: JailSlot, in_group: bool, filters: u32) -> Result<(), VmError> {
        let Some(jail) = &self.jail else { return Ok(()) };
        let name = Self::group_name(slot);
        let cgroup = jail.cgroups.as_ref().filter(|_| in_group).map(|groups| (groups, name.as_str()));
        let no_user = || VmError::Jail { layer: JailLayer::User, problem: format!("there is no slot {}", slot.index) };
        let id = jail.uids.of(slot).ok_or_else(no_user)?;
        verify::process(&verify::Expected { pid, id, spaces: &jail.spaces, cgroup, filters })
    }

    pub(super) fn forget(&self, id: ProcessId) {
        let held = self.held().remove(&id);
        if let Some(Held { slot: Some(slot), in_group: true, .. }) = held {
            self.remove_group(slot);
        }
    }
}

fn make_jail(config: &JailConfig, id: &str, program: &Path) -> Result<(Jail, Vec<String>), EngineError> {
    if !rustix::process::geteuid().is_root() {
        return Err(EngineError::NeedsRoot);
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if !(1..=32).contains(&id.len()) || !id.chars().all(plain) {
        let source = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(system(&format!("naming cgroups after {id:?}"), source));
    }
    let spaces = Spaces::make(program, config.void.as_deref())
        .map_err(|source| system("making the namespaces of VMMs", source))?;
    let (cgroups, missing) = match (Cgroups::new(id), config.cgroups) {
        (Ok(cgroups), _) => (Some(cgroups), Vec::new()),
        (Err(source), CgroupChoice::Required) => return Err(EngineError::NoCgroups(source)),
        (Err(error), CgroupChoice::IfAvailable) => {
            tracing::warn!(%error, "VMMs run without cgroup limits");
            (None, vec![format!("cgroup limits: {error}")])
        }
    };
    Ok((Jail { spaces, cgroups, uids: Uids::new(id), leave_out: config.leave_out.clone() }, missing))
}

fn system(what: &str, source: io::Error) -> EngineError {
    EngineError::System { what: what.to_owned(), source }
}

/// Whether a pidfd's process has ended.
pub(super) fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&rustix::event::Timespec::default())), Ok(n) if n > 0)
}

impl Privileged for Local {
    fn facts(&self) -> io::Result<VmmFacts> {
        Ok(self.facts.clone())
    }

    fn spawn(&self, order: &SpawnOrder, fds: SpawnFds<'_>) -> Result<Spawned, VmError> {
        launch::spawn(self, order, fds)
    }

    fn confirm(&self, id: ProcessId) -> Result<(), VmError> {
        let taken = self.with(id, |held| {
            // From here on the kernel refuses what the supervisor answered.
            drop(held.supervisor.take());
            Ok((held.slot, held.in_group, held.files.clone()))
        });
        let (slot, in_group, files) =
            taken.map_err(|source| VmError::System { what: "confirming a VMM's start".to_owned(), source })?;
        let (Some(_), Some(slot)) = (&self.jail, slot) else { return Ok(()) };
        // Ours and QEMU's own.
        self.verify(id.pid, slot, in_group, 2)?;
        let image = files.first().copied().unwrap_or_default();
        verify::descriptors(id.pid, &files, image)
    }

    fn adopt(&self, id: ProcessId) -> Result<Option<OwnedFd>, VmError> {
        let failed = |source| VmError::System { what: "taking over a VMM".to_owned(), source };
        let Some(pid) = Pid::from_raw(id.pid) else { return Ok(None) };
        // Once held, the pid can't be given away unnoticed.
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::NONBLOCK) else { return Ok(None) };
        if id.is_gone() || has_ended(&pidfd) {
            return Ok(None);
        }
        let theirs = pidfd.try_clone().map_err(failed)?;
        if self.held().contains_key(&id) {
            return Ok(Some(theirs));
        }
        let uid = process::uid(id.pid).map_err(failed)?;
        let slot = self.jail.as_ref().and_then(|jail| jail.uids.slot(uid));
        let ours = match (&self.jail, slot) {
            (Some(jail), Some(slot)) => {
                let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", id.pid)).map_err(failed)?;
                // A machine without a slot may be another instance's, and shares may be the same.
                jail.cgroups.as_ref().is_none_or(|all| all.holds(&groups, &Self::group_name(slot)).is_ok())
            }
            (Some(_), None) => false,
            (None, _) => uid == rustix::process::geteuid().as_raw(),
        };
        if !ours {
            return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, "the process is no VMM of ours")));
        }
        let in_group = self.jail.as_ref().is_some_and(|jail| jail.cgroups.is_some());
        let held = Held { pidfd, child: false, slot, in_group, supervisor: None, files: Vec::new(), memory: None };
        self.held().insert(id, held);
        Ok(Some(theirs))
    }

    fn end_strays(&self, keep: &[ProcessId]) -> io::Result<Vec<ProcessId>> {
        strays::end(self, keep)
    }

    fn kill(&self, id: ProcessId) -> io::Result<()> {
        let sent = self.with(id, |held| match pidfd_send_signal(&held.pidfd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        });
        match sent {
            // It has ended, and was forgotten.
            Err(error) if id.is_gone() => {
                tracing::trace!(%error, pid = id.pid, "gone already");
                Ok(())
            }
            result => result,
        }
    }

    fn ended(&self, id: ProcessId) -> io::Result<Option<String>> {
        let how = self.with(id, |held| {
            if !held.child {
                return Ok(has_ended(&held.pidfd).then(|| "it ended".to_owned()));
            }
            let status = waitid(WaitId::PidFd(held.pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG)?;
            Ok(status.map(|status| match (status.exit_status(), status.terminating_signal()) {
                (Some(0), _) => "it exited".to_owned(),
                (Some(code), _) => format!("exit status {code}"),
                (_, Some(signal)) => format!("killed by signal {signal}"),
                _ => "it ended".to_owned(),
            }))
        });
        match how {
            Ok(Some(how)) => {
                self.forget(id);
                Ok(Some(how))
            }
            Err(_) if id.is_gone() => Ok(Some("it ended".to_owned())),
            result => result,
        }
    }

    fn open_memory(&self, id: ProcessId, len: u64) -> io::Result<MemoryHandle> {
        self.with(id, |_held| Ok(()))?;
        let handle = memory::open(id.pid, len)?;
        self.with(id, |held| {
            held.memory = Some((handle.start, len));
            Ok(())
        })?;
        Ok(handle)
    }

    fn read_memory(&self, id: ProcessId, ranges: &[Range], arena: ArenaId) -> io::Result<()> {
        let unknown = |what| io::Error::new(io::ErrorKind::NotFound, what);
        let memory = self.with(id, |held| held.memory.ok_or_else(|| unknown("the VMM's memory was not opened")))?;
        let arenas = self.arenas.lock().map_err(|_poisoned| io::Error::other("the table of arenas"))?;
        let target = arenas.get(&arena).cloned().ok_or_else(|| unknown("there is no such arena"))?;
        drop(arenas);
        target.fill(id.pid, memory, ranges)
    }

    fn register_arena(&self, memory: BorrowedFd<'_>, len: u64) -> io::Result<ArenaId> {
        let target = Arc::new(Target::new(memory, len)?);
        let id = ArenaId(self.next_arena.fetch_add(1, Ordering::Relaxed));
        self.arenas.lock().map_err(|_poisoned| io::Error::other("the table of arenas"))?.insert(id, target);
        Ok(id)
    }

    fn drop_arena(&self, arena: ArenaId) -> io::Result<()> {
        let dropped = self.arenas.lock().map_err(|_poisoned| io::Error::other("the table of arenas"))?.remove(&arena);
        drop(dropped);
        Ok(())
    }

    fn stats(&self, id: ProcessId) -> io::Result<ProcessStats> {
        self.with(id, |_held| Ok(()))?;
        process::stats(id.pid)
    }
}

/// The group of `/dev/kvm` is not needed: the descriptor is handed in.
pub(super) fn kvm_device(accel: Accel) -> Option<&'static Path> {
    (accel == Accel::Kvm).then(|| Path::new("/dev/kvm"))
}
