//! What the agent does to the machine as a whole, behind a trait: the wall clock, the kernel's random number generator,
//! the host name, the network, freezing the root file system, holding processes, and where the root directory is.
//!
//! [`LinuxSystem`] does it, [`RecordingSystem`] only records it. Ordinary file and process work is not in here.

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use coppice_guest_proto::limits::RESEED_SIGNAL;
use rustix::{
    fs::{Mode, OFlags},
    process::Signal,
    time::{ClockId, Timespec},
};

use crate::{
    connections,
    netlink::Socket,
    network::{Interface, NetworkConfig},
    processes::{Group, Processes},
};

/// The effects that reach beyond the agent's own processes and files.
pub trait System: Send + Sync + 'static {
    /// The wall clock, nanoseconds since the Unix epoch.
    fn realtime_ns(&self) -> i64;
    /// Steps the wall clock.
    fn step_clock(&self, unix_ns: i64) -> io::Result<()>;
    /// Adds entropy to the kernel's CRNG, credits it, and forces a reseed.
    fn add_entropy(&self, entropy: &[u8]) -> io::Result<()>;
    /// Sets the kernel's host name.
    fn set_hostname(&self, hostname: &str) -> io::Result<()>;
    /// Makes the network interface `new`, from `old`, which was set before. May be repeated.
    fn set_network(&self, old: Option<&NetworkConfig>, new: &NetworkConfig) -> io::Result<()>;
    /// Ends all connections from an address that the machine does not have any more, with an error for who uses them.
    fn end_connections(&self, address: Ipv4Addr) -> io::Result<()>;
    /// Writes everything that is dirty to the disk.
    fn sync(&self);
    /// Freezes the root file system.
    fn freeze(&self) -> io::Result<()>;
    /// Thaws the root file system.
    fn thaw(&self) -> io::Result<()>;
    /// Holds every process that was started in [`Group::Commands`], and all that came from it; all or none. `TimedOut`:
    /// some did not stand still in time. `Unsupported`: there is no way to.
    fn hold_processes(&self, limit: Duration) -> io::Result<()>;
    /// Lets them go on.
    fn release_processes(&self) -> io::Result<()>;
    /// Tells the processes of [`Group::Commands`] that listen for it to draw their random numbers anew.
    fn reseed_processes(&self) -> io::Result<()>;
    /// Makes what resume hooks left running part of [`Group::Commands`].
    fn adopt_hooks(&self) -> io::Result<()>;
    /// Where a new process writes `0` to join a group; `None` where there are no groups.
    fn door(&self, group: Group) -> io::Result<Option<OwnedFd>>;
    /// The directory that paths of the protocol are resolved in: `/`, except in tests and fakes.
    fn root(&self) -> &Path;
}

/// Linux `struct rand_pool_info` (include/uapi/linux/random.h): two ints, then the bytes as `__u32`s.
#[repr(C)]
struct RandPoolInfo {
    entropy_count: i32,
    buf_size: i32,
    buf: [u32; coppice_guest_proto::limits::MAX_ENTROPY / 4],
}

/// `_IOC` of include/uapi/asm-generic/ioctl.h: direction, size, type, number.
const fn ioc(direction: u64, kind: u8, number: u64, size: u64) -> u64 {
    (direction << 30) | (size << 16) | ((kind as u64) << 8) | number
}

/// `_IOW('R', 0x03, int [2])`, include/uapi/linux/random.h.
const RNDADDENTROPY: u64 = ioc(1, b'R', 0x03, 8);
/// `_IO('R', 0x07)`, include/uapi/linux/random.h.
const RNDRESEEDCRNG: u64 = ioc(0, b'R', 0x07, 0);
/// `_IOWR('X', 119, int)`, include/uapi/linux/fs.h.
const FIFREEZE: u64 = ioc(3, b'X', 119, 4);
/// `_IOWR('X', 120, int)`, include/uapi/linux/fs.h.
const FITHAW: u64 = ioc(3, b'X', 120, 4);

const _: () = assert!(RNDADDENTROPY == 0x4008_5203);
const _: () = assert!(RNDRESEEDCRNG == 0x5207);
const _: () = assert!(FIFREEZE == 0xC004_5877);
const _: () = assert!(FITHAW == 0xC004_5878);
const _: () = assert!(std::mem::offset_of!(RandPoolInfo, buf) == 8);

/// The machine that the agent is PID 1 of.
#[derive(Debug, Default)]
pub struct LinuxSystem {
    network: Mutex<Network>,
    processes: Option<Processes>,
}

/// Opened when it is first needed, and kept.
#[derive(Debug, Default)]
struct Network {
    interface: Option<Interface>,
    diag: Option<Socket>,
}

impl Network {
    fn interface(&mut self) -> io::Result<&mut Interface> {
        match &mut self.interface {
            Some(interface) => Ok(interface),
            none => Ok(none.insert(Interface::find()?)),
        }
    }
}

impl LinuxSystem {
    /// The running machine. The caller says by this that the agent may change it as a whole.
    #[must_use]
    pub fn new() -> Self {
        Self { network: Mutex::default(), processes: None }
    }

    /// Makes the groups that processes are held in, in a mounted cgroup v2 hierarchy. Without them nothing can be held.
    #[must_use]
    pub fn with_groups(mut self, root: &Path) -> Self {
        match Processes::make(root) {
            Ok(processes) => self.processes = Some(processes),
            Err(error) => tracing::error!("{}: processes can't be held: {error}", root.display()),
        }
        self
    }

    fn processes(&self) -> io::Result<&Processes> {
        self.processes.as_ref().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Brings the network interface up, before it has an address, and opens what later handshakes need: all of that is then
    /// part of what machines are restored from. Returns whether there is one.
    pub fn bring_network_up(&self) -> io::Result<bool> {
        let mut network = self.network();
        match network.interface() {
            Ok(interface) => interface.bring_up()?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        }
        network.diag = Socket::sock_diag().ok();
        Ok(true)
    }

    fn network(&self) -> std::sync::MutexGuard<'_, Network> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn freeze_ioctl(request: u64) -> io::Result<()> {
        let root = rustix::fs::open("/", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        // SAFETY: FIFREEZE and FITHAW ignore their argument; `root` is open for the duration of the call.
        cvt(unsafe { libc::ioctl(root.as_raw_fd(), request, 0) })
    }
}

fn cvt(ret: i32) -> io::Result<()> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn to_ns(time: Timespec) -> i64 {
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

impl System for LinuxSystem {
    fn realtime_ns(&self) -> i64 {
        to_ns(rustix::time::clock_gettime(ClockId::Realtime))
    }

    fn step_clock(&self, unix_ns: i64) -> io::Result<()> {
        let time = Timespec { tv_sec: unix_ns.div_euclid(1_000_000_000), tv_nsec: unix_ns.rem_euclid(1_000_000_000) };
        Ok(rustix::time::clock_settime(ClockId::Realtime, time)?)
    }

    fn add_entropy(&self, entropy: &[u8]) -> io::Result<()> {
        let random = rustix::fs::open("/dev/urandom", OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())?;
        let size = i32::try_from(entropy.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut info = Box::new(RandPoolInfo { entropy_count: size * 8, buf_size: size, buf: [0; _] });
        let (words, tail) = entropy.as_chunks::<4>();
        let padded = (!tail.is_empty()).then(|| {
            let mut last = [0; 4];
            last[..tail.len()].copy_from_slice(tail);
            last
        });
        for (to, from) in info.buf.iter_mut().zip(words.iter().copied().chain(padded)) {
            *to = u32::from_ne_bytes(from);
        }
        if entropy.len() > size_of_val(&info.buf) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: RNDADDENTROPY reads a rand_pool_info followed by `buf_size` bytes, which `buf` holds (checked above).
        cvt(unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, std::ptr::from_ref(&*info)) })?;
        // SAFETY: RNDRESEEDCRNG takes no argument.
        cvt(unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG, 0) })
    }

    fn set_hostname(&self, hostname: &str) -> io::Result<()> {
        Ok(rustix::system::sethostname(hostname.as_bytes())?)
    }

    fn set_network(&self, old: Option<&NetworkConfig>, new: &NetworkConfig) -> io::Result<()> {
        self.network().interface()?.set(old, new)
    }

    fn end_connections(&self, address: Ipv4Addr) -> io::Result<()> {
        connections::end(&mut self.network().diag, address)
    }

    fn sync(&self) {
        rustix::fs::sync();
    }

    fn freeze(&self) -> io::Result<()> {
        Self::freeze_ioctl(FIFREEZE)
    }

    fn thaw(&self) -> io::Result<()> {
        Self::freeze_ioctl(FITHAW)
    }

    fn hold_processes(&self, limit: Duration) -> io::Result<()> {
        self.processes()?.hold(limit)
    }

    fn release_processes(&self) -> io::Result<()> {
        self.processes()?.release()
    }

    fn reseed_processes(&self) -> io::Result<()> {
        // SAFETY: the number is that of a real-time signal, none of those that libc keeps for itself (32 to 34).
        let signal = unsafe { Signal::from_raw_unchecked(RESEED_SIGNAL) };
        self.processes.as_ref().map_or(Ok(()), |processes| processes.signal(signal))
    }

    fn adopt_hooks(&self) -> io::Result<()> {
        self.processes.as_ref().map_or(Ok(()), Processes::adopt_hooks)
    }

    fn door(&self, group: Group) -> io::Result<Option<OwnedFd>> {
        self.processes.as_ref().map(|processes| processes.door(group).try_clone_to_owned()).transpose()
    }

    fn root(&self) -> &Path {
        Path::new("/")
    }
}

/// One call of [`RecordingSystem`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// [`System::step_clock`]
    StepClock(i64),
    /// [`System::add_entropy`]
    AddEntropy(Vec<u8>),
    /// [`System::set_hostname`]
    SetHostname(String),
    /// [`System::set_network`]: the old address, and what was set.
    SetNetwork(Option<Ipv4Addr>, NetworkConfig),
    /// [`System::end_connections`]
    EndConnections(Ipv4Addr),
    /// [`System::sync`]
    Sync,
    /// [`System::freeze`]
    Freeze,
    /// [`System::thaw`]
    Thaw,
    /// [`System::hold_processes`]
    HoldProcesses,
    /// [`System::reseed_processes`]
    ReseedProcesses,
    /// [`System::release_processes`]
    ReleaseProcesses,
}

/// A system whose effects are recorded and not applied, for tests and fakes. Paths are resolved below `root`.
#[derive(Debug)]
pub struct RecordingSystem {
    root: PathBuf,
    state: Mutex<Recorded>,
}

#[derive(Debug, Default)]
struct Recorded {
    effects: Vec<Effect>,
    /// Added to the real clock by steps.
    clock_offset_ns: i64,
    entropy_error: Option<i32>,
    network_error: Option<i32>,
    connections_error: Option<i32>,
    hold_error: Option<i32>,
}

impl RecordingSystem {
    /// A system whose root directory is `root`, which should exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), state: Mutex::default() }
    }

    /// What was asked for, in order.
    #[must_use]
    pub fn effects(&self) -> Vec<Effect> {
        self.lock().effects.clone()
    }

    /// Makes [`System::add_entropy`] fail with this errno from now on.
    pub fn fail_entropy(&self, errno: Option<i32>) {
        self.lock().entropy_error = errno;
    }

    /// Makes [`System::set_network`] fail with this errno from now on.
    pub fn fail_network(&self, errno: Option<i32>) {
        self.lock().network_error = errno;
    }

    /// Makes [`System::end_connections`] fail with this errno from now on.
    pub fn fail_connections(&self, errno: Option<i32>) {
        self.lock().connections_error = errno;
    }

    /// Makes [`System::hold_processes`] fail with this errno from now on.
    pub fn fail_hold(&self, errno: Option<i32>) {
        self.lock().hold_error = errno;
    }

    /// Puts the recorded clock off by this much, as if the machine had been captured a while ago.
    pub fn set_clock_error_ns(&self, error_ns: i64) {
        self.lock().clock_offset_ns = error_ns;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Recorded> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, effect: Effect) {
        self.lock().effects.push(effect);
    }
}

impl System for RecordingSystem {
    fn realtime_ns(&self) -> i64 {
        to_ns(rustix::time::clock_gettime(ClockId::Realtime)).saturating_add(self.lock().clock_offset_ns)
    }

    fn step_clock(&self, unix_ns: i64) -> io::Result<()> {
        let now = to_ns(rustix::time::clock_gettime(ClockId::Realtime));
        let mut state = self.lock();
        state.clock_offset_ns = unix_ns.saturating_sub(now);
        state.effects.push(Effect::StepClock(unix_ns));
        Ok(())
    }

    fn add_entropy(&self, entropy: &[u8]) -> io::Result<()> {
        if let Some(errno) = self.lock().entropy_error {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.record(Effect::AddEntropy(entropy.to_vec()));
        Ok(())
    }

    fn set_hostname(&self, hostname: &str) -> io::Result<()> {
        self.record(Effect::SetHostname(hostname.to_owned()));
        Ok(())
    }

    fn set_network(&self, old: Option<&NetworkConfig>, new: &NetworkConfig) -> io::Result<()> {
        if let Some(errno) = self.lock().network_error {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.record(Effect::SetNetwork(old.map(|old| old.address), new.clone()));
        Ok(())
    }

    fn end_connections(&self, address: Ipv4Addr) -> io::Result<()> {
        if let Some(errno) = self.lock().connections_error {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.record(Effect::EndConnections(address));
        Ok(())
    }

    fn sync(&self) {
        self.record(Effect::Sync);
    }

    fn freeze(&self) -> io::Result<()> {
        self.record(Effect::Freeze);
        Ok(())
    }

    fn thaw(&self) -> io::Result<()> {
        self.record(Effect::Thaw);
        Ok(())
    }

    fn hold_processes(&self, _: Duration) -> io::Result<()> {
        if let Some(errno) = self.lock().hold_error {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.record(Effect::HoldProcesses);
        Ok(())
    }

    fn release_processes(&self) -> io::Result<()> {
        self.record(Effect::ReleaseProcesses);
        Ok(())
    }

    fn reseed_processes(&self) -> io::Result<()> {
        self.record(Effect::ReseedProcesses);
        Ok(())
    }

    fn adopt_hooks(&self) -> io::Result<()> {
        Ok(())
    }

    fn door(&self, _: Group) -> io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    fn root(&self) -> &Path {
        &self.root
    }
}
