//! HTTP to a port of a sandbox.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};

use crate::common::{Server, service};

async fn with_web() -> (Server, String) {
    let server = Server::start().await;
    let id = server.sandbox();
    server.serve(3000, service::web().await);
    (server, format!("/v1/sandboxes/{id}/proxy/3000"))
}

#[tokio::test]
async fn a_request_reaches_the_service_as_it_was_sent() {
    let (server, proxy) = with_web().await;
    let id = proxy.split('/').nth(3).unwrap();
    let request = server.call(Method::from_bytes(b"PROPFIND").unwrap(), &format!("{proxy}/a%2Fb//c?x=1&y=%20"));
    let request = request.header("X-Pandastack-Broker-Auth", "Basic theirs").header("X-Forwarded-For", "6.6.6.6");
    let request = request.header("X-Own", "kept").header("Accept", "text/x").body("some bytes");
    let (status, told) = server.json(request).await;
    assert_eq!(status, 200);
    assert_eq!((&told["method"], &told["body"]), (&json!("PROPFIND"), &json!("some bytes")));
    assert_eq!(told["target"], "/a%2Fb//c?x=1&y=%20");
    let headers = &told["headers"];
    for (name, value) in [
        ("host", "localhost:3000"),
        ("authorization", "Basic theirs"),
        ("x-forwarded-for", "127.0.0.1"),
        ("x-forwarded-proto", "http"),
        ("x-forwarded-host", &server.address.to_string()),
        ("x-forwarded-prefix", &proxy),
        ("x-fcs-sandbox", id),
        ("x-own", "kept"),
        ("content-length", "10"),
    ] {
        assert_eq!(headers[name], value, "{name}: {told}");
    }
    assert!(!told.to_string().contains(&server.token), "the guest saw the token: {told}");
    for path in [proxy.clone(), format!("{proxy}/"), format!("{proxy}?q")] {
        let (_, told) = server.json(server.get(&path)).await;
        assert_eq!(told["target"], if path.ends_with("?q") { "/?q" } else { "/" });
        assert_eq!(told["headers"]["authorization"], Value::Null);
    }
}

#[tokio::test]
async fn an_answer_comes_back_with_its_status_and_without_power_over_the_apis_host() {
    let (server, proxy) = with_web().await;
    let missing = server.get(&format!("{proxy}/missing")).send().await.unwrap();
    assert_eq!((missing.status().as_u16(), missing.text().await.unwrap().as_str()), (404, "not here"));
    let moved = server.get(&format!("{proxy}/moved")).send().await.unwrap();
    assert_eq!(moved.status(), 302);
    assert_eq!(moved.headers()["location"], format!("{proxy}/elsewhere"));
    assert_eq!(moved.headers()["set-cookie"], format!("a=b; Path={proxy}/"));
    assert!(moved.headers()["content-security-policy"].to_str().unwrap().starts_with("sandbox "));
    let head = server.call(Method::HEAD, &format!("{proxy}/missing")).send().await.unwrap();
    assert_eq!((head.status().as_u16(), head.headers()["content-length"].to_str().unwrap()), (404, "8"));
}

#[tokio::test]
async fn answers_are_streamed() {
    let (server, proxy) = with_web().await;
    let start = Instant::now();
    let mut slow = server.get(&format!("{proxy}/slow")).send().await.unwrap();
    assert_eq!(slow.chunk().await.unwrap().unwrap(), "piece 0\n");
    let first = start.elapsed();
    assert_eq!(slow.chunk().await.unwrap().unwrap(), "piece 1\n");
    assert!(start.elapsed() - first >= Duration::from_millis(400), "the first piece came with the second");
}

#[tokio::test]
async fn requests_are_streamed() {
    let server = Server::start().await;
    let id = server.sandbox();
    // Answers as soon as it has seen the first piece of a body, long before its end.
    let address = service::raw(|mut stream| async move {
        let head = service::head(&mut stream).await;
        assert!(head.to_ascii_lowercase().contains("transfer-encoding: chunked"), "{head}");
        let mut piece = [0; 10];
        stream.read_exact(&mut piece).await.unwrap();
        assert_eq!(&piece, b"5\r\nfirst\r\n");
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nseen").await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap_or_default();
    })
    .await;
    server.serve(80, address);
    let mut wire = server.wire().await;
    let path = format!("/v1/sandboxes/{id}/proxy/80/up");
    wire.send(server.head("POST", &path, "Transfer-Encoding: chunked\r\n") + "5\r\nfirst\r\n").await;
    let answer = timeout(Duration::from_secs(5), wire.response()).await.unwrap();
    assert_eq!((answer.status, answer.text().as_str()), (200, "seen"));
}

#[tokio::test]
async fn large_bodies_go_both_ways_whole() {
    let (server, proxy) = with_web().await;
    let body: Vec<u8> = (0..16_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for chunked in [false, true] {
        let request = server.call(Method::PUT, &format!("{proxy}/echo"));
        let request = if chunked {
            let pieces: Vec<_> = body.chunks(100_000).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect();
            request.body(reqwest::Body::wrap_stream(futures::stream::iter(pieces)))
        } else {
            request.body(body.clone())
        };
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), 200);
        assert!(answer.bytes().await.unwrap() == body, "chunked: {chunked}");
    }
}

#[tokio::test]
async fn refusals_say_why() {
    let (server, proxy) = with_web().await;
    let id = proxy.split('/').nth(3).unwrap().to_owned();
    server.fake.loopback.lock().unwrap().push(4000);
    let other = server.store.create("other", "x").await.unwrap();
    let at = |port: &str| format!("/v1/sandboxes/{id}/proxy/{port}/x");
    for (port, status, code) in [
        ("5000", 502, "port_refused"),
        ("4000", 502, "port_loopback_only"),
        ("22", 400, "port_reserved"),
        ("0", 400, "invalid_port"),
        ("65536", 400, "invalid_port"),
        ("+80", 400, "invalid_port"),
        ("web", 400, "invalid_port"),
    ] {
        let (got, body) = server.json(server.get(&at(port))).await;
        assert_eq!((got, body["code"].as_str().unwrap()), (status, code), "{port}: {body}");
    }
    let (_, body) = server.json(server.get(&at("4000"))).await;
    assert!(body["hint"].as_str().unwrap().contains("0.0.0.0:4000"), "{body}");
    let foreign = server.client.get(server.url(&proxy)).bearer_auth(&other);
    assert_eq!(server.json(foreign).await.0, 404);
    assert_eq!(server.json(server.client.get(server.url(&proxy))).await.0, 401);
    assert_eq!(server.json(server.get("/v1/sandboxes/nope/proxy/80")).await.0, 404);
    server.post(&format!("/v1/sandboxes/{id}/pause"), "").send().await.unwrap();
    let (status, body) = server.json(server.get(&proxy)).await;
    assert_eq!((status, &body["code"]), (503, &json!("sandbox_not_running")));
}

#[tokio::test]
async fn a_service_that_breaks_http_is_502_and_harms_nobody() {
    let server = Server::start().await;
    let id = server.sandbox();
    let long = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(200_000));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "X: y\r\n".repeat(1000));
    let flood = "HTTP/1.1 103 Early Hints\r\n\r\n".repeat(1000);
    for (what, answer) in [
        ("nothing", ""),
        ("noise", "\0\x01\x02garbage\r\n\r\n"),
        ("ssh", "SSH-2.0-OpenSSH_9.2\r\n"),
        ("http/0.9", "<html>hello</html>"),
        ("half a head", "HTTP/1.1 200 OK\r\nX: y"),
        ("bad status", "HTTP/1.1 9999 OK\r\n\r\n"),
        ("two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
        ("negative length", "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"),
        ("bad name", "HTTP/1.1 200 OK\r\nX Y: z\r\n\r\n"),
        ("nul", "HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n"),
        ("unasked upgrade", "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"),
        ("long head", &long),
        ("many headers", &many),
        ("endless hints", &flood),
    ] {
        server.serve(80, service::saying(answer).await);
        let asked = server.json(server.get(&format!("/v1/sandboxes/{id}/proxy/80/")));
        let (status, body) = timeout(Duration::from_secs(10), asked).await.unwrap_or_else(|_| panic!("{what} hangs"));
        assert_eq!(status, 502, "{what}: {body}");
        assert!(["port_bad_http", "port_closed"].contains(&body["code"].as_str().unwrap()), "{what}: {body}");
        assert!(body["error"].as_str().unwrap().len() < 500, "{what}");
    }
    assert_eq!(server.json(server.get("/v1/me")).await.0, 200);
}

#[tokio::test]
async fn what_a_service_says_of_its_connection_is_not_believed() {
    let server = Server::start().await;
    let id = server.sandbox();
    let path = format!("/v1/sandboxes/{id}/proxy/80/");
    let both = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 100\r\nConnection: close, X-Gone\r\n\
                X-Gone: 1\r\nKeep-Alive: timeout=5\r\n\r\n2\r\nhi\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\nsmuggled";
    server.serve(80, service::saying(both).await);
    let mut wire = server.wire().await;
    for _ in 0..2 {
        wire.send(server.head("GET", &path, "")).await;
        let answer = wire.response().await;
        assert_eq!((answer.status, answer.text().as_str(), answer.complete), (200, "hi", true), "{}", answer.head);
        assert!(answer.header("x-gone").is_none() && answer.header("keep-alive").is_none(), "{}", answer.head);
    }
    // A server of HTTP/1.0 says by closing that it is done: the client's connection goes on all the same.
    server.serve(80, service::saying("HTTP/1.0 200 OK\r\n\r\nold").await);
    for _ in 0..2 {
        wire.send(server.head("GET", &path, "")).await;
        let answer = wire.response().await;
        assert_eq!((answer.text().as_str(), answer.complete), ("old", true));
        assert!(answer.head.starts_with("HTTP/1.1 "));
    }
    // An answer that breaks off is never taken for a whole one.
    server.serve(80, service::saying("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart").await);
    wire.send(server.head("GET", &path, "")).await;
    assert!(!wire.response().await.complete);
}

#[tokio::test]
async fn websockets_go_through_and_stay_when_they_are_quiet() {
    let server = Server::with(|config| config.timing.head_read = Duration::from_millis(200)).await;
    let id = server.sandbox();
    server.serve(80, service::switching().await);
    let mut wire = server.wire().await;
    let more = "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n";
    wire.send(server.head("GET", &format!("/v1/sandboxes/{id}/proxy/80/ws"), more)).await;
    let (status, head) = wire.response_head().await;
    assert_eq!(status, 101, "{head}");
    let head = head.to_ascii_lowercase();
    assert!(head.contains("upgrade: websocket") && head.contains("connection: upgrade") && head.contains("x-a: b"));
    assert_eq!(wire.exactly(5).await, b"hello");
    for _ in 0..3 {
        sleep(Duration::from_millis(300)).await;
        wire.send("ab").await;
        assert_eq!(wire.exactly(4).await, b"abab");
    }
    wire.finish().await;
    assert_eq!(wire.until_closed().await, b"bye");
    // HTTP/2 would carry requests that nobody looks at.
    server.serve(81, service::web().await);
    let h2c = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n";
    let mut wire = server.wire().await;
    wire.send(server.head("GET", &format!("/v1/sandboxes/{id}/proxy/81/"), h2c)).await;
    let answer = wire.response().await;
    assert_eq!(answer.status, 200);
    assert!(!answer.text().contains("h2c") && !answer.text().contains("http2-settings"), "{}", answer.text());
}

#[tokio::test]
async fn a_client_that_hangs_up_ends_the_connection_into_the_guest() {
    let server = Server::start().await;
    let id = server.sandbox();
    for (answer, wait) in [
        ("", false),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx", true),
        ("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", true),
    ] {
        let (address, mut gone) = service::mute(answer).await;
        server.serve(80, address);
        let mut wire = server.wire().await;
        let more = "Connection: Upgrade\r\nUpgrade: websocket\r\n";
        wire.send(server.head("GET", &format!("/v1/sandboxes/{id}/proxy/80/"), more)).await;
        if wait {
            wire.response_head().await;
        } else {
            sleep(Duration::from_millis(200)).await;
        }
        assert!(gone.try_recv().is_err());
        drop(wire);
        timeout(Duration::from_secs(5), gone.recv()).await.unwrap_or_else(|_| panic!("{answer:?} goes on"));
    }
}

#[tokio::test]
async fn silence_has_an_end_and_places_are_given_back() {
    let server = Server::with(|config| {
        config.timing.port_idle = Duration::from_millis(400);
        config.limits.connections_per_sandbox = 1;
    })
    .await;
    let id = server.sandbox();
    let (address, _gone) = service::mute("").await;
    server.serve(80, address);
    let path = format!("/v1/sandboxes/{id}/proxy/80/");
    let mut first = server.wire().await;
    first.send(server.head("GET", &path, "")).await;
    sleep(Duration::from_millis(150)).await;
    let second = server.get(&path).send().await.unwrap();
    assert_eq!((second.status().as_u16(), second.headers()["retry-after"].to_str().unwrap()), (503, "5"));
    let body: Value = serde_json::from_slice(&first.response().await.body).unwrap();
    assert_eq!(body["code"], "port_silent", "{body}");
    server.serve(80, service::web().await);
    assert_eq!(server.json(server.get(&path)).await.0, 200);
    // A stream that says something now and then is not silent.
    assert_eq!(server.get(&format!("{path}slow")).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_request_body_that_breaks_is_the_clients_mistake() {
    let (server, proxy) = with_web().await;
    let mut wire = server.wire().await;
    wire.send(server.head("POST", &format!("{proxy}/echo-not"), "Transfer-Encoding: chunked\r\n") + "zz\r\n").await;
    let answer = wire.response().await;
    assert_eq!(answer.status, 400, "{}", answer.text());
}
