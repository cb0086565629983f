//! Room for sandboxes: never more than there is, never less, and nothing is made of what is refused.

use super::*;

use coppice_api::HostReport;
use coppice_host::Overcommit;

/// What a machine of the tests' template counts for when it counts in full: its 128 MiB, and its VMM's own.
const MACHINE: u64 = (128 + 64) << 20;
/// The image of its memory, while a live fork is under way.
const IMAGE: u64 = 128 << 20;

/// Every promise counts in full, and so much memory is there.
fn exactly(limit: u64) -> RoomConfig {
    RoomConfig {
        memory_limit: Some(limit),
        memory_reserve: 0,
        memory_overcommit: Overcommit::times(1),
        ..RoomConfig::default()
    }
}

impl World {
    /// The same with a host that gives only so much.
    async fn with_room(self, max_sandboxes: usize, room: RoomConfig) -> Self {
        self.host.stop().await;
        let config = HostConfig { max_sandboxes, room, ..config(&self.data, &self.engine, &self.slots, None) };
        let host = Host::start(config).await.unwrap();
        Self { host, ..self }
    }

    async fn report(&self) -> HostReport {
        self.host.report().await.unwrap()
    }

    /// Forks as a client does that waits for room: a host that is busy is asked again, one that is full is not.
    async fn fork_patiently(&self, parent: &str, live: bool, count: i64) -> Result<Fork, HostError> {
        loop {
            let made = match live {
                true => self.host.fork_tree(W, parent, spec(count)).await,
                false => self.host.fork_disk(W, parent, spec(count)).await,
            };
            match made {
                Err(e) if e.class() == ErrorClass::Transient => tokio::time::sleep(Duration::from_millis(5)).await,
                made => return made,
            }
        }
    }

    /// Nothing is set aside any more.
    async fn settled(&self) -> HostReport {
        let report = self.report().await;
        let being_made = (report.sandboxes.being_made, report.memory.being_made, report.disk.being_made);
        assert_eq!(being_made, (0, 0, 0));
        report
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fan_outs_that_race_for_the_last_room_get_all_of_it_and_no_more() {
    for round in 0..4_u64 {
        let live = round % 2 == 0;
        let image = if live { IMAGE } else { 0 };
        // Room for a parent and three fan-outs of four, by number and by memory in turn; a little is left over.
        let (number, limit) = match round / 2 {
            0 => (1 + 3 * 4 + 3, 1 << 40),
            _ => (64, MACHINE * (1 + 3 * 4) + image + MACHINE / 2),
        };
        let w = world().await.with_room(number, exactly(limit)).await;
        let parent = w.create().await.id;
        w.engine.script(|s| s.start_delay = Duration::from_millis(10));
        let forks = futures::future::join_all((0..8).map(|_| w.fork_patiently(&parent, live, 4))).await;
        let (made, refused): (Vec<_>, Vec<_>) = forks.into_iter().partition(Result::is_ok);
        assert_eq!((made.len(), refused.len()), (3, 5), "round {round}: {refused:?}");
        for refused in refused.into_iter().map(Result::unwrap_err) {
            assert_eq!(refused.class(), ErrorClass::Capacity, "{refused}");
            assert!(["no_memory", "too_many_sandboxes"].contains(&refused.code()), "{refused}");
        }
        let mut expected: Vec<String> = made.iter().flat_map(|fork| ids(fork.as_ref().unwrap())).collect();
        assert_eq!(expected.len(), 12);
        expected.push(parent);
        w.exactly(&expected).await;
        assert_eq!(w.snapshots().len(), if live { 3 } else { 0 });
        assert!(names(&w.data.staging_dir()).is_empty());
        w.settled().await;
    }
}

#[tokio::test]
async fn what_fails_and_what_is_deleted_gives_its_room_back() {
    let w = world().await.with_room(64, exactly(MACHINE * 5 + IMAGE)).await;
    let parent = w.create().await.id;
    for _ in 0..3 {
        // Every child fails, some fail, the capture fails, the client hangs up.
        w.engine.script(|s| s.fail_restores = 4);
        w.host.fork_tree(W, &parent, spec(4)).await.unwrap_err();
        w.engine.script(|s| (s.fail_restores, s.refuse_resume) = (0, 2));
        let some = w.host.fork_tree(W, &parent, spec(4)).await.unwrap();
        assert_eq!((some.children.len(), some.errors.len()), (2, 2));
        w.engine.script(|s| s.fail_captures = 1);
        w.host.fork_tree(W, &parent, spec(2)).await.unwrap_err();
        w.engine.script(|s| s.start_delay = Duration::from_millis(100));
        let cut = tokio::time::timeout(Duration::from_millis(20), w.host.fork_tree(W, &parent, spec(2))).await;
        assert!(cut.is_err());
        w.engine.script(|s| s.start_delay = Duration::ZERO);
        for child in ids(&some) {
            w.host.delete(W, &child).await.unwrap();
        }
        w.exactly([&parent]).await;
        w.settled().await;
    }
    // All of it is there.
    let full = w.host.fork_tree(W, &parent, spec(4)).await.unwrap();
    let refused = w.host.create(W, CreateSandboxRequest::default()).await.unwrap_err();
    assert_eq!((refused.class(), refused.code()), (ErrorClass::Capacity, "no_memory"));
    w.exactly([&parent].into_iter().chain(&ids(&full))).await;
}

#[tokio::test]
async fn one_that_hibernates_gives_its_memory_back_and_wakes_only_into_room() {
    let w = world().await.with_room(64, exactly(MACHINE * 2 + MACHINE / 2)).await;
    let [sleeper, other] = [w.create().await.id, w.create().await.id];
    assert_eq!(w.host.create(W, CreateSandboxRequest::default()).await.unwrap_err().code(), "no_memory");
    w.host.hibernate(W, &sleeper).await.unwrap();
    let third = w.create().await.id;
    let refused = w.host.wake(W, &sleeper).await.unwrap_err();
    assert_eq!((refused.class(), refused.code()), (ErrorClass::Capacity, "no_memory"));
    let report = w.settled().await;
    let by_status = [("hibernated".to_owned(), 1), ("running".to_owned(), 2)].into();
    assert_eq!((report.sandboxes.total, report.sandboxes.by_status), (3, by_status));
    w.host.delete(W, &other).await.unwrap();
    w.host.wake(W, &sleeper).await.unwrap();
    assert_eq!(w.settled().await.room.sandboxes, 0);
    for id in [&sleeper, &third] {
        w.host.delete(W, id).await.unwrap();
    }
    assert_eq!(w.settled().await.room.sandboxes, 2);
}

#[tokio::test]
async fn a_refusal_says_the_numbers_and_the_report_explains_them() {
    let w = world().await.with_room(64, exactly(MACHINE * 4)).await;
    let parent = w.create().await.id;
    let refused = w.host.fork_tree(W, &parent, spec(16)).await.unwrap_err();
    let need = (16 * MACHINE + IMAGE) >> 20;
    let text = refused.chain();
    assert!(text.contains("16 more sandbox(es)") && text.contains(&format!("{need} MiB must be set aside")), "{text}");
    assert!(refused.hint().unwrap().contains("coppice host show"));
    w.exactly([&parent]).await;
    assert!(w.snapshots().is_empty());
    // The machines are measured in the background: the fake ones have a MiB each to themselves.
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    let report = loop {
        let report = w.settled().await;
        if report.memory.private == 1 << 20 {
            break report;
        }
        assert!(std::time::Instant::now() < deadline, "{report:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let memory = &report.memory;
    assert_eq!((memory.promised, memory.promised_counted), (MACHINE - (1 << 20), MACHINE - (1 << 20)));
    assert_eq!((memory.limit, memory.overcommit), (Some(MACHINE * 4), 1.0));
    assert!(memory.measured_ms_ago.is_some() && memory.total >= memory.available);
    assert_eq!(memory.headroom, MACHINE * 3);
    assert_eq!((report.room.sandboxes, report.room.memory_mb, report.room.bound_by.as_str()), (3, 128, "memory"));
    assert_eq!((report.slots.taken, report.slots.limit, report.sandboxes.limit), (1, 64, 64));
    // Taken over by a new run of the host it counts as before.
    let w = w.with_room(64, exactly(MACHINE * 4)).await;
    assert_eq!(w.report().await.room.sandboxes, 3);
}
