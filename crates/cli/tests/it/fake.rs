//! A small cloud over HTTP, and the binary run against it.

use std::collections::BTreeMap;
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

pub const A: &str = "aaaaaaaa-0000-4000-8000-000000000001";
pub const B: &str = "bbbbbbbb-0000-4000-8000-000000000002";
pub const BC: &str = "bcbcbcbc-0000-4000-8000-000000000003";

#[derive(Default)]
pub struct State {
    pub sandboxes: BTreeMap<String, Value>,
    pub files: BTreeMap<String, Vec<u8>>,
    pub seen: Vec<(String, Bytes)>,
    pub create_delay: Duration,
}

#[derive(Clone)]
pub struct Cloud {
    pub url: String,
    state: Arc<Mutex<State>>,
}

impl Cloud {
    pub async fn start() -> Self {
        let state: Arc<Mutex<State>> = Arc::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let cloud = Self { url: format!("http://{}", listener.local_addr().unwrap()), state };
        let service = cloud.clone();
        let router = axum::Router::new().fallback(move |request: Request| {
            let cloud = service.clone();
            async move {
                let line = format!("{} {}", request.method(), request.uri());
                let body = axum::body::to_bytes(request.into_body(), 1 << 24).await.unwrap_or_default();
                cloud.answer(&line, body).await
            }
        });
        tokio::spawn(async move { axum::serve(listener, router).await });
        for id in [A, B, BC] {
            let parent = if id == A { json!({}) } else { json!({"fork_parent_id": A, "fork_index": "0"}) };
            cloud.with(|state| state.sandboxes.insert(id.into(), sandbox(id, &parent)));
        }
        cloud
    }

    pub fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn lines(&self) -> Vec<String> {
        self.with(|state| state.seen.iter().map(|(line, _)| line.clone()).collect())
    }

    pub fn body(&self, line: &str) -> Value {
        self.with(|state| {
            let found = state.seen.iter().find(|(seen, _)| seen == line);
            serde_json::from_slice(&found.unwrap_or_else(|| panic!("no {line}")).1).unwrap_or(Value::Null)
        })
    }

    async fn answer(&self, line: &str, body: Bytes) -> Response {
        self.with(|state| state.seen.push((line.to_owned(), body.clone())));
        let (method, target) = line.split_once(' ').unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let parts: Vec<&str> = path.trim_start_matches("/v1/").split('/').collect();
        let json_body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        match (method, &parts[..]) {
            ("GET", ["sandboxes"]) => {
                reply(200, &Value::Array(self.with(|state| state.sandboxes.values().cloned().collect())))
            }
            ("POST", ["sandboxes"]) => {
                let delay = self.with(|state| state.create_delay);
                tokio::time::sleep(delay).await;
                let id = "cccccccc-0000-4000-8000-00000000000c";
                let made = sandbox(id, &json_body["metadata"]);
                self.with(|state| state.sandboxes.insert(id.into(), made.clone()));
                reply(201, &made)
            }
            ("DELETE", ["sandboxes", id]) => match self.with(|state| state.sandboxes.remove(*id)) {
                Some(_) => StatusCode::NO_CONTENT.into_response(),
                None => missing("sandbox_not_found"),
            },
            ("GET", ["sandboxes", id]) => match self.with(|state| state.sandboxes.get(*id).cloned()) {
                Some(found) => reply(200, &found),
                None => missing("sandbox_not_found"),
            },
            (_, ["sandboxes", _, "network"]) => {
                reply(200, &json!({"egress": json_body.get("egress").cloned().unwrap_or(json!("none"))}))
            }
            ("POST", ["sandboxes", _, "exec", "stream"]) => stream(&json_body),
            ("POST", ["sandboxes", _, "exec"]) => {
                reply(200, &json!({"stdout": "out\n", "stderr": "", "exit_code": 3, "duration_ms": 1}))
            }
            ("POST", ["sandboxes", id, "fork" | "fork-tree"]) => reply(201, &fork(id, json_body["count"].as_u64())),
            (_, ["sandboxes", _, "fs", ..]) => self.file(method, &parts, query, body),
            ("GET", ["sandboxes", _, "logs"]) => "one\ntwo\n".into_response(),
            ("GET", ["", "version"]) => reply(200, &json!({"version": "9", "engine": "fake"})),
            ("POST", ["me", "tokens"] | ["workspaces", _, "tokens"]) => {
                let workspace = if parts[0] == "me" { "default" } else { parts[1] };
                let mut made = token(workspace, &json_body["label"]);
                made["token"] = "pds_0f8fad5bd9cb469fa16570867728950e".into();
                reply(201, &made)
            }
            ("GET", ["me", "tokens"]) => reply(200, &json!([token("default", &"ci".into())])),
            ("DELETE", ["me", "tokens", "pds_0f8fad5b"]) => StatusCode::NO_CONTENT.into_response(),
            ("GET", ["me"]) => reply(
                200,
                &json!({"user_id": "u", "email": "", "current_org": "a", "orgs": ["a"], "auth_method": "token"}),
            ),
            ("GET", ["workspaces"]) => reply(200, &json!([workspace("a", &json!({}))])),
            ("GET", ["workspaces", name]) => reply(200, &workspace(name, &json!({"sandboxes": 9, "fan_out": 4}))),
            ("PUT", ["workspaces", name]) => reply(200, &workspace(name, &json_body)),
            ("DELETE", ["workspaces", "full"]) => {
                reply(409, &json!({"error": "not empty", "code": "workspace_not_empty"}))
            }
            ("DELETE", ["workspaces", _]) => StatusCode::NO_CONTENT.into_response(),
            ("GET", ["audit"]) => reply(
                200,
                &json!([{"id": 7, "at": "2026-01-01T00:00:00Z", "workspace": "a", "token": "pds_0f8fad5b",
                    "method": "POST", "route": "/v1/sandboxes", "resource": A, "status": 201, "request_id": "r"}]),
            ),
            ("GET", ["snapshots"]) => reply(200, &json!({"snapshots": []})),
            _ => reply(404, &json!({"error": format!("no route {line}"), "code": "no_route"})),
        }
    }

    fn file(&self, method: &str, parts: &[&str], query: &str, body: Bytes) -> Response {
        let path = query.trim_start_matches("path=").replace("%2F", "/");
        match (method, parts.last().copied().unwrap_or_default()) {
            ("PUT", _) => {
                let bytes = body.len();
                self.with(|state| state.files.insert(path.clone(), body.to_vec()));
                reply(200, &json!({"path": path, "bytes": bytes}))
            }
            ("GET", "stat") => self.stat(&path),
            ("GET", "dir") => {
                let mut names: BTreeMap<String, bool> = BTreeMap::new();
                let prefix = format!("{}/", path.trim_end_matches('/'));
                self.with(|state| {
                    for rest in state.files.keys().filter_map(|file| file.strip_prefix(&prefix)) {
                        let (name, dir) = rest.split_once('/').map_or((rest, false), |(name, _)| (name, true));
                        names.insert(name.to_owned(), dir);
                    }
                });
                let entry = |(name, dir): (String, bool)| entry(&name, dir);
                reply(200, &json!({"path": path, "entries": names.into_iter().map(entry).collect::<Vec<_>>()}))
            }
            ("GET", _) => match self.with(|state| state.files.get(&path).cloned()) {
                Some(bytes) => bytes.into_response(),
                None => missing("file_not_found"),
            },
            _ => missing("no_route"),
        }
    }

    fn stat(&self, path: &str) -> Response {
        let prefix = format!("{}/", path.trim_end_matches('/'));
        let (file, dir) = self
            .with(|state| (state.files.contains_key(path), state.files.keys().any(|file| file.starts_with(&prefix))));
        if file || dir || path == "/tmp" { reply(200, &entry("x", !file)) } else { missing("file_not_found") }
    }

    /// Runs the binary to its end.
    pub async fn run(&self, args: &[&str]) -> Output {
        self.spawn(args).wait_with_output().await.unwrap()
    }

    /// Runs the binary with this standard input.
    pub async fn run_with(&self, args: &[&str], input: &[u8]) -> Output {
        let mut child = command(args).env("PANDASTACK_API", &self.url).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input).await.unwrap();
        drop(stdin);
        child.wait_with_output().await.unwrap()
    }

    pub fn spawn(&self, args: &[&str]) -> Child {
        command(args).env("PANDASTACK_API", &self.url).spawn().unwrap()
    }
}

/// The binary, with nothing of this process's environment but a key.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coppice"));
    command.args(args).env_clear().env("PANDASTACK_API_KEY", "pds_test").env("COPPICE_DATA_DIR", "/nonexistent");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

pub fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn reply(status: u16, body: &Value) -> Response {
    (StatusCode::from_u16(status).unwrap(), axum::Json(body)).into_response()
}

fn missing(code: &str) -> Response {
    reply(404, &json!({"error": "there is no such thing", "code": code, "hint": "look again"}))
}

fn entry(name: &str, dir: bool) -> Value {
    json!({"name": name, "is_dir": dir, "size": 1, "mode": if dir { "d" } else { "f" }, "mtime": 1})
}

fn sandbox(id: &str, metadata: &Value) -> Value {
    let metadata = if metadata.is_object() { metadata.clone() } else { json!({}) };
    json!({
        "id": id, "template": "base", "cpu": 1, "memory_mb": 512, "status": "running", "guest_ip": "",
        "metadata": metadata, "boot_ms": 90, "boot_mode": "snapshot", "created_at": "2026-01-01T00:00:00Z",
        "persistent": false, "ttl_seconds": 600,
    })
}

fn fork(parent: &str, count: Option<u64>) -> Value {
    let child = |index: u64| {
        sandbox(&format!("dddddddd-0000-4000-8000-{index:012}"), &json!({"fork_index": index.to_string()}))
    };
    json!({
        "children": (0..count.unwrap_or(1)).map(child).collect::<Vec<_>>(), "parent_id": parent, "snapshot_id": "S",
        "tree_id": "T", "at": "2026-01-01T00:00:00Z", "parent_paused_ms": 12.5, "disk_clone": "reflink",
        "flushed": true, "mode": "fork-tree", "inherited": "inherited memory and disk", "memory_bytes": 1 << 20,
    })
}

fn token(workspace: &str, label: &Value) -> Value {
    json!({
        "prefix": "pds_0f8fad5b", "label": label, "role": "member", "workspace": workspace,
        "created_at": "2026-01-01T00:00:00Z", "expires_at": "2026-01-02T00:00:00Z",
    })
}

fn workspace(name: &str, quota: &Value) -> Value {
    let usage = json!({"sandboxes": 9, "memory_mb": 512, "snapshots": 0, "disk_mb": 1024});
    json!({"name": name, "created_at": "2026-01-01T00:00:00Z", "quota": quota, "usage": usage, "tokens": 2})
}

fn stream(body: &Value) -> Response {
    let end = match body["cmd"].as_str().unwrap_or_default() {
        "slow" => "event: error\ndata: {\"error\":\"command timeout after 1s\"}\n\n".to_owned(),
        "cut" => String::new(),
        _ => "event: exit\ndata: {\"exit_code\":7,\"duration_ms\":1}\n\n".to_owned(),
    };
    let text =
        format!("event: stdout\ndata: {{\"chunk\":\"o\\u00e9\"}}\n\nevent: stderr\ndata: {{\"chunk\":\"e\"}}\n\n{end}");
    ([("content-type", "text/event-stream; charset=utf-8")], text).into_response()
}
