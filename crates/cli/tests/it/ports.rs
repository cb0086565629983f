//! `coppice ports`, `preview` and `port-forward` against a server of raw sockets: one that leaves HTTP.

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Child;
use tokio::time::timeout;

use crate::fake::{A, command, err, out};

const PATIENCE: Duration = Duration::from_secs(20);

/// A server with one sandbox: port 80 says everything twice, nothing listens on 81.
async fn server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(BufReader::new(stream)));
        }
    });
    url
}

async fn serve(mut stream: BufReader<TcpStream>) {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let lower = head.to_ascii_lowercase();
    let length = lower.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).await.unwrap();
    let request: Value = serde_json::from_slice(&body).unwrap_or_default();
    let line = head.lines().next().unwrap_or_default().trim_end_matches(" HTTP/1.1").to_owned();
    let port = json!({
        "port": 80, "label": "web", "listening": true, "source": "user", "public": request["public"] == true,
        "proxy_url": "http://x/proxy/80/",
    });
    let link = json!({
        "id": "L", "sandbox_id": A, "port": 80, "paths": request["paths"].as_array().cloned().unwrap_or_default(),
        "created_at": "2026-01-01T00:00:00Z", "expires_at": "2026-01-01T01:00:00Z",
        "url": "http://x/v1/p/T/", "token": "T",
    });
    let (status, answer) = match line.strip_prefix("GET /v1/sandboxes/").map(|rest| rest.trim_start_matches(A)) {
        Some("") => ("200 OK", sandbox()),
        Some("/ports") => ("200 OK", json!([port])),
        Some("/previews") => ("200 OK", json!([link])),
        Some("/tunnel/80") => {
            assert!(lower.contains("upgrade: tcp") && lower.contains("connection: upgrade"), "{head}");
            let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: tcp\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.unwrap();
            return twice(stream).await;
        }
        Some("/tunnel/81") => {
            ("502 Bad Gateway", json!({"error": "nothing listens on port 81", "code": "port_refused"}))
        }
        _ if line.starts_with("POST") && line.ends_with("/ports") => ("201 Created", port),
        _ if line.starts_with("POST") && line.ends_with("/preview") => ("200 OK", link),
        _ if line.starts_with("DELETE") => ("204 No Content", Value::Null),
        _ => ("404 Not Found", json!({"error": "there is no such thing", "code": "sandbox_not_found"})),
    };
    let body = if answer.is_null() { String::new() } else { answer.to_string() };
    let text = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
    stream.write_all(text.as_bytes()).await.unwrap();
}

async fn twice(mut stream: BufReader<TcpStream>) {
    let mut buffer = [0; 1024];
    while let Ok(length) = stream.read(&mut buffer).await {
        if length == 0 {
            stream.write_all(b"bye").await.unwrap_or_default();
            return;
        }
        for _ in 0..2 {
            stream.write_all(&buffer[..length]).await.unwrap_or_default();
        }
    }
}

fn sandbox() -> Value {
    json!({
        "id": A, "template": "base", "cpu": 1, "memory_mb": 512, "status": "running", "guest_ip": "10.203.1.0",
        "metadata": {}, "boot_ms": 90, "boot_mode": "snapshot", "created_at": "2026-01-01T00:00:00Z",
        "persistent": false, "ttl_seconds": 600,
    })
}

async fn run(url: &str, args: &[&str]) -> std::process::Output {
    command(args).env("PANDASTACK_API", url).output().await.unwrap()
}

/// Starts a forward, and gives the addresses that it listens on.
async fn forward(url: &str, ports: &[&str]) -> (Child, Vec<String>) {
    let mut args = vec!["--json", "port-forward", A];
    args.extend(ports);
    let mut child = command(&args).env("PANDASTACK_API", url).stderr(Stdio::inherit()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let mut text = String::new();
    while let Some(line) = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap() {
        text += &line;
        if line == "}" {
            break;
        }
    }
    let told: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(told["sandbox"], A);
    let local = |one: &Value| one["local"].as_str().unwrap().to_owned();
    (child, told["forwards"].as_array().unwrap().iter().map(local).collect())
}

#[tokio::test]
async fn many_connections_go_through_and_each_way_ends_by_itself() {
    let url = server().await;
    let (mut child, local) = forward(&url, &["0:80", "0:80"]).await;
    assert_eq!(local.len(), 2);
    let talks = (0..20_u8).map(|number| {
        let address = local[usize::from(number) % 2].clone();
        async move {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(&[number, 0xff, 0]).await.unwrap();
            let mut heard = [0; 6];
            stream.read_exact(&mut heard).await.unwrap();
            assert_eq!(heard, [number, 0xff, 0, number, 0xff, 0]);
            stream.shutdown().await.unwrap();
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.unwrap();
            assert_eq!(rest, b"bye");
        }
    });
    timeout(PATIENCE, futures::future::join_all(talks)).await.unwrap();
    // An interruption ends it cleanly, and the connections with it.
    let mut open = TcpStream::connect(&local[0]).await.unwrap();
    open.write_all(b"x").await.unwrap();
    open.read_exact(&mut [0; 2]).await.unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let status = timeout(PATIENCE, child.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(0));
    let ended = timeout(PATIENCE, open.read(&mut [0])).await.unwrap();
    assert!(!matches!(ended, Ok(length) if length > 0), "{ended:?}");
}

#[tokio::test]
async fn a_port_that_nothing_listens_on_ends_its_connection_only() {
    let url = server().await;
    let (mut child, local) = forward(&url, &["0:81", "0:80"]).await;
    let mut refused = TcpStream::connect(&local[0]).await.unwrap();
    let ended = timeout(PATIENCE, refused.read(&mut [0])).await.unwrap();
    assert!(!matches!(ended, Ok(length) if length > 0), "{ended:?}");
    let mut fine = TcpStream::connect(&local[1]).await.unwrap();
    fine.write_all(b"x").await.unwrap();
    fine.read_exact(&mut [0; 2]).await.unwrap();
    child.kill().await.unwrap();
}

#[tokio::test]
async fn what_can_not_be_forwarded_is_told_at_once() {
    let url = server().await;
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = format!("{}:80", taken.local_addr().unwrap().port());
    let done = run(&url, &["port-forward", A, &port]).await;
    assert_eq!(done.status.code(), Some(1));
    assert!(err(&done).contains("can't listen on 127.0.0.1:") && err(&done).contains("hint:"), "{}", err(&done));
    let gone = A.replace('a', "e");
    let done = run(&url, &["port-forward", &gone, "0:80"]).await;
    assert_eq!((done.status.code(), out(&done).as_str()), (Some(1), ""));
    for bad in ["", "0", "x:80", "80:x", "70000"] {
        assert_eq!(run(&url, &["port-forward", A, bad]).await.status.code(), Some(2), "{bad}");
    }
}

#[tokio::test]
async fn ports_are_listed_opened_and_closed() {
    let url = server().await;
    let listed = out(&run(&url, &["ports", "list", A]).await);
    assert!(listed.contains("80") && listed.contains("web") && listed.contains("listens"), "{listed}");
    let opened = run(&url, &["--json", "ports", "open", A, "80", "--label", "web", "--public"]).await;
    assert_eq!(serde_json::from_str::<Value>(&out(&opened)).unwrap()["public"], true);
    assert_eq!(out(&run(&url, &["ports", "close", A, "80"]).await), "closed 80\n");
    assert_eq!(run(&url, &["ports", "open", A, "0"]).await.status.code(), Some(2));
}

#[tokio::test]
async fn links_are_made_listed_and_revoked() {
    let url = server().await;
    let made = run(&url, &["preview", "create", A, "80", "--ttl", "60", "--path", "/a"]).await;
    assert_eq!(out(&made), "http://x/v1/p/T/\n");
    assert!(err(&made).contains(&format!("coppice preview revoke {A} L")), "{}", err(&made));
    let listed = out(&run(&url, &["preview", "list", A]).await);
    assert!(listed.contains("all") && listed.contains("2026-01-01T01:00:00Z"), "{listed}");
    assert_eq!(out(&run(&url, &["preview", "revoke", A, "L"]).await), "revoked L\n");
}
