//! What listens in a sandbox: real sockets, well-behaved and not.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Listens, and hands each connection to `serve`.
pub async fn raw<F, Fut>(serve: F) -> SocketAddr
where
    F: Fn(TcpStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    });
    address
}

/// Answers every request with these bytes once its head has come, and ends the connection.
pub async fn saying(bytes: impl Into<Vec<u8>>) -> SocketAddr {
    let bytes = bytes.into();
    raw(move |mut stream| {
        let bytes = bytes.clone();
        async move {
            head(&mut stream).await;
            stream.write_all(&bytes).await.unwrap_or_default();
            stream.shutdown().await.unwrap_or_default();
            // What is unread when a socket closes becomes a reset, which may overtake the answer.
            let mut rest = [0; 4096];
            while matches!(stream.read(&mut rest).await, Ok(length) if length > 0) {}
        }
    })
    .await
}

/// Tells of each connection when its other side is gone.
pub async fn mute(answer: &'static str) -> (SocketAddr, mpsc::UnboundedReceiver<()>) {
    let (gone, ended) = mpsc::unbounded_channel();
    let address = raw(move |mut stream| {
        let gone = gone.clone();
        async move {
            head(&mut stream).await;
            stream.write_all(answer.as_bytes()).await.unwrap_or_default();
            let mut rest = [0; 4096];
            while matches!(stream.read(&mut rest).await, Ok(length) if length > 0) {}
            gone.send(()).unwrap_or_default();
        }
    })
    .await;
    (address, ended)
}

/// Leaves HTTP when asked to, and then says everything twice. When the other side has said all, it says `bye`.
pub async fn switching() -> SocketAddr {
    raw(|mut stream| async move {
        let head = head(&mut stream).await;
        assert!(head.to_ascii_lowercase().contains("connection: upgrade"), "{head}");
        let answer =
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-A: b\r\n\r\nhello";
        stream.write_all(answer.as_bytes()).await.unwrap();
        twice(stream).await;
    })
    .await
}

/// Says everything twice, and `bye` at the end.
pub async fn twice(mut stream: TcpStream) {
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

/// A request's head.
pub async fn head(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => bytes.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// A real web server. `/slow` gives a second piece half a second after the first; everything else tells what was asked.
pub async fn web() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = axum::Router::new().fallback(tell);
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

async fn tell(request: Request) -> Response {
    let (parts, body) = request.into_parts();
    match parts.uri.path() {
        "/slow" => {
            let pieces = futures::stream::unfold(0, |number| async move {
                if number > 0 {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                (number < 2).then(|| (Ok::<_, std::io::Error>(format!("piece {number}\n")), number + 1))
            });
            Body::from_stream(pieces).into_response()
        }
        "/echo" => body.into_response(),
        "/missing" => (http::StatusCode::NOT_FOUND, "not here").into_response(),
        "/moved" => ([("location", "/elsewhere"), ("set-cookie", "a=b")], http::StatusCode::FOUND).into_response(),
        _ => {
            let headers: BTreeMap<String, String> = parts
                .headers
                .iter()
                .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
                .collect();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            axum::Json(json!({
                "method": parts.method.as_str(), "target": parts.uri.to_string(), "headers": headers,
                "body": String::from_utf8_lossy(&body),
            }))
            .into_response()
        }
    }
}
