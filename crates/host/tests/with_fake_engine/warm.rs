//! Warm fork: what the child has, what becomes of the parent, what fails, who else asks meanwhile, and a crash at any moment.

use super::hibernate::{killed, runtime};
use super::*;

use coppice_net::Seat;

impl World {
    async fn warm(&self, id: &str) -> Result<Fork, HostError> {
        self.host.fork_warm(W, id, spec(1)).await
    }

    /// A sandbox that has something in memory and on its disk.
    async fn original(&self) -> Sandbox {
        let made = self.host.create(W, with_network(allow(&["example.org"]))).await.unwrap();
        self.write(&made.id, "/root/disk", "d").await;
        self.write(&made.id, "/dev/shm/memory", "m").await;
        made
    }

    /// It runs, with all that the original had.
    async fn is_original(&self, id: &str) {
        assert_eq!(self.host.get(W, id).await.unwrap().status, SandboxStatus::Running);
        assert_eq!(self.read(id, "/dev/shm/memory").await.unwrap(), "m");
        assert_eq!(self.read(id, "/root/disk").await.unwrap(), "d");
        assert_eq!(self.slots.taken().into_values().collect::<Vec<_>>(), [Egress::allow(&["example.org"]).unwrap()]);
    }

    /// The parent has nothing any more but a record and a log, and says who has taken its place; the child is in this seat.
    async fn moved(&self, parents: &[&str], child: &str, seat: Seat) {
        for parent in parents {
            let stopped = self.host.get(W, parent).await.unwrap();
            assert_eq!((stopped.status, stopped.guest_ip.as_str()), (SandboxStatus::Stopped, ""));
            let dir = self.data.sandboxes_dir().join(parent);
            assert_eq!(names(&dir), ["console.log".to_owned()].into());
            assert!(!self.host.logs(W, parent, None).await.unwrap().is_empty());
        }
        let last = self.host.get(W, parents.last().unwrap()).await.unwrap();
        assert_eq!(last.metadata["successor"], child);
        assert_eq!((self.engine.alive().len(), self.engine.running().len()), (1, 1));
        assert_eq!(names(&self.data.run_dir()), [child.to_owned()].into());
        assert_eq!(self.slots.seats().into_values().collect::<Vec<_>>(), [(seat, false)]);
    }
}

#[tokio::test]
async fn the_child_has_the_parents_place_and_the_parent_is_stopped() {
    let w = world().await;
    let parent = w.original().await;
    let held = w.host.holdings(W).await.unwrap();
    let metadata = [("k".to_owned(), "v".to_owned()), ("successor".to_owned(), "x".to_owned())].into();
    let fork = w.host.fork_warm(W, &parent.id, ForkSpec { count: 1, metadata, on_ttl: None }).await.unwrap();
    let [child] = fork.children.as_slice() else { panic!("{:?}", fork.children) };
    assert_eq!((fork.mode.as_str(), fork.parent_id.as_str(), fork.flushed), ("warm", parent.id.as_str(), true));
    assert!(fork.errors.is_empty() && fork.parent_paused_ms > 0.0 && fork.inherited.contains("stopped"));
    assert_eq!((&child.status, child.boot_mode), (&SandboxStatus::Running, coppice_api::BootMode::Snapshot));
    assert_eq!((&child.guest_ip, &child.network), (&parent.guest_ip, &parent.network));
    assert_eq!((child.metadata["k"].as_str(), child.metadata["fork_parent_id"].as_str()), ("v", parent.id.as_str()));
    assert_eq!((&child.metadata["fork_tree_id"], child.metadata.get("successor")), (&fork.tree_id, None));
    w.is_original(&child.id).await;
    w.moved(&[&parent.id], &child.id, Seat::Second).await;
    assert_eq!(w.read(&child.id, "/run/ip").await.unwrap().trim(), parent.guest_ip);
    assert_ne!(w.read(&child.id, "/run/hostname").await.unwrap(), format!("sb-{}\n", &parent.id[..12]));
    let now = w.host.holdings(W).await.unwrap();
    assert_eq!(now.sandboxes.iter().map(|held| &held.id).collect::<Vec<_>>(), [&child.id]);
    assert_eq!((now.sandboxes[0].memory_mib, now.sandboxes.len()), (held.sandboxes[0].memory_mib, 1));

    // Whatever is asked of the parent now, it says who to ask, also after a restart.
    let w = w.restart().await;
    let (host, id) = (&w.host, parent.id.as_str());
    for refused in [
        w.read(id, "/root/disk").await.map(drop),
        host.ports(W, id).await.map(drop),
        host.pause(W, id).await,
        host.resume(W, id).await,
        host.hibernate(W, id).await,
        host.wake(W, id).await,
        host.snapshot(W, id).await.map(drop),
        host.fork_tree(W, id, spec(1)).await.map(drop),
        host.fork_disk(W, id, spec(1)).await.map(drop),
        host.fork_warm(W, id, spec(1)).await.map(drop),
        host.promote(W, id, PromoteRequest::default()).await.map(drop),
    ] {
        let error = refused.unwrap_err();
        assert_eq!((error.class(), error.code()), (ErrorClass::Conflict, "sandbox_not_running"), "{error}");
        assert!(error.hint().unwrap().contains(&child.id), "{:?}", error.hint());
    }
    w.is_original(&child.id).await;
    w.moved(&[&parent.id], &child.id, Seat::Second).await;
    // Its record can go, and nothing else goes with it.
    host.delete(W, id).await.unwrap();
    w.is_original(&child.id).await;
    w.exactly([&child.id]).await;
    host.delete(W, &child.id).await.unwrap();
    w.exactly([]).await;
    assert!(w.snapshots().is_empty());
}

#[tokio::test]
async fn it_is_one_child_and_never_two_machines_at_once() {
    let w = world().await;
    let parent = w.original().await.id;
    for count in [-1, 0, 2, 16] {
        let error = w.host.fork_warm(W, &parent, spec(count)).await.unwrap_err();
        assert_eq!((error.class(), error.code()), (ErrorClass::Caller, "bad_fork_count"), "{count}");
    }
    w.engine.script(|s| (s.start_delay, s.capture_delay) = (Duration::from_millis(20), Duration::from_millis(20)));
    let mut fork = std::pin::pin!(w.warm(&parent));
    let mut seen = BTreeSet::new();
    let fork = loop {
        tokio::select! {
            fork = &mut fork => break fork.unwrap(),
            () = tokio::time::sleep(Duration::from_millis(1)) => drop(seen.insert(w.engine.running().len())),
        }
    };
    assert_eq!(seen, [0, 1].into(), "machines that ran");
    w.is_original(&fork.children[0].id).await;
}

#[tokio::test]
async fn one_after_the_other_and_every_other_operation_in_between() {
    let w = world().await;
    let first = w.original().await;
    let mut parents = vec![first.id.clone()];
    let mut w = w;
    for round in 0..5 {
        let parent = parents.last().unwrap().clone();
        let child = w.warm(&parent).await.unwrap().children.remove(0);
        assert_eq!(child.guest_ip, first.guest_ip);
        let seat = if round % 2 == 0 { Seat::Second } else { Seat::First };
        let all: Vec<&str> = parents.iter().map(String::as_str).collect();
        w.moved(&all, &child.id, seat).await;
        w.is_original(&child.id).await;
        parents.push(child.id.clone());
        match round {
            0 => w = w.restart().await,
            1 => w.host.delete(W, &parents.remove(0)).await.unwrap(),
            2 => {
                // Its children have places of their own.
                let tree = w.host.fork_tree(W, &child.id, spec(2)).await.unwrap();
                let disk = w.host.fork_disk(W, &child.id, spec(1)).await.unwrap();
                for other in tree.children.iter().chain(&disk.children) {
                    assert_ne!(other.guest_ip, first.guest_ip);
                    assert_eq!(w.read(&other.id, "/root/disk").await.unwrap(), "d");
                    w.host.delete(W, &other.id).await.unwrap();
                }
                let snapshot = w.host.snapshot(W, &child.id).await.unwrap();
                w.host.delete_snapshot(W, &snapshot.id).await.unwrap();
                w.host.pause(W, &child.id).await.unwrap();
                assert_eq!(w.warm(&child.id).await.unwrap_err().class(), ErrorClass::Conflict);
                w.host.resume(W, &child.id).await.unwrap();
            }
            _ => {}
        }
    }
    // One that hibernates is woken for it, and begins in the first seat of another slot.
    let last = parents.last().unwrap().clone();
    w.host.hibernate(W, &last).await.unwrap();
    assert!(w.slots.taken().is_empty() && w.engine.alive().is_empty());
    let child = w.warm(&last).await.unwrap().children.remove(0);
    parents.push(child.id.clone());
    w.is_original(&child.id).await;
    assert_eq!(w.slots.seats().into_values().collect::<Vec<_>>(), [(Seat::Second, false)]);
    for id in parents {
        w.host.delete(W, &id).await.unwrap();
    }
    w.exactly([]).await;
    assert!(w.snapshots().is_empty());
}

#[tokio::test]
async fn without_a_child_the_parent_runs_on_as_it_was() {
    let w = world().await;
    let parent = w.original().await;
    type Break = fn(&World);
    let breaks: [(Break, &str); 5] = [
        (|w| w.engine.script(|s| s.refuse_resume = 1), "guest_unresponsive"),
        (|w| w.engine.script(|s| s.fail_restores = 1), "restore_failed"),
        (|w| w.engine.script(|s| s.fail_captures = 1), "capture_failed"),
        (|w| w.engine.script(|s| s.no_space = 1), "no_storage"),
        (|w| w.slots.fail_seats(1), "network_failed"),
    ];
    for (script, code) in breaks {
        script(&w);
        let error = w.warm(&parent.id).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        w.is_original(&parent.id).await;
        w.exactly([&parent.id]).await;
        assert_eq!(w.slots.seats().into_values().collect::<Vec<_>>(), [(Seat::First, false)], "{code}");
        assert_eq!((w.engine.running().len(), w.snapshots().len()), (1, 0), "{code}");
        assert_eq!(w.host.get(W, &parent.id).await.unwrap().guest_ip, parent.guest_ip);
    }
    // Nor does a record that can't be written do any harm.
    let database = format!("sqlite://{}", w.data.host_db().display());
    let writes = ["UPDATE ON sandboxes WHEN NEW.status = 'stopped'", "INSERT ON snapshots", "INSERT ON sandboxes"];
    for (when, number) in writes.into_iter().zip(0..) {
        let pool = sqlx::SqlitePool::connect(&database).await.unwrap();
        let refuse = format!("CREATE TRIGGER refuse{number} BEFORE {when} BEGIN SELECT RAISE(ABORT, 'no'); END");
        sqlx::query(sqlx::AssertSqlSafe(refuse)).execute(&pool).await.unwrap();
        let error = w.warm(&parent.id).await.unwrap_err();
        assert_eq!(error.code(), "store_failed", "{when}: {error}");
        w.is_original(&parent.id).await;
        w.exactly([&parent.id]).await;
        assert_eq!(w.slots.seats().into_values().collect::<Vec<_>>(), [(Seat::First, false)], "{when}");
        assert!(w.snapshots().is_empty(), "{when}");
        sqlx::query(sqlx::AssertSqlSafe(format!("DROP TRIGGER refuse{number}"))).execute(&pool).await.unwrap();
        pool.close().await;
    }
    // Then it can be moved all the same.
    let child = w.warm(&parent.id).await.unwrap().children.remove(0);
    w.is_original(&child.id).await;
    w.moved(&[&parent.id], &child.id, Seat::Second).await;
}

#[tokio::test]
async fn who_asks_meanwhile_waits_and_is_told_what_became_of_it() {
    let w = world().await;
    let parent = w.original().await.id;
    w.engine.script(|s| s.capture_delay = Duration::from_millis(60));
    let late = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        w.read(&parent, "/dev/shm/memory").await
    };
    // It fails: the parent answers.
    w.engine.script(|s| s.refuse_resume = 1);
    let (failed, read) = tokio::join!(w.warm(&parent), late);
    failed.unwrap_err();
    assert_eq!(read.unwrap(), "m");
    // It does not: they are told of the child.
    let late = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        w.read(&parent, "/dev/shm/memory").await
    };
    let (forked, read) = tokio::join!(w.warm(&parent), late);
    let child = forked.unwrap().children.remove(0).id;
    let error = read.unwrap_err();
    assert!(error.code() == "sandbox_not_running" && error.hint().unwrap().contains(&child), "{error}");
    w.is_original(&child).await;
}

#[tokio::test]
async fn operations_at_once_with_a_warm_fork_end_in_an_allowed_order() {
    let w = world().await;
    for round in 0..12 {
        let id = w.original().await.id;
        let delay = Duration::from_millis(round);
        w.engine.script(|s| (s.start_delay, s.capture_delay) = (delay / 2, delay / 4));
        let delete = async {
            tokio::time::sleep(delay).await;
            if round % 2 == 0 { w.host.delete(W, &id).await } else { Ok(()) }
        };
        let (one, other, tree, slept, read, deleted) = tokio::join!(
            w.warm(&id),
            w.warm(&id),
            w.host.fork_tree(W, &id, spec(1)),
            w.host.hibernate(W, &id),
            w.read(&id, "/dev/shm/memory"),
            delete,
        );
        deleted.unwrap();
        let allowed = |e: &HostError| matches!(e.class(), ErrorClass::Conflict | ErrorClass::NotFound);
        assert!(slept.as_ref().err().is_none_or(allowed), "{slept:?}");
        // A session that ended because its machine did is an error, never a wrong answer.
        assert!(read.is_err() || read.as_ref().is_ok_and(|text| text == "m"), "{read:?}");
        assert!(!(one.is_ok() && other.is_ok()), "a machine is moved once");
        for fork in [&one, &other, &tree] {
            assert!(fork.as_ref().err().is_none_or(allowed), "{fork:?}");
        }
        for child in [one, other, tree].iter().flatten().flat_map(ids) {
            assert_eq!(w.read(&child, "/dev/shm/memory").await.unwrap(), "m");
            assert_eq!(w.read(&child, "/root/disk").await.unwrap(), "d");
        }
        for sandbox in w.host.list(W).await.unwrap() {
            w.host.delete(W, &sandbox.id).await.unwrap();
        }
        w.exactly([]).await;
        assert!(w.snapshots().is_empty());
    }
}

#[tokio::test]
async fn whoever_hangs_up_does_not_undo_it() {
    let w = world().await;
    let mut id = w.original().await.id;
    w.engine.script(|s| (s.start_delay, s.capture_delay) = (Duration::from_millis(3), Duration::from_millis(3)));
    for patience in [0u64, 1, 3, 6, 9, 12, 50] {
        drop(tokio::time::timeout(Duration::from_millis(patience), w.warm(&id)).await);
        // What was begun is in the mailbox soon; what comes after it is done after it.
        tokio::time::sleep(Duration::from_millis(20)).await;
        w.host.set_network(W, &id, allow(&["example.org"])).await.unwrap();
        let sandbox = w.host.get(W, &id).await.unwrap();
        if sandbox.status == SandboxStatus::Stopped {
            id = sandbox.metadata["successor"].clone();
        }
        w.is_original(&id).await;
        assert_eq!(w.engine.alive().len(), 1);
    }
}

#[tokio::test]
async fn it_lives_as_long_as_its_parent_would_have_and_the_parents_record_no_longer() {
    let w = world().await;
    let request = CreateSandboxRequest { ttl_seconds: Some(86_400), persistent: Some(true), ..Default::default() };
    let parent = w.host.create(W, request).await.unwrap().id;
    let child = w.warm(&parent).await.unwrap().children.remove(0);
    assert_eq!((child.ttl_seconds, child.persistent), (86_400, true));
    let brief = LifecyclePatch { ttl_seconds: Some(1), persistent: None, on_ttl: None };
    w.host.set_lifecycle(W, &parent, brief).await.unwrap();
    w.exactly([&child.id]).await;
    // Unless it was asked for.
    let metadata = [("explore_ttl".to_owned(), "1".to_owned())].into();
    let next =
        w.host.fork_warm(W, &child.id, ForkSpec { count: 1, metadata, on_ttl: None }).await.unwrap().children.remove(0);
    assert_eq!((next.ttl_seconds, next.persistent), (1, false));
    w.host.delete(W, &child.id).await.unwrap();
    w.exactly([]).await;
}

#[tokio::test]
async fn a_loser_that_moved_is_a_loser_still() {
    let w = world().await;
    let parent = w.original().await.id;
    let mut tree = w.host.fork_tree(W, &parent, spec(3)).await.unwrap().children;
    let (winner, loser, kept) = (tree.remove(0), tree.remove(0).id, tree.remove(0).id);
    let moved = w.warm(&loser).await.unwrap().children.remove(0).id;
    let again = w.warm(&moved).await.unwrap().children.remove(0).id;
    let kept_on = w.warm(&kept).await.unwrap().children.remove(0).id;
    w.host.promote(W, &kept_on, PromoteRequest::default()).await.unwrap();
    let request = PromoteRequest { cleanup_siblings: true, tree_id: None };
    let answer = w.host.promote(W, &winner.id, request).await.unwrap();
    let deleted: BTreeSet<_> = answer.deleted.into_iter().collect();
    assert_eq!(deleted, [loser, moved, again, kept].into());
    w.exactly([&parent, &winner.id, &kept_on]).await;
}

#[test]
fn a_daemon_that_is_killed_during_a_warm_fork_leaves_one_whole_machine() {
    let mut daemon = runtime();
    let (mut w, mut id) = daemon.block_on(async {
        let w = world().await;
        let id = w.original().await.id;
        (w, id)
    });
    w.engine.script(|s| (s.start_delay, s.capture_delay) = (Duration::from_millis(4), Duration::from_millis(4)));
    let (mut stayed, mut moved) = (0, 0);
    for step in 0..60u64 {
        let parent = id.clone();
        let patience = Duration::from_micros(700 * step);
        (daemon, w) = killed(daemon, w, patience, async |host| drop(host.fork_warm(W, &parent, spec(1)).await));
        daemon.block_on(async {
            let sandbox = w.host.get(W, &id).await.unwrap();
            let seats: Vec<_> = w.slots.seats().into_values().collect();
            assert!(matches!(seats.as_slice(), [(_, false)]), "{step}: {seats:?}");
            match sandbox.metadata.get("successor").cloned() {
                None => stayed += 1,
                Some(successor) => {
                    moved += 1;
                    assert_eq!(sandbox.status, SandboxStatus::Stopped, "{step}");
                    w.moved(&[&id], &successor, seats[0].0).await;
                    w.host.delete(W, &id).await.unwrap();
                    id = successor;
                }
            }
            w.is_original(&id).await;
            w.exactly([&id]).await;
        });
    }
    assert!(stayed > 0 && moved > 0, "both sides of the moment were hit: {stayed} {moved}");
}
