//! A tiny HTTP server that records what it is sent and answers what a test says.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use coppice_client::Client;
use serde_json::{Value, json};

/// One request as it arrived.
#[derive(Debug, Clone)]
pub struct Seen {
    /// `METHOD /path?query`.
    pub line: String,
    pub authorization: String,
    pub body: Bytes,
}

impl Seen {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }
}

pub struct Server {
    pub url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    pub async fn start<F, Fut>(answer: F) -> Self
    where
        F: Fn(Seen) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Response> + Send + 'static,
    {
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let log = seen.clone();
        let router = axum::Router::new().fallback(move |request: Request| {
            let (answer, log) = (answer.clone(), log.clone());
            async move {
                let line = format!("{} {}", request.method(), request.uri());
                let header = request.headers().get("authorization");
                let authorization = header.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
                let body = axum::body::to_bytes(request.into_body(), 1 << 24).await.unwrap();
                let seen = Seen { line, authorization, body };
                log.lock().unwrap_or_else(PoisonError::into_inner).push(seen.clone());
                answer(seen).await
            }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, seen }
    }

    pub fn client(&self) -> Client {
        Client::new(&self.url, "pds_test").unwrap()
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn lines(&self) -> Vec<String> {
        self.seen().into_iter().map(|seen| seen.line).collect()
    }
}

pub fn reply(status: u16, body: &Value) -> Response {
    (StatusCode::from_u16(status).unwrap(), axum::Json(body)).into_response()
}

pub fn sse(text: impl Into<Body>) -> Response {
    Response::builder().header("content-type", "text/event-stream; charset=utf-8").body(text.into()).unwrap()
}

pub fn sandbox(id: &str, metadata: &Value) -> Value {
    json!({
        "id": id, "template": "base", "cpu": 1, "memory_mb": 512, "status": "running", "guest_ip": "",
        "metadata": metadata, "boot_ms": 90, "boot_mode": "snapshot", "created_at": "2026-01-01T00:00:00Z",
        "persistent": false, "ttl_seconds": 600, "an_unknown_field": [1],
    })
}

pub fn fork(children: &[Value], errors: &Value) -> Value {
    json!({
        "children": children, "errors": errors, "parent_id": "P", "snapshot_id": "S", "tree_id": "T",
        "at": "2026-01-01T00:00:00Z", "parent_paused_ms": 12.5, "disk_clone": "reflink", "flushed": true,
        "mode": "fork-tree", "inherited": "memory and disk", "memory_bytes": 1,
    })
}
