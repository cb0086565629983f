//! Why an engine could not do what it was asked. One enum per operation; causes are chained by `#[source]`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use coppice_snapshot::{CreateImageError, OpenImageError};
use serde::{Deserialize, Serialize};

/// Why an engine can't work on this host.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The VMM program is missing.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// It does not say which version it is.
    #[error("the VMM's version can't be told from {0:?}")]
    Version(String),
    /// It is too old.
    #[error("QEMU {found} is too old; {needed} or newer is needed")]
    TooOld {
        /// Its version.
        found: String,
        /// The oldest that works.
        needed: &'static str,
    },
    /// A jail can only be made by root.
    #[error("the jail of VMMs can only be made by root")]
    NeedsRoot,
    /// There are no cgroups, and the configuration requires them.
    #[error("VMMs can't be limited: there are no usable cgroups")]
    NoCgroups(#[source] io::Error),
    /// KVM was asked for, and can't be used.
    #[error("KVM was asked for, but {0}")]
    NoKvm(String),
    /// Something of the operating system failed.
    #[error("{what}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// The VMM could not be started, or not spoken to.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum VmError {
    /// The VMM program is not installed.
    #[error("{program} is not installed; `make setup` or `apt-get install qemu-system-x86` installs it")]
    ProgramMissing {
        /// What was looked for.
        program: PathBuf,
    },
    /// Something of the operating system failed.
    #[error("{what}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        #[source]
        #[serde(with = "crate::privileged::io_error")]
        source: io::Error,
    },
    /// The VMM process ended.
    #[error("the VMM process ended: {reason}")]
    Dead {
        /// Exit status, and the last lines that it printed.
        reason: String,
    },
    /// The VMM refused a command.
    #[error("the VMM refused {command}: {reason}")]
    Refused {
        /// The monitor command.
        command: String,
        /// What it said.
        reason: String,
    },
    /// The VMM did not answer in time.
    #[error("the VMM did not answer {command} within {after:?}")]
    Timeout {
        /// The monitor command.
        command: String,
        /// How long was waited.
        after: Duration,
    },
    /// The host's disk is full.
    #[error("no space left on the host's disk")]
    NoSpace,
    /// A layer of the jail could not be had, or does not hold. The VMM does not run.
    #[error("the VMM's jail has no {layer}: {problem}")]
    Jail {
        /// Which.
        layer: JailLayer,
        /// What was expected, and what was found.
        problem: String,
    },
}

/// What the jail of a VMM is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JailLayer {
    /// A user and group of its own, no other groups, no capabilities.
    User,
    /// No way to gain privileges by executing a program.
    NoNewPrivs,
    /// The filter of system calls.
    Seccomp,
    /// A network namespace without an interface that is up, and no IPC or host name shared with the host.
    Namespaces,
    /// A file system view of its own, read-only, with the VMM's program and nothing of the data directory.
    Files,
    /// A cgroup with limits.
    Cgroup,
    /// Limits of core files, open files, file sizes; first in line when memory runs out.
    Limits,
    /// Only the descriptors of the order, and no writable one of a memory image.
    Descriptors,
}

impl JailLayer {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::User,
        Self::NoNewPrivs,
        Self::Seccomp,
        Self::Namespaces,
        Self::Files,
        Self::Cgroup,
        Self::Limits,
        Self::Descriptors,
    ];
}

impl std::fmt::Display for JailLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::User => "user of its own",
            Self::NoNewPrivs => "bar against new privileges",
            Self::Seccomp => "system call filter",
            Self::Namespaces => "empty namespaces",
            Self::Files => "file system view of its own",
            Self::Cgroup => "cgroup with limits",
            Self::Limits => "process limits",
            Self::Descriptors => "closed set of descriptors",
        })
    }
}

/// Why a machine could not be booted.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A file that it boots from is missing.
    #[error("{what} is missing at {path}; `coppice setup` makes it")]
    Missing {
        /// "guest kernel", "initramfs" or "disk".
        what: &'static str,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The VMM.
    #[error("the VM could not be started")]
    Vm(#[from] VmError),
}

/// Why an image could not be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// A file that is needed is missing.
    #[error("{what} is missing at {path}")]
    Missing {
        /// "guest kernel", "initramfs" or "disk".
        what: &'static str,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The image was captured by another engine, or by another way to execute guest code.
    #[error("the image was captured with {captured}, this host runs {here}")]
    Incompatible {
        /// Engine, version and accelerator in the manifest.
        captured: String,
        /// Of this host.
        here: String,
    },
    /// The image is not usable.
    #[error("the machine image can't be used")]
    Image(#[from] OpenImageError),
    /// The VMM.
    #[error("the image could not be restored")]
    Vm(#[from] VmError),
}

/// Why a VM could not be taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// Its process is gone (or the pid is now another process).
    #[error("the VM's process is gone")]
    Gone,
    /// The VMM.
    #[error("the VM could not be taken over")]
    Vm(#[from] VmError),
}

/// Why a capture failed. The VM runs on.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The image could not be written.
    #[error("the machine image could not be written")]
    Image(#[from] CreateImageError),
    /// The disk could not be cloned.
    #[error("the disk could not be cloned")]
    Disk(#[source] io::Error),
    /// Guest memory could not be read or copied.
    #[error("guest memory could not be copied")]
    Memory(#[source] io::Error),
    /// The host's disk is full.
    #[error("no space left on the host's disk for the capture")]
    NoSpace,
    /// The guest's processes do not stand still.
    #[error("the guest's processes could not be held")]
    Hold(#[source] crate::GuestError),
    /// The VMM.
    #[error("the VM could not be captured")]
    Vm(#[from] VmError),
}

/// Why there is no session with the guest.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The guest did not answer before the deadline.
    #[error("the guest did not answer within {after:?}; last line of its console: {console:?}")]
    Timeout {
        /// How long was waited.
        after: Duration,
        /// Last line of the console, empty when there is none.
        console: String,
    },
    /// The VM ended while its guest was waited for.
    #[error("the VM ended before its guest answered: {reason}")]
    Dead {
        /// Why it ended.
        reason: String,
    },
    /// The guest speaks another protocol.
    #[error("the guest's agent can't be spoken to")]
    Preamble(#[from] coppice_guest_proto::session::PreambleError),
    /// The channel broke.
    #[error("the channel to the guest broke")]
    Io(#[from] io::Error),
}
