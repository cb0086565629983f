//! What every engine must do. One suite, run against the fake and against real VMs.
//!
//! [`run`] panics with the name of the case that failed. It uses only the traits, the file system, and what a guest's
//! agent offers; where a case needs a real operating system in the guest, [`Guest::Real`] turns it on. It does not measure:
//! that is `examples/engine_bench.rs`.
#![expect(clippy::unwrap_used, reason = "a test suite: a failure is a panic, whose message says where")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use coppice_engine::{
    AdoptError, BootSpec, CapturePlan, Captured, Engine, GuestKernel, GuestSession, JailSlot, Nic, Rebind,
    RestoreError, SessionError, Vm, VmPlace, VmState,
};
use coppice_guest_proto::v1::{QuiesceRequest, ResumeReason, ThawRequest};
use coppice_snapshot::{MachineImage, MachineSpec, PendingImage};
use uuid::Uuid;

use crate::handshake;

/// What is in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guest {
    /// The fake's few words of shell.
    Fake,
    /// Linux, with a shell and coreutils.
    Real,
}

/// What the suite needs.
#[derive(Clone)]
pub struct Fixtures {
    /// An existing empty directory with a short path, best on a file system with reflink.
    pub dir: PathBuf,
    /// A root disk; it is cloned.
    pub disk: PathBuf,
    /// Kernel files.
    pub kernel: GuestKernel,
    /// Shape to boot.
    pub machine: MachineSpec,
    /// What is in the guest.
    pub guest: Guest,
    /// How long a guest may take to answer after a boot or a restore.
    pub patience: Duration,
    /// Makes network devices. They need to lead nowhere.
    pub nic: Arc<dyn Fn() -> Nic + Send + Sync>,
    /// Ends a VM's process behind the engine's back. That it is gone already is fine.
    pub crash: Arc<dyn Fn(i32) + Send + Sync>,
}

struct Suite {
    engine: Arc<dyn Engine>,
    fixtures: Fixtures,
    count: AtomicU32,
    pids: Mutex<Vec<i32>>,
}

impl Drop for Suite {
    /// A failed case must not leave VMs running: dropping their handles does.
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Ok(pids) = self.pids.get_mut()
        {
            pids.iter().for_each(|pid| (self.fixtures.crash)(*pid));
        }
    }
}

struct Machine {
    vm: Arc<dyn Vm>,
    session: GuestSession,
}

/// Runs all cases, one after the other.
pub async fn run(engine: Arc<dyn Engine>, fixtures: Fixtures) {
    let suite = Suite { engine, fixtures, count: AtomicU32::new(0), pids: Mutex::default() };
    let parent = suite.boots_and_answers().await;
    suite.pause_and_resume_are_idempotent(&parent).await;
    suite.a_new_session_ends_the_one_before(&parent).await;
    let parent = Machine { session: suite.handshake(&parent.vm, ResumeReason::Unpause).await, vm: parent.vm };
    suite.a_guest_that_does_not_answer_is_a_typed_timeout(&parent).await;
    let parent = Machine { session: suite.handshake(&parent.vm, ResumeReason::Unpause).await, vm: parent.vm };
    let image = suite.a_capture_holds_disk_and_memory_and_leaves_the_parent_alone(&parent).await;
    suite.parent_and_child_diverge(&parent, &image).await;
    suite.four_children_of_one_image(&image).await;
    suite.a_grandchild_has_what_both_generations_wrote(&image).await;
    suite.a_deleted_image_can_not_be_restored_but_its_children_live_and_fork(image).await;
    if suite.fixtures.guest == Guest::Real {
        suite.captures_in_a_row_restore_exactly(&parent).await;
    }
    suite.a_capture_while_paused_stays_paused(&parent).await;
    suite.an_abandoned_capture_leaves_nothing_and_the_parent_runs(&parent).await;
    suite.a_cloned_disk_has_what_was_written(&parent).await;
    let parent = suite.a_dropped_handle_leaves_the_vm_and_it_can_be_adopted(parent).await;
    suite.a_crash_is_noticed(&parent).await;
    suite.a_kill_is_idempotent_and_leaves_nothing(parent).await;
    suite.what_is_missing_is_named().await;
    if suite.fixtures.guest == Guest::Real {
        suite.a_guest_that_powers_off_or_panics_says_so().await;
    }
}

fn case(name: &str) {
    tracing::info!(name, "conformance");
}

impl Suite {
    fn next(&self, what: &str) -> PathBuf {
        self.fixtures.dir.join(format!("{what}{}", self.count.fetch_add(1, Ordering::Relaxed)))
    }

    /// Places for a machine whose disk is a clone of `disk`.
    fn place(&self, disk: &Path) -> VmPlace {
        let run_dir = self.next("r");
        std::fs::create_dir(&run_dir).unwrap();
        let own = self.next("d");
        coppice_disk::clone_file(disk, &own).unwrap();
        VmPlace { id: Uuid::new_v4(), run_dir, disk: own, console_log: self.next("c") }
    }

    fn rebind(&self, place: VmPlace) -> Rebind {
        let (kernel, nic) = (self.fixtures.kernel.clone(), (self.fixtures.nic)());
        Rebind { place, kernel, nic, jail: JailSlot::unslotted() }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.fixtures.patience
    }

    fn started(&self, vm: &Arc<dyn Vm>) {
        self.pids.lock().unwrap().push(vm.record().pid);
    }

    fn ended(&self, pid: i32) {
        self.pids.lock().unwrap().retain(|p| *p != pid);
    }

    async fn handshake(&self, vm: &Arc<dyn Vm>, reason: ResumeReason) -> GuestSession {
        let session = vm.open_session(self.deadline()).await.unwrap();
        session.resume(handshake::request(reason), self.deadline()).await.unwrap();
        session
    }

    async fn boot(&self, reason: ResumeReason) -> Machine {
        let spec = BootSpec {
            place: self.place(&self.fixtures.disk),
            machine: self.fixtures.machine.clone(),
            kernel: self.fixtures.kernel.clone(),
            nic: (self.fixtures.nic)(),
            jail: JailSlot::unslotted(),
        };
        let vm = self.engine.boot(spec).await.unwrap();
        self.started(&vm);
        Machine { session: self.handshake(&vm, reason).await, vm }
    }

    async fn restore(&self, image: &MachineImage) -> Machine {
        let rebind = self.rebind(self.place(&image.disk_path()));
        let vm = self.engine.restore(image, rebind).await.unwrap();
        self.started(&vm);
        Machine { session: self.handshake(&vm, ResumeReason::Fork).await, vm }
    }

    async fn capture(&self, vm: &Arc<dyn Vm>, durable: bool) -> Captured {
        let image = PendingImage::create(&self.next("i")).unwrap();
        vm.capture(CapturePlan { image, id: Uuid::new_v4(), durable, hold: None }).await.unwrap()
    }

    async fn boots_and_answers(&self) -> Machine {
        case("boots and answers");
        let parent = self.boot(ResumeReason::Bake).await;
        assert_eq!(*parent.vm.state().borrow(), VmState::Running);
        assert_eq!(parent.shell("echo hello").await, "hello\n");
        let failed = parent.session.run(&["/bin/sh", "-c", "exit 3"], self.fixtures.patience).await.unwrap();
        assert_eq!((failed.exit_code, failed.timed_out), (3, false));
        let stats = parent.vm.stats().await.unwrap();
        assert!(stats.pss_bytes > 0 && stats.disk_bytes > 0);
        parent
    }

    async fn pause_and_resume_are_idempotent(&self, parent: &Machine) {
        case("pause and resume are idempotent");
        for _ in 0..2 {
            parent.vm.pause().await.unwrap();
            assert_eq!(*parent.vm.state().borrow(), VmState::Paused);
        }
        let waits = parent.session.run(&["/bin/sh", "-c", "true"], self.fixtures.patience);
        assert!(tokio::time::timeout(Duration::from_millis(150), waits).await.is_err());
        for _ in 0..2 {
            parent.vm.resume().await.unwrap();
            assert_eq!(*parent.vm.state().borrow(), VmState::Running);
        }
        assert_eq!(parent.shell("echo again").await, "again\n");
    }

    async fn a_new_session_ends_the_one_before(&self, parent: &Machine) {
        case("a new session ends the one before");
        let new = parent.vm.open_session(self.deadline()).await.unwrap();
        tokio::time::timeout(self.fixtures.patience, parent.session.closed()).await.unwrap();
        assert!(parent.session.is_closed() && !new.is_closed());
        assert_ne!(parent.session.id(), new.id());
        parent.session.run(&["/bin/sh", "-c", "true"], Duration::from_secs(1)).await.unwrap_err();
    }

    async fn a_guest_that_does_not_answer_is_a_typed_timeout(&self, parent: &Machine) {
        case("a guest that does not answer is a typed timeout");
        parent.vm.pause().await.unwrap();
        let soon = Instant::now() + Duration::from_millis(300);
        let error = parent.vm.open_session(soon).await.unwrap_err();
        assert!(matches!(error, SessionError::Timeout { .. }), "{error}");
        parent.vm.resume().await.unwrap();
    }

    async fn a_capture_holds_disk_and_memory_and_leaves_the_parent_alone(&self, parent: &Machine) -> MachineImage {
        case("a capture holds disk and memory and leaves the parent alone");
        parent.write("/root/on-disk", b"not flushed").await;
        parent.write("/run/in-memory", b"only in memory").await;
        if self.fixtures.guest == Guest::Real {
            // A process that holds a value nowhere but in its memory, and shows that it is alive.
            let line = "(v=$(cat /proc/sys/kernel/random/uuid); echo $v > /run/value; while :; do echo $v > /run/alive; \
                        sleep 0.1; done) > /dev/null 2>&1 & sleep 0.3; cat /run/value";
            assert_eq!(parent.shell(line).await.len(), 37);
        }
        let captured = self.capture(&parent.vm, true).await;
        captured.image.verify().unwrap();
        assert!(captured.memory_bytes > 0 && captured.timings.paused > Duration::ZERO);
        assert_eq!(*parent.vm.state().borrow(), VmState::Running);
        // The session from before goes on.
        assert_eq!(parent.shell("cat /run/in-memory").await, "only in memory");
        assert!(!parent.session.is_closed());
        captured.image
    }

    async fn parent_and_child_diverge(&self, parent: &Machine, image: &MachineImage) {
        case("parent and child diverge");
        let child = self.restore(image).await;
        assert_eq!(child.shell("cat /root/on-disk /run/in-memory").await, "not flushedonly in memory");
        if self.fixtures.guest == Guest::Real {
            let line = "rm /run/alive; sleep 0.5; cmp /run/alive /run/value && echo survived";
            assert_eq!(child.shell(line).await, "survived\n");
        }
        for path in ["/root/on-disk", "/run/in-memory"] {
            child.write(path, b"child").await;
            parent.write(path, b"parent").await;
        }
        assert_eq!(child.shell("cat /root/on-disk /run/in-memory").await, "childchild");
        assert_eq!(parent.shell("cat /root/on-disk /run/in-memory").await, "parentparent");
        child.end(self).await;
        image.verify().unwrap();
    }

    async fn four_children_of_one_image(&self, image: &MachineImage) {
        case("four children of one image");
        let children = futures::future::join_all((0..4).map(|_| self.restore(image))).await;
        for (index, child) in children.iter().enumerate() {
            assert_eq!(child.shell("cat /run/in-memory").await, "only in memory");
            child.write("/root/mine", index.to_string().as_bytes()).await;
        }
        for (index, child) in children.into_iter().enumerate() {
            assert_eq!(child.shell("cat /root/mine").await, index.to_string());
            child.end(self).await;
        }
        image.verify().unwrap();
    }

    async fn a_grandchild_has_what_both_generations_wrote(&self, image: &MachineImage) {
        case("a grandchild has what both generations wrote");
        let child = self.restore(image).await;
        child.write("/run/second", b"second").await;
        child.write("/root/second", b"second").await;
        let second = self.capture(&child.vm, false).await.image;
        let grandchild = self.restore(&second).await;
        let line = "cat /root/on-disk /run/in-memory /run/second /root/second";
        let expected = "not flushedonly in memorysecondsecond";
        assert_eq!(grandchild.shell(line).await, expected);
        assert_eq!(child.shell(line).await, expected);
        child.end(self).await;
        assert_eq!(grandchild.shell(line).await, expected);
        grandchild.end(self).await;
        std::fs::remove_dir_all(second.dir()).unwrap();
    }

    async fn a_deleted_image_can_not_be_restored_but_its_children_live_and_fork(&self, image: MachineImage) {
        case("a deleted image can't be restored, but its children live and fork");
        let child = self.restore(&image).await;
        // As publishing by rename, then deletion.
        let moved = self.next("m");
        std::fs::rename(image.dir(), &moved).unwrap();
        std::fs::remove_dir_all(&moved).unwrap();
        let place = self.place(&self.fixtures.disk);
        let run_dir = place.run_dir.clone();
        let rebind = self.rebind(place);
        let error = self.engine.restore(&image, rebind).await.unwrap_err();
        assert!(matches!(error, RestoreError::Image(_)), "{error}");
        assert_empty(&run_dir);
        assert_eq!(child.shell("cat /run/in-memory").await, "only in memory");
        let second = self.capture(&child.vm, true).await.image;
        second.verify().unwrap();
        let grandchild = self.restore(&second).await;
        assert_eq!(grandchild.shell("cat /root/on-disk /run/in-memory").await, "not flushedonly in memory");
        grandchild.end(self).await;
        child.end(self).await;
    }

    /// Two captures of one machine, with pages changed and set to zero in between, the first one's image gone, and a child of
    /// the second that outlives its image.
    async fn captures_in_a_row_restore_exactly(&self, parent: &Machine) {
        case("captures in a row restore exactly");
        let sum = "sha256sum < /dev/shm/pages";
        parent.shell("head -c 24M /dev/urandom > /dev/shm/pages").await;
        let first = self.capture(&parent.vm, false).await;
        assert!(first.memory_written_bytes > 24 << 20 && first.memory_written_bytes <= first.memory_bytes);
        std::fs::remove_dir_all(first.image.dir()).unwrap();
        let change = "dd if=/dev/zero of=/dev/shm/pages bs=1M seek=4 count=2 conv=notrunc 2>&1 && \
                      dd if=/dev/urandom of=/dev/shm/pages bs=64k seek=201 count=1 conv=notrunc 2>&1";
        parent.shell(change).await;
        let expected = parent.shell(sum).await;
        let second = self.capture(&parent.vm, false).await;
        let child = self.restore(&second.image).await;
        assert_eq!(child.shell(sum).await, expected);
        std::fs::remove_dir_all(second.image.dir()).unwrap();
        parent.shell("head -c 24M /dev/urandom > /dev/shm/pages").await;
        let third = self.capture(&parent.vm, false).await;
        assert_eq!(child.shell(sum).await, expected);
        parent.shell("rm /dev/shm/pages").await;
        child.end(self).await;
        std::fs::remove_dir_all(third.image.dir()).unwrap();
    }

    async fn a_capture_while_paused_stays_paused(&self, parent: &Machine) {
        case("a capture while paused stays paused");
        parent.vm.pause().await.unwrap();
        let captured = self.capture(&parent.vm, false).await;
        assert_eq!(*parent.vm.state().borrow(), VmState::Paused);
        // The image is of a machine that runs.
        let child = self.restore(&captured.image).await;
        assert_eq!(*child.vm.state().borrow(), VmState::Running);
        child.end(self).await;
        parent.vm.resume().await.unwrap();
        assert_eq!(parent.shell("echo back").await, "back\n");
    }

    async fn an_abandoned_capture_leaves_nothing_and_the_parent_runs(&self, parent: &Machine) {
        case("an abandoned capture leaves nothing, and the parent runs");
        for wait in [0, 1, 3, 10, 30] {
            let dir = self.next("i");
            let image = PendingImage::create(&dir).unwrap();
            let capture = parent.vm.capture(CapturePlan { image, id: Uuid::new_v4(), durable: false, hold: None });
            let done = tokio::time::timeout(Duration::from_millis(wait), capture).await.is_ok();
            assert_eq!(parent.shell("echo runs").await, "runs\n");
            let gone = eventually(self.fixtures.patience, || done || !dir.exists()).await;
            assert!(gone, "an abandoned image is still at {}", dir.display());
            assert_eq!(*parent.vm.state().borrow(), VmState::Running);
        }
    }

    async fn a_cloned_disk_has_what_was_written(&self, parent: &Machine) {
        case("a cloned disk has what was written");
        parent.write("/root/for-the-clone", b"there").await;
        let dest = self.next("d");
        // What is in the guest's page cache is the guest's to flush.
        let mut agent = parent.session.client();
        assert!(agent.quiesce(QuiesceRequest { max_freeze_ms: 5000 }).await.unwrap().into_inner().frozen);
        let clone = parent.vm.clone_disk(&dest).await.unwrap();
        agent.thaw(ThawRequest {}).await.unwrap();
        assert!(clone.paused > Duration::ZERO);
        parent.vm.clone_disk(&dest).await.unwrap_err();
        assert_eq!(*parent.vm.state().borrow(), VmState::Running);
        let spec = BootSpec {
            place: self.place(&dest),
            machine: self.fixtures.machine.clone(),
            kernel: self.fixtures.kernel.clone(),
            nic: (self.fixtures.nic)(),
            jail: JailSlot::unslotted(),
        };
        let vm = self.engine.boot(spec).await.unwrap();
        self.started(&vm);
        let child = Machine { session: self.handshake(&vm, ResumeReason::Fork).await, vm };
        assert_eq!(child.shell("cat /root/for-the-clone").await, "there");
        let memory = child.session.run(&["/bin/sh", "-c", "cat /run/in-memory"], self.fixtures.patience).await.unwrap();
        assert_ne!(memory.exit_code, 0, "a plain fork has the disk only");
        child.end(self).await;
    }

    async fn a_dropped_handle_leaves_the_vm_and_it_can_be_adopted(&self, parent: Machine) -> Machine {
        case("a dropped handle leaves the VM, and it can be adopted");
        let Machine { vm, session } = parent;
        let record = vm.record();
        drop(vm);
        tokio::time::timeout(self.fixtures.patience, session.closed()).await.unwrap();
        let json = serde_json::to_string(&record).unwrap();
        let record = serde_json::from_str(&json).unwrap();
        let vm = self.engine.adopt(record).await.unwrap();
        assert_eq!(*vm.state().borrow(), VmState::Running);
        let parent = Machine { session: self.handshake(&vm, ResumeReason::Unpause).await, vm };
        assert_eq!(parent.shell("cat /run/in-memory").await, "parent");
        // Capture still finds the memory of a machine that it did not start.
        let child = self.restore(&self.capture(&parent.vm, false).await.image).await;
        assert_eq!(child.shell("cat /run/in-memory").await, "parent");
        child.end(self).await;
        parent
    }

    async fn a_crash_is_noticed(&self, parent: &Machine) {
        case("a crash is noticed");
        let child = self.restore(&self.capture(&parent.vm, false).await.image).await;
        let mut state = child.vm.state();
        (self.fixtures.crash)(child.vm.record().pid);
        let dead = state.wait_for(|s| matches!(s, VmState::Dead(_)));
        tokio::time::timeout(self.fixtures.patience, dead).await.unwrap().unwrap();
        tokio::time::timeout(self.fixtures.patience, child.session.closed()).await.unwrap();
        child.vm.pause().await.unwrap_err();
        let error = child.vm.open_session(self.deadline()).await.unwrap_err();
        assert!(matches!(error, SessionError::Dead { .. }), "{error}");
        let image = PendingImage::create(&self.next("i")).unwrap();
        let dir = image.dir().to_owned();
        child.vm.capture(CapturePlan { image, id: Uuid::new_v4(), durable: false, hold: None }).await.unwrap_err();
        assert!(!dir.exists());
        let error = self.engine.adopt(child.vm.record()).await.unwrap_err();
        assert!(matches!(error, AdoptError::Gone), "{error}");
        child.end(self).await;
    }

    async fn a_kill_is_idempotent_and_leaves_nothing(&self, parent: Machine) {
        case("a kill is idempotent and leaves nothing");
        let place = parent.vm.record().place;
        self.ended(parent.vm.record().pid);
        parent.vm.kill().await.unwrap();
        parent.vm.kill().await.unwrap();
        assert!(matches!(&*parent.vm.state().borrow(), VmState::Dead(_)));
        assert_empty(&place.run_dir);
        assert!(place.disk.exists(), "the disk is the caller's");
        let console = std::fs::metadata(&place.console_log).unwrap();
        assert!(console.len() > 0);
    }

    async fn what_is_missing_is_named(&self) {
        case("what is missing is named");
        let place = self.place(&self.fixtures.disk);
        std::fs::remove_file(&place.disk).unwrap();
        let run_dir = place.run_dir.clone();
        let (machine, kernel) = (self.fixtures.machine.clone(), self.fixtures.kernel.clone());
        let spec = BootSpec { place, machine, kernel, nic: (self.fixtures.nic)(), jail: JailSlot::unslotted() };
        let error = self.engine.boot(spec).await.unwrap_err();
        assert!(matches!(error, coppice_engine::BootError::Missing { what: "disk", .. }), "{error}");
        assert_empty(&run_dir);
    }

    async fn a_guest_that_powers_off_or_panics_says_so(&self) {
        case("a guest that powers off or panics says so");
        for (key, expected) in [("o", "powered off"), ("c", "panic")] {
            let machine = self.boot(ResumeReason::Bake).await;
            let mut state = machine.vm.state();
            let line = format!("echo {key} > /proc/sysrq-trigger");
            // The guest may be gone before it can report.
            drop(machine.session.run(&["/bin/sh", "-c", &line], Duration::from_secs(5)).await);
            let dead = state.wait_for(|s| matches!(s, VmState::Dead(_)));
            let dead = tokio::time::timeout(self.fixtures.patience, dead).await.unwrap().unwrap().clone();
            assert!(matches!(&dead, VmState::Dead(reason) if reason.contains(expected)), "{dead:?}");
            machine.end(self).await;
        }
    }
}

impl Machine {
    async fn shell(&self, line: &str) -> String {
        let output = self.session.run(&["/bin/sh", "-c", line], Duration::from_secs(30)).await.unwrap();
        assert_eq!(output.exit_code, 0, "{line}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    async fn write(&self, path: &str, data: &[u8]) {
        let deadline = Instant::now() + Duration::from_secs(30);
        self.session.write_file(path, Bytes::copy_from_slice(data), 0, deadline).await.unwrap();
        assert_eq!(self.session.read_file(path, 1 << 20, deadline).await.unwrap(), data);
    }

    async fn end(self, suite: &Suite) {
        let run_dir = self.vm.record().place.run_dir;
        suite.ended(self.vm.record().pid);
        self.vm.kill().await.unwrap();
        assert_empty(&run_dir);
    }
}

fn assert_empty(dir: &Path) {
    let left: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

async fn eventually(within: Duration, condition: impl Fn() -> bool) -> bool {
    let end = Instant::now() + within;
    while Instant::now() < end {
        if condition() {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    condition()
}
