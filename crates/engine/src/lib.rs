//! What runs a VM: the seam [`Engine`]/[`Vm`], the `qemu` engine, and sessions with the guest.
//!
//! One conformance suite (`coppice_testkit::engine_conformance`) runs against every engine and against the scriptable
//! fake. This crate runs one VM at a time and knows nothing of sandboxes, templates, TTLs or records: that is the host's.

mod error;
mod jail;
mod privileged;
mod probe;
mod process;
mod qemu;
mod session;
mod shared_memory;
mod spec;
mod tsc;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use coppice_snapshot::MachineImage;
use tokio::sync::{broadcast, watch};

pub use error::{AdoptError, BootError, CaptureError, EngineError, JailLayer, RestoreError, SessionError, VmError};
pub use jail::{CgroupChoice, JailChoice, JailConfig};
pub use privileged::{
    AccelChoice, ArenaId, JailReport, JailSlot, Local, LocalConfig, MemoryHandle, Nic, Privileged, ProcessId,
    ProcessStats, Range, SpawnFds, SpawnOrder, Spawned, StartFds, StartKind, UID_BASE, VmmFacts, WireError,
};
pub use probe::Verdict;
pub use qemu::{QemuConfig, QemuEngine};
pub use session::{GuestError, GuestSession, RunOutput};
pub use spec::{
    BootSpec, Capabilities, CapturePlan, CaptureTimings, Captured, DiskClone, GuestKernel, Rebind, RestoreTimings,
    VmPlace, VmRecord, VmState, VmStats,
};

/// Starts VMs: from nothing, from an image, or again after the daemon was restarted.
#[async_trait]
pub trait Engine: Send + Sync + std::fmt::Debug {
    /// What this engine can do on this host, decided once when it was made.
    fn capabilities(&self) -> &Capabilities;

    /// Boots a kernel on a disk. Answers when the VM runs, not when its guest answers: see [`Vm::open_session`].
    async fn boot(&self, spec: BootSpec) -> Result<Arc<dyn Vm>, BootError>;

    /// Restores an image into a new VM, which runs when this answers. `rebind` is everything that differs from the
    /// captured machine. Cancelling the future leaves no process.
    async fn restore(&self, image: &MachineImage, rebind: Rebind) -> Result<Arc<dyn Vm>, RestoreError>;

    /// Takes over a VM that outlived the daemon that started it. Nothing about the VM changes.
    async fn adopt(&self, record: VmRecord) -> Result<Arc<dyn Vm>, AdoptError>;

    /// Ends the VMs of this instance that none of `keep` is, and waits until they are gone: what a crash left between the
    /// start of a VM and its record. Answers how many there were.
    async fn end_strays(&self, keep: &[VmRecord]) -> Result<usize, VmError>;
}

/// One VM. Dropping the handle leaves the VM running: VMs outlive the daemon. Only [`Vm::kill`] ends one.
#[async_trait]
pub trait Vm: Send + Sync + std::fmt::Debug {
    /// Opens a session with the guest's agent, and proves that it is one (preamble). A former session of this handle ends.
    /// Waits, event-driven, until the guest answers or the deadline passes.
    async fn open_session(&self, deadline: Instant) -> Result<GuestSession, SessionError>;

    /// Stops the virtual CPUs and drains block I/O. Idempotent.
    async fn pause(&self) -> Result<(), VmError>;

    /// Lets the virtual CPUs run. Idempotent.
    async fn resume(&self) -> Result<(), VmError>;

    /// Captures memory, device state and disk in one pause into `plan.image`, and completes the image. A VM that ran
    /// before runs afterwards, whatever went wrong; one that was paused stays paused.
    async fn capture(&self, plan: CapturePlan) -> Result<Captured, CaptureError>;

    /// Clones only the disk, in one pause, to `dest`, which must not exist.
    async fn clone_disk(&self, dest: &Path) -> Result<DiskClone, CaptureError>;

    /// What the VM uses, as measured on the host.
    async fn stats(&self) -> Result<VmStats, VmError>;

    /// Ends the VM and waits until its process is gone and its sockets are removed. Idempotent.
    async fn kill(&self) -> Result<(), VmError>;

    /// What [`Engine::adopt`] needs.
    fn record(&self) -> VmRecord;

    /// The state, and every change of it: a guest that powers off, panics or runs into a full host disk, and a VM process
    /// that dies, show up here at once.
    fn state(&self) -> watch::Receiver<VmState>;

    /// What the guest prints on its serial console from now on, as raw bytes of a stranger. A receiver that is too slow
    /// loses pieces. All of it (bounded) is in [`VmPlace::console_log`].
    fn console(&self) -> broadcast::Receiver<Bytes>;
}
