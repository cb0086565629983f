//! Plain data that goes into and comes out of an engine.

use std::path::PathBuf;
use std::time::Duration;

use coppice_snapshot::{Accel, EngineKind, MachineImage, MachineSpec, PendingImage};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::GuestSession;
use crate::privileged::{JailSlot, Nic};

pub use coppice_disk::CloneKind;

/// What an engine can do on this host.
#[derive(Debug, Clone, Serialize)]
pub struct Capabilities {
    /// Which engine.
    pub engine: EngineKind,
    /// Version of the VMM program, e.g. `7.2.22`.
    pub version: String,
    /// How guest code is executed.
    pub accel: Accel,
    /// Why, in one sentence: what the probe of `/dev/kvm` found.
    pub accel_reason: String,
}

/// Files of the guest kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestKernel {
    /// Compressed kernel (bzImage).
    pub vmlinuz: PathBuf,
    /// Initramfs with the agent as `/init`.
    pub initramfs: PathBuf,
}

/// Where a VM keeps what belongs to it alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmPlace {
    /// Id of the VM, new for each process.
    pub id: Uuid,
    /// Existing directory for its sockets; the engine makes files there and removes them on kill. Short: the path of a
    /// unix socket has at most 107 bytes.
    pub run_dir: PathBuf,
    /// Root disk, raw, owned by this VM.
    pub disk: PathBuf,
    /// Where the serial console is appended to; bounded by the engine.
    pub console_log: PathBuf,
}

/// What a machine boots from.
#[derive(Debug, Clone)]
pub struct BootSpec {
    /// Its own files.
    pub place: VmPlace,
    /// Shape; `machine.cmdline` is the caller's part of the kernel command line, the engine adds its own.
    pub machine: MachineSpec,
    /// Kernel and initramfs files.
    pub kernel: GuestKernel,
    /// Its network device.
    pub nic: Nic,
    /// Its VMM's jail.
    pub jail: JailSlot,
}

/// Everything that differs between a captured machine and the VM that is restored from it.
#[derive(Debug, Clone)]
pub struct Rebind {
    /// The new VM's own files. `disk` must already be a clone of the image's disk.
    pub place: VmPlace,
    /// Kernel and initramfs files of the image's kernel id.
    pub kernel: GuestKernel,
    /// The new VM's network device.
    pub nic: Nic,
    /// The new VMM's jail.
    pub jail: JailSlot,
}

/// Where a capture goes.
#[derive(Debug)]
pub struct CapturePlan {
    /// The directory to fill.
    pub image: PendingImage,
    /// Id for the manifest.
    pub id: Uuid,
    /// Whether all of it must be on disk, and every file have a checksum, before the capture answers. Templates and
    /// snapshots that users keep want that; a fork whose children start from the page cache does not.
    pub durable: bool,
    /// Whose processes are held right before the pause, if the VM runs. A hold that fails fails the capture. Whoever gives this
    /// releases them again, whatever the capture answers.
    pub hold: Option<GuestSession>,
}

/// A complete capture.
#[derive(Debug)]
pub struct Captured {
    /// The image.
    pub image: MachineImage,
    /// How the disk was cloned. [`CloneKind::Copy`] is slow and must be reported.
    pub disk_clone: CloneKind,
    /// Bytes of guest memory that were copied from the VM.
    pub memory_bytes: u64,
    /// Bytes of it that were written to the image's memory file: long stretches of zeros are not.
    pub memory_written_bytes: u64,
    /// What the time was made of.
    pub timings: CaptureTimings,
}

/// What a capture's time was made of. All but the last happen inside the pause.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct CaptureTimings {
    /// From the request to stop to the VM running again (or to the end of the copy, for a VM that stays paused).
    pub paused: Duration,
    /// Until the virtual CPUs had stopped and block I/O was drained.
    pub stop: Duration,
    /// Writing device state.
    pub devices: Duration,
    /// Cloning the disk.
    pub disk: Duration,
    /// Finding and copying dirty memory.
    pub memory: Duration,
    /// After the pause: writing the copied pages to the image's memory file, checksums, manifest.
    pub publish: Duration,
}

/// A disk cloned in a pause of its own.
#[derive(Debug, Clone, Copy)]
pub struct DiskClone {
    /// How.
    pub kind: CloneKind,
    /// How long the VM was paused.
    pub paused: Duration,
}

/// What a restore's time was made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreTimings {
    /// Until the VMM process answered.
    pub spawn: Duration,
    /// Until device state was loaded and the virtual CPUs ran.
    pub load: Duration,
}

/// What is needed to adopt a VM after a restart of the daemon. Stored as JSON by the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmRecord {
    /// Its own files.
    pub place: VmPlace,
    /// Shape.
    pub machine: MachineSpec,
    /// Process id of the VMM.
    pub pid: i32,
    /// Start time of that process in clock ticks since boot (field 22 of /proc/PID/stat), and the boot id of the host:
    /// a pid alone may have been given to another process.
    pub pid_start: u64,
    /// `/proc/sys/kernel/random/boot_id` at the start.
    pub boot_id: String,
    /// The guest port of the latest session.
    pub channel_port: u8,
    /// The memory file that this VM maps, if it was restored from an image.
    pub memory_base: Option<PathBuf>,
    /// The restore's timings, if it was restored.
    pub restore: Option<RestoreTimings>,
}

/// What a VM is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmState {
    /// Virtual CPUs run.
    Running,
    /// Paused by us.
    Paused,
    /// Stopped by an I/O error of its disk, e.g. the host's file system is full. Holds what the VMM said.
    IoError(String),
    /// Gone, and why: powered off by the guest, guest panicked, killed, VMM died with a signal.
    Dead(String),
}

/// What a VM uses on the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct VmStats {
    /// Proportional set size of the VMM process, bytes: its own pages, and its share of shared ones.
    pub pss_bytes: u64,
    /// Pages that it alone holds (private dirty), bytes.
    pub private_bytes: u64,
    /// CPU time of the VMM process.
    pub cpu_time: Duration,
    /// Bytes allocated to its disk on the host (shared extents included).
    pub disk_bytes: u64,
}
