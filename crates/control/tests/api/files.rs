//! Files: bodies that are streams.

use bytes::Bytes;
use coppice_api::ErrorClass;
use reqwest::Method;
use serde_json::json;

use crate::common::{Act, Server};

fn path(id: &str, file: &str) -> String {
    format!("/v1/sandboxes/{id}/fs?path={file}")
}

#[tokio::test]
async fn bytes_come_back_as_they_went() {
    let server = Server::start().await;
    let id = server.sandbox();
    let all: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    let big = path(&id, "%2Ftmp%2Fa+b%26%C3%A9");
    let (status, reply) = server.json(server.call(Method::PUT, &big).body(all.clone())).await;
    assert_eq!((status, &reply), (200, &json!({"path": "/tmp/a b&\u{e9}", "bytes": all.len()})));
    let read = server.get(&big).send().await.unwrap();
    assert_eq!(read.headers()["content-type"], "application/octet-stream");
    assert_eq!(read.bytes().await.unwrap(), all);

    let empty = path(&id, "/tmp/empty");
    assert_eq!(server.json(server.call(Method::PUT, &empty)).await.1["bytes"], 0);
    assert_eq!(server.get(&empty).send().await.unwrap().bytes().await.unwrap().len(), 0);

    let (_, listing) = server.json(server.get(&format!("/v1/sandboxes/{id}/fs/dir?path=%2Ftmp"))).await;
    assert_eq!(listing["path"], "/tmp");
    assert_eq!(listing["entries"][1], json!({"name":"empty","is_dir":false,"size":0,"mode":"f","mtime":1_700_000_000}));
    let (_, root) = server.json(server.get(&format!("/v1/sandboxes/{id}/fs/dir"))).await;
    assert_eq!(root["entries"][0]["is_dir"], true);
    let (_, stat) = server.json(server.get(&format!("/v1/sandboxes/{id}/fs/stat?path=/tmp/empty"))).await;
    assert_eq!((&stat["name"], stat["mtime"].is_i64()), (&json!("empty"), true));
    assert_eq!(server.call(Method::DELETE, &empty).send().await.unwrap().status(), 204);
    assert_eq!(server.json(server.get(&empty)).await.0, 404);
    assert_eq!(server.json(server.get(&format!("/v1/sandboxes/{id}/fs/stat?path=/tmp/empty"))).await.0, 404);
}

#[tokio::test]
async fn paths_are_absolute() {
    let server = Server::start().await;
    let id = server.sandbox();
    let long = format!("/{}", "x".repeat(5000));
    for (file, code) in [
        ("", "path_not_absolute"),
        ("etc", "path_not_absolute"),
        ("%2Fa%00b", "invalid_path"),
        ("%2F%ff", "invalid_query"),
        (&long, "path_too_long"),
    ] {
        for (method, tail) in [
            (Method::GET, "fs"),
            (Method::PUT, "fs"),
            (Method::DELETE, "fs"),
            (Method::GET, "fs/dir"),
            (Method::GET, "fs/stat"),
        ] {
            let request = server.call(method, &format!("/v1/sandboxes/{id}/{tail}?path={file}"));
            let (status, body) = server.json(request).await;
            assert_eq!((status, body["code"].as_str().unwrap()), (400, code), "{tail} {file:.20}");
        }
    }
    let (status, body) = server.json(server.get(&format!("/v1/sandboxes/{id}/fs"))).await;
    assert_eq!((status, &body["code"]), (400, &json!("path_required")));
    let (status, body) = server.json(server.call(Method::DELETE, &path(&id, "/a/.."))).await;
    assert_eq!((status, &body["code"]), (400, &json!("path_is_root")));
    // The answer arrives although the client sends before it reads.
    let (status, body) = server.json(server.call(Method::PUT, &path(&id, "x")).body(vec![7; 8 << 20])).await;
    assert_eq!((status, &body["code"]), (400, &json!("path_not_absolute")));
    assert!(server.fake.calls().iter().all(|call| call.starts_with("get ")));
}

#[tokio::test]
async fn a_file_over_the_limit_is_refused_and_not_written() {
    let server = Server::with(|config| config.limits.upload = 100_000).await;
    let id = server.sandbox();
    let target = path(&id, "/x");
    server.fake.files.lock().unwrap().insert("/x".into(), Bytes::from_static(b"old"));
    // With a length, and without one.
    let (status, body) = server.json(server.call(Method::PUT, &target).body(vec![7; 5 << 20])).await;
    assert_eq!((status, &body["code"]), (413, &json!("file_too_large")));
    let pieces = futures::stream::iter((0..500).map(|_| Ok::<_, std::io::Error>(vec![7_u8; 10_000])));
    let chunked = server.call(Method::PUT, &target).body(reqwest::Body::wrap_stream(pieces));
    let (status, body) = server.json(chunked).await;
    assert_eq!((status, &body["code"]), (413, &json!("file_too_large")));
    assert_eq!(server.fake.files.lock().unwrap()["/x"], "old");
    let (status, _) = server.json(server.call(Method::PUT, &target).body(vec![7; 100_000])).await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn json_bodies_are_bounded() {
    let server = Server::start().await;
    let body = format!(r#"{{"template":"{}"}}"#, "x".repeat(4 << 20));
    let (status, answer) = server.json(server.post("/v1/sandboxes", &body)).await;
    assert_eq!((status, &answer["code"]), (413, &json!("body_too_large")));
}

#[tokio::test]
async fn an_upload_that_breaks_or_stalls_is_undone() {
    let server = Server::with(|config| config.timing.upload_idle = std::time::Duration::from_millis(300)).await;
    let id = server.sandbox();
    let head = server.head("PUT", &path(&id, "/x"), "Content-Length: 1000\r\n");
    let mut wire = server.wire().await;
    wire.send(head.clone() + "part").await;
    while server.fake.open_streams() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    drop(wire);
    server.fake.quiet().await;
    let mut wire = server.wire().await;
    wire.send(head + "part").await;
    assert_eq!(wire.response().await.status, 408);
    assert!(server.fake.files.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_file_that_can_not_be_read_is_an_error_not_a_short_file() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.fake.script("read /dir", [Act::Fail(ErrorClass::Conflict, "/dir is a directory")]);
    assert_eq!(server.json(server.get(&path(&id, "/dir"))).await.0, 409);
    server
        .fake
        .script("read /bad", [Act::Out(b"abc".to_vec()), Act::Sleep(50), Act::Fail(ErrorClass::Internal, "disk")]);
    let mut wire = server.wire().await;
    wire.send(server.head("GET", &path(&id, "/bad"), "")).await;
    let raw = wire.response().await;
    assert_eq!((raw.status, &raw.body[..], raw.complete), (200, &b"abc"[..], false));
    server.fake.quiet().await;
}

#[tokio::test]
async fn changes_are_bounded_and_a_get_flushes_nothing() {
    let server = Server::start().await;
    let id = server.sandbox();
    let all = format!("/v1/sandboxes/{id}/changes");
    server.fake.calls();
    let (status, seen) = server.json(server.get(&all)).await;
    assert_eq!(status, 200);
    // What a guest named it, and nothing that a reader could take for the end of something.
    assert_eq!(seen["added"][0]["path"], "/root/a\u{1b}[2J\u{85}\n");
    assert_eq!(seen["added"][0]["type"], "file");
    assert_eq!((&seen["flushed"], &seen["counts"]["added"]), (&json!(false), &json!(1)));
    let (_, flushed) = server.json(server.post(&format!("{all}?limit=7&path=%2Froot%2F.%2Fa%20b%2F"), "")).await;
    assert_eq!(flushed["flushed"], true);
    let asked: Vec<_> = server.fake.calls().into_iter().filter(|call| call.starts_with("asked")).collect();
    assert_eq!(asked, ["asked default 1000 / flush=false", "asked default 7 /root/a b flush=true"]);
    for (query, code) in [
        ("limit=0", "invalid_limit"),
        ("limit=10001", "invalid_limit"),
        ("limit=x", "invalid_limit"),
        ("path=etc", "path_not_absolute"),
        ("path=%2Fa%2F..%2Fb", "invalid_path"),
    ] {
        let (status, answer) = server.json(server.get(&format!("{all}?{query}"))).await;
        assert_eq!((status, answer["code"].as_str()), (400, Some(code)), "{query}");
    }
}
