//! The whole of explore against a fake server: one fork, bounded concurrency, who wins, who dies, also when things fail.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::fake::{Seen, Server, fork, reply, sandbox, sse};
use axum::response::{IntoResponse, Response};
use coppice_client::{Candidate, ExploreError, ExploreOptions, explore, explore_until};
use serde_json::{Value, json};

/// A cloud whose children run `exit N`, `sleep`, `break` and print scores.
#[derive(Clone, Default)]
struct Cloud {
    alive: Arc<Mutex<BTreeSet<String>>>,
    running: Arc<AtomicUsize>,
    most_running: Arc<AtomicUsize>,
    missing: Option<usize>,
    promote_fails: bool,
    promote_deletes_nothing: bool,
    delete_fails: Option<&'static str>,
    changes_fail: bool,
}

impl Cloud {
    async fn answer(self, seen: Seen) -> Response {
        let body = seen.json();
        let path = seen.line.split(' ').nth(1).unwrap_or_default().to_owned();
        let parts: Vec<&str> = path.trim_start_matches("/v1/sandboxes/").split('/').collect();
        let id = parts.first().copied().unwrap_or_default().to_owned();
        match (seen.line.split(' ').next().unwrap_or_default(), parts.get(1..).unwrap_or_default()) {
            ("POST", ["fork-tree"]) => self.fork(&body),
            ("POST", ["exec"]) => Self::exec(&id, &body),
            ("POST", ["exec", "stream"]) => self.stream(&body).await,
            ("POST", ["changes?limit=100"]) => self.changes(&id),
            ("POST", ["promote"]) => self.promote(&id),
            ("DELETE", []) => self.delete(&id),
            _ => reply(404, &json!({"error": seen.line, "code": "no_route"})),
        }
    }

    fn fork(&self, body: &Value) -> Response {
        let mut children = Vec::new();
        let mut errors = Vec::new();
        for index in 0..usize::try_from(body["count"].as_u64().unwrap()).unwrap() {
            if self.missing == Some(index) {
                errors.push(json!({"index": index, "err": "did not answer"}));
                continue;
            }
            let id = format!("K{index}");
            children.push(sandbox(&id, &json!({"fork_index": index.to_string(), "fork_tree_id": "T"})));
            self.alive.lock().unwrap().insert(id);
        }
        reply(201, &fork(&children, &json!(errors)))
    }

    fn exec(id: &str, body: &Value) -> Response {
        let cmd = body["cmd"].as_str().unwrap();
        let (stdout, exit_code) = match cmd {
            "score" => (format!("scoring\n0.{}\n", id.trim_start_matches('K')), 0),
            "bad score" => ("not a number\n".to_owned(), 0),
            "failing score" => ("1\n".to_owned(), 2),
            _ => (String::new(), 0),
        };
        reply(200, &json!({"stdout": stdout, "stderr": "", "exit_code": exit_code, "duration_ms": 1}))
    }

    fn changes(&self, id: &str) -> Response {
        if self.changes_fail {
            return reply(503, &json!({"error": "too many disks are being compared", "code": "busy"}));
        }
        let entry = |path: &str, kind: &str| json!({"path": path, "type": kind, "size": 3, "mode": "0644"});
        let added = json!([entry("/root/d", "dir"), entry("/root/d/a.py", "file")]);
        let since = json!({"kind": "fork", "id": "P", "at": "2026-01-01T00:00:00Z"});
        let counts = json!({"added": 2, "modified": 1, "deleted": 0, "earlier": 0});
        let bytes = json!({"added": 3, "modified": 3, "deleted": 0});
        reply(
            200,
            &json!({"sandbox_id": id, "since": since, "at": "2026-01-01T00:00:01Z", "flushed": true, "added": added,
                "modified": [entry("/app/b", "file")], "deleted": [], "counts": counts, "bytes": bytes,
                "truncated": false}),
        )
    }

    async fn stream(&self, body: &Value) -> Response {
        let now = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(now, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(30)).await;
        let cmd = body["cmd"].as_str().unwrap();
        if cmd == "hang" {
            tokio::time::sleep(Duration::from_secs(3600)).await;
        }
        self.running.fetch_sub(1, Ordering::SeqCst);
        let out = "event: stdout\ndata: {\"chunk\":\"out\"}\n\n";
        match cmd.split_once(' ') {
            Some(("exit", code)) => {
                sse(format!("{out}event: exit\ndata: {{\"exit_code\":{code},\"duration_ms\":10}}\n\n"))
            }
            Some(("quick", code)) => {
                sse(format!("{out}event: exit\ndata: {{\"exit_code\":{code},\"duration_ms\":5}}\n\n"))
            }
            _ if cmd == "slow" => {
                sse(format!("{out}event: error\ndata: {{\"error\":\"command timeout after 1s\"}}\n\n"))
            }
            _ => sse(out),
        }
    }

    fn promote(&self, id: &str) -> Response {
        if self.promote_fails {
            return reply(500, &json!({"error": "promote broke", "code": "internal"}));
        }
        let mut alive = self.alive.lock().unwrap();
        let deleted: Vec<String> = if self.promote_deletes_nothing {
            Vec::new()
        } else {
            alive.iter().filter(|other| *other != id).cloned().collect()
        };
        alive.retain(|other| !deleted.contains(other));
        reply(200, &json!({"winner": id, "tree_id": "T", "deleted": deleted, "failures": {}}))
    }

    fn delete(&self, id: &str) -> Response {
        if self.delete_fails == Some(id) {
            return reply(500, &json!({"error": "stuck", "code": "internal"}));
        }
        if !self.alive.lock().unwrap().remove(id) {
            return reply(404, &json!({"error": "no such sandbox", "code": "sandbox_not_found"}));
        }
        axum::http::StatusCode::NO_CONTENT.into_response()
    }

    fn alive(&self) -> Vec<String> {
        self.alive.lock().unwrap().iter().cloned().collect()
    }

    async fn start(&self) -> Server {
        let cloud = self.clone();
        Server::start(move |seen| cloud.clone().answer(seen)).await
    }
}

fn candidates(commands: &[&str]) -> Vec<Candidate> {
    let candidate =
        |(index, command): (usize, &&str)| Candidate { label: format!("c{index}"), command: (*command).into() };
    commands.iter().enumerate().map(candidate).collect()
}

#[tokio::test]
async fn the_one_that_succeeds_is_promoted_and_the_others_die() {
    let cloud = Cloud::default();
    let server = cloud.start().await;
    let list = candidates(&["exit 1", "exit 0", "slow", "breaks"]);
    let outcome = explore(&server.client(), "P", &list, &ExploreOptions::default()).await.unwrap();
    assert_eq!((outcome.winner.as_deref(), outcome.winner_id.as_deref()), (Some("c1"), Some("K1")));
    assert!(outcome.promoted && outcome.failures.is_empty());
    assert_eq!(outcome.deleted, ["K0", "K2", "K3"]);
    assert_eq!(cloud.alive(), ["K1"]);
    assert_eq!((outcome.tree_id.as_str(), outcome.parent_paused_ms), ("T", 12.5));
    let [failed, won, slow, broken] = &outcome.branches[..] else { panic!("{outcome:?}") };
    assert_eq!((failed.exit_code, failed.score, failed.viable), (Some(1), 0.0, false));
    assert_eq!((won.exit_code, won.score, won.stdout_tail.as_str()), (Some(0), 1.0, "out"));
    assert_eq!(won.files_changed, ["/app/b", "/root/d/a.py"]);
    for branch in [failed, won, slow] {
        let counts = branch.changes.as_ref().unwrap().counts;
        assert_eq!((counts.added, counts.modified, counts.deleted), (2, 1, 0), "{}", branch.label);
    }
    assert!(broken.changes.is_none(), "nobody knows what became of it");
    assert!(slow.timed_out && slow.exit_code.is_none() && slow.stdout_tail == "out");
    assert!(!broken.timed_out && broken.error.is_some());
    let [flush, first] = &server.seen()[..2] else { panic!() };
    assert_eq!((flush.line.as_str(), flush.json()["cmd"].as_str()), ("POST /v1/sandboxes/P/exec", Some("sync")));
    assert_eq!(first.line, "POST /v1/sandboxes/P/fork-tree");
    assert_eq!(first.json(), json!({"count": 4, "metadata": {"explore": "1", "explore_ttl": "600"}}));
    let promote = server.seen().into_iter().find(|seen| seen.line.ends_with("promote")).unwrap();
    assert_eq!(promote.json(), json!({"cleanup_siblings": true, "tree_id": "T"}));
}

#[tokio::test]
async fn a_branch_whose_changes_cannot_be_told_may_win() {
    let server = Cloud { changes_fail: true, ..Cloud::default() }.start().await;
    let outcome = explore(&server.client(), "P", &candidates(&["exit 0"]), &ExploreOptions::default()).await.unwrap();
    let branch = &outcome.branches[0];
    assert!(branch.viable && branch.error.is_none() && branch.changes.is_none());
    assert!(branch.changes_error.as_ref().unwrap().contains("too many disks"));
    assert_eq!(outcome.winner_id.as_deref(), Some("K0"));
}

#[tokio::test]
async fn scores_decide_then_the_shortest() {
    let server = Cloud::default().start().await;
    let options = ExploreOptions { score: Some("score".into()), ..ExploreOptions::default() };
    let list = candidates(&["quick 0", "exit 0", "exit 0", "exit 1"]);
    let outcome = explore(&server.client(), "P", &list, &options).await.unwrap();
    assert_eq!(outcome.winner.as_deref(), Some("c2"));
    let scores: Vec<f64> = outcome.branches.iter().map(|branch| branch.score).collect();
    assert_eq!(scores, [0.0, 0.1, 0.2, 0.0]);

    let server = Cloud::default().start().await;
    let outcome = explore(&server.client(), "P", &candidates(&["exit 0", "quick 0"]), &ExploreOptions::default()).await;
    assert_eq!(outcome.unwrap().winner.as_deref(), Some("c1"));
}

#[tokio::test]
async fn a_branch_that_cannot_be_scored_cannot_win() {
    for score in ["bad score", "failing score"] {
        let cloud = Cloud::default();
        let server = cloud.start().await;
        let options = ExploreOptions { score: Some(score.into()), ..ExploreOptions::default() };
        let error = explore(&server.client(), "P", &candidates(&["exit 0"]), &options).await.unwrap_err();
        assert!(error.to_string().contains("score command"), "{error}");
        assert!(cloud.alive().is_empty());
    }
}

#[tokio::test]
async fn without_a_viable_branch_all_children_die_and_the_error_tells() {
    let cloud = Cloud::default();
    let server = cloud.start().await;
    let list = candidates(&["exit 2", "slow"]);
    let error = explore(&server.client(), "P", &list, &ExploreOptions::default()).await.unwrap_err();
    assert_eq!(error.to_string(), "no branch succeeded: c0: exit code 2; c1: ran into its deadline");
    let ExploreError::NoViableBranch(outcome) = error else { panic!("{error}") };
    assert_eq!((outcome.deleted.len(), outcome.winner), (2, None));
    assert!(cloud.alive().is_empty());
    assert!(!server.lines().iter().any(|line| line.ends_with("promote")));
}

#[tokio::test]
async fn at_most_so_many_run_at_once() {
    let cloud = Cloud::default();
    let server = cloud.start().await;
    let options = ExploreOptions { concurrency: 3, ..ExploreOptions::default() };
    explore(&server.client(), "P", &candidates(&["exit 0"; 9]), &options).await.unwrap();
    assert_eq!(cloud.most_running.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn a_child_that_did_not_start_loses_and_the_others_keep_their_places() {
    let cloud = Cloud { missing: Some(0), ..Cloud::default() };
    let server = cloud.start().await;
    let list = candidates(&["exit 0", "exit 1", "exit 0"]);
    let outcome = explore(&server.client(), "P", &list, &ExploreOptions::default()).await.unwrap();
    assert_eq!(outcome.branches[0].sandbox_id, "");
    assert!(outcome.branches[0].error.as_deref().unwrap().contains("did not answer"));
    assert_eq!((outcome.branches[1].sandbox_id.as_str(), outcome.branches[1].exit_code), ("K1", Some(1)));
    assert_eq!(outcome.winner_id.as_deref(), Some("K2"));
}

#[tokio::test]
async fn losers_die_when_promote_fails_or_deletes_nothing() {
    let cloud = Cloud { promote_fails: true, ..Cloud::default() };
    let server = cloud.start().await;
    let outcome = explore(&server.client(), "P", &candidates(&["exit 0", "exit 1"]), &ExploreOptions::default()).await;
    let outcome = outcome.unwrap();
    assert!(!outcome.promoted && outcome.failures["K0"].contains("promote broke"));
    assert_eq!(cloud.alive(), ["K0"]);

    let cloud = Cloud { promote_deletes_nothing: true, delete_fails: Some("K2"), ..Cloud::default() };
    let server = cloud.start().await;
    let list = candidates(&["exit 0", "exit 1", "exit 1"]);
    let outcome = explore(&server.client(), "P", &list, &ExploreOptions::default()).await.unwrap();
    assert_eq!(outcome.deleted, ["K1"]);
    assert!(outcome.failures["K2"].contains("stuck"));
}

#[tokio::test]
async fn without_promotion_the_winner_stays_a_child() {
    let cloud = Cloud::default();
    let server = cloud.start().await;
    let options = ExploreOptions { promote: false, ..ExploreOptions::default() };
    let outcome = explore(&server.client(), "P", &candidates(&["exit 1", "exit 0"]), &options).await.unwrap();
    assert!(!outcome.promoted && outcome.winner_id.as_deref() == Some("K1"));
    assert_eq!(cloud.alive(), ["K1"]);
}

#[tokio::test]
async fn an_interruption_deletes_every_child() {
    let cloud = Cloud::default();
    let server = cloud.start().await;
    let forked = Arc::new(tokio::sync::Notify::new());
    let notify = forked.clone();
    let options = ExploreOptions { on_fork: Some(Arc::new(move |_| notify.notify_one())), ..ExploreOptions::default() };
    let interrupt = async {
        forked.notified().await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let list = candidates(&["hang", "exit 0"]);
    let error = explore_until(&server.client(), "P", &list, &options, interrupt).await.unwrap_err();
    assert!(
        matches!(&error, ExploreError::Interrupted { deleted, failures } if deleted.len() == 2 && failures.is_empty())
    );
    assert!(cloud.alive().is_empty());
}

#[tokio::test]
async fn an_interruption_while_the_fork_is_answered_deletes_every_child_too() {
    let cloud = Cloud::default();
    let server = cloud.start().await;
    let list = candidates(&["exit 0", "exit 0"]);
    let options = ExploreOptions { changes: false, ..ExploreOptions::default() };
    let error = explore_until(&server.client(), "P", &list, &options, std::future::ready(())).await.unwrap_err();
    assert!(
        matches!(&error, ExploreError::Interrupted { deleted, failures } if deleted.len() == 2 && failures.is_empty())
    );
    assert!(cloud.alive().is_empty());
}

#[tokio::test]
async fn what_cannot_be_explored_is_refused_before_anything_is_sent() {
    let server = Cloud::default().start().await;
    let client = server.client();
    let twice = vec![Candidate { label: "a".into(), command: "x".into() }; 2];
    let zero = ExploreOptions { concurrency: 0, ..ExploreOptions::default() };
    for (list, options) in [
        (candidates(&[]), ExploreOptions::default()),
        (candidates(&["x"; 17]), ExploreOptions::default()),
        (candidates(&[" "]), ExploreOptions::default()),
        (twice, ExploreOptions::default()),
        (candidates(&["x"]), zero),
    ] {
        assert!(matches!(explore(&client, "P", &list, &options).await, Err(ExploreError::Invalid(_))));
    }
    assert!(server.lines().is_empty());
}
