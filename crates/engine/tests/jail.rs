//! The jail of real VMMs, tried from inside their identity, and the verification of each of its layers. Needs root and
//! QEMU; says **skipped, because** when something is missing. The VMMs wait for a machine that never comes, so no guest is
//! needed.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests: a failure is a panic")]

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use coppice_engine::{
    JailChoice, JailConfig, JailLayer, JailSlot, Local, LocalConfig, Nic, Privileged, ProcessId, SpawnFds, SpawnOrder,
    Spawned, StartFds, StartKind, UID_BASE, VmError,
};
use coppice_net::Seat;
use coppice_snapshot::MachineSpec;
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// The privileged side, leaving layers out, or why not.
fn local(name: &str, leave_out: &[JailLayer]) -> Result<Local, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("it needs root".to_owned());
    }
    let jail = JailConfig { leave_out: leave_out.to_vec(), ..JailConfig::default() };
    let id = format!("test-{name}-{}", std::process::id());
    let config = LocalConfig { id, jail: JailChoice::On(jail), ..LocalConfig::default() };
    Local::new(config).map_err(|error| error.to_string())
}

macro_rules! local_or_skip {
    ($name:expr, $leave_out:expr) => {
        match local($name, $leave_out) {
            Ok(local) => local,
            Err(reason) => return eprintln!("skipped, because {reason}"),
        }
    };
}

/// What a VMM is made of, and the machine's files, as a daemon keeps them: for nobody else.
struct Place {
    dir: tempfile::TempDir,
    sockets: Vec<UnixListener>,
    log: File,
    memory: File,
    disk: File,
    /// Nothing ever comes out of it.
    devices: (OwnedFd, OwnedFd),
    nic: Nic,
}

const SOCKETS: [&str; 4] = ["qmp", "con", "ch0", "ch1"];
const MEMORY_MIB: u32 = 128;

impl Place {
    fn new() -> Self {
        let dir = tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap();
        let sockets = SOCKETS.map(|name| UnixListener::bind(dir.path().join(name)).unwrap()).into();
        let file = |name: &str, len: u64| {
            use std::os::unix::fs::OpenOptionsExt;
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create_new(true).mode(0o600).open(dir.path().join(name)).unwrap();
            file.set_len(len).unwrap();
            file
        };
        file("memory", u64::from(MEMORY_MIB) << 20);
        let (log, disk) = (file("log", 0), file("disk.ext4", 1 << 20));
        let memory = File::open(dir.path().join("memory")).unwrap();
        let (theirs, ours) = io::pipe().map(|(read, write)| (read.into(), write.into())).unwrap();
        Self { log, memory, disk, sockets, devices: (theirs, ours), nic: Nic::isolated().unwrap(), dir }
    }

    fn fds(&self) -> SpawnFds<'_> {
        let socket = |nr: usize| self.sockets[nr].as_fd();
        SpawnFds {
            monitor: socket(0),
            console: socket(1),
            ports: [socket(2), socket(3)],
            log: self.log.as_fd(),
            memory: self.memory.as_fd(),
            disk: self.disk.as_fd(),
            tap: self.nic.tap.as_fd(),
            start: StartFds::Restore { devices: self.devices.0.as_fd() },
        }
    }

    fn spawn(&self, local: &Local, jail: JailSlot) -> Result<Spawned, VmError> {
        let id = || "test".to_owned();
        let machine =
            MachineSpec { cpus: 1, memory_mib: MEMORY_MIB, kernel: id(), initramfs: id(), cmdline: String::new() };
        let order = SpawnOrder { machine, start: StartKind::Restore, mac: self.nic.mac, jail };
        local.spawn(&order, self.fds())
    }

    /// Waits for the monitor's greeting and answer: QEMU has started then.
    fn wait_for_monitor(&self) {
        let stream = UnixStream::connect(self.dir.path().join("qmp")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut lines = BufReader::new(&stream).lines();
        let said = || std::fs::read_to_string(self.dir.path().join("log")).unwrap();
        assert!(lines.next().unwrap().unwrap_or_else(|e| panic!("{e}: {}", said())).contains("QMP"));
        (&stream).write_all(b"{\"execute\": \"qmp_capabilities\"}\n").unwrap();
        assert!(lines.next().unwrap_or_else(|| panic!("{}", said())).unwrap().contains("return"));
    }

    fn start(&self, local: &Local, jail: JailSlot) -> ProcessId {
        let spawned = self.spawn(local, jail).unwrap();
        self.wait_for_monitor();
        local.confirm(spawned.id).unwrap();
        spawned.id
    }
}

/// Ends a VMM also when a test fails.
struct Ends<'a>(&'a Local, ProcessId);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            end(self.0, self.1);
        }
    }
}

fn end(local: &Local, id: ProcessId) -> String {
    local.kill(id).unwrap();
    loop {
        if let Some(how) = local.ended(id).unwrap() {
            return how;
        }
        std::thread::yield_now();
    }
}

/// How much of a VMM's identity a helper takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Identity {
    /// All of it.
    Whole,
    /// User and group only: what would be left if the namespaces were escaped.
    User,
}

/// Runs `work` in a process of its own with the identity of a VMM, and answers with what it says.
fn inside(pid: i32, identity: Identity, work: impl Fn() -> Vec<String>) -> Vec<String> {
    let uid = std::fs::metadata(format!("/proc/{pid}")).unwrap().uid();
    let kinds = [
        ("net", LinkNameSpaceType::Network),
        ("ipc", LinkNameSpaceType::InterProcessCommunication),
        ("uts", LinkNameSpaceType::HostNameAndNISDomainName),
        // The way to the others leads through this one's `/proc`.
        ("mnt", LinkNameSpaceType::Mount),
    ];
    let spaces: Vec<_> = kinds.map(|(name, kind)| (File::open(format!("/proc/{pid}/ns/{name}")).unwrap(), kind)).into();
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let (mut report, answer) = io::pipe().unwrap();
    // SAFETY: the child has one thread, and ends by `_exit`; the C library keeps its allocator usable in it.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let enter = || -> io::Result<Vec<String>> {
            join_groups(&groups)?;
            // SAFETY: this process has one thread.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS)? };
            if identity == Identity::Whole {
                for (space, kind) in &spaces {
                    rustix::thread::move_into_link_name_space(space.as_fd(), Some(*kind))?;
                }
            }
            let (uid, gid) = (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(uid));
            rustix::thread::set_thread_groups(&[])?;
            rustix::thread::set_thread_res_gid(gid, gid, gid)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
            Ok(work())
        };
        let text = enter().unwrap_or_else(|error| vec![format!("the helper failed: {error}")]).join("\n");
        (&answer).write_all(text.as_bytes()).ok();
        // SAFETY: ends this process without the handlers of the test program.
        unsafe { libc::_exit(0) }
    }
    drop(answer);
    let mut text = String::new();
    report.read_to_string(&mut text).unwrap();
    rustix::process::waitpid(rustix::process::Pid::from_raw(child), rustix::process::WaitOptions::empty()).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// Enters the groups of a VMM: their limits count for who broke out, too.
fn join_groups(groups: &str) -> io::Result<()> {
    for line in groups.lines().filter(|line| line.contains("/coppice-test-")) {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controller, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let mount =
            if controller.is_empty() { "/sys/fs/cgroup".to_owned() } else { format!("/sys/fs/cgroup/{controller}") };
        std::fs::write(format!("{mount}{path}/cgroup.procs"), "0")?;
    }
    Ok(())
}

/// What must fail: says what did not, or with an unexpected error.
struct Trial(Vec<String>);

impl Trial {
    fn fails<T>(&mut self, what: &str, result: io::Result<T>, expected: &[i32]) {
        match result {
            Ok(_) => self.0.push(format!("{what} is possible")),
            Err(error) if error.raw_os_error().is_some_and(|errno| expected.contains(&errno)) => {}
            Err(error) => self.0.push(format!("{what} fails otherwise: {error}")),
        }
    }
}

fn signal(pid: i32) -> io::Result<()> {
    // SAFETY: plain numbers; signal 0 only checks whether it might.
    if unsafe { libc::kill(pid, 0) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn read_memory(pid: i32) -> io::Result<()> {
    let mut byte = 0u8;
    let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(0x1000), iov_len: 1 };
    // SAFETY: `local` is one byte of ours; the kernel checks the rest.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    if read >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Network interfaces that are up.
fn interfaces_up() -> io::Result<Vec<String>> {
    // SAFETY: all-zero is a valid value of this plain struct; the socket is closed with its owner.
    let (socket, mut request) = unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        (<OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd), std::mem::zeroed::<libc::ifreq>())
    };
    let mut up = Vec::new();
    for index in 1..64 {
        request.ifr_ifru.ifru_ifindex = index;
        // SAFETY: both read and write one ifreq; the flags are valid when the second succeeds.
        unsafe {
            if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFNAME, &raw mut request) == 0
                && libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) == 0
                && i32::from(request.ifr_ifru.ifru_flags) & libc::IFF_UP != 0
            {
                up.push(format!("interface {index} is up"));
            }
        }
    }
    Ok(up)
}

#[test]
fn from_inside_a_vmms_identity_nothing_of_the_host_or_of_another_sandbox_can_be_reached() {
    let local = local_or_skip!("inside", &[]);
    let (one, other) = (Place::new(), Place::new());
    // Nobody is nearer than who sits at the same slot.
    let [first, second] = Seat::ALL.map(|seat| JailSlot::of(65_001, seat).unwrap());
    let (mine, theirs) = (one.start(&local, first), other.start(&local, second));
    let ends = (Ends(&local, mine), Ends(&local, theirs));
    let uid = |id: ProcessId| std::fs::metadata(format!("/proc/{}", id.pid)).unwrap().uid();
    assert!(uid(mine) >= UID_BASE && uid(theirs) >= UID_BASE && uid(theirs) != uid(mine));

    let mut secrets = ["disk.ext4", "memory", "qmp"].map(|name| other.dir.path().join(name)).to_vec();
    // Its own are no different: it has descriptors, not paths.
    secrets.push(one.dir.path().join("disk.ext4"));
    let hosts = ["coppice.db", "control.db", "credentials.env"].map(|name| Path::new("/var/lib/coppice").join(name));
    for name in ["coppice.db", "credentials.env"] {
        let path = other.dir.path().join(name);
        std::fs::write(&path, "secret").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        secrets.push(path);
    }
    let abstract_name = format!("coppice-jail-test-{}", std::process::id());
    let address = {
        use std::os::linux::net::SocketAddrExt;
        std::os::unix::net::SocketAddr::from_abstract_name(&abstract_name).unwrap()
    };
    let _listener = UnixListener::bind_addr(&address).unwrap();
    UnixStream::connect_addr(&address).unwrap();
    let test = i32::try_from(std::process::id()).unwrap();

    for identity in [Identity::Whole, Identity::User] {
        let wrong = inside(mine.pid, identity, || {
            let mut trial = Trial(Vec::new());
            for path in &secrets {
                for write in [false, true] {
                    let opened = OpenOptions::new().read(!write).write(write).open(path);
                    trial.fails(&format!("opening {}", path.display()), opened, &[libc::ENOENT, libc::EACCES]);
                }
            }
            for pid in [theirs.pid, test, 1] {
                trial.fails(&format!("a signal to {pid}"), signal(pid), &[libc::EPERM]);
                trial.fails(&format!("reading the memory of {pid}"), read_memory(pid), &[libc::EPERM]);
                for name in ["environ", "maps", "mem", "fd/3", "root/etc", "cwd", "pagemap"] {
                    let opened = File::open(format!("/proc/{pid}/{name}"));
                    trial.fails(&format!("/proc/{pid}/{name}"), opened, &[libc::ENOENT, libc::EACCES, libc::EPERM]);
                }
            }
            let made = File::create("/usr/lib/coppice-was-here");
            trial.fails("writing to /usr", made, &[libc::EROFS, libc::EACCES]);
            trial.fails("writing to /", File::create("/coppice-was-here"), &[libc::EROFS, libc::EACCES]);
            trial.fails(
                "raising privileges",
                rustix::thread::set_thread_uid(rustix::process::Uid::ROOT).map_err(Into::into),
                &[libc::EPERM],
            );
            if identity == Identity::Whole {
                trial.fails(
                    "connecting to an abstract socket",
                    UnixStream::connect_addr(&address),
                    &[libc::ECONNREFUSED],
                );
                for path in &hosts {
                    trial.fails(&format!("opening {}", path.display()), File::open(path), &[libc::ENOENT]);
                }
                trial.fails("looking at /proc", std::fs::read_dir("/proc"), &[libc::ENOENT]);
                trial.fails("looking at /var", std::fs::read_dir("/var"), &[libc::ENOENT]);
                trial.fails("opening a device", File::open("/dev/kvm"), &[libc::ENOENT]);
                trial.0.extend(interfaces_up().unwrap_or_else(|error| vec![format!("no list of interfaces: {error}")]));
                trial.0.extend(std::fs::metadata("/usr/lib").is_err().then(|| "it has no libraries".to_owned()));
            }
            trial.0
        });
        assert!(wrong.is_empty(), "{identity:?}: {wrong:#?}");
    }
    assert_eq!(end(&local, mine), "killed by signal 9");
    assert_eq!(end(&local, theirs), "killed by signal 9");
    drop(ends);
    drop(local);
    assert_nothing_left("inside");
}

#[test]
fn a_layer_that_is_left_out_is_noticed_and_named() {
    let alone = JailLayer::ALL.map(|layer| vec![layer]);
    // Without the one the other can't be put on, which is an error of its own.
    let both = vec![JailLayer::NoNewPrivs, JailLayer::Seccomp];
    for left_out in alone.into_iter().chain([both]) {
        let layer = left_out[0];
        let local = local_or_skip!("leaves", &left_out);
        let place = Place::new();
        let outcome = match place.spawn(&local, JailSlot { index: 65_010 }) {
            Ok(spawned) => {
                let _guard = Ends(&local, spawned.id);
                place.wait_for_monitor();
                let confirmed = local.confirm(spawned.id);
                end(&local, spawned.id);
                confirmed
            }
            Err(error) => Err(error),
        };
        assert!(matches!(&outcome, Err(VmError::Jail { layer: named, .. }) if *named == layer), "{layer}: {outcome:?}");
        drop(local);
        assert_nothing_left("leaves");
    }
}

#[test]
fn a_vmm_is_limited_holds_no_writable_image_and_is_known_only_to_who_spawned_it() {
    let local = local_or_skip!("limits", &[]);
    let place = Place::new();
    let slot = JailSlot { index: 65_020 };
    let id = place.start(&local, slot);
    let guard = Ends(&local, id);
    // What it holds of the memory image is for reading, whatever QEMU asked for.
    let image = place.memory.metadata().unwrap().ino();
    let mut of_image = 0;
    for entry in std::fs::read_dir(format!("/proc/{}/fd", id.pid)).unwrap() {
        let entry = entry.unwrap();
        if std::fs::metadata(entry.path()).is_ok_and(|meta| meta.ino() == image) {
            of_image += 1;
            let info = format!("/proc/{}/fdinfo/{}", id.pid, entry.file_name().display());
            let info = std::fs::read_to_string(info).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
            assert_eq!(i32::from_str_radix(flags, 8).unwrap() & libc::O_ACCMODE, libc::O_RDONLY, "{info}");
        }
    }
    assert!(of_image > 0);
    // Two VMMs of one user could reach into each other.
    let again = Place::new().spawn(&local, slot).unwrap_err();
    assert!(matches!(again, VmError::Jail { layer: JailLayer::User, .. }), "{again}");
    // Neither this process nor one of another instance is a VMM of this one's.
    let own = i32::try_from(std::process::id()).unwrap();
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let start_time = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap();
    let stranger = ProcessId { pid: own, start_time };
    local.adopt(stranger).unwrap_err();
    local.kill(stranger).unwrap_err();
    local.open_memory(stranger, 4096).unwrap_err();
    local.stats(stranger).unwrap_err();
    // A restarted daemon takes it over, and ends it.
    let next = local_or_skip!("limits", &[]);
    assert!(next.kill(id).is_err(), "it was not taken over yet");
    assert!(next.adopt(id).unwrap().is_some());
    assert!(next.adopt(ProcessId { start_time: id.start_time + 1, ..id }).unwrap().is_none());
    assert_eq!(next.open_memory(id, u64::from(MEMORY_MIB) << 20).unwrap().base.metadata().unwrap().ino(), image);
    assert!(next.stats(id).unwrap().pss_bytes > 0);
    assert_eq!(end(&next, id), "it ended");
    assert_eq!(end(&local, id), "killed by signal 9");
    drop(guard);
    drop((local, next));
    assert_nothing_left("limits");
}

#[test]
fn vmms_that_nobody_knows_are_ended_and_no_others() {
    let local = local_or_skip!("strays", &[]);
    let places = [Place::new(), Place::new(), Place::new()];
    // The last two sit at one slot: a crash between a machine and its successor.
    let seats = [(65_031, Seat::First), (65_032, Seat::First), (65_032, Seat::Second)];
    let slots = seats.map(|(index, seat)| JailSlot::of(index, seat).unwrap());
    let ids: Vec<ProcessId> = places.iter().zip(slots).map(|(place, slot)| place.start(&local, slot)).collect();
    let bake = Place::new();
    let bake_id = bake.start(&local, JailSlot::unslotted());
    let elsewhere = local_or_skip!("elsewhere", &[]);
    let guards: Vec<_> = ids.iter().chain([&bake_id]).map(|id| Ends(&local, *id)).collect();
    assert!(elsewhere.end_strays(&[]).unwrap().is_empty(), "another instance's are not touched");
    // As after a crash: the next daemon knows one of them, and neither the others nor a bake that somebody else does.
    let next = local_or_skip!("strays", &[]);
    assert!(next.adopt(ids[1]).unwrap().is_some());
    let mut ended = next.end_strays(&[ids[1]]).unwrap();
    ended.sort_by_key(|id| id.pid);
    let mut expected = vec![ids[0], ids[2]];
    expected.sort_by_key(|id| id.pid);
    assert_eq!(ended, expected);
    assert!(next.stats(ids[1]).unwrap().pss_bytes > 0);
    assert_eq!(local.ended(bake_id).unwrap(), None);
    assert!(next.end_strays(&[ids[1]]).unwrap().is_empty());
    assert_eq!(end(&next, ids[1]), "it ended");
    // The first daemon is still their parent here.
    for id in ids.iter().chain([&bake_id]) {
        end(&local, *id);
    }
    drop(guards);
    drop((local, next, elsewhere));
    assert_nothing_left("strays");
}

/// No cgroup of a test, in any hierarchy.
fn assert_nothing_left(name: &str) {
    let name = format!("coppice-test-{name}-{}", std::process::id());
    let mut folders = vec![PathBuf::from("/sys/fs/cgroup")];
    folders.extend(std::fs::read_dir("/sys/fs/cgroup").unwrap().map(|entry| entry.unwrap().path()));
    let left: Vec<PathBuf> = folders.iter().map(|folder| folder.join(&name)).filter(|path| path.exists()).collect();
    assert!(left.is_empty(), "{left:?}");
}
