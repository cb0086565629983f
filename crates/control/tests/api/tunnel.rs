//! Raw TCP to a port of a sandbox.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::common::{Server, Wire, service};

const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: tcp\r\n";

async fn open(server: &Server, id: &str, port: u16) -> Wire {
    let mut wire = server.wire().await;
    wire.send(server.head("GET", &format!("/v1/sandboxes/{id}/tunnel/{port}"), UPGRADE)).await;
    let (status, head) = wire.response_head().await;
    assert_eq!(status, 101, "{head}");
    assert!(head.to_ascii_lowercase().contains("upgrade: tcp"), "{head}");
    wire
}

#[tokio::test]
async fn bytes_go_both_ways_and_each_way_ends_by_itself() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.serve(22, service::raw(service::twice).await);
    let mut wire = open(&server, &id, 22).await;
    wire.send(b"\0\xff\r\n").await;
    assert_eq!(wire.exactly(8).await, b"\0\xff\r\n\0\xff\r\n");
    // The other side answers after it heard the end.
    wire.finish().await;
    assert_eq!(wire.until_closed().await, b"bye");
}

#[tokio::test]
async fn a_megabyte_each_way_is_whole() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.serve(80, service::raw(service::twice).await);
    let mut wire = open(&server, &id, 80).await;
    for byte in 0..=255_u8 {
        wire.send([byte; 1024]).await;
        assert_eq!(wire.exactly(2048).await, [byte; 2048]);
    }
}

#[tokio::test]
async fn refusals_come_before_the_upgrade() {
    let server = Server::start().await;
    let id = server.sandbox();
    let other = server.store.create("other", "x").await.unwrap();
    for (path, more, status) in [
        (format!("/v1/sandboxes/{id}/tunnel/80"), "", 426),
        (format!("/v1/sandboxes/{id}/tunnel/80"), "Connection: Upgrade\r\nUpgrade: websocket\r\n", 426),
        (format!("/v1/sandboxes/{id}/tunnel/80"), UPGRADE, 502),
        (format!("/v1/sandboxes/{id}/tunnel/0"), UPGRADE, 400),
        (format!("/v1/sandboxes/{}/tunnel/80", id.replace(char::is_numeric, "0")), UPGRADE, 404),
    ] {
        let mut wire = server.wire().await;
        wire.send(server.head("GET", &path, more)).await;
        let answer = wire.response().await;
        assert_eq!(answer.status, status, "{path} {more}: {}", answer.text());
        assert_eq!(answer.header("upgrade").is_some(), status == 426);
    }
    server.serve(80, service::web().await);
    let mut wire = server.wire().await;
    let head = server.head("GET", &format!("/v1/sandboxes/{id}/tunnel/80"), UPGRADE);
    wire.send(head.replace(&server.token, &other)).await;
    assert_eq!(wire.response().await.status, 404);
}

#[tokio::test]
async fn tunnels_end_with_the_server_and_do_not_hold_it() {
    let mut server = Server::start().await;
    let id = server.sandbox();
    server.serve(80, service::raw(service::twice).await);
    let mut wire = open(&server, &id, 80).await;
    wire.send("a").await;
    wire.exactly(2).await;
    timeout(Duration::from_secs(5), server.stopped()).await.unwrap();
    assert!(timeout(Duration::from_secs(5), wire.until_closed()).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_quiet_tunnel_ends_at_its_time() {
    let server = Server::with(|config| config.timing.port_idle = Duration::from_millis(400)).await;
    let id = server.sandbox();
    server.serve(80, service::raw(service::twice).await);
    let mut wire = open(&server, &id, 80).await;
    for _ in 0..3 {
        sleep(Duration::from_millis(250)).await;
        wire.send("a").await;
        assert_eq!(wire.exactly(2).await, b"aa");
    }
    assert!(timeout(Duration::from_secs(5), wire.until_closed()).await.unwrap().is_empty());
}
