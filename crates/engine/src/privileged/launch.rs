//! From an order to a VMM in its jail: command line, descriptors, group, filter, process, verification.
//!
//! What fails leaves nothing. Whether the machine inside comes to life is seen on the other side, by its monitor.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStringExt;

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::child::{self, Confinement, FIRST_FD, Plan, StartError, Started};
use super::command_line::{self, Fds, Flavour, Start};
use super::local::{Held, Jail, Local, kvm_device};
use super::{JailSlot, ProcessId, SpawnFds, SpawnOrder, Spawned, StartFds, StartKind};
use crate::jail::cgroup::{Group, Limits};
use crate::jail::filter::{self, Offer, Reads, Supervisor};
use crate::jail::verify::{FileId, file_id};
use crate::jail::{OOM_SCORE, limits};
use crate::process::start_time;
use crate::{JailLayer, VmError};

/// What QEMU needs beyond guest memory and TCG's cache, bytes: itself, its threads, block I/O in flight, and page cache
/// that is charged to it.
const OVERHEAD: u64 = 384 << 20;
/// Threads of a VMM beyond its virtual CPUs: block I/O alone may have 64.
const THREADS: u64 = 128;

pub(super) fn cgroup_limits(order: &SpawnOrder, tb_size_mib: u32) -> Limits {
    let cpus = u64::from(order.machine.cpus);
    Limits {
        memory_bytes: (u64::from(order.machine.memory_mib) << 20) + (u64::from(tb_size_mib) << 20) + OVERHEAD,
        // One more for the threads that do its I/O.
        cpus: cpus + 1,
        processes: cpus + THREADS,
    }
}

/// A group that goes when its VMM does not come to be.
struct GroupGuard<'a> {
    local: &'a Local,
    slot: JailSlot,
    group: Option<Group>,
    keep: bool,
}

impl Drop for GroupGuard<'_> {
    fn drop(&mut self) {
        if self.group.take().is_some() && !self.keep {
            self.local.remove_group(self.slot);
        }
    }
}

/// A child that is killed and reaped when its start does not get to its end.
struct ChildGuard(Option<i32>);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        if let Some(pid) = self.0.take().and_then(Pid::from_raw) {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
            child::reap(pid.as_raw_nonzero().get());
        }
    }
}

pub(super) fn spawn(local: &Local, order: &SpawnOrder, fds: SpawnFds<'_>) -> Result<Spawned, VmError> {
    check(order, &fds)?;
    local.check_slot(order.jail)?;
    match spawn_once(local, order, fds) {
        // An empty group may be taken for a leftover by a process of the same instance that starts at this moment.
        Err(VmError::Jail { layer: JailLayer::Cgroup, problem }) => {
            tracing::debug!(problem, "once more");
            spawn_once(local, order, fds)
        }
        result => result,
    }
}

fn spawn_once(local: &Local, order: &SpawnOrder, fds: SpawnFds<'_>) -> Result<Spawned, VmError> {
    let group = local.make_group(order)?;
    coppice_fault::point!("vmm.group");
    let mut guard = GroupGuard { local, slot: order.jail, group, keep: false };
    let has_group = guard.group.is_some();
    let jail = local.jail.as_ref();
    let reads = if order.start == StartKind::Boot { Reads::All } else { Reads::Plain };
    let filter = jail.filter(|jail| jail.has(JailLayer::Seccomp)).map(|_| filter::program(reads));
    let (numbers, inherited) = numbers(&fds, filter.is_some());
    let offers = if filter.is_some() { offers(local, &fds, numbers)? } else { Vec::new() };
    let disk_bytes = rustix::fs::fstat(fds.disk).map(|stat| u64::try_from(stat.st_size).unwrap_or(0)).unwrap_or(0);
    let mut confinement = jail.map_or_else(Confinement::default, |jail| confinement(jail, order.jail, disk_bytes));
    confinement.filter = filter.as_deref();
    if jail.is_some_and(|jail| jail.has(JailLayer::Cgroup)) {
        confinement.groups = guard.group.iter().flat_map(|group| &group.procs).map(AsFd::as_fd).collect();
    }
    let plan = Plan {
        program: &local.program.path,
        arguments: arguments(local, order, numbers)?,
        fds: inherited,
        log: fds.log,
        confinement,
    };
    let Started { pid, listener } = child::start(&plan).map_err(|error| explain(local, error))?;
    let mut child = ChildGuard(Some(pid));
    coppice_fault::point!("vmm.started");
    drop(plan);
    let filtered = listener.is_some();
    // Before anything else: it waits for its first file.
    let supervisor = listener.map(|listener| Supervisor::start(listener, offers)).transpose();
    let supervisor = supervisor.map_err(|source| system("answering QEMU", source))?;
    // Not reaped before it is held, so the pid is still its own.
    let held = Pid::from_raw(pid).map(|pid| pidfd_open(pid, PidfdFlags::NONBLOCK)).transpose();
    let pidfd = held.map_err(|errno| system("watching QEMU", errno.into()))?;
    let pidfd = pidfd.ok_or_else(|| system("watching QEMU", io::ErrorKind::NotFound.into()))?;
    let theirs = pidfd.try_clone().map_err(|source| system("watching QEMU", source))?;
    let id = ProcessId { pid, start_time: start_time(pid).map_err(|source| system("watching QEMU", source))? };
    if let Some(jail) = jail {
        if jail.has(JailLayer::Limits) {
            // By root, so that it can't go below.
            std::fs::write(format!("/proc/{pid}/oom_score_adj"), OOM_SCORE.to_string()).map_err(|error| {
                VmError::Jail { layer: JailLayer::Limits, problem: format!("oom_score_adj: {error}") }
            })?;
        }
        local.verify(pid, order.jail, has_group, 1)?;
        if !filtered {
            // What QEMU puts on by itself can't be told from ours.
            return Err(VmError::Jail { layer: JailLayer::Seccomp, problem: "it was not installed".to_owned() });
        }
    }
    let held = Held {
        pidfd,
        child: true,
        slot: jail.map(|_| order.jail),
        in_group: has_group,
        supervisor,
        files: files(&fds)?,
        memory: None,
    };
    local.held().insert(id, held);
    (guard.keep, child.0) = (true, None);
    Ok(Spawned { id, pidfd: theirs })
}

/// The order comes from the other side: nothing of it is believed.
fn check(order: &SpawnOrder, fds: &SpawnFds<'_>) -> Result<(), VmError> {
    let machine = &order.machine;
    let sound = order.start == fds.kind()
        && (1..=64).contains(&machine.cpus)
        && (128..=65_536).contains(&machine.memory_mib)
        && machine.cmdline.len() <= 2048
        // Unicast.
        && order.mac[0] & 1 == 0;
    if sound { Ok(()) } else { Err(system("reading the order", io::ErrorKind::InvalidInput.into())) }
}

/// The layers that the process puts on by itself.
fn confinement<'a>(jail: &'a Jail, slot: JailSlot, disk_bytes: u64) -> Confinement<'a> {
    let spaces = &jail.spaces;
    let shared = [&spaces.net, &spaces.ipc, &spaces.uts].map(|space| (space.fd(), space.kind));
    Confinement {
        id: jail.uids.of(slot).filter(|_| jail.has(JailLayer::User)),
        groups: Vec::new(),
        limits: if jail.has(JailLayer::Limits) { limits(disk_bytes) } else { Vec::new() },
        namespaces: if jail.has(JailLayer::Namespaces) { shared.to_vec() } else { Vec::new() },
        files: jail.has(JailLayer::Files).then(|| spaces.mnt.fd()),
        no_new_privs: jail.has(JailLayer::NoNewPrivs),
        filter: None,
    }
}

/// The numbers that descriptors have in the VMM, and those that it inherits. Memory and kernel come last: where a filter
/// answers opens, they are only names.
fn numbers<'a>(fds: &SpawnFds<'a>, answered: bool) -> (Fds, Vec<BorrowedFd<'a>>) {
    let mut inherited = Vec::new();
    let mut give = |fd: BorrowedFd<'a>| -> RawFd {
        inherited.push(fd);
        FIRST_FD + RawFd::try_from(inherited.len()).unwrap_or(RawFd::MAX) - 1
    };
    let [first, second] = fds.ports;
    let (monitor, console, ports) = (give(fds.monitor), give(fds.console), [give(first), give(second)]);
    let (disk, tap) = (give(fds.disk), give(fds.tap));
    let (start, memory) = match fds.start {
        StartFds::Restore { devices } => (Start::Restore { devices: give(devices) }, give(fds.memory)),
        StartFds::Boot { vmlinuz, initramfs } => {
            let start = Start::Boot { vmlinuz: give(vmlinuz), initramfs: give(initramfs), tsc_khz: None };
            (start, give(fds.memory))
        }
    };
    let named = match fds.start {
        StartFds::Restore { .. } => 1,
        StartFds::Boot { .. } => 3,
    };
    if answered {
        inherited.truncate(inherited.len().saturating_sub(named));
    }
    (Fds { monitor, console, ports, memory, disk, tap, start }, inherited)
}

/// What the VMM gets for the names that its command line has.
fn offers(local: &Local, fds: &SpawnFds<'_>, numbers: Fds) -> Result<Vec<Offer>, VmError> {
    let name = command_line::fd_path;
    let failed = |source| system("opening QEMU's files", source);
    let writable = local.jail.as_ref().is_some_and(|jail| !jail.has(JailLayer::Descriptors));
    let memory = if writable {
        let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fds.memory));
        Offer::writable(name(numbers.memory), own.as_ref())
    } else {
        Offer::read_only(name(numbers.memory), fds.memory)
    };
    let mut all = vec![memory.map_err(failed)?];
    if let (StartFds::Boot { vmlinuz, initramfs }, Start::Boot { vmlinuz: first, initramfs: second, .. }) =
        (fds.start, numbers.start)
    {
        all.push(Offer::read_only(name(first), vmlinuz).map_err(failed)?);
        all.push(Offer::read_only(name(second), initramfs).map_err(failed)?);
    }
    if let Some(device) = kvm_device(local.program.accel) {
        all.push(Offer::writable(device.display().to_string(), device).map_err(failed)?);
    }
    Ok(all)
}

fn arguments(local: &Local, order: &SpawnOrder, mut numbers: Fds) -> Result<Vec<CString>, VmError> {
    let program = &local.program;
    if let Start::Boot { tsc_khz, .. } = &mut numbers.start {
        *tsc_khz = program.tsc_khz;
    }
    let flavour = Flavour {
        accel: program.accel,
        tb_size_mib: program.tb_size_mib,
        // `rom=off` came with QEMU 8.2.
        readonly_memory: program.version >= (8, 2),
    };
    let all = command_line::arguments(&order.machine, flavour, numbers, order.mac);
    let all: Result<Vec<CString>, _> = all.into_iter().map(|argument| CString::new(argument.into_vec())).collect();
    all.map_err(|error| system("building QEMU's command line", error.into()))
}

/// What a started VMM may hold: the memory image first.
fn files(fds: &SpawnFds<'_>) -> Result<Vec<FileId>, VmError> {
    let null = std::fs::File::open("/dev/null").map_err(|source| system("opening /dev/null", source))?;
    let mut all = vec![fds.memory];
    all.extend(fds.list());
    all.push(null.as_fd());
    let ids: io::Result<Vec<FileId>> = all.into_iter().map(file_id).collect();
    let mut ids = ids.map_err(|source| system("examining QEMU's files", source))?;
    ids.extend(std::fs::File::open("/dev/kvm").and_then(file_id).ok());
    Ok(ids)
}

fn explain(local: &Local, error: StartError) -> VmError {
    match error {
        StartError::Layer(layer, error) => VmError::Jail { layer, problem: error.to_string() },
        StartError::Exec(error) if error.kind() == io::ErrorKind::NotFound => {
            VmError::ProgramMissing { program: local.program.path.clone() }
        }
        StartError::Exec(source) => system("executing QEMU", source),
        StartError::Other(what, source) => system(what, source),
    }
}

fn system(what: &str, source: io::Error) -> VmError {
    if coppice_disk::is_no_space(&source) {
        VmError::NoSpace
    } else {
        VmError::System { what: what.to_owned(), source }
    }
}
