//! Both ends of the socket in one process, on real descriptors. What the calls mean is behind the traits and tested there;
//! here they are stand-ins that remember what they were asked for.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coppice_engine::{
    ArenaId, JailLayer, JailReport, JailSlot, MemoryHandle, Privileged, ProcessId, ProcessStats, Range, SpawnFds,
    SpawnOrder, Spawned, StartFds, StartKind, VmError, VmmFacts,
};
use coppice_net::{Counters, Egress, NetError, Opening, Seat, Slot, SlotRecord, Slots, address_of};
use coppice_snapshot::{Accel, MachineSpec};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::client::{CallError, MAX_CONNECTIONS, lock};
use crate::message::{MachineRequest, Request, SlotsRequest};
use crate::{Broker, RemotePrivileged, RemoteSlots, Server, frame};

fn text_file(text: &str) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.into()
}

fn text_of(fd: impl AsFd) -> String {
    let (mut file, mut text) = (File::from(fd.as_fd().try_clone_to_owned().unwrap()), String::new());
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    text
}

#[derive(Debug, Default)]
struct TestSlots {
    kept: Mutex<Vec<SlotRecord>>,
    opened: Mutex<Vec<Opening>>,
    /// Calls of `counters` meet here, if it is set: they must be there at the same time.
    meet: Option<Barrier>,
}

impl TestSlots {
    fn slot(seat: Seat) -> Slot {
        let tap = Arc::new(text_file(tap_of(seat)));
        Slot { index: 3, seat, mac: [2, 0x63, 1, 2, 3, 4], address: address_of(3).unwrap(), tap }
    }
}

fn tap_of(seat: Seat) -> &'static str {
    match seat {
        Seat::First => "tap",
        Seat::Second => "other tap",
    }
}

impl Slots for TestSlots {
    fn reclaim(&self, keep: &[SlotRecord]) -> Result<(), NetError> {
        *lock(&self.kept) = keep.to_vec();
        Ok(())
    }
    fn take(&self, egress: &Egress) -> Result<Slot, NetError> {
        if *egress == Egress::None {
            return Err(NetError::Exhausted { limit: 7 });
        }
        Ok(Self::slot(Seat::First))
    }
    fn reseat(&self, index: u32) -> Result<Slot, NetError> {
        if index == 3 { Ok(Self::slot(Seat::Second)) } else { Err(NetError::UnknownSlot { index }) }
    }
    fn unseat(&self, index: u32, _seat: Seat) -> Result<(), NetError> {
        if index == 3 { Ok(()) } else { Err(NetError::UnknownSlot { index }) }
    }
    fn put(&self, index: u32) -> Result<(), NetError> {
        if index == 3 { Ok(()) } else { Err(NetError::UnknownSlot { index }) }
    }
    fn set_egress(&self, _index: u32, _egress: &Egress) -> Result<(), NetError> {
        let source = io::Error::from_raw_os_error(libc::ENOSPC);
        Err(NetError::System { what: "a rule".into(), source })
    }
    fn open_names(&self, _index: u32, openings: &[Opening]) -> Result<(), NetError> {
        lock(&self.opened).extend_from_slice(openings);
        Ok(())
    }
    fn guest_socket(&self) -> Result<OwnedFd, NetError> {
        Ok(text_file("guest"))
    }
    fn dns_sockets(&self) -> Result<(OwnedFd, OwnedFd), NetError> {
        Ok((text_file("udp"), text_file("tcp")))
    }
    fn counters(&self) -> Result<Counters, NetError> {
        if let Some(meet) = &self.meet {
            meet.wait();
        }
        Ok(Counters { spoofed: 1, refused: u64::MAX, host_refused: 3 })
    }
    fn capacity(&self) -> (u32, u32) {
        (1, 1000)
    }
    fn close(&self) -> Result<(), NetError> {
        Err(NetError::InUse { taken: 1 })
    }
}

const VMM: ProcessId = ProcessId { pid: 4_000_000, start_time: 77 };
const EARLIER: ProcessId = ProcessId { pid: 4_000_001, start_time: 78 };

#[derive(Debug, Default)]
struct TestPrivileged {
    orders: Mutex<Vec<(SpawnOrder, usize)>>,
    arenas: Mutex<Vec<File>>,
    killed: Mutex<Vec<ProcessId>>,
}

impl Privileged for TestPrivileged {
    fn facts(&self) -> io::Result<VmmFacts> {
        Ok(VmmFacts {
            version: "7.2.22".into(),
            accel: Accel::Tcg,
            accel_reason: "a reason".into(),
            boot_id: "b".into(),
            jail: JailReport::On { missing: vec!["cgroup: none".into()] },
        })
    }
    fn spawn(&self, order: &SpawnOrder, fds: SpawnFds<'_>) -> Result<Spawned, VmError> {
        assert_eq!(fds.kind(), order.start);
        assert_eq!(text_of(fds.memory), "memory");
        assert_eq!(text_of(fds.tap), tap_of(order.jail.place().unwrap().1), "the seat's own, whichever came");
        if order.machine.cpus == 64 {
            return Err(VmError::Jail { layer: JailLayer::Cgroup, problem: "none".into() });
        }
        lock(&self.orders).push((order.clone(), fds.list().len()));
        Ok(Spawned { id: VMM, pidfd: text_file("pidfd") })
    }
    fn confirm(&self, id: ProcessId) -> Result<(), VmError> {
        assert_eq!(id, VMM);
        Err(VmError::Dead { reason: "it ended".into() })
    }
    fn end_strays(&self, keep: &[ProcessId]) -> io::Result<Vec<ProcessId>> {
        assert_eq!(keep, [EARLIER]);
        Ok(vec![ProcessId { pid: 77, start_time: 7 }])
    }
    fn adopt(&self, id: ProcessId) -> Result<Option<OwnedFd>, VmError> {
        match id {
            EARLIER => Ok(Some(text_file("earlier"))),
            ProcessId { pid: 5_000_000, .. } => Ok(None),
            _ => Err(VmError::NoSpace),
        }
    }
    fn kill(&self, id: ProcessId) -> io::Result<()> {
        lock(&self.killed).push(id);
        Ok(())
    }
    fn ended(&self, id: ProcessId) -> io::Result<Option<String>> {
        Ok((lock(&self.killed).contains(&id)).then(|| "killed by signal 9".into()))
    }
    fn open_memory(&self, _id: ProcessId, len: u64) -> io::Result<MemoryHandle> {
        if len == 4096 {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let file = |text| File::from(text_file(text));
        Ok(MemoryHandle { start: 0x7f00_0000_0000, pagemap: file("pagemap"), base: file("base") })
    }
    fn read_memory(&self, _id: ProcessId, ranges: &[Range], arena: ArenaId) -> io::Result<()> {
        let arenas = lock(&self.arenas);
        let place = usize::try_from(arena.0).unwrap();
        let mut arena = arenas.get(place).ok_or_else(|| io::Error::other("no such arena"))?;
        let total: u64 = ranges.iter().map(|range| range.len).sum();
        arena.rewind()?;
        write!(arena, "{} {total}", ranges.len())
    }
    fn register_arena(&self, memory: BorrowedFd<'_>, _len: u64) -> io::Result<ArenaId> {
        let mut arenas = lock(&self.arenas);
        arenas.push(memory.try_clone_to_owned()?.into());
        Ok(ArenaId(arenas.len() as u64 - 1))
    }
    fn drop_arena(&self, _arena: ArenaId) -> io::Result<()> {
        Ok(())
    }
    fn stats(&self, _id: ProcessId) -> io::Result<ProcessStats> {
        Ok(ProcessStats { pss_bytes: 1, private_bytes: 2, cpu_time: Duration::from_millis(3) })
    }
}

/// A broker with its server on a thread.
struct World {
    broker: Broker,
    gifts: Vec<OwnedFd>,
    slots: Arc<TestSlots>,
    privileged: Arc<TestPrivileged>,
    serving: JoinHandle<io::Result<()>>,
}

fn world_with(slots: TestSlots) -> World {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (slots, privileged) = (Arc::new(slots), Arc::<TestPrivileged>::default());
    let server = Server::new(privileged.clone(), slots.clone());
    let serving = std::thread::spawn(move || server.serve(&theirs, vec![text_file("first"), text_file("second")]));
    let (broker, inherited) = Broker::connect(ours).unwrap();
    World { broker, gifts: inherited.fds, slots, privileged, serving }
}

fn world() -> World {
    world_with(TestSlots::default())
}

/// A process that is there.
fn living(pid: i32) -> ProcessId {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields = stat.rsplit_once(')').unwrap().1;
    ProcessId { pid, start_time: fields.split_ascii_whitespace().nth(19).unwrap().parse().unwrap() }
}

impl World {
    fn slots(&self) -> RemoteSlots {
        RemoteSlots::new(self.broker.clone())
    }

    fn privileged(&self) -> RemotePrivileged {
        RemotePrivileged::new(self.broker.clone())
    }

    /// Still there and in step.
    fn answers(&self) {
        assert_eq!(self.slots().capacity(), (1, 1000));
    }

    /// A connection without a client: for what no honest one says.
    fn raw(&self) -> UnixStream {
        self.broker.open().unwrap()
    }

    fn refused(&self, request: MachineRequest, fds: &[BorrowedFd<'_>]) {
        let answer = self.broker.call(&Request::Machine(request), fds);
        assert!(matches!(&answer, Err(CallError::Failed(crate::failure::Failure::Refused(_)))), "{answer:?}");
        self.answers();
    }
}

#[test]
fn what_the_privileged_half_has_for_the_other_comes_with_the_greeting() {
    let world = world();
    let texts: Vec<String> = world.gifts.iter().map(text_of).collect();
    assert_eq!(texts, ["first", "second"]);
    drop(world.broker);
    world.serving.join().unwrap().unwrap();
}

#[test]
fn slots_are_the_same_on_both_sides() {
    let world = world();
    let slots = world.slots();
    let listed = Egress::allow(&["1.2.3.0/24:443", "*.example.org"]).unwrap();
    for egress in [&Egress::Open, &listed] {
        let slot = slots.take(egress).unwrap();
        assert_eq!((slot.index, slot.mac, slot.address), (3, [2, 0x63, 1, 2, 3, 4], address_of(3).unwrap()));
        assert_eq!(text_of(&slot.tap), "tap");
    }
    assert!(matches!(slots.take(&Egress::None), Err(NetError::Exhausted { limit: 7 })));
    let next = slots.reseat(3).unwrap();
    assert_eq!((next.index, next.seat, next.mac), (3, Seat::Second, [2, 0x63, 1, 2, 3, 4]));
    assert_eq!(text_of(&next.tap), "other tap");
    slots.unseat(3, Seat::First).unwrap();
    assert!(matches!(slots.reseat(4), Err(NetError::UnknownSlot { index: 4 })));
    assert!(matches!(slots.unseat(4, Seat::First), Err(NetError::UnknownSlot { index: 4 })));
    assert!(matches!(slots.reseat(u32::MAX), Err(NetError::Remote { .. })));
    slots.put(3).unwrap();
    assert!(matches!(slots.put(4), Err(NetError::UnknownSlot { index: 4 })));
    assert!(matches!(slots.put(u32::MAX), Err(NetError::Remote { .. })));
    match slots.set_egress(3, &listed) {
        Err(NetError::System { what, source }) => {
            assert_eq!((what.as_str(), source.kind()), ("a rule", io::ErrorKind::StorageFull));
        }
        other => panic!("{other:?}"),
    }
    let opening = Opening { address: Ipv4Addr::new(1, 1, 1, 1), port: Some(443), ttl: Duration::from_secs(9) };
    slots.open_names(3, &vec![opening.clone(); 2500]).unwrap();
    assert_eq!(*lock(&world.slots.opened), vec![opening; 2500]);
    assert_eq!(text_of(slots.guest_socket().unwrap()), "guest");
    let (udp, tcp) = slots.dns_sockets().unwrap();
    assert_eq!((text_of(udp).as_str(), text_of(tcp).as_str()), ("udp", "tcp"));
    assert_eq!(slots.counters().unwrap(), Counters { spoofed: 1, refused: u64::MAX, host_refused: 3 });
    assert_eq!(slots.capacity(), (1, 1000));
    assert_eq!(slots.slot_of(address_of(9).unwrap()), Some(9));
    assert!(matches!(slots.close(), Err(NetError::InUse { taken: 1 })));
}

#[test]
fn records_for_more_than_one_message_arrive_as_one_list() {
    let world = world();
    let name = |n: u32| format!("{}.{n}.example.org:443", "long-label-of-a-name".repeat(3));
    let records: Vec<SlotRecord> = (0..600)
        .map(|index| SlotRecord {
            index,
            mac: [2, 0x63, 0, 0, 0, 1],
            address: address_of(index).unwrap(),
            egress: Egress::allow(&(0..64).map(name).collect::<Vec<_>>()).unwrap(),
            seat: Seat::Second,
        })
        .collect();
    assert!(crate::message::encode(&records).unwrap().len() > 2 * frame::MAX_MESSAGE);
    world.slots().reclaim(&records).unwrap();
    assert!(*lock(&world.slots.kept) == records);
    world.slots().reclaim(&[]).unwrap();
    assert!(lock(&world.slots.kept).is_empty());
}

/// What a VMM is started with.
struct Parts {
    _dir: tempfile::TempDir,
    sockets: [UnixListener; 4],
    files: [OwnedFd; 5],
    tap: OwnedFd,
}

impl Parts {
    fn new() -> Option<Self> {
        // Only the kind is looked at, so one without a device will do; but there are hosts without any.
        let tap = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun").ok()?.into();
        let dir = tempfile::tempdir().unwrap();
        let listen = |name| UnixListener::bind(dir.path().join(name)).unwrap();
        let sockets = ["a", "b", "c", "d"].map(listen);
        let files = ["log", "memory", "disk", "kernel", "initramfs"].map(text_file);
        Some(Self { _dir: dir, sockets, files, tap })
    }

    fn fds(&self) -> SpawnFds<'_> {
        let [monitor, console, first, second] = self.sockets.each_ref().map(AsFd::as_fd);
        let [log, memory, disk, vmlinuz, initramfs] = self.files.each_ref().map(AsFd::as_fd);
        let start = StartFds::Boot { vmlinuz, initramfs };
        SpawnFds { monitor, console, ports: [first, second], log, memory, disk, tap: self.tap.as_fd(), start }
    }
}

fn order() -> SpawnOrder {
    let machine = MachineSpec {
        cpus: 1,
        memory_mib: 256,
        kernel: "k1".into(),
        initramfs: "i1".into(),
        cmdline: "coppice.x=1".into(),
    };
    let jail = JailSlot { index: 3 };
    SpawnOrder { machine, start: StartKind::Boot, mac: [2, 0x63, 1, 2, 3, 4], jail }
}

#[test]
fn machines_are_the_same_on_both_sides() {
    let Some(parts) = Parts::new() else { return };
    let world = world();
    let privileged = world.privileged();
    assert_eq!(privileged.facts().unwrap(), world.privileged.facts().unwrap());
    world.refused(MachineRequest::Spawn(order()), &parts.fds().list());
    let slot = world.slots().take(&Egress::Open).unwrap();
    let spawned = privileged.spawn(&order(), parts.fds()).unwrap();
    assert_eq!((spawned.id, text_of(&spawned.pidfd).as_str()), (VMM, "pidfd"));
    assert_eq!(*lock(&world.privileged.orders), [(order(), 10)]);
    let mut large = order();
    large.machine.cpus = 64;
    let refused = privileged.spawn(&large, parts.fds());
    assert!(matches!(refused, Err(VmError::Jail { layer: JailLayer::Cgroup, .. })), "{refused:?}");
    assert!(matches!(privileged.confirm(VMM), Err(VmError::Dead { reason }) if reason == "it ended"));
    world.slots().put(slot.index).unwrap();
    world.refused(MachineRequest::Spawn(order()), &parts.fds().list());
    let memory = privileged.open_memory(VMM, 1 << 28).unwrap();
    assert_eq!((memory.start, text_of(memory.pagemap), text_of(memory.base)), {
        (0x7f00_0000_0000, "pagemap".to_owned(), "base".to_owned())
    });
    assert_eq!(privileged.open_memory(VMM, 4096).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    let stats = privileged.stats(VMM).unwrap();
    assert_eq!(stats.cpu_time, Duration::from_millis(3));
    assert_eq!(privileged.ended(VMM).unwrap(), None);
    privileged.kill(VMM).unwrap();
    assert_eq!(privileged.ended(VMM).unwrap().as_deref(), Some("killed by signal 9"));
    privileged.kill(VMM).unwrap();
    assert_eq!(lock(&world.privileged.killed).len(), 1, "what has ended needs no killing");
}

#[test]
fn a_successor_sits_beside_its_predecessor_only_where_a_seat_was_made() {
    let Some(parts) = Parts::new() else { return };
    let world = world();
    let (privileged, slots) = (world.privileged(), world.slots());
    let order_for = |seat| SpawnOrder { jail: JailSlot::of(3, seat).unwrap(), ..order() };
    let refused = |seat| world.refused(MachineRequest::Spawn(order_for(seat)), &parts.fds().list());
    let started = |seat| drop(privileged.spawn(&order_for(seat), parts.fds()).unwrap());
    slots.take(&Egress::Open).unwrap();
    started(Seat::First);
    refused(Seat::Second);
    slots.reseat(3).unwrap();
    started(Seat::Second);
    // It could not take over.
    slots.unseat(3, Seat::Second).unwrap();
    refused(Seat::Second);
    started(Seat::First);
    // It did.
    slots.reseat(3).unwrap();
    slots.unseat(3, Seat::First).unwrap();
    refused(Seat::First);
    started(Seat::Second);
    slots.put(3).unwrap();
    refused(Seat::Second);
}

#[test]
fn a_machine_of_an_earlier_run_is_known_once_it_is_adopted() {
    let world = world();
    let privileged = world.privileged();
    let stranger = living(i32::try_from(std::process::id()).unwrap());
    assert_eq!(privileged.kill(stranger).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(privileged.ended(stranger).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(text_of(privileged.adopt(EARLIER).unwrap().unwrap()), "earlier");
    let stray = ProcessId { pid: 77, start_time: 7 };
    assert_eq!(privileged.end_strays(&[EARLIER]).unwrap(), [stray]);
    privileged.kill(EARLIER).unwrap();
    assert!(privileged.adopt(ProcessId { pid: 5_000_000, start_time: 1 }).unwrap().is_none());
    assert!(matches!(privileged.adopt(ProcessId { pid: 6, start_time: 1 }), Err(VmError::NoSpace)));
    assert_eq!(*lock(&world.privileged.killed), [EARLIER]);
}

fn arena(len: u64, seal: bool) -> OwnedFd {
    let memory = memfd_create("arena", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, len).unwrap();
    if seal {
        fcntl_add_seals(&memory, SealFlags::SHRINK).unwrap();
    }
    memory
}

#[test]
fn ranges_for_more_than_one_message_are_one_copy() {
    let world = world();
    let privileged = world.privileged();
    privileged.adopt(EARLIER).unwrap();
    let memory = arena(1 << 20, true);
    let arena = privileged.register_arena(memory.as_fd(), 1 << 20).unwrap();
    let ranges: Vec<Range> = (0..100_000).map(|n| Range { start: n << 20, len: 4096 }).collect();
    privileged.read_memory(EARLIER, &ranges, arena).unwrap();
    assert!(text_of(&memory).starts_with("100000 409600000"));
    let error = privileged.read_memory(EARLIER, &ranges, ArenaId(9)).unwrap_err();
    assert_eq!(error.to_string(), "no such arena");
    // What an unfinished list left must not be part of the next one.
    privileged.read_memory(EARLIER, &ranges[..1], arena).unwrap();
    assert!(text_of(&memory).starts_with("1 4096"));
    privileged.drop_arena(arena).unwrap();
}

#[test]
fn nobody_elses_process_can_be_named() {
    let world = world();
    let own = living(i32::try_from(std::process::id()).unwrap());
    let gone = [ProcessId { start_time: 1, ..own }, ProcessId { pid: -1, start_time: 0 }, VMM];
    for id in [own, living(1)].into_iter().chain(gone) {
        if gone.contains(&id) {
            // Nobody is there any more: that is what was asked for, and nobody is killed.
            world.privileged().kill(id).unwrap();
            assert_eq!(world.privileged().ended(id).unwrap().as_deref(), Some("it ended"));
        } else {
            world.refused(MachineRequest::Kill(id), &[]);
            world.refused(MachineRequest::Ended(id), &[]);
        }
        world.refused(MachineRequest::Confirm(id), &[]);
        world.refused(MachineRequest::OpenMemory(id, 1 << 28), &[]);
        let read = MachineRequest::ReadMemory { id, ranges: Vec::new(), arena: ArenaId(0), more: false };
        world.refused(read, &[]);
        world.refused(MachineRequest::Stats(id), &[]);
    }
    for pid in [0, 1, -1, i32::MIN] {
        world.refused(MachineRequest::Adopt(ProcessId { pid, start_time: 0 }), &[]);
    }
    assert!(lock(&world.privileged.killed).is_empty());
}

#[test]
fn orders_out_of_range_are_refused() {
    let Some(parts) = Parts::new() else { return };
    let world = world();
    world.slots().take(&Egress::Open).unwrap();
    let changes: [fn(&mut SpawnOrder); 14] = [
        |order| order.machine.cpus = 0,
        |order| order.machine.cpus = 65,
        |order| order.machine.memory_mib = 1 << 20,
        |order| order.machine.cmdline = "x".repeat(4000),
        |order| order.machine.cmdline = "a\nb".into(),
        |order| order.machine.kernel = "../k".into(),
        |order| order.mac = [1, 0, 0, 0, 0, 1],
        |order| order.mac = [0; 6],
        |order| order.mac = [2, 0x63, 1, 2, 3, 5],
        |order| order.jail = JailSlot { index: 4 },
        |order| order.jail = JailSlot::of(3, Seat::Second).unwrap(),
        |order| order.jail = JailSlot::unslotted(),
        |order| order.jail = JailSlot { index: u32::MAX },
        |order| order.start = StartKind::Restore,
    ];
    for change in changes {
        let mut order = order();
        change(&mut order);
        world.refused(MachineRequest::Spawn(order), &parts.fds().list());
    }
    world.refused(MachineRequest::OpenMemory(VMM, 5), &[]);
    assert!(lock(&world.privileged.orders).is_empty());
}

#[test]
fn descriptors_that_are_not_what_they_must_be_are_refused() {
    let Some(parts) = Parts::new() else { return };
    let world = world();
    world.slots().take(&Egress::Open).unwrap();
    let right = parts.fds().list();
    let (stream, _other) = UnixStream::pair().unwrap();
    let dir = File::open("/").unwrap();
    // Needs no right to read the file; opened again by root it would be readable.
    let path = rustix::fs::open("/etc/passwd", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    let readable = File::open("/etc/passwd").unwrap();
    let null = File::open("/dev/null").unwrap();
    for (place, wrong) in right.iter().enumerate() {
        let mut wrongs = vec![stream.as_fd(), dir.as_fd(), path.as_fd(), null.as_fd()];
        // Log and disk must be open for writing.
        if place == 4 || place == 6 {
            wrongs.push(readable.as_fd());
        }
        for fd in wrongs {
            let mut list = right.clone();
            list[place] = fd;
            world.refused(MachineRequest::Spawn(order()), &list);
        }
        assert!(wrong.as_fd().try_clone_to_owned().is_ok());
    }
    world.refused(MachineRequest::Spawn(order()), &right[1..]);
    world.refused(MachineRequest::Spawn(order()), &[]);
    world.refused(MachineRequest::Facts, &[stream.as_fd()]);
    world.refused(MachineRequest::RegisterArena(4096), &[]);
    for (memory, len) in [
        (arena(4096, false), 4096),
        (arena(4096, true), 8192),
        (arena(4096, true), 0),
        (arena(4096, true), u64::MAX),
        (arena(4096, true), 100),
        (text_file("x"), 4096),
    ] {
        world.refused(MachineRequest::RegisterArena(len), &[memory.as_fd()]);
    }
    assert!(lock(&world.privileged.orders).is_empty());
    // A connection is made of nothing but a unix socket either.
    let first = lock(world.broker.first());
    frame::send(&*first, &crate::message::encode(&Request::Connect).unwrap(), &[dir.as_fd()]).unwrap();
    let answer = frame::receive(&*first).unwrap();
    assert!(matches!(crate::message::decode::<crate::message::Reply>(&answer.message), Ok(Err(_))));
    drop(first);
    world.answers();
}

#[test]
fn what_is_not_understood_ends_its_connection_and_no_other() {
    let world = world();
    let huge = (u32::MAX.to_le_bytes(), [0u8; 4]);
    for bytes in [
        [&huge.0[..], &huge.1].concat(),
        vec![0; 8],
        vec![3, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ] {
        let mut raw = world.raw();
        raw.write_all(&bytes).unwrap();
        let mut rest = Vec::new();
        raw.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        // Closed, or reset when bytes were left unread: nothing was answered.
        assert_eq!(raw.read_to_end(&mut rest).unwrap_or(0), 0, "{bytes:?}");
        world.answers();
    }
    // Refused, but understood: the connection goes on.
    let raw = world.raw();
    for request in [Request::Hello { version: 0 }, Request::Connect, Request::Slots(SlotsRequest::Put(u32::MAX))] {
        frame::send(&raw, &crate::message::encode(&request).unwrap(), &[]).unwrap();
        frame::receive(&raw).unwrap();
    }
    world.answers();
}

#[test]
fn another_version_is_not_served() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = Server::new(Arc::<TestPrivileged>::default(), Arc::<TestSlots>::default());
    std::thread::spawn(move || server.serve(&theirs, Vec::new()));
    let hello = Request::Hello { version: crate::message::VERSION + 1 };
    frame::send(&ours, &crate::message::encode(&hello).unwrap(), &[]).unwrap();
    let answer = frame::receive(&ours).unwrap();
    assert!(matches!(crate::message::decode::<crate::message::Reply>(&answer.message), Ok(Err(_))));
}

#[test]
fn calls_at_the_same_time_do_not_wait_for_each_other_and_more_than_that_wait() {
    let calls = MAX_CONNECTIONS;
    let world = world_with(TestSlots { meet: Some(Barrier::new(calls)), ..TestSlots::default() });
    std::thread::scope(|scope| {
        // Twice as many as there are connections: they go in two rounds.
        for _ in 0..2 * calls {
            scope.spawn(|| world.slots().counters().unwrap());
        }
    });
    world.answers();
}

#[test]
fn the_end_of_the_privileged_half_is_noticed_and_calls_fail() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = Server::new(Arc::<TestPrivileged>::default(), Arc::<TestSlots>::default());
    let copy = theirs.try_clone().unwrap();
    let serving = std::thread::spawn(move || server.serve(&theirs, Vec::new()));
    let (broker, _) = Broker::connect(ours).unwrap();
    let waiting = {
        let broker = broker.clone();
        std::thread::spawn(move || broker.wait_for_end())
    };
    assert!(!waiting.is_finished());
    copy.shutdown(std::net::Shutdown::Both).unwrap();
    waiting.join().unwrap();
    serving.join().unwrap().unwrap();
    assert!(matches!(RemoteSlots::new(broker.clone()).put(1), Err(NetError::Remote { .. })));
    assert_eq!(RemotePrivileged::new(broker).facts().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

/// Not a bound that fails a build: a number to look at, with `--nocapture`.
#[test]
fn a_round_trip_is_measured() {
    let world = world();
    let slots = world.slots();
    let rounds = 2000u32;
    let measure = |name: &str, call: &dyn Fn()| {
        call();
        let begin = Instant::now();
        (0..rounds).for_each(|_| call());
        println!("{name}: {:?}", begin.elapsed() / rounds);
    };
    measure("a number", &|| assert_eq!(slots.capacity(), (1, 1000)));
    measure("a descriptor", &|| drop(slots.guest_socket().unwrap()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any bytes in well-formed frames: refused, answered, or the end of that connection, and the server goes on.
    #[test]
    fn any_message_leaves_the_server_alive(messages in proptest::collection::vec(proptest::collection::vec(prop_oneof![0u8..12, any::<u8>()], 0..60), 1..6), fds in 0usize..4) {
        let world = world();
        let raw = world.raw();
        for message in &messages {
            let sent = frame::send(&raw, message, &vec![raw.as_fd(); fds]);
            if sent.and_then(|()| frame::receive(&raw)).is_err() {
                break;
            }
        }
        world.answers();
        prop_assert!(lock(&world.privileged.orders).is_empty());
    }
}
