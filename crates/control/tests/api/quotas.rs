//! Quotas and the rate of creates: decided before anything is made, and exact also when many ask at once.

use std::sync::atomic::Ordering;
use std::time::Duration;

use coppice_control::{Auth, Control, ControlConfig};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::common::Server;

/// A server, and a token of workspace `a` with this quota.
async fn limited(quota: &Value) -> (Server, String) {
    let server = Server::with(|config| config.limits.create_rate = 0).await;
    let token = server.store.create("a", "x").await.unwrap();
    set(&server, quota).await;
    (server, token)
}

async fn set(server: &Server, quota: &Value) {
    let put = server.call(Method::PUT, "/v1/workspaces/a").body(quota.to_string());
    let (status, row) = server.json(put).await;
    assert_eq!((status, &row["quota"]), (200, quota));
}

async fn usage(server: &Server) -> Value {
    server.json(server.get("/v1/workspaces/a")).await.1["usage"].clone()
}

async fn create(server: &Server, token: &str) -> (u16, Value) {
    server.json(server.call_as(token, Method::POST, "/v1/sandboxes")).await
}

async fn fork(server: &Server, token: &str, id: &str, kind: &str, count: u64) -> (u16, Value) {
    let path = format!("/v1/sandboxes/{id}/{kind}");
    server.json(server.call_as(token, Method::POST, &path).body(json!({"count": count}).to_string())).await
}

#[tokio::test]
async fn many_creates_at_once_do_not_exceed_a_quota_and_fill_it() {
    let (server, token) = limited(&json!({"sandboxes": 5})).await;
    server.fake.pace.store(50, Ordering::SeqCst);
    let all = futures::future::join_all((0..20).map(|_| create(&server, &token))).await;
    assert_eq!(all.iter().filter(|(status, _)| *status == 201).count(), 5);
    for (_, body) in all.iter().filter(|(status, _)| *status != 201) {
        assert_eq!(body["code"], "quota_exceeded");
        assert!(body["error"].as_str().unwrap().contains("max sandboxes reached"), "{body}");
    }
    assert_eq!(usage(&server).await, json!({"sandboxes": 5, "memory_mb": 2560, "snapshots": 0, "disk_mb": 5120}));
    let response = server.call_as(&token, Method::POST, "/v1/sandboxes").send().await.unwrap();
    assert_eq!(response.status(), 429);
    assert!(response.headers().get("retry-after").is_none());
    // Of another workspace nobody asked.
    assert_eq!(server.json(server.post("/v1/sandboxes", "")).await.0, 201);
}

#[tokio::test]
async fn children_that_are_there_before_their_fork_is_answered_count_once() {
    let (server, token) = limited(&json!({"sandboxes": 17})).await;
    let (_, parent) = create(&server, &token).await;
    let id = parent["id"].as_str().unwrap();
    // Children are listed at once, and the fork is answered later.
    server.fake.pace.store(200, Ordering::SeqCst);
    let (one, two) = tokio::join!(fork(&server, &token, id, "fork-tree", 8), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        fork(&server, &token, id, "fork", 8).await
    });
    assert_eq!((one.0, two.0), (201, 201), "{} {}", one.1, two.1);
    assert_eq!(create(&server, &token).await.0, 429);
    assert_eq!(usage(&server).await["sandboxes"], 17);
}

#[tokio::test]
async fn each_limit_is_a_limit_and_what_is_deleted_counts_no_more() {
    let (server, token) = limited(&json!({"fan_out": 2})).await;
    let (_, first) = create(&server, &token).await;
    let id = first["id"].as_str().unwrap();
    for kind in ["fork", "fork-tree"] {
        let (status, body) = fork(&server, &token, id, kind, 3).await;
        assert_eq!((status, &body["code"]), (429, &json!("quota_exceeded")), "{kind}");
        assert_eq!(fork(&server, &token, id, kind, 2).await.0, 201);
    }
    // Five of 512 MiB of memory and 1 GiB of disk.
    set(&server, &json!({"memory_mb": 3072})).await;
    assert_eq!(fork(&server, &token, id, "fork-tree", 2).await.0, 429);
    assert_eq!(create(&server, &token).await.0, 201);
    let (status, body) = create(&server, &token).await;
    assert_eq!((status, body["error"].as_str().unwrap().contains("MiB of memory")), (429, true), "{body}");

    set(&server, &json!({"snapshots": 1, "disk_mb": 6 * 1024 + 1536})).await;
    let snapshot = format!("/v1/sandboxes/{id}/snapshots");
    let taken = server.json(server.call_as(&token, Method::POST, &snapshot)).await;
    assert_eq!(taken.0, 201);
    assert_eq!(server.json(server.call_as(&token, Method::POST, &snapshot)).await.0, 429);
    set(&server, &json!({"snapshots": 9, "disk_mb": 8000})).await;
    let (status, body) = server.json(server.call_as(&token, Method::POST, &snapshot)).await;
    assert_eq!((status, body["error"].as_str().unwrap().contains("MiB of disk")), (429, true), "{body}");

    set(&server, &json!({"sandboxes": 6})).await;
    assert_eq!(create(&server, &token).await.0, 429);
    let gone = server.call_as(&token, Method::DELETE, &format!("/v1/sandboxes/{id}")).send().await.unwrap();
    assert_eq!(gone.status(), 204);
    assert_eq!(create(&server, &token).await.0, 201);
    let mistyped = server.call(Method::PUT, "/v1/workspaces/a").body(r#"{"sandbox":1}"#);
    assert_eq!(server.json(mistyped).await.0, 400);
    set(&server, &json!({"sandboxes": 0})).await;
    assert_eq!(create(&server, &token).await.0, 429);
    set(&server, &json!({})).await;
    assert_eq!(create(&server, &token).await.0, 201);
}

#[tokio::test]
async fn who_takes_anothers_place_needs_no_room_and_stays_when_nobody_waits() {
    let (server, token) = limited(&json!({"sandboxes": 1, "memory_mb": 512})).await;
    let (_, parent) = create(&server, &token).await;
    let mut id = parent["id"].as_str().unwrap().to_owned();
    let warm =
        |id: &str| server.call_as(&token, Method::POST, &format!("/v1/sandboxes/{id}/fork")).body(r#"{"mode":"warm"}"#);
    for _ in 0..3 {
        let (status, body) = server.json(warm(&id)).await;
        assert_eq!((status, &body["mode"], body["children"].as_array().unwrap().len()), (201, &json!("warm"), 1));
        assert_eq!(usage(&server).await["sandboxes"], 1);
        assert_eq!(create(&server, &token).await.0, 429);
        // It has moved: the host says so, and not that it was never there.
        let (status, body) = server.json(warm(&id)).await;
        assert_eq!((status, &body["code"]), (409, &json!("sandbox_not_running")), "{body}");
        id = body_child(&server.json(server.call_as(&token, Method::GET, &format!("/v1/sandboxes/{id}"))).await.1);
    }
    server.fake.calls();
    server.fake.pace.store(300, Ordering::SeqCst);
    warm(&id).timeout(Duration::from_millis(100)).send().await.unwrap_err();
    // While there are two both count.
    assert_eq!(create(&server, &token).await.0, 429);
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert!(!server.fake.calls().iter().any(|call| call.starts_with("delete")), "the child is all there is");
    assert_eq!(usage(&server).await["sandboxes"], 1);
    assert_eq!(create(&server, &token).await.0, 429);
}

fn body_child(parent: &Value) -> String {
    assert_eq!(parent["status"], "stopped");
    parent["metadata"]["successor"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_failure_gives_back_what_was_promised() {
    let (server, token) = limited(&json!({"sandboxes": 1})).await;
    for _ in 0..3 {
        let body = r#"{"template":"no-such"}"#;
        assert_eq!(server.json(server.call_as(&token, Method::POST, "/v1/sandboxes").body(body)).await.0, 400);
    }
    server.fake.fail("create", coppice_api::ErrorClass::Internal, "panic");
    assert_eq!(create(&server, &token).await.0, 500);
    server.fake.mend("create");
    assert_eq!(create(&server, &token).await.0, 201);
}

#[tokio::test]
async fn hanging_up_is_no_way_around_a_quota() {
    let (server, token) = limited(&json!({"sandboxes": 1})).await;
    server.fake.pace.store(400, Ordering::SeqCst);
    let hung = server.call_as(&token, Method::POST, "/v1/sandboxes").timeout(Duration::from_millis(100));
    hung.send().await.unwrap_err();
    // It is still being made.
    assert_eq!(create(&server, &token).await.0, 429);
    // Then nobody has it, and it is deleted.
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        if usage(&server).await["sandboxes"] == 0 && server.fake.calls().iter().any(|c| c.starts_with("delete a")) {
            break;
        }
    }
    assert_eq!(create(&server, &token).await.0, 201);
    assert_eq!(usage(&server).await["sandboxes"], 1);
}

#[tokio::test]
async fn after_a_restart_what_is_there_still_counts() {
    let (server, token) = limited(&json!({"sandboxes": 2})).await;
    assert_eq!(create(&server, &token).await.0, 201);
    assert_eq!(create(&server, &token).await.0, 201);
    let control = Control::new(server.fake.clone(), ControlConfig::new(Auth::Tokens(server.store.clone()))).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/sandboxes", listener.local_addr().unwrap());
    let serving = tokio::spawn(control.serve(listener, std::future::pending()));
    let (status, body) = server.json(server.client.post(url).bearer_auth(&token)).await;
    assert_eq!((status, &body["code"]), (429, &json!("quota_exceeded")));
    serving.abort();
}

#[tokio::test]
async fn creates_and_forks_have_a_rate_and_nothing_else_has() {
    let server = Server::with(|config| config.limits.create_rate = 1).await;
    let id = server.sandbox();
    let path = format!("/v1/sandboxes/{id}/fork-tree");
    assert_eq!(server.json(server.post("/v1/sandboxes", "")).await.0, 201);
    assert_eq!(server.json(server.post(&path, r#"{"count":16}"#)).await.0, 201);
    server.fake.calls();
    for path in ["/v1/sandboxes", &path, &format!("/v1/sandboxes/{id}/fork")] {
        let response = server.post(path, "").send().await.unwrap();
        assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &"1".parse().unwrap()));
        let body: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
        assert_eq!(body["code"], "rate_limited");
    }
    assert!(!server.fake.calls().iter().any(|call| call.starts_with("create") || call.starts_with("fork")));
    for _ in 0..50 {
        assert_eq!(server.json(server.get("/v1/sandboxes")).await.0, 200);
    }
    let other = server.store.create("other", "x").await.unwrap();
    assert_eq!(create(&server, &other).await.0, 201);
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(server.json(server.post("/v1/sandboxes", "")).await.0, 201);
}
