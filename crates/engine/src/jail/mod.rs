//! What holds a VMM back: a guest that breaks out of QEMU finds nothing to go on with.
//!
//! | module | layer |
//! |---|---|
//! | [`cgroup`] | limits of memory, processors, processes; v1 and v2 |
//! | [`filter`] | system calls that are refused, and opens that are answered by us |
//! | [`spaces`] | a file system view and namespaces that all VMMs share, with nothing of the host's in them |
//! | [`uids`] | which user a VMM is |
//! | [`verify`] | looks at a running VMM from outside, and names the layer that does not hold |
//!
//! User, limits and descriptors are put on by `privileged::child`. QEMU's own `-sandbox` comes on top.

pub(crate) mod cgroup;
pub(crate) mod filter;
pub(crate) mod spaces;
pub(crate) mod uids;
pub(crate) mod verify;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::process::Resource;

use crate::JailLayer;

/// Whether VMMs are held back.
#[derive(Debug, Clone)]
pub enum JailChoice {
    /// By every layer.
    On(JailConfig),
    /// By nothing but QEMU's own sandbox: for development without root. Guests that break out have the rights of who runs this.
    Off,
}

/// The jail.
#[derive(Debug, Clone, Default)]
pub struct JailConfig {
    /// Whether a host without usable cgroups is an error.
    pub cgroups: CgroupChoice,
    /// The network namespace of VMMs, in which nothing is up; made when absent.
    pub void: Option<Arc<OwnedFd>>,
    /// Layers to leave out, so that tests can see that the verification notices. The start fails then.
    #[doc(hidden)]
    pub leave_out: Vec<JailLayer>,
}

/// What a host without usable cgroups means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CgroupChoice {
    /// An error.
    #[default]
    Required,
    /// VMMs run without limits, and [`crate::JailReport`] says so.
    IfAvailable,
}

/// Limits that a process has by itself. A disk never grows, and everything else that QEMU writes is small.
pub(crate) fn limits(disk_bytes: u64) -> Vec<(Resource, u64)> {
    const LEAST_FILE: u64 = 128 << 20;
    vec![
        (Resource::Core, 0),
        (Resource::Nofile, OPEN_FILES),
        (Resource::Fsize, disk_bytes.max(LEAST_FILE)),
        (Resource::Msgqueue, 0),
    ]
}

/// Open files of a VMM: some for each virtual CPU and chardev.
pub(crate) const OPEN_FILES: u64 = 1024;
/// First in line when the host's memory runs out, before the daemon and everything that is not a sandbox.
pub(crate) const OOM_SCORE: i32 = 500;
