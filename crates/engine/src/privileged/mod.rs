//! What needs rights that the rest of the product does not have, behind one narrow trait.
//!
//! [`Local`] does it in this process, which must be root for a jail. The same trait over a unix socket splits the product
//! in two: what parses HTTP and guest bytes on one side, these few calls on the other. So every order is plain data, files
//! go over as open descriptors and never as paths, and only processes that were spawned or adopted here can be named.
//! All calls block, for microseconds to a few milliseconds; none needs an async runtime.
//!
//! It does not speak to monitors or guests, and does not decide when a machine is paused.

pub(crate) mod child;
mod command_line;
mod examine;
mod launch;
mod local;
mod memory;
mod strays;
mod wire;

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use coppice_net::Seat;
use coppice_snapshot::{Accel, MachineSpec};
use serde::{Deserialize, Serialize};

use crate::VmError;
pub(crate) use examine::major_minor;
pub use local::{AccelChoice, Local, LocalConfig};
pub(crate) use memory::ranges_until;
pub use wire::WireError;
pub(crate) use wire::io_error;

/// A process that can't be mistaken for another one: pids are reused, pairs of pid and start time are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// Process id.
    pub pid: i32,
    /// Start time in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_time: u64,
}

impl ProcessId {
    /// Whether there is no such process any more: it was reaped, and its pid may be another's.
    #[must_use]
    pub fn is_gone(self) -> bool {
        crate::process::start_time(self.pid).ok() != Some(self.start_time)
    }
}

/// Which jail a VMM gets: its user and group id, and the name of its cgroup, follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct JailSlot {
    /// Below 2^17 for machines with a network slot, see [`JailSlot::of`]. No two VMMs have the same at the same time.
    pub index: u32,
}

impl JailSlot {
    /// Indexes are below this.
    pub(crate) const LIMIT: u32 = 1 << 28;
    /// From here on they belong to machines without a network slot.
    pub(crate) const UNSLOTTED: u32 = (1 << 27) | (1 << 26);
    /// There are fewer slots than this; the second seats of all of them are behind the first ones.
    pub(crate) const SLOTS: u32 = 1 << 16;

    /// That of a seat of a network slot. `None` for an index that no slot has.
    #[must_use]
    pub fn of(index: u32, seat: Seat) -> Option<Self> {
        let base = match seat {
            Seat::First => 0,
            Seat::Second => Self::SLOTS,
        };
        (index < Self::SLOTS).then_some(Self { index: base + index })
    }

    /// The network slot and the seat that it is of; the inverse of [`Self::of`].
    #[must_use]
    pub fn place(self) -> Option<(u32, Seat)> {
        match self.index.checked_sub(Self::SLOTS) {
            None => Some((self.index, Seat::First)),
            Some(index) if index < Self::SLOTS => Some((index, Seat::Second)),
            Some(_) => None,
        }
    }

    /// Whether it is one of [`Self::unslotted`].
    #[must_use]
    pub fn is_unslotted(self) -> bool {
        self.index >= Self::UNSLOTTED
    }

    /// For a machine without a network slot, e.g. one that a template is baked from: none of the slots' indexes, and with
    /// near certainty no other machine's (that it is taken is an error at the spawn).
    #[must_use]
    pub fn unslotted() -> Self {
        let random = uuid::Uuid::new_v4().as_u128();
        let low = u32::try_from(random & u128::from(Self::LIMIT - Self::UNSLOTTED - 1)).unwrap_or(0);
        Self { index: Self::UNSLOTTED | low }
    }
}

/// What kind of VMMs the privileged side starts, found out once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmmFacts {
    /// Version of QEMU, e.g. `7.2.22`.
    pub version: String,
    /// How guest code is executed.
    pub accel: Accel,
    /// Why, in one sentence.
    pub accel_reason: String,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// What holds a VMM back.
    pub jail: JailReport,
}

/// What the jail of this host consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JailReport {
    /// Every layer is there, or is named here with the reason (only where the operator allowed that).
    On {
        /// Layers that could not be had.
        missing: Vec<String>,
    },
    /// There is none: the operator said so.
    Off,
}

/// From what a machine starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StartKind {
    /// A kernel.
    Boot,
    /// Captured device state and memory.
    Restore,
}

/// An order to start a VMM. The command line is made from it on the privileged side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnOrder {
    /// Shape.
    pub machine: MachineSpec,
    /// From what.
    pub start: StartKind,
    /// Hardware address of its network device.
    pub mac: [u8; 6],
    /// Its jail.
    pub jail: JailSlot,
}

/// The open descriptors that a VMM gets: it opens nothing by itself.
#[derive(Debug, Clone, Copy)]
pub struct SpawnFds<'a> {
    /// Listening socket of the monitor.
    pub monitor: BorrowedFd<'a>,
    /// Listening socket of the serial console.
    pub console: BorrowedFd<'a>,
    /// Listening sockets of the guest ports.
    pub ports: [BorrowedFd<'a>; 2],
    /// Standard output and error; appending.
    pub log: BorrowedFd<'a>,
    /// Guest memory, which is mapped privately; open for reading.
    pub memory: BorrowedFd<'a>,
    /// Root disk, open for reading and writing.
    pub disk: BorrowedFd<'a>,
    /// TAP device with `IFF_VNET_HDR`.
    pub tap: BorrowedFd<'a>,
    /// What it starts from.
    pub start: StartFds<'a>,
}

/// The part of [`SpawnFds`] that depends on [`StartKind`].
#[derive(Debug, Clone, Copy)]
pub enum StartFds<'a> {
    /// Files of a kernel.
    Boot {
        /// Compressed kernel.
        vmlinuz: BorrowedFd<'a>,
        /// Initramfs.
        initramfs: BorrowedFd<'a>,
    },
    /// Of a captured machine.
    Restore {
        /// Device state, at its beginning.
        devices: BorrowedFd<'a>,
    },
}

impl<'a> SpawnFds<'a> {
    /// All of them, in the order that [`Self::from_list`] takes.
    #[must_use]
    pub fn list(&self) -> Vec<BorrowedFd<'a>> {
        let [first, second] = self.ports;
        let mut all = vec![self.monitor, self.console, first, second, self.log, self.memory, self.disk, self.tap];
        match self.start {
            StartFds::Boot { vmlinuz, initramfs } => all.extend([vmlinuz, initramfs]),
            StartFds::Restore { devices } => all.push(devices),
        }
        all
    }

    /// From a list as [`Self::list`] makes it; `None` when it has another length.
    #[must_use]
    pub fn from_list(kind: StartKind, list: &[BorrowedFd<'a>]) -> Option<Self> {
        let (&[monitor, console, first, second, log, memory, disk, tap], rest) = list.split_first_chunk::<8>()?;
        let start = match (kind, rest) {
            (StartKind::Boot, &[vmlinuz, initramfs]) => StartFds::Boot { vmlinuz, initramfs },
            (StartKind::Restore, &[devices]) => StartFds::Restore { devices },
            _ => return None,
        };
        Some(Self { monitor, console, ports: [first, second], log, memory, disk, tap, start })
    }

    /// Which kind of start they are for.
    #[must_use]
    pub fn kind(&self) -> StartKind {
        match self.start {
            StartFds::Boot { .. } => StartKind::Boot,
            StartFds::Restore { .. } => StartKind::Restore,
        }
    }
}

/// A VMM that was started.
#[derive(Debug)]
pub struct Spawned {
    /// Who it is.
    pub id: ProcessId,
    /// Readable when it has ended.
    pub pidfd: OwnedFd,
}

/// The memory of a machine, seen from outside.
#[derive(Debug)]
pub struct MemoryHandle {
    /// Where the VMM maps it.
    pub start: u64,
    /// Its `/proc/PID/pagemap`: which pages were written is read from it without further rights.
    pub pagemap: File,
    /// The mapped file, whatever became of its name; open for reading.
    pub base: File,
}

/// Pages that lie together, as offset into guest memory and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Offset of the first byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

/// Bytes in a list of ranges.
#[must_use]
pub fn total(ranges: &[Range]) -> u64 {
    ranges.iter().map(|r| r.len).fold(0, u64::saturating_add)
}

/// Names a registered arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ArenaId(pub u64);

/// What a VMM process uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStats {
    /// Proportional set size, bytes.
    pub pss_bytes: u64,
    /// Private dirty pages, bytes.
    pub private_bytes: u64,
    /// User and system time.
    pub cpu_time: Duration,
}

/// The privileged side.
pub trait Privileged: Send + Sync + std::fmt::Debug {
    /// What it starts.
    ///
    /// # Errors
    /// That the privileged side can't be reached.
    fn facts(&self) -> io::Result<VmmFacts>;

    /// Starts a VMM in its jail, and checks from outside that every layer holds. On an error nothing is left.
    /// [`Self::confirm`] must follow when its monitor has answered.
    ///
    /// # Errors
    /// [`VmError::Jail`] names a layer that could not be had.
    fn spawn(&self, order: &SpawnOrder, fds: SpawnFds<'_>) -> Result<Spawned, VmError>;

    /// The VMM's monitor has answered, so it needs no more files: from now on it is refused all. Checks what it holds. On an
    /// error the caller kills it.
    ///
    /// # Errors
    /// [`VmError::Jail`] names a layer that does not hold.
    fn confirm(&self, id: ProcessId) -> Result<(), VmError>;

    /// Takes over a VMM of an earlier run, and answers with its pidfd; `None` when it is gone.
    ///
    /// # Errors
    /// That the process is no VMM of ours.
    fn adopt(&self, id: ProcessId) -> Result<Option<OwnedFd>, VmError>;

    /// Ends every VMM of this instance that is not to be kept, and waits until it is gone: what a crash left between the
    /// start of a process and its record. Answers which. Nothing of a bake that another process does, nothing of another instance, and no other process, is touched.
    ///
    /// # Errors
    /// What the system says, or that one does not end.
    fn end_strays(&self, keep: &[ProcessId]) -> io::Result<Vec<ProcessId>>;

    /// Sends SIGKILL. Succeeds when it is already gone.
    ///
    /// # Errors
    /// That the process was neither spawned nor adopted here.
    fn kill(&self, id: ProcessId) -> io::Result<()>;

    /// How a VMM ended, `None` while it runs. Reaps it and removes its cgroup. To be called when the pidfd is readable.
    ///
    /// # Errors
    /// That the privileged side can't be reached.
    fn ended(&self, id: ProcessId) -> io::Result<Option<String>>;

    /// Finds the guest memory of `len` bytes in a VMM.
    ///
    /// # Errors
    /// What the system says.
    fn open_memory(&self, id: ProcessId, len: u64) -> io::Result<MemoryHandle>;

    /// Copies ranges of guest memory, one after the other, to the beginning of an arena. [`Self::open_memory`] came before.
    ///
    /// # Errors
    /// What the system says, or that a range is outside of guest memory or does not fit.
    fn read_memory(&self, id: ProcessId, ranges: &[Range], arena: ArenaId) -> io::Result<()>;

    /// Maps a memfd (sealed against shrinking) of `len` bytes as target of [`Self::read_memory`], with all of its pages made.
    ///
    /// # Errors
    /// What the system says.
    fn register_arena(&self, memory: BorrowedFd<'_>, len: u64) -> io::Result<ArenaId>;

    /// Unmaps an arena. One that is not known is fine.
    ///
    /// # Errors
    /// That the privileged side can't be reached.
    fn drop_arena(&self, arena: ArenaId) -> io::Result<()>;

    /// What a VMM uses.
    ///
    /// # Errors
    /// What the system says.
    fn stats(&self, id: ProcessId) -> io::Result<ProcessStats>;
}

/// The network device of a machine.
#[derive(Debug, Clone)]
pub struct Nic {
    /// TAP device with `IFF_VNET_HDR`.
    pub tap: std::sync::Arc<OwnedFd>,
    /// Hardware address.
    pub mac: [u8; 6],
}

impl Nic {
    /// A device that leads nowhere (see [`coppice_net::isolated_tap`]), for bakes and tests. Needs root.
    ///
    /// # Errors
    /// What the system says.
    pub fn isolated() -> io::Result<Self> {
        Ok(Self { tap: std::sync::Arc::new(coppice_net::isolated_tap()?), mac: Self::random_mac() })
    }

    /// A random address, locally administered, unicast.
    #[must_use]
    pub fn random_mac() -> [u8; 6] {
        let [.., a, b, c, d] = uuid::Uuid::new_v4().into_bytes();
        [0x02, 0x63, a, b, c, d]
    }
}

/// First user id of VMMs, which have 2^28 of them: one for each slot of an instance, and instances have different ones.
/// Above the ranges of users, of systemd's dynamic users and of its containers, below 2^31.
pub const UID_BASE: u32 = 0x7000_0000;
