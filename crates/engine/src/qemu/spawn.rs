//! Starts a QEMU process: sockets bound by us, files opened by us, an unprivileged user, a session of its own.
//!
//! The process needs nothing of the daemon to go on: no pipe, no parent-death signal, no path. Watching it is `watch.rs`.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coppice_snapshot::MachineSpec;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use super::command_line::{self, Fds, Flavour, Start};
use crate::VmError;
use crate::process::Process;

/// Whom the VMM runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub uid: u32,
    pub gid: u32,
    /// The group that may open `/dev/kvm`, where KVM is used.
    pub kvm: Option<u32>,
}

/// Paths of a VM's sockets and files in its run directory.
#[derive(Debug, Clone)]
pub(crate) struct RunDir(pub PathBuf);

impl RunDir {
    pub fn monitor(&self) -> PathBuf {
        self.0.join("qmp")
    }
    pub fn console(&self) -> PathBuf {
        self.0.join("con")
    }
    pub fn port(&self, port: u8) -> PathBuf {
        self.0.join(if port == 0 { "ch0" } else { "ch1" })
    }
    /// What QEMU prints.
    pub fn log(&self) -> PathBuf {
        self.0.join("qemu.log")
    }
    /// Guest memory of a machine without an image: only holes, unlinked as soon as QEMU has it mapped.
    pub fn fresh_memory(&self) -> PathBuf {
        self.0.join("memory")
    }

    /// Removes what the engine made. Missing files are fine.
    pub fn clear(&self) {
        for path in [self.monitor(), self.console(), self.port(0), self.port(1), self.log(), self.fresh_memory()] {
            if let Err(error) = std::fs::remove_file(&path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "a file of a VM can't be removed");
            }
        }
    }
}

/// Longest path of a unix socket, bytes (`sun_path` with its terminator has 108).
const MAX_SOCKET_PATH: usize = 107;

/// The open files of a machine that is to be started.
#[derive(Debug)]
pub(crate) struct Files {
    pub memory: File,
    pub disk: File,
    pub start: StartFiles,
}

/// What the machine starts from.
#[derive(Debug)]
pub(crate) enum StartFiles {
    Boot { vmlinuz: File, initramfs: File, tsc_khz: Option<u32> },
    Restore { devices: File },
}

/// What to start.
pub(crate) struct Launch<'a> {
    pub program: &'a Path,
    pub identity: Option<Identity>,
    pub flavour: Flavour,
    pub machine: &'a MachineSpec,
    pub run_dir: &'a RunDir,
}

/// Starts QEMU. The process is held before this returns; on an error nothing is left. Blocking, a few milliseconds.
pub(crate) fn spawn(launch: &Launch<'_>, files: &Files) -> Result<Process, VmError> {
    let listen = |path: PathBuf| -> Result<UnixListener, VmError> {
        if path.as_os_str().len() > MAX_SOCKET_PATH {
            let source = io::Error::from(io::ErrorKind::InvalidFilename);
            return Err(VmError::System {
                what: format!("the path of the socket {} is too long", path.display()),
                source,
            });
        }
        UnixListener::bind(&path).map_err(|source| system(format!("binding {}", path.display()), source))
    };
    let run_dir = launch.run_dir;
    let monitor = listen(run_dir.monitor())?;
    let console = listen(run_dir.console())?;
    let ports = [listen(run_dir.port(0))?, listen(run_dir.port(1))?];
    let log = OpenOptions::new()
        .append(true)
        .create_new(true)
        .mode(0o600)
        .open(run_dir.log())
        .map_err(|source| system("creating QEMU's log", source))?;
    let start = match &files.start {
        StartFiles::Boot { vmlinuz, initramfs, tsc_khz } => {
            Start::Boot { vmlinuz: vmlinuz.as_raw_fd(), initramfs: initramfs.as_raw_fd(), tsc_khz: *tsc_khz }
        }
        StartFiles::Restore { devices } => Start::Restore { devices: devices.as_raw_fd() },
    };
    let fds = Fds {
        monitor: monitor.as_raw_fd(),
        console: console.as_raw_fd(),
        ports: [ports[0].as_raw_fd(), ports[1].as_raw_fd()],
        memory: files.memory.as_raw_fd(),
        disk: files.disk.as_raw_fd(),
        start,
    };
    let arguments = command_line::arguments(launch.machine, launch.flavour, fds);
    let mut command = Command::new(launch.program);
    command.args(arguments).env_clear().current_dir("/").stdin(Stdio::null());
    let stderr = log.try_clone().map_err(|source| system("duplicating QEMU's log", source))?;
    command.stdout(log).stderr(stderr);
    prepare(&mut command, launch.identity, inherited(&fds));
    let child = command.spawn().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => VmError::ProgramMissing { program: launch.program.to_owned() },
        _ => system("starting QEMU", source),
    })?;
    let pid = i32::try_from(child.id()).unwrap_or(i32::MAX);
    // Not reaped before it is held, so the pid is still its own.
    Process::hold(pid).map_err(|source| system("watching QEMU", source))
}

fn inherited(fds: &Fds) -> Vec<RawFd> {
    let mut all = vec![fds.monitor, fds.console, fds.ports[0], fds.ports[1], fds.memory, fds.disk];
    match fds.start {
        Start::Boot { vmlinuz, initramfs, .. } => all.extend([vmlinuz, initramfs]),
        Start::Restore { devices } => all.push(devices),
    }
    all
}

/// Between fork and exec: a session and process group of its own, the VMM's user with no groups but KVM's, and the
/// descriptors under the numbers that they have here.
fn prepare(command: &mut Command, identity: Option<Identity>, fds: Vec<RawFd>) {
    let groups: Vec<Gid> = identity.and_then(|identity| identity.kvm).map(Gid::from_raw).into_iter().collect();
    let become_it = move || {
        rustix::process::setsid()?;
        if let Some(Identity { uid, gid, .. }) = identity {
            // Groups first, user last: each needs the privilege that the next one gives up. The child has one thread.
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            set_thread_groups(&groups)?;
            set_thread_res_gid(gid, gid, gid)?;
            set_thread_res_uid(uid, uid, uid)?;
        }
        for fd in &fds {
            // SAFETY: the descriptor is open in the parent for as long as `spawn` runs, so also in this child of it.
            let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(*fd) };
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls; it allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(become_it);
    }
}

fn system(what: impl Into<String>, source: io::Error) -> VmError {
    if coppice_disk::is_no_space(&source) { VmError::NoSpace } else { VmError::System { what: what.into(), source } }
}

/// Lets the VMM's user open a memory file. QEMU before 8.2 opens it for writing though it maps it privately: a VMM that
/// was taken over could then write a shared image. A known limit, which the jail's issue closes (QEMU 8.2, or a sealed
/// copy); with `readonly_memory` the right to read is enough.
pub(crate) fn grant_memory(file: &File, identity: Option<Identity>, readonly: bool) -> Result<(), VmError> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let Some(identity) = identity else { return Ok(()) };
    let meta = file.metadata().map_err(|source| system("examining the memory file", source))?;
    let mode = if readonly { 0o640 } else { 0o660 };
    if meta.gid() != identity.gid {
        std::os::unix::fs::fchown(file, None, Some(identity.gid))
            .map_err(|source| system("giving the memory file to the VMM's group", source))?;
    }
    if meta.mode() & 0o7777 != mode {
        file.set_permissions(std::fs::Permissions::from_mode(mode))
            .map_err(|source| system("setting the mode of the memory file", source))?;
    }
    Ok(())
}

/// A sparse file for the memory of a machine that has no image.
pub(crate) fn fresh_memory(run_dir: &RunDir, machine: &MachineSpec) -> Result<File, VmError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(run_dir.fresh_memory())
        .map_err(|source| system("creating the memory file", source))?;
    file.set_len(u64::from(machine.memory_mib) << 20).map_err(|source| system("sizing the memory file", source))?;
    Ok(file)
}

/// A descriptor for the device state that QEMU writes: it may only be written through it, and lies in memory.
pub(crate) fn device_state_file() -> io::Result<(File, OwnedFd)> {
    let file = rustix::fs::memfd_create("coppice-device-state", rustix::fs::MemfdFlags::CLOEXEC)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let writer = OpenOptions::new().write(true).open(path)?;
    Ok((File::from(file), writer.into()))
}
