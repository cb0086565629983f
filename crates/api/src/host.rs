//! What a host has, what of it is used and promised, and so what fits on it still.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Answer of `GET /v1/host`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct HostReport {
    /// Engine with its version and accelerator.
    pub engine: String,
    /// Sandboxes.
    pub sandboxes: HostSandboxes,
    /// Memory.
    pub memory: HostMemory,
    /// The disk of the data directory.
    pub disk: HostDisk,
    /// Places on the network.
    pub slots: HostSlots,
    /// What fits on top.
    pub room: HostRoom,
}

/// Sandboxes of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct HostSandboxes {
    /// All of them.
    pub total: u64,
    /// How many there are by status; a status that none has is left out.
    pub by_status: BTreeMap<String, u64>,
    /// Being made by requests that are under way.
    pub being_made: u64,
    /// Most of them on this host (`--max-sandboxes`).
    pub limit: u64,
}

/// Memory of a host, bytes. `headroom` = the smaller of (`available` - `images`) and (`limit` - `private` - `images`, where there
/// is a limit), less `reserve`, `promised_counted` and `being_made`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct HostMemory {
    /// Of the machine.
    pub total: u64,
    /// What the kernel could give now without swapping; less where the control group of this host allows less.
    pub available: u64,
    /// Most that all sandboxes together may use (`--memory-limit`); absent: no limit but the host's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Never given to sandboxes (`--memory-reserve`).
    pub reserve: u64,
    /// Measured: proportional set size of all VMMs. `private` and `images` are what it is made of.
    pub pss: u64,
    /// Measured: pages that belong to one sandbox alone.
    pub private: u64,
    /// Measured: pages of images in use. However many sandboxes were made from an image, its pages are there once.
    pub images: u64,
    /// What the machines that are there may still write: their memory, less what is private to them already.
    pub promised: u64,
    /// How many bytes of promises one byte stands for (`--memory-overcommit`).
    pub overcommit: f64,
    /// `promised`, divided by `overcommit`; a machine that was not measured yet counts for at least what one needs at once.
    pub promised_counted: u64,
    /// Set aside for requests that are under way.
    pub being_made: u64,
    /// What can still be set aside.
    pub headroom: u64,
    /// Milliseconds since the machines were measured; absent: not yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_ms_ago: Option<u64>,
}

/// Disk of a host, bytes. `headroom` = `free` - `reserve` - `promised_counted` - `being_made`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct HostDisk {
    /// Of the file system that the data directory is on.
    pub total: u64,
    /// Free there; less where that file system is a file on another one with less free space.
    pub free: u64,
    /// Never given to sandboxes (`--disk-reserve`).
    pub reserve: u64,
    /// What the disks that are there may still come to fill. A disk that shares blocks with an image may write all of them anew.
    pub promised: u64,
    /// How many bytes of promises one byte stands for (`--disk-overcommit`).
    pub overcommit: f64,
    /// `promised`, divided by `overcommit`.
    pub promised_counted: u64,
    /// Set aside for requests that are under way.
    pub being_made: u64,
    /// What can still be set aside.
    pub headroom: u64,
}

/// Places on the network of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct HostSlots {
    /// In use.
    pub taken: u64,
    /// There are so many.
    pub limit: u64,
}

/// How many more sandboxes fit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct HostRoom {
    /// Memory of the sandboxes that this is said of, MiB: those of the template `base`.
    pub memory_mb: u64,
    /// Their disk, MiB.
    pub disk_mb: u64,
    /// So many more, by all of the limits.
    pub sandboxes: u64,
    /// What ends first: `memory`, `disk`, `slots` or `sandboxes`.
    pub bound_by: String,
}
