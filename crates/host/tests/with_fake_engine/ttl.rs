//! What becomes of a sandbox that nobody uses, and what counts as use.

use super::*;

use coppice_api::OnTtl;
use coppice_host::ExecSpec;

fn request(ttl: i64, on_ttl: OnTtl) -> CreateSandboxRequest {
    CreateSandboxRequest { ttl_seconds: Some(ttl), on_ttl: Some(on_ttl), ..Default::default() }
}

impl World {
    async fn short_lived(&self, on_ttl: OnTtl) -> String {
        self.host.create(W, request(1, on_ttl)).await.unwrap().id
    }

    async fn becomes(&self, id: &str, status: SandboxStatus) {
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        loop {
            let now = self.host.get(W, id).await.unwrap().status;
            if now == status {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "{id} is {now:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test]
async fn what_is_in_progress_is_use_and_looking_is_none() {
    let w = world().await;
    let looked_at = w.short_lived(OnTtl::Delete).await;
    let [command, file, upload] = [w.create().await.id, w.create().await.id, w.create().await.id];
    w.write(&file, "/root/file", "text").await;
    let patch = LifecyclePatch { ttl_seconds: Some(1), ..LifecyclePatch::default() };
    for id in [&command, &file, &upload] {
        w.host.set_lifecycle(W, id, patch.clone()).await.unwrap();
    }
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let stuck = futures::stream::once(async move {
        ended.await.unwrap_or_default();
        Ok(Bytes::from("late"))
    });
    let (host, id) = (Arc::clone(&w.host), upload.clone());
    let writing = tokio::spawn(async move { host.write_file(W, &id, "/root/upload", stuck.boxed()).await });
    let spec = ExecSpec { argv: vec!["sleep".into(), "3".into()], ..ExecSpec::default() };
    let (host, id) = (Arc::clone(&w.host), command.clone());
    let running = tokio::spawn(async move { drop(host.exec(W, &id, spec).await.unwrap()) });
    // Opened, and read by nobody.
    let body = w.host.read_file(W, &file, "/root/file").await.unwrap().body;

    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_millis(2500) {
        drop(w.host.get(W, &looked_at).await);
        drop(w.host.lifecycle(W, &looked_at).await);
        drop(w.host.logs(W, &looked_at, None).await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let used: BTreeSet<String> = [&command, &file, &upload].map(Clone::clone).into();
    assert_eq!(w.ids().await, used);
    for id in &used {
        assert_eq!(w.host.lifecycle(W, id).await.unwrap().idle_seconds, 0);
    }
    drop((body, end));
    assert_eq!(writing.await.unwrap().unwrap(), 4);
    running.await.unwrap();
    w.exactly([]).await;
}

#[tokio::test]
async fn one_that_is_to_hibernate_is_kept_until_it_is_deleted_and_counts_for_quotas() {
    let w = world().await;
    let id = w.short_lived(OnTtl::Hibernate).await;
    w.write(&id, "/dev/shm/memory", "m").await;
    let held = w.host.holdings(W).await.unwrap();
    w.becomes(&id, SandboxStatus::Hibernated).await;
    let w = w.restart().await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let kept = w.host.get(W, &id).await.unwrap();
    assert_eq!((kept.status, kept.on_ttl), (SandboxStatus::Hibernated, OnTtl::Hibernate));
    assert_eq!(w.host.holdings(W).await.unwrap(), held);
    // Any use wakes it, and its time begins again.
    assert_eq!(w.read(&id, "/dev/shm/memory").await.unwrap(), "m");
    assert_eq!(w.host.get(W, &id).await.unwrap().status, SandboxStatus::Running);
    w.becomes(&id, SandboxStatus::Hibernated).await;
    // From now on it ends the other way: as soon as it was awake and idle again.
    let patch = LifecyclePatch { on_ttl: Some(OnTtl::Delete), ..LifecyclePatch::default() };
    assert_eq!(w.host.set_lifecycle(W, &id, patch).await.unwrap().on_ttl, OnTtl::Delete);
    let w = w.restart().await;
    assert_eq!(w.host.lifecycle(W, &id).await.unwrap().on_ttl, OnTtl::Delete);
    w.host.wake(W, &id).await.unwrap();
    w.exactly([]).await;
    assert!(w.snapshots().is_empty());
}

#[tokio::test]
async fn children_end_as_their_parent_does_and_explored_ones_are_only_kept_when_chosen() {
    let w = world().await;
    let parent = w.host.create(W, request(500, OnTtl::Hibernate)).await.unwrap();
    let ways = |fork: &Fork| fork.children.iter().map(|c| (c.ttl_seconds, c.on_ttl)).collect::<Vec<_>>();
    let inherited = w.host.fork_tree(W, &parent.id, spec(2)).await.unwrap();
    assert_eq!(ways(&inherited), [(500, OnTtl::Hibernate); 2]);
    let booted = w.host.fork_disk(W, &parent.id, spec(1)).await.unwrap();
    assert_eq!(ways(&booted), [(500, OnTtl::Hibernate)]);
    let asked = ForkSpec { on_ttl: Some(OnTtl::Delete), ..spec(1) };
    assert_eq!(ways(&w.host.fork_tree(W, &parent.id, asked).await.unwrap()), [(500, OnTtl::Delete)]);

    let explored = ForkSpec { metadata: [("explore_ttl".to_owned(), "2".to_owned())].into(), ..spec(2) };
    let fork = w.host.fork_tree(W, &parent.id, explored.clone()).await.unwrap();
    assert_eq!(ways(&fork), [(2, OnTtl::Delete); 2]);
    let kept = ForkSpec { on_ttl: Some(OnTtl::Hibernate), ..explored };
    assert_eq!(ways(&w.host.fork_tree(W, &parent.id, kept).await.unwrap()), [(2, OnTtl::Hibernate); 2]);
    let [winner, loser] = [&fork.children[0].id, &fork.children[1].id];
    let request = PromoteRequest { cleanup_siblings: false, tree_id: None };
    w.host.promote(W, winner, request).await.unwrap();
    // Nobody is there to clean up.
    let w = w.restart().await;
    let promoted = w.host.get(W, winner).await.unwrap();
    assert_eq!((promoted.ttl_seconds, promoted.on_ttl), (500, OnTtl::Hibernate));
    tokio::time::sleep(Duration::from_millis(3000)).await;
    let ids = w.ids().await;
    assert!(ids.contains(winner) && !ids.contains(loser), "{ids:?}");
}

#[tokio::test]
async fn one_that_can_not_hibernate_runs_on_and_one_whose_machine_is_dead_is_deleted() {
    let w = world().await;
    let [whole, dead] = [w.short_lived(OnTtl::Hibernate).await, w.short_lived(OnTtl::Hibernate).await];
    let newest = w.engine.alive().into_iter().max().unwrap();
    w.engine.crash(newest);
    w.engine.script(|s| s.fail_captures = 1);
    w.exactly([&whole]).await;
    assert!(!w.ids().await.contains(&dead));
    tokio::time::sleep(Duration::from_millis(500)).await;
    // It was tried, and is not tried again at once.
    assert_eq!(w.host.get(W, &whole).await.unwrap().status, SandboxStatus::Running);
    let mut left = 1;
    w.engine.script(|s| left = s.fail_captures);
    assert_eq!(left, 0);
}
