//! What the client sends, and what it makes of the answers.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::fake::{Seen, Server, fork, reply, sandbox, sse};
use axum::body::Body;
use axum::response::IntoResponse;
use coppice_client::api::{
    CreateSandboxRequest, EgressPolicy, ExecRequest, ForkMode, ForkRequest, LifecyclePatch, NetworkRequest,
    PromoteRequest, SandboxStatus,
};
use coppice_client::{Client, ClientError, ExecEvent, WriteBody};
use serde_json::json;

fn exec(cmd: &str) -> ExecRequest {
    ExecRequest { cmd: cmd.into(), ..ExecRequest::default() }
}

#[tokio::test]
async fn routes_are_those_of_the_contract() {
    let server = Server::start(|seen: Seen| async move {
        let line = seen.line.as_str();
        match line {
            "GET /v1/sandboxes" => reply(200, &json!([sandbox("A", &json!({"k": "v"}))])),
            "GET /v1/snapshots?sandbox_id=A+b" => reply(200, &json!({"snapshots": []})),
            "GET /v1/snapshots" | "GET /v1/templates" => reply(200, &json!([])),
            "PATCH /v1/sandboxes/A/lifecycle" | "GET /v1/sandboxes/A/lifecycle" => {
                reply(200, &json!({"ttl_seconds": 5, "persistent": false, "idle_seconds": 1}))
            }
            "PATCH /v1/sandboxes/A/network" | "GET /v1/sandboxes/A/network" => {
                reply(200, &json!({"egress": {"allow": ["example.org:443"]}}))
            }
            "POST /v1/sandboxes/A/fork" | "POST /v1/sandboxes/A/fork-tree" => {
                reply(201, &fork(&[sandbox("B", &json!({}))], &json!([])))
            }
            "POST /v1/sandboxes/A/hibernate" => reply(200, &json!({"status": "hibernated"})),
            "POST /v1/sandboxes/A/wake" => reply(200, &json!({"status": "running"})),
            "POST /v1/sandboxes/A/promote" => {
                reply(200, &json!({"winner": "A", "tree_id": "T", "deleted": ["B"], "failures": {}}))
            }
            _ if line.starts_with("DELETE") || line.ends_with("pause") || line.ends_with("resume") => {
                axum::http::StatusCode::NO_CONTENT.into_response()
            }
            "POST /v1/sandboxes" | "GET /v1/sandboxes/A" => reply(201, &sandbox("A", &json!({}))),
            "GET /version" => reply(200, &json!({"version": "1", "engine": "qemu"})),
            _ => reply(404, &json!({"error": format!("unexpected {line}"), "code": "no_route"})),
        }
    })
    .await;
    let client = server.client();
    let request = CreateSandboxRequest { template: Some("base".into()), ..CreateSandboxRequest::default() };
    assert_eq!(client.create(&request).await.unwrap().status, SandboxStatus::Running);
    assert_eq!(client.list().await.unwrap()[0].metadata["k"], "v");
    client.get("A").await.unwrap();
    client.pause("A").await.unwrap();
    client.resume("A").await.unwrap();
    assert_eq!(client.hibernate("A").await.unwrap().status, SandboxStatus::Hibernated);
    assert_eq!(client.wake("A").await.unwrap().status, SandboxStatus::Running);
    let patch = LifecyclePatch { ttl_seconds: Some(5), ..LifecyclePatch::default() };
    assert_eq!(client.set_lifecycle("A", &patch).await.unwrap(), client.lifecycle("A").await.unwrap());
    let allow = NetworkRequest { egress: Some(EgressPolicy::Allow(vec!["example.org:443".into()])) };
    assert_eq!(client.set_network("A", &allow).await.unwrap(), client.network("A").await.unwrap());
    assert_eq!(client.snapshots(Some("A b")).await.unwrap(), []);
    assert_eq!(client.snapshots(None).await.unwrap(), []);
    assert_eq!(client.templates().await.unwrap(), []);
    let warm = ForkRequest { count: Some(1), mode: ForkMode::Warm, ..ForkRequest::default() };
    assert_eq!(client.fork("A", &warm).await.unwrap().children[0].id, "B");
    client.fork_tree("A", 3, BTreeMap::from([("a".into(), "b".into())])).await.unwrap();
    let promote = PromoteRequest { cleanup_siblings: true, tree_id: None };
    assert_eq!(client.promote("A", &promote).await.unwrap().deleted, ["B"]);
    client.delete("A").await.unwrap();
    client.delete_snapshot("S").await.unwrap();
    client.delete_template("t").await.unwrap();
    assert_eq!(client.version().await.unwrap().engine, "qemu");

    let seen = server.seen();
    assert!(seen.iter().all(|seen| seen.authorization == "Bearer pds_test"));
    let body = |line: &str| seen.iter().find(|seen| seen.line == line).unwrap().json();
    assert_eq!(body("POST /v1/sandboxes"), json!({"template": "base"}));
    assert_eq!(body("PATCH /v1/sandboxes/A/lifecycle"), json!({"ttl_seconds": 5}));
    assert_eq!(body("PATCH /v1/sandboxes/A/network"), json!({"egress": {"allow": ["example.org:443"]}}));
    assert_eq!(body("POST /v1/sandboxes/A/fork"), json!({"count": 1, "mode": "warm"}));
    assert_eq!(body("POST /v1/sandboxes/A/fork-tree"), json!({"count": 3, "metadata": {"a": "b"}}));
    assert_eq!(body("POST /v1/sandboxes/A/promote"), json!({"cleanup_siblings": true}));
}

#[tokio::test]
async fn files_travel_as_raw_bytes() {
    let server = Server::start(|seen: Seen| async move {
        match seen.line.split('?').next().unwrap_or_default() {
            "GET /v1/sandboxes/A/fs" => vec![0_u8, 255, 10].into_response(),
            "PUT /v1/sandboxes/A/fs" => reply(200, &json!({"path": "/x", "bytes": seen.body.len()})),
            "GET /v1/sandboxes/A/fs/dir" => {
                let entry = json!({"name": "f", "is_dir": false, "size": 3, "mode": "f", "mtime": 7});
                reply(200, &json!({"path": "/", "entries": [entry]}))
            }
            _ => reply(404, &json!({"error": "no such file", "code": "file_not_found", "hint": "look"})),
        }
    })
    .await;
    let client = server.client();
    assert_eq!(&client.read_file("A", "/tmp/a b&é").await.unwrap().bytes(10).await.unwrap()[..], [0, 255, 10]);
    let too_large = client.read_file("A", "/x").await.unwrap().bytes(2).await;
    assert!(matches!(too_large, Err(ClientError::Decode { .. })));
    assert_eq!(client.write_file("A", "/x", vec![7_u8; 5]).await.unwrap().bytes, 5);
    let pieces = futures::stream::iter([Ok(bytes::Bytes::from_static(b"ab")), Ok(bytes::Bytes::from_static(b"c"))]);
    assert_eq!(client.write_file("A", "/x", WriteBody::stream(pieces, Some(3))).await.unwrap().bytes, 3);
    assert_eq!(client.write_file("A", "/x", Vec::new()).await.unwrap().bytes, 0);
    assert_eq!(client.list_dir("A", "/").await.unwrap()[0].mtime, 7);
    let error = client.stat("A", "/x").await.unwrap_err();
    assert!(error.is_not_found());
    assert_eq!((error.code(), error.hint()), ("file_not_found", Some("look".into())));
    assert_eq!(server.lines()[0], "GET /v1/sandboxes/A/fs?path=%2Ftmp%2Fa+b%26%C3%A9");
}

#[tokio::test]
async fn a_command_streams_and_ends_with_its_exit_code() {
    let text = "event: stdout\ndata: {\"chunk\":\"a\\u2028\"}\n\n: ping\n\nevent: stderr\ndata: {\"chunk\":\"b\"}\n\n\
                event: exit\ndata: {\"exit_code\":3,\"duration_ms\":5}\n\n";
    let server = Server::start(move |_| async move { sse(text) }).await;
    let mut stream = server.client().exec_stream("A", &exec("x")).await.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap(), ExecEvent::Stdout("a\u{2028}".into()));
    assert_eq!(stream.next().await.unwrap().unwrap(), ExecEvent::Stderr("b".into()));
    assert!(matches!(stream.next().await, Some(Ok(ExecEvent::Exit(exit))) if exit.exit_code == 3));
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn a_stream_that_breaks_is_never_an_exit_code() {
    for (text, code, timed_out) in [
        ("event: stdout\ndata: {\"chunk\":\"a\"}\n\n", "exec_interrupted", false),
        ("event: error\ndata: {\"error\":\"command timeout after 3s\"}\n\n", "exec_timeout", true),
        ("event: error\ndata: {\"error\":\"guest is gone\"}\n\n", "exec_failed", false),
        ("event: exit\ndata: nonsense\n\n", "bad_answer", false),
    ] {
        let server = Server::start(move |_| async move { sse(text) }).await;
        let mut stream = server.client().exec_stream("A", &exec("x")).await.unwrap();
        let error = loop {
            match stream.next().await.unwrap() {
                Ok(ExecEvent::Exit(exit)) => panic!("{exit:?}"),
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!((error.code(), error.is_timeout()), (code, timed_out), "{text}");
        assert!(stream.next().await.is_none());
    }
}

#[tokio::test]
async fn logs_are_text_or_lines() {
    let server = Server::start(|seen: Seen| async move {
        if seen.line.ends_with("follow=true") {
            sse("event: line\ndata: {\"line\":\"one\\n\"}\n\n: ping\n\nevent: line\ndata: {\"line\":\"42\"}\n\n")
        } else {
            "boot\n".into_response()
        }
    })
    .await;
    let client = server.client();
    assert_eq!(&client.logs("A").await.unwrap()[..], b"boot\n");
    let mut lines = client.follow_logs("A").await.unwrap();
    assert_eq!(lines.next().await.unwrap().as_deref(), Some("one\n"));
    assert_eq!(lines.next().await.unwrap().as_deref(), Some("42"));
    assert_eq!(lines.next().await.unwrap(), None);
}

#[tokio::test]
async fn failures_are_told_apart() {
    let server = Server::start(|seen: Seen| async move {
        match seen.line.as_str() {
            "GET /v1/sandboxes/json" => reply(409, &json!({"error": "busy", "code": "sandbox_busy"})),
            "GET /v1/sandboxes/html" => (axum::http::StatusCode::BAD_GATEWAY, "<html>nginx</html>").into_response(),
            "GET /v1/sandboxes/moved" => axum::response::Redirect::temporary("/elsewhere").into_response(),
            "GET /v1/sandboxes/shape" => reply(200, &json!({"id": 7})),
            _ => sse(Body::from_stream(futures::stream::iter([Err::<String, _>(std::io::Error::other("cut"))]))),
        }
    })
    .await;
    let client = server.client();
    let error = |id: &'static str| {
        let client = client.clone();
        async move { client.get(id).await.unwrap_err() }
    };
    let busy = error("json").await;
    assert_eq!((busy.status(), busy.code(), busy.to_string().as_str()), (Some(409), "sandbox_busy", "busy"));
    assert_eq!(error("html").await.code(), "http_502");
    assert!(error("moved").await.to_string().contains("/elsewhere"));
    assert_eq!(error("shape").await.code(), "bad_answer");
    assert_eq!(error("cut").await.code(), "no_answer");
    let nobody = Client::new("http://127.0.0.1:1", "t").unwrap().list().await.unwrap_err();
    assert_eq!(nobody.code(), "no_answer");
    assert!(nobody.hint().unwrap().contains("coppice up"));
}

#[tokio::test]
async fn an_exec_waits_no_longer_than_its_deadline_and_some() {
    // Not a test of the clock: only that a command without a deadline of its own has none here either.
    let server = Server::start(|_| async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        reply(200, &json!({"stdout": "", "stderr": "", "exit_code": 0, "duration_ms": 300}))
    })
    .await;
    assert_eq!(server.client().exec("A", &exec("sleep 0.3")).await.unwrap().duration_ms, 300);
}
