//! What a VM has in its run directory: sockets that are bound here, its log, and for a moment its memory.
//!
//! All of it is opened here and handed over as descriptors: a VMM resolves no path of ours. Starting one is the privileged
//! side's.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use coppice_snapshot::MachineSpec;

use crate::VmError;
use crate::privileged::{SpawnFds, StartFds};

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
    /// Guest memory of a machine without an image, for the moment in which it has a name.
    fn fresh_memory(&self) -> PathBuf {
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
    Boot { vmlinuz: File, initramfs: File },
    Restore { devices: File },
}

/// Sockets that listen before QEMU starts, so that connecting never races it, and its log.
#[derive(Debug)]
pub(crate) struct Endpoints {
    monitor: UnixListener,
    console: UnixListener,
    ports: [UnixListener; 2],
    log: File,
}

impl Endpoints {
    /// Makes them.
    pub fn make(run_dir: &RunDir) -> Result<Self, VmError> {
        let log = OpenOptions::new().append(true).create_new(true).mode(0o600).open(run_dir.log());
        Ok(Self {
            monitor: listen(run_dir.monitor())?,
            console: listen(run_dir.console())?,
            ports: [listen(run_dir.port(0))?, listen(run_dir.port(1))?],
            log: log.map_err(|source| system("creating QEMU's log", source))?,
        })
    }

    /// All that a VMM gets.
    pub fn fds<'a>(&'a self, files: &'a Files, tap: &'a OwnedFd) -> SpawnFds<'a> {
        let [first, second] = &self.ports;
        SpawnFds {
            monitor: self.monitor.as_fd(),
            console: self.console.as_fd(),
            ports: [first.as_fd(), second.as_fd()],
            log: self.log.as_fd(),
            memory: files.memory.as_fd(),
            disk: files.disk.as_fd(),
            tap: tap.as_fd(),
            start: match &files.start {
                StartFiles::Boot { vmlinuz, initramfs } => {
                    StartFds::Boot { vmlinuz: vmlinuz.as_fd(), initramfs: initramfs.as_fd() }
                }
                StartFiles::Restore { devices } => StartFds::Restore { devices: devices.as_fd() },
            },
        }
    }
}

fn listen(path: PathBuf) -> Result<UnixListener, VmError> {
    if path.as_os_str().len() > MAX_SOCKET_PATH {
        let source = io::Error::from(io::ErrorKind::InvalidFilename);
        return Err(VmError::System { what: format!("the path of the socket {} is too long", path.display()), source });
    }
    UnixListener::bind(&path).map_err(|source| system(format!("binding {}", path.display()), source))
}

fn system(what: impl Into<String>, source: io::Error) -> VmError {
    if coppice_disk::is_no_space(&source) { VmError::NoSpace } else { VmError::System { what: what.into(), source } }
}

/// A sparse file for the memory of a machine that has no image, already without a name. Nothing is ever written to it.
pub(crate) fn fresh_memory(run_dir: &RunDir, machine: &MachineSpec) -> Result<File, VmError> {
    let path = run_dir.fresh_memory();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(|source| system("creating the memory file", source))?;
    std::fs::remove_file(&path).map_err(|source| system("unlinking the memory file", source))?;
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
