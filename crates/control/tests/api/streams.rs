//! exec, exec/stream and logs, as they are on the wire.

use std::time::{Duration, Instant};

use coppice_api::ErrorClass;
use coppice_control::ControlConfig;
use serde_json::{Value, json};

use crate::common::{Act, Raw, Server};

fn out(text: &str) -> Act {
    Act::Out(text.as_bytes().to_vec())
}

fn quick(config: &mut ControlConfig) {
    config.timing.pad_after = Duration::from_millis(150);
    config.timing.pad_every = Duration::from_millis(60);
    config.timing.keepalive = Duration::from_millis(100);
    config.timing.exec_grace = Duration::from_millis(200);
}

async fn exec(server: &Server, id: &str, body: Value) -> (u16, Value) {
    server.json(server.post(&format!("/v1/sandboxes/{id}/exec"), &body.to_string())).await
}

async fn stream(server: &Server, id: &str, cmd: &str) -> Raw {
    let mut wire = server.wire().await;
    let body = json!({"cmd": cmd, "timeout_seconds": 2.5}).to_string();
    wire.send(server.posted(&format!("/v1/sandboxes/{id}/exec/stream"), &body)).await;
    wire.response().await
}

/// Events and their data, checked for everything that published parsers trip over.
fn events(raw: &Raw) -> Vec<(String, Value)> {
    assert_eq!(raw.status, 200);
    assert_eq!(raw.header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert_eq!(raw.header("transfer-encoding"), Some("chunked"));
    assert_eq!(raw.header("cache-control"), Some("no-cache"));
    assert_eq!(raw.header("content-encoding"), None);
    assert!(raw.complete, "aborted");
    assert!(raw.body.is_ascii() && !raw.body.contains(&b'\r'));
    let text = raw.text();
    let frames = text.split_terminator("\n\n").filter(|frame| !frame.starts_with(':'));
    frames
        .map(|frame| {
            let (event, data) = frame.split_once('\n').unwrap();
            let data = data.strip_prefix("data: ").unwrap();
            assert!(!data.contains('\n'));
            (event.strip_prefix("event: ").unwrap().to_owned(), serde_json::from_str(data).unwrap())
        })
        .collect()
}

fn joined(events: &[(String, Value)], name: &str) -> String {
    events.iter().filter(|(event, _)| event == name).map(|(_, data)| data["chunk"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn exec_answers_what_the_command_did() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.fake.script("x", [out("h\u{e9}"), Act::Err(vec![b'e', 0xff, 0xc3]), out(" \u{2028}"), Act::Exit(7)]);
    let (status, reply) = exec(&server, &id, json!({"cmd": "x"})).await;
    let expected = json!({"stdout":"h\u{e9} \u{2028}","stderr":"e\u{fffd}\u{fffd}","exit_code":7,"duration_ms":12});
    assert_eq!((status, reply), (200, expected));

    let body =
        json!({"cmd":"x","env":{"A":"b"},"cwd":"/tmp","user":"nobody","stdin":"in","timeout_seconds":2.5,"unknown":1});
    exec(&server, &id, body).await;
    let spec = server.fake.last_spec();
    assert_eq!(spec.argv, ["/bin/sh", "-c", "x"]);
    assert_eq!(
        (spec.cwd.as_deref(), spec.user.as_deref(), spec.stdin.as_deref()),
        (Some("/tmp"), Some("nobody"), Some(&b"in"[..]))
    );
    assert_eq!((spec.timeout, spec.env["A"].as_str()), (Some(Duration::from_millis(2500)), "b"));
    exec(&server, &id, json!({"cmd":"x"})).await;
    assert_eq!(server.fake.last_spec().timeout, Some(Duration::from_secs(3600)));
    server.fake.quiet().await;
}

#[tokio::test]
async fn an_early_timeout_is_504_with_the_words_that_clients_look_for() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.fake.script("slow", [out("part"), Act::TimedOut]);
    let (status, body) = exec(&server, &id, json!({"cmd":"slow","timeout_seconds":2})).await;
    assert_eq!(
        (status, &body["error"], &body["code"]),
        (504, &json!("command timeout after 2s"), &json!("exec_timeout"))
    );
    // A guest that doesn't keep the deadline is not waited for.
    let server = Server::with(|config| config.timing.exec_grace = Duration::from_millis(100)).await;
    let id = server.sandbox();
    server.fake.script("hang", [Act::Hang]);
    server.fake.script("yes", [Act::Flood(Vec::new())]);
    for cmd in ["hang", "yes"] {
        let (status, body) = exec(&server, &id, json!({"cmd":cmd,"timeout_seconds":0.1})).await;
        assert_eq!((status, &body["error"]), (504, &json!("command timeout after 0.1s")));
    }
    server.fake.quiet().await;
}

#[tokio::test]
async fn exec_that_breaks_is_an_error() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.fake.script("ends", [out("part")]);
    server.fake.script("breaks", [out("part"), Act::Fail(ErrorClass::Transient, "connect: connection refused")]);
    let (status, body) = exec(&server, &id, json!({"cmd":"ends"})).await;
    assert_eq!((status, &body["code"]), (500, &json!("exec_interrupted")));
    let response = server.post(&format!("/v1/sandboxes/{id}/exec"), r#"{"cmd":"breaks"}"#).send().await.unwrap();
    assert_eq!(response.status(), 500, "it was started: 503 would mean that it was not");
    assert!(!response.headers().contains_key("retry-after"));
    assert!(!response.text().await.unwrap().contains("connection refused"));
}

#[tokio::test]
async fn output_is_bounded_and_the_command_killed() {
    let server = Server::with(|config| {
        config.timing.pad_after = Duration::from_secs(2);
        config.limits.exec_output = 100_000;
    })
    .await;
    let id = server.sandbox();
    server.fake.script("fits", [Act::Out(vec![b'x'; 100_000]), Act::Err(vec![b'y'; 100_000]), Act::Exit(0)]);
    let (status, reply) = exec(&server, &id, json!({"cmd":"fits"})).await;
    assert_eq!((status, reply["stdout"].as_str().unwrap().len()), (200, 100_000));
    server.fake.script("yes", [Act::Flood(vec![b'y'; 1000])]);
    let (status, body) = exec(&server, &id, json!({"cmd":"yes"})).await;
    assert_eq!((status, &body["code"]), (413, &json!("exec_output_too_large")));
    assert!(body["hint"].as_str().unwrap().contains("exec/stream"));
    server.fake.script("late", [Act::Sleep(2500), Act::Flood(vec![b'y'; 1000])]);
    let (status, reply) = exec(&server, &id, json!({"cmd":"late"})).await;
    assert_eq!((status, &reply["exit_code"], reply["stdout"].as_str().unwrap().len()), (200, &json!(137), 100_000));
    assert!(reply["stderr"].as_str().unwrap().contains("more than 100000 bytes"));
    server.fake.quiet().await;
}

#[tokio::test]
async fn what_all_outputs_hold_together_is_bounded_and_given_back() {
    let server = Server::with(|config| config.limits.exec_output_total_kib = 100).await;
    let id = server.sandbox();
    server.fake.script("half", [Act::Out(vec![b'x'; 80 << 10]), Act::Exit(0)]);
    server.fake.script("hold", [Act::Out(vec![b'x'; 80 << 10]), Act::Sleep(2000), Act::Exit(0)]);
    for _ in 0..5 {
        assert_eq!(exec(&server, &id, json!({"cmd":"half"})).await.0, 200);
    }
    let (held, refused) = tokio::join!(exec(&server, &id, json!({"cmd":"hold"})), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        exec(&server, &id, json!({"cmd":"half"})).await
    });
    assert_eq!((held.0, refused.0), (200, 413));
    assert_eq!(exec(&server, &id, json!({"cmd":"half"})).await.0, 200);
}

#[tokio::test]
async fn slow_commands_are_padded_with_spaces() {
    let server = Server::with(quick).await;
    let id = server.sandbox();
    server.fake.script("slow", [out("a"), Act::Sleep(500), out("b"), Act::Exit(3)]);
    let mut wire = server.wire().await;
    wire.send(server.posted(&format!("/v1/sandboxes/{id}/exec"), r#"{"cmd":"slow"}"#)).await;
    let raw = wire.response().await;
    assert_eq!((raw.status, raw.header("content-type"), raw.complete), (200, Some("application/json"), true));
    let text = raw.text();
    let spaces = text.len() - text.trim_start().len();
    assert!((2..=8).contains(&spaces), "{text:?}");
    let reply: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(reply, json!({"stdout":"ab","stderr":"","exit_code":3,"duration_ms":12}));

    server.fake.script("late", [out("a"), Act::Err(b"e".to_vec()), Act::Sleep(300), Act::TimedOut]);
    let (status, reply) = exec(&server, &id, json!({"cmd":"late","timeout_seconds":2})).await;
    assert_eq!((status, &reply["exit_code"], &reply["stdout"]), (200, &json!(124), &json!("a")));
    assert_eq!(reply["stderr"], "e\ncommand timeout after 2s\n");

    server.fake.script("dies", [Act::Sleep(300), Act::Fail(ErrorClass::Internal, "the machine died")]);
    let mut wire = server.wire().await;
    wire.send(server.posted(&format!("/v1/sandboxes/{id}/exec"), r#"{"cmd":"dies"}"#)).await;
    let raw = wire.response().await;
    assert_eq!((raw.status, raw.complete), (200, false), "no client may take it for an answer");
    assert!(raw.text().trim().is_empty());
}

#[tokio::test]
async fn a_client_that_hangs_up_kills_its_command() {
    let server = Server::with(quick).await;
    let id = server.sandbox();
    server.fake.script("hang", [out("a"), Act::Hang]);
    for (tail, wait) in [("exec", 20), ("exec", 300), ("exec/stream", 50)] {
        let mut wire = server.wire().await;
        wire.send(server.posted(&format!("/v1/sandboxes/{id}/{tail}"), r#"{"cmd":"hang"}"#)).await;
        while server.fake.open_streams() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(wait)).await;
        assert_eq!(server.fake.open_streams(), 1);
        drop(wire);
        server.fake.quiet().await;
    }
}

#[tokio::test]
async fn events_come_as_they_happen_and_end_with_exit() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.fake.script("x", [out("a\n"), Act::Sleep(600), Act::Err(b"b".to_vec()), Act::Exit(3)]);
    let mut wire = server.wire().await;
    wire.send(server.posted(&format!("/v1/sandboxes/{id}/exec/stream"), r#"{"cmd":"x"}"#)).await;
    wire.response_head().await;
    assert_eq!(wire.chunk().await.unwrap(), b"event: stdout\ndata: {\"chunk\":\"a\\n\"}\n\n");
    let start = Instant::now();
    assert_eq!(wire.chunk().await.unwrap(), b"event: stderr\ndata: {\"chunk\":\"b\"}\n\n");
    assert!(start.elapsed() > Duration::from_millis(200));
    assert_eq!(wire.chunk().await.unwrap(), b"event: exit\ndata: {\"exit_code\":3,\"duration_ms\":12}\n\n");
    assert_eq!(wire.chunk().await.unwrap(), b"");
    // The connection is good for another request.
    wire.send(server.head("GET", "/v1/me", "")).await;
    assert_eq!(wire.response().await.status, 200);
    server.fake.quiet().await;
}

#[tokio::test]
async fn characters_are_not_cut_and_line_separators_escaped() {
    let server = Server::start().await;
    let id = server.sandbox();
    let text = "\u{e9}\u{2028}x\u{85}\u{2029}\u{1F980}\0\x0b ".repeat(2000);
    let acts = text.as_bytes().chunks(7).map(|piece| Act::Out(piece.to_vec())).chain([Act::Exit(0)]);
    server.fake.script("x", acts.collect::<Vec<_>>());
    let all = events(&stream(&server, &id, "x").await);
    assert_eq!(joined(&all, "stdout"), text);
    // One large piece is several frames; the two streams don't mix; a tail that never became whole is one U+FFFD.
    let large = "\u{20ac}".repeat(100_000);
    server.fake.script("y", [Act::Out(vec![0xe2]), Act::Err(vec![0xe2, 0x82]), out(&large), Act::Exit(0)]);
    let all = events(&stream(&server, &id, "y").await);
    assert_eq!(joined(&all, "stdout"), format!("\u{fffd}{large}"));
    assert_eq!(joined(&all, "stderr"), "\u{fffd}");
    assert!(all.iter().all(|(_, data)| data["chunk"].as_str().is_none_or(|chunk| chunk.len() <= 64 << 10)));
    assert_eq!(all.last().unwrap().0, "exit");
}

#[tokio::test]
async fn a_stream_that_breaks_ends_cleanly_with_an_error_event() {
    let server = Server::with(quick).await;
    let id = server.sandbox();
    server.fake.script("timeout", [out("a"), Act::TimedOut]);
    server.fake.script("hang", [out("a"), Act::Hang]);
    server.fake.script("ends", [out("a")]);
    server.fake.script("fails", [out("a"), Act::Fail(ErrorClass::Transient, "vm: i/o timeout")]);
    for (cmd, said) in [
        ("timeout", "command timeout after 2.5s"),
        ("hang", "command timeout after 2.5s"),
        ("ends", "interrupted"),
        ("fails", "vm: input/output timeout"),
    ] {
        let all = events(&stream(&server, &id, cmd).await);
        assert_eq!(joined(&all, "stdout"), "a");
        let (event, data) = all.last().unwrap();
        assert_eq!(event, "error");
        assert!(data["error"].as_str().unwrap().contains(said), "{data}");
    }
    server.fake.quiet().await;
}

#[tokio::test]
async fn silence_is_filled_with_comments() {
    let server = Server::with(quick).await;
    let id = server.sandbox();
    server.fake.script("x", [Act::Sleep(350), Act::Exit(0)]);
    let raw = stream(&server, &id, "x").await;
    let pings = raw.text().matches(": ping\n\n").count();
    assert!((1..=4).contains(&pings), "{}", raw.text());
    assert_eq!(events(&raw).len(), 1);
}

#[tokio::test]
async fn a_stream_that_does_not_start_is_an_ordinary_error() {
    let server = Server::start().await;
    let id = server.sandbox();
    let unknown = server.post("/v1/sandboxes/00000000-0000-0000-0000-000000000000/exec/stream", r#"{"cmd":"x"}"#);
    assert_eq!(server.json(unknown).await.0, 404);
    server.fake.fail("exec", ErrorClass::Conflict, "it is paused");
    let (status, body) = server.json(server.post(&format!("/v1/sandboxes/{id}/exec/stream"), r#"{"cmd":"x"}"#)).await;
    assert_eq!((status, &body["hint"]), (409, &json!("resume it")));
}

#[tokio::test]
async fn logs_whole() {
    let server = Server::start().await;
    let id = server.sandbox();
    let logs = format!("/v1/sandboxes/{id}/logs");
    for query in ["", "?follow=false", "?follow=0&stream=both", "?stream=stdout", "?follow=no"] {
        let response = server.get(&format!("{logs}{query}")).send().await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/plain; charset=utf-8");
        assert_eq!(response.text().await.unwrap(), "boot \u{e9}\nline two\nlogin: \n");
    }
    assert_eq!(server.get(&format!("{logs}?tail=1")).send().await.unwrap().text().await.unwrap(), "login: \n");
    for query in ["?tail=x", "?tail=-1", "?follow=maybe"] {
        assert_eq!(server.json(server.get(&format!("{logs}{query}"))).await.0, 400);
    }
}

#[tokio::test]
async fn logs_followed() {
    let server = Server::with(quick).await;
    let id = server.sandbox();
    let follow = |query: &'static str| {
        let head = server.head("GET", &format!("/v1/sandboxes/{id}/logs?{query}"), "Accept: application/json\r\n");
        async {
            let mut wire = server.wire().await;
            wire.send(head).await;
            wire.response().await
        }
    };
    server
        .fake
        .script("follow", [out("old\r\n42\nnu"), Act::Sleep(250), out("ll\x0b\x1c\u{2028}\nlast"), Act::Sleep(1)]);
    for query in ["follow=true", "follow=1", "follow=yes&stream=both", "follow=TRUE"] {
        let raw = follow(query).await;
        assert!(raw.text().contains(": ping\n\n"));
        let lines: Vec<_> = events(&raw);
        assert!(lines.iter().all(|(event, data)| event == "line" && data.as_object().unwrap().len() == 1));
        let text: Vec<_> = lines.iter().map(|(_, data)| data["line"].as_str().unwrap()).collect();
        assert_eq!(text, ["old\n", "42\n", "null\u{2028}\n", "last"]);
    }
    server.fake.script("follow", [out("a\n"), Act::Fail(ErrorClass::Internal, "the machine died")]);
    let broken = events(&follow("follow=1").await);
    assert_eq!(broken[1].0, "error");
    assert!(broken[1].1["line"].as_str().unwrap().contains("the machine died"));
    server.fake.quiet().await;
}
