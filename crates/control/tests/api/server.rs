//! Connections: how slow, how many, how long, and how they end.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::time::{sleep, timeout};

use crate::common::{Act, Server};

#[tokio::test]
async fn a_head_must_not_be_slow_but_idle_connections_stay() {
    let server = Server::with(|config| config.timing.head_read = Duration::from_millis(300)).await;
    let mut slow = server.wire().await;
    let start = Instant::now();
    slow.send("GET /healthz HTTP/1.1\r\n").await;
    sleep(Duration::from_millis(150)).await;
    slow.send("X: y\r\n").await;
    let rest = slow.until_closed().await;
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 4"), "{rest:?}");
    assert!(start.elapsed() < Duration::from_secs(2));

    let mut idle = server.wire().await;
    for _ in 0..3 {
        idle.send(server.head("GET", "/healthz", "")).await;
        assert_eq!(idle.response().await.status, 200);
        sleep(Duration::from_millis(500)).await;
    }
    // A head that comes slowly on a kept connection is cut too; so is a second one's.
    idle.send("GET /healthz HTTP/1.1\r\n").await;
    let start = Instant::now();
    idle.until_closed().await;
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn a_slow_body_is_408_and_a_slow_command_is_not_cut() {
    let server = Server::with(|config| {
        config.timing.head_read = Duration::from_millis(200);
        config.timing.body_read = Duration::from_millis(400);
    })
    .await;
    let id = server.sandbox();
    let exec = format!("/v1/sandboxes/{id}/exec");
    let mut wire = server.wire().await;
    wire.send(server.head("POST", &exec, "Content-Length: 100\r\n") + "{").await;
    assert_eq!(wire.response().await.status, 408);
    server.fake.script("slow", [Act::Sleep(700), Act::Exit(0)]);
    let mut wire = server.wire().await;
    wire.send(server.posted(&exec, r#"{"cmd":"slow"}"#)).await;
    assert_eq!(wire.response().await.status, 200);
}

#[tokio::test]
async fn expectations_get_100_and_nothing_else_below_200() {
    let server = Server::start().await;
    let id = server.sandbox();
    let mut wire = server.wire().await;
    let head =
        server.head("PUT", &format!("/v1/sandboxes/{id}/fs?path=/x"), "Content-Length: 2\r\nExpect: 100-continue\r\n");
    wire.send(head).await;
    assert_eq!(wire.response_head().await.0, 100);
    wire.send("hi").await;
    assert_eq!(wire.response().await.status, 200);
}

#[tokio::test]
async fn garbage_is_answered_or_closed_and_harms_nobody() {
    let server = Server::with(|config| config.timing.head_read = Duration::from_millis(500)).await;
    for garbage in ["\x16\x03\x01\x02\0\x01", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET\r\n\r\n", &"X".repeat(100_000)] {
        let mut wire = server.wire().await;
        wire.send(garbage).await;
        let rest = timeout(Duration::from_secs(12), wire.until_closed()).await.unwrap();
        assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 4"), "{:?}", String::from_utf8_lossy(&rest));
    }
    assert_eq!(server.json(server.get("/v1/me")).await.0, 200);
}

#[tokio::test]
async fn connections_are_bounded_and_the_next_one_waits() {
    let server = Server::with(|config| config.limits.connections = 2).await;
    let mut first = server.wire().await;
    let mut second = server.wire().await;
    for wire in [&mut first, &mut second] {
        wire.send(server.head("GET", "/healthz", "")).await;
        assert_eq!(wire.response().await.status, 200);
    }
    let mut third = server.wire().await;
    third.send(server.head("GET", "/healthz", "")).await;
    assert!(timeout(Duration::from_millis(300), third.response_head()).await.is_err());
    drop(first);
    assert_eq!(timeout(Duration::from_secs(5), third.response_head()).await.unwrap().0, 200);
}

#[tokio::test]
async fn a_stop_lets_requests_finish_and_ends_streams_cleanly() {
    let mut server = Server::with(|config| config.timing.shutdown_grace = Duration::from_millis(1500)).await;
    let id = server.sandbox();
    server.fake.script("short", [Act::Sleep(300), Act::Exit(0)]);
    server.fake.script("long", [Act::Out(b"a".to_vec()), Act::Hang]);
    server.fake.script("follow", [Act::Out(b"a\n".to_vec()), Act::Hang]);
    let body = |cmd| json!({"cmd": cmd}).to_string();
    let mut idle = server.wire().await;
    idle.send(server.head("GET", "/healthz", "")).await;
    idle.response().await;
    let mut short = server.wire().await;
    short.send(server.posted(&format!("/v1/sandboxes/{id}/exec"), &body("short"))).await;
    let mut long = server.wire().await;
    long.send(server.posted(&format!("/v1/sandboxes/{id}/exec/stream"), &body("long"))).await;
    let mut unary = server.wire().await;
    unary.send(server.posted(&format!("/v1/sandboxes/{id}/exec"), &body("long"))).await;
    let mut logs = server.wire().await;
    logs.send(server.head("GET", &format!("/v1/sandboxes/{id}/logs?follow=1"), "")).await;
    while server.fake.open_streams() < 4 {
        sleep(Duration::from_millis(5)).await;
    }
    let start = Instant::now();
    server.stop();
    let (logs, long, short, unary, _) =
        tokio::join!(logs.response(), long.response(), short.response(), unary.response(), server.stopped());
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(logs.complete && logs.text().contains("shutting down"));
    assert!(long.complete && long.text().contains("event: error") && long.text().contains("shutting down"));
    assert_eq!(short.status, 200);
    assert_eq!(unary.status, 500);
    assert!(idle.until_closed().await.is_empty());
    assert_eq!(server.fake.open_streams(), 0);
    assert!(tokio::net::TcpStream::connect(server.address).await.is_err());
}
