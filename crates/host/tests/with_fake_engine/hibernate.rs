//! Hibernate and wake: what comes back, who wakes, what fails, and a crash at any moment.

use super::*;

use coppice_host::ExecSpec;
use tokio::runtime::Runtime;

impl World {
    async fn hibernate(&self, id: &str) {
        self.host.hibernate(W, id).await.unwrap();
    }

    async fn status(&self, id: &str) -> SandboxStatus {
        self.host.get(W, id).await.unwrap().status
    }

    async fn hostname(&self, id: &str) -> String {
        let spec = ExecSpec { argv: vec!["hostname".into()], ..ExecSpec::default() };
        let mut events = self.host.exec(W, id, spec).await.unwrap();
        let mut name = String::new();
        while let Some(event) = events.next().await {
            if let coppice_host::ExecEvent::Stdout(piece) = event.unwrap() {
                name.push_str(std::str::from_utf8(&piece).unwrap());
            }
        }
        name
    }

    /// It is in its image and nowhere else.
    async fn asleep(&self, id: &str) {
        let sandbox = self.host.get(W, id).await.unwrap();
        assert_eq!((sandbox.status, sandbox.guest_ip.as_str()), (SandboxStatus::Hibernated, ""));
        assert!(self.engine.alive().is_empty() && self.slots.taken().is_empty());
        assert_eq!((self.snapshots().len(), names(&self.data.run_dir()).len()), (1, 0));
        assert_eq!(names(&self.data.sandboxes_dir()), [id.to_owned()].into());
        assert!(!self.data.sandboxes_dir().join(id).join("disk.ext4").exists());
    }

    /// A sandbox that has something in memory and on its disk, and hibernates.
    async fn sleeper(&self) -> String {
        let id = self.create().await.id;
        self.write(&id, "/root/disk", "d").await;
        self.write(&id, "/dev/shm/memory", "m").await;
        self.hibernate(&id).await;
        id
    }

    async fn is_whole(&self, id: &str) {
        assert_eq!(self.read(id, "/dev/shm/memory").await.unwrap(), "m");
        assert_eq!(self.read(id, "/root/disk").await.unwrap(), "d");
    }
}

#[tokio::test]
async fn what_hibernates_is_on_the_disk_only_and_wakes_as_it_was() {
    let w = world().await;
    let made = w.host.create(W, with_network(allow(&["example.org"]))).await.unwrap();
    let id = made.id.clone();
    w.write(&id, "/root/disk", "d").await;
    w.write(&id, "/dev/shm/memory", "m").await;
    let (name, held) = (w.hostname(&id).await, w.host.holdings(W).await.unwrap());
    w.hibernate(&id).await;
    w.asleep(&id).await;
    w.hibernate(&id).await;
    w.asleep(&id).await;
    assert!(w.host.list_snapshots(W, None).await.unwrap().is_empty(), "it is no snapshot of the client's");
    let image = w.snapshots().pop_first().unwrap();
    assert_eq!(w.host.get_snapshot(W, &image).await.unwrap_err().code(), "snapshot_not_found");
    assert_eq!(w.host.delete_snapshot(W, &image).await.unwrap_err().code(), "snapshot_not_found");
    assert_eq!(w.host.holdings(W).await.unwrap(), held);
    // Looking at it does not wake it, nor does a new run of the host.
    let w = w.restart().await;
    w.host.lifecycle(W, &id).await.unwrap();
    w.host.network(W, &id).await.unwrap();
    assert!(!w.host.logs(W, &id, None).await.unwrap().is_empty());
    assert_eq!(w.host.list(W).await.unwrap()[0].status, SandboxStatus::Hibernated);
    w.asleep(&id).await;
    // A policy can be changed meanwhile.
    w.host.set_network(W, &id, allow(&["example.net"])).await.unwrap();
    w.asleep(&id).await;

    w.host.wake(W, &id).await.unwrap();
    w.exactly([&id]).await;
    assert!(w.snapshots().is_empty(), "an image is woken once");
    w.is_whole(&id).await;
    assert_eq!(w.hostname(&id).await, name);
    assert_eq!(w.slots.taken().into_values().collect::<Vec<_>>(), [Egress::allow(&["example.net"]).unwrap()]);
    let woken = w.host.get(W, &id).await.unwrap();
    assert_eq!(w.read(&id, "/run/ip").await.unwrap().trim(), woken.guest_ip);
    assert_eq!((woken.created_at, woken.metadata), (made.created_at, made.metadata));
    w.host.wake(W, &id).await.unwrap();
    let w = w.restart().await;
    w.is_whole(&id).await;
    w.exactly([&id]).await;
}

#[tokio::test]
async fn every_use_wakes() {
    type Use = fn(Arc<Host>, String) -> futures::future::BoxFuture<'static, ()>;
    let uses: [Use; 8] = [
        |host, id| Box::pin(async move { drop(host.stat(W, &id, "/root/disk").await.unwrap()) }),
        |host, id| Box::pin(async move { host.remove(W, &id, "/root/disk").await.unwrap() }),
        |host, id| Box::pin(async move { drop(host.ports(W, &id).await.unwrap()) }),
        |host, id| Box::pin(async move { drop(host.connect(W, &id, 1).await) }),
        |host, id| Box::pin(async move { drop(host.snapshot(W, &id).await.unwrap()) }),
        |host, id| Box::pin(async move { drop(host.fork_tree(W, &id, spec(2)).await.unwrap()) }),
        |host, id| Box::pin(async move { drop(host.fork_disk(W, &id, spec(1)).await.unwrap()) }),
        |host, id| Box::pin(async move { host.resume(W, &id).await.unwrap() }),
    ];
    let w = world().await;
    for make_use in uses {
        let id = w.sleeper().await;
        w.asleep(&id).await;
        make_use(Arc::clone(&w.host), id.clone()).await;
        assert_eq!(w.status(&id).await, SandboxStatus::Running);
        assert_eq!(w.read(&id, "/dev/shm/memory").await.unwrap(), "m");
        for sandbox in w.host.list(W).await.unwrap() {
            w.host.delete(W, &sandbox.id).await.unwrap();
        }
        for snapshot in w.host.list_snapshots(W, None).await.unwrap() {
            w.host.delete_snapshot(W, &snapshot.id).await.unwrap();
        }
    }
    // What is wrong anyway is no use.
    let id = w.sleeper().await;
    w.host.fork_tree(W, &id, spec(0)).await.unwrap_err();
    assert_eq!(w.host.pause(W, &id).await.unwrap_err().class(), ErrorClass::Conflict);
    w.asleep(&id).await;
}

#[tokio::test]
async fn many_who_wake_one_sandbox_get_one_machine() {
    let w = world().await;
    let id = w.sleeper().await;
    w.engine.script(|s| s.start_delay = Duration::from_millis(20));
    let reads = futures::future::join_all((0..8).map(|_| w.read(&id, "/dev/shm/memory")));
    let wakes = futures::future::join_all((0..4).map(|_| w.host.wake(W, &id)));
    let (reads, wakes) = tokio::join!(reads, wakes);
    assert!(reads.into_iter().all(|read| read.unwrap() == "m") && wakes.iter().all(Result::is_ok));
    w.exactly([&id]).await;
}

#[tokio::test]
async fn who_uses_it_while_it_falls_asleep_waits_and_wakes_it() {
    let w = world().await;
    let id = w.create().await.id;
    w.write(&id, "/dev/shm/memory", "m").await;
    w.engine.script(|s| s.capture_delay = Duration::from_millis(100));
    let read = async {
        tokio::time::sleep(Duration::from_millis(40)).await;
        assert_eq!(w.status(&id).await, SandboxStatus::Running, "not before it is so");
        w.read(&id, "/dev/shm/memory").await.unwrap()
    };
    let (slept, read) = tokio::join!(w.host.hibernate(W, &id), read);
    slept.unwrap();
    assert_eq!(read, "m");
    w.exactly([&id]).await;
}

#[tokio::test]
async fn what_can_not_be_woken_hibernates_on_and_says_why() {
    let w = world().await;
    let id = w.sleeper().await;
    type Break = fn(&mut coppice_testkit::fake_engine::Script);
    let breaks: [(Break, &str); 2] =
        [(|s| s.refuse_resume = 1, "guest_unresponsive"), (|s| s.fail_restores = 1, "restore_failed")];
    for (script, code) in breaks {
        w.engine.script(script);
        let error = w.read(&id, "/dev/shm/memory").await.unwrap_err();
        assert_eq!((error.class(), error.code()), (ErrorClass::Unavailable, code));
        assert!(error.chain().contains("still hibernates"), "{}", error.chain());
        w.asleep(&id).await;
        w.engine.script(script);
        assert_eq!(w.host.wake(W, &id).await.unwrap_err().code(), code);
        w.asleep(&id).await;
        w.engine.script(script);
        assert_eq!(w.host.fork_tree(W, &id, spec(1)).await.unwrap_err().class(), ErrorClass::Unavailable);
        w.asleep(&id).await;
    }
    let taken: Vec<_> = (0..64).map(|_| w.slots.take(&Egress::Open).unwrap()).collect();
    let error = w.host.wake(W, &id).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (ErrorClass::Capacity, "no_network_slot"));
    for slot in taken {
        w.slots.put(slot.index).unwrap();
    }
    w.asleep(&id).await;
    w.is_whole(&id).await;

    // One whose image is damaged says so, and can be deleted.
    w.hibernate(&id).await;
    std::fs::remove_file(w.data.snapshots_dir().join(w.snapshots().pop_first().unwrap()).join("memory")).unwrap();
    let error = w.host.wake(W, &id).await.unwrap_err();
    assert_eq!(error.class(), ErrorClass::Unavailable, "{error}");
    w.asleep(&id).await;
    w.host.delete(W, &id).await.unwrap();
    w.exactly([]).await;
    assert!(w.snapshots().is_empty());
}

#[tokio::test]
async fn what_can_not_be_hibernated_goes_on() {
    let w = world().await;
    let id = w.create().await.id;
    w.write(&id, "/root/disk", "d").await;
    w.write(&id, "/dev/shm/memory", "m").await;
    w.engine.script(|s| s.no_space = 1);
    let error = w.host.hibernate(W, &id).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (ErrorClass::Capacity, "no_storage"));
    w.is_whole(&id).await;
    w.engine.script(|s| s.fail_captures = 1);
    assert_eq!(w.host.hibernate(W, &id).await.unwrap_err().code(), "capture_failed");
    w.is_whole(&id).await;
    assert_eq!(w.status(&id).await, SandboxStatus::Running);
    assert!(w.snapshots().is_empty());
    // A paused one stays paused, and hibernates, too.
    w.host.pause(W, &id).await.unwrap();
    w.engine.script(|s| s.fail_captures = 1);
    w.host.hibernate(W, &id).await.unwrap_err();
    assert_eq!(w.status(&id).await, SandboxStatus::Paused);
    assert_eq!(w.host.wake(W, &id).await.unwrap_err().class(), ErrorClass::Conflict);
    w.hibernate(&id).await;
    w.asleep(&id).await;
    w.is_whole(&id).await;
    // Nor does one that has failed.
    w.engine.crash(w.engine.alive()[0]);
    while w.status(&id).await != SandboxStatus::Failed {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(w.host.hibernate(W, &id).await.unwrap_err().code(), "sandbox_failed");
    assert_eq!(w.host.wake(W, &id).await.unwrap_err().code(), "sandbox_failed");
}

#[tokio::test]
async fn one_that_dies_right_after_it_woke_has_failed() {
    let w = world().await;
    let id = w.sleeper().await;
    w.engine.script(|s| s.die_after = Some((1, Duration::from_millis(30))));
    w.host.wake(W, &id).await.unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    while w.status(&id).await != SandboxStatus::Failed {
        assert!(std::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // Not the image once more: what it wrote since would be lost without a word.
    assert_eq!(w.read(&id, "/root/disk").await.unwrap_err().code(), "sandbox_failed");
    w.host.delete(W, &id).await.unwrap();
    w.exactly([]).await;
}

#[tokio::test]
async fn rounds_lose_nothing_and_leave_nothing() {
    let w = world().await;
    let parent = w.create().await.id;
    let child = w.host.fork_tree(W, &parent, spec(2)).await.unwrap().children.remove(1);
    w.host.delete(W, &parent).await.unwrap();
    let id = child.id.clone();
    let mut expected = String::new();
    for round in 0..20 {
        let line = format!("echo {round} >> /dev/shm/m; echo {round} >> /root/d");
        expected.push_str(&format!("{round}\n"));
        let spec = ExecSpec { argv: vec!["sh".into(), "-c".into(), line], ..ExecSpec::default() };
        let mut run = w.host.exec(W, &id, spec).await.unwrap();
        while let Some(event) = run.next().await {
            event.unwrap();
        }
        w.hibernate(&id).await;
        assert!(w.snapshots().len() <= 2, "its image, and that of the fork for its sibling: {:?}", w.snapshots());
    }
    assert_eq!(w.read(&id, "/dev/shm/m").await.unwrap(), expected);
    assert_eq!(w.read(&id, "/root/d").await.unwrap(), expected);
    assert_eq!(w.host.get(W, &id).await.unwrap().metadata, child.metadata);
    for sandbox in w.host.list(W).await.unwrap() {
        w.host.delete(W, &sandbox.id).await.unwrap();
    }
    w.exactly([]).await;
    assert!(w.snapshots().is_empty());
}

#[tokio::test]
async fn idleness_counts_again_once_it_has_woken() {
    let w = world().await;
    let request = CreateSandboxRequest { ttl_seconds: Some(1), ..Default::default() };
    let id = w.host.create(W, request).await.unwrap().id;
    w.hibernate(&id).await;
    let w = w.restart().await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    w.asleep(&id).await;
    w.host.wake(W, &id).await.unwrap();
    w.exactly([]).await;
    assert!(w.snapshots().is_empty());
}

#[tokio::test]
async fn operations_at_once_with_hibernate_end_in_an_allowed_order() {
    let w = world().await;
    for _ in 0..10 {
        let id = w.create().await.id;
        w.write(&id, "/dev/shm/memory", "m").await;
        let lifecycle = LifecyclePatch { ttl_seconds: Some(500), ..LifecyclePatch::default() };
        let (slept, read, woken, fork, kept, again, ttl) = tokio::join!(
            w.host.hibernate(W, &id),
            w.read(&id, "/dev/shm/memory"),
            w.host.wake(W, &id),
            w.host.fork_tree(W, &id, spec(1)),
            w.host.snapshot(W, &id),
            w.host.hibernate(W, &id),
            w.host.set_lifecycle(W, &id, lifecycle),
        );
        [slept, woken, again].into_iter().for_each(Result::unwrap);
        ttl.unwrap();
        let allowed = |e: &HostError| e.class() == ErrorClass::Conflict;
        assert!(fork.is_ok() || fork.as_ref().is_err_and(allowed), "{fork:?}");
        assert!(kept.is_ok() || kept.as_ref().is_err_and(allowed), "{kept:?}");
        // A session that ended because its machine did is an error, never a wrong answer.
        assert!(read.is_err() || read.as_ref().is_ok_and(|text| text == "m"), "{read:?}");
        assert_eq!(w.read(&id, "/dev/shm/memory").await.unwrap(), "m");
        assert_eq!(w.host.lifecycle(W, &id).await.unwrap().ttl_seconds, 500);
        let (slept, deleted, woken) =
            tokio::join!(w.host.hibernate(W, &id), w.host.delete(W, &id), w.host.wake(W, &id));
        deleted.unwrap();
        let gone = |e: &HostError| matches!(e.class(), ErrorClass::NotFound | ErrorClass::Conflict);
        assert!(slept.as_ref().err().is_none_or(gone) && woken.as_ref().err().is_none_or(gone), "{slept:?} {woken:?}");
        for child in fork.iter().flat_map(ids) {
            w.host.delete(W, &child).await.unwrap();
        }
        if let Ok(snapshot) = kept {
            w.host.delete_snapshot(W, &snapshot.id).await.unwrap();
        }
        w.exactly([]).await;
        assert!(w.snapshots().is_empty());
    }
}

#[tokio::test]
async fn whoever_hangs_up_stops_neither_hibernate_nor_wake() {
    let w = world().await;
    let id = w.sleeper().await;
    w.engine.script(|s| (s.start_delay, s.capture_delay) = (Duration::from_millis(3), Duration::from_millis(3)));
    for patience in [0u64, 1, 2, 4, 8] {
        let patience = Duration::from_millis(patience);
        drop(tokio::time::timeout(patience, w.host.wake(W, &id)).await);
        w.is_whole(&id).await;
        drop(tokio::time::timeout(patience, w.host.hibernate(W, &id)).await);
        w.hibernate(&id).await;
        w.asleep(&id).await;
    }
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Nothing of a daemon goes on. Its database has a thread of its own, which a kill would end, too.
pub(crate) fn end(daemon: Runtime, data: &DataDir) {
    daemon.shutdown_timeout(Duration::from_secs(5));
    let database = data.host_db().canonicalize().unwrap();
    let open = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        fds.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|file| file == database)
    };
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    while open() {
        assert!(std::time::Instant::now() < deadline, "the database is still open");
        std::thread::yield_now();
    }
}

/// Runs `work` in a daemon that is killed after `patience`, and answers with the next one. What a thread of it was doing
/// at that moment is still done, as a system call would be.
pub(super) fn killed(
    last: Runtime,
    w: World,
    patience: Duration,
    work: impl AsyncFnOnce(Arc<Host>),
) -> (Runtime, World) {
    let World { engine, slots, data, host, dir } = w;
    last.block_on(host.stop());
    drop(host);
    end(last, &data);
    let daemon = runtime();
    daemon.block_on(async {
        let host = start(&data, &engine, &slots).await;
        drop(tokio::time::timeout(patience, work(host)).await);
    });
    end(daemon, &data);
    let next = runtime();
    let host = next.block_on(start(&data, &engine, &slots));
    (next, World { engine, slots, data, host, dir })
}

#[test]
fn a_daemon_that_is_killed_while_one_hibernates_or_wakes_loses_nothing() {
    let mut daemon = runtime();
    let (mut w, id) = daemon.block_on(async {
        let w = world().await;
        let id = w.create().await.id;
        w.write(&id, "/root/disk", "d").await;
        w.write(&id, "/dev/shm/memory", "m").await;
        (w, id)
    });
    w.engine.script(|s| (s.start_delay, s.capture_delay) = (Duration::from_millis(4), Duration::from_millis(4)));
    let mut seen = BTreeMap::<String, u32>::new();
    for step in 0..60u64 {
        let patience = Duration::from_micros(500 * step);
        (daemon, w) = killed(daemon, w, patience, async |host| drop(host.hibernate(W, &id).await));
        daemon.block_on(async {
            let status = w.status(&id).await;
            *seen.entry(format!("hibernate: {status:?}")).or_default() += 1;
            assert!(matches!(status, SandboxStatus::Running | SandboxStatus::Hibernated), "{step}: {status:?}");
            if status == SandboxStatus::Running {
                w.exactly([&id]).await;
                assert!(w.snapshots().is_empty(), "{step}");
                w.is_whole(&id).await;
                w.hibernate(&id).await;
            }
            w.asleep(&id).await;
        });
        (daemon, w) = killed(daemon, w, patience, async |host| drop(host.wake(W, &id).await));
        daemon.block_on(async {
            let status = w.status(&id).await;
            *seen.entry(format!("wake: {status:?}")).or_default() += 1;
            assert!(matches!(status, SandboxStatus::Running | SandboxStatus::Hibernated), "{step}: {status:?}");
            assert_eq!(w.snapshots().len(), usize::from(status == SandboxStatus::Hibernated), "{step}");
            w.is_whole(&id).await;
            w.exactly([&id]).await;
        });
    }
    // Both sides of both moments were hit.
    assert_eq!(seen.len(), 4, "{seen:?}");
}

#[test]
fn a_daemon_that_is_killed_in_a_disk_fork_leaves_no_frozen_disk() {
    let daemon = runtime();
    let (w, id) = daemon.block_on(async {
        let w = world().await;
        let id = w.create().await.id;
        (w, id)
    });
    w.engine.script(|s| s.capture_delay = Duration::from_millis(300));
    let (daemon, w) =
        killed(daemon, w, Duration::from_millis(100), async |host| drop(host.fork_disk(W, &id, spec(1)).await));
    w.engine.script(|s| s.capture_delay = Duration::ZERO);
    daemon.block_on(async {
        w.exactly([&id]).await;
        // Processes that wait for the disk can't be held.
        w.host.snapshot(W, &id).await.unwrap();
    });
}
