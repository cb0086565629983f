//! A scriptable host, and the real API over it on a real listener.

mod fake;
pub mod service;
mod wire;

use std::net::SocketAddr;
use std::sync::Arc;

use coppice_api::Role;
use coppice_control::{Auth, Control, ControlConfig, NewToken, TokenStore};
pub use fake::{Act, Fake};
use reqwest::{Client, Method, RequestBuilder};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
pub use wire::{Raw, Wire};

/// The API, serving.
pub struct Server {
    pub fake: Arc<Fake>,
    pub address: SocketAddr,
    pub token: String,
    pub store: TokenStore,
    pub client: Client,
    stop: Option<oneshot::Sender<()>>,
    task: Option<JoinHandle<std::io::Result<()>>>,
    _folder: tempfile::TempDir,
}

impl Server {
    pub async fn start() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(configure: impl FnOnce(&mut ControlConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = TokenStore::open(&folder.path().join("control.db")).await.unwrap();
        let new = NewToken { label: "test".into(), role: Role::Admin, lifetime: None };
        let token = store.create_token("default", &new).await.unwrap().token;
        let mut config = ControlConfig::new(Auth::Tokens(store.clone()));
        configure(&mut config);
        let fake = Arc::new(Fake::default());
        let control = Control::new(fake.clone(), config).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(control.serve(listener, async move {
            stopped.await.unwrap_or_default();
        }));
        let client = Client::builder().redirect(reqwest::redirect::Policy::none()).no_proxy().build().unwrap();
        Self { fake, address, token, store, client, stop: Some(stop), task: Some(task), _folder: folder }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn call(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, self.url(path)).bearer_auth(&self.token)
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.call(Method::GET, path)
    }

    pub fn post(&self, path: &str, body: &str) -> RequestBuilder {
        self.call(Method::POST, path).body(body.to_owned())
    }

    /// Status, and the body as JSON (null where it is none).
    pub async fn json(&self, request: RequestBuilder) -> (u16, Value) {
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let kind = response.headers().get("content-type").map(|v| v.to_str().unwrap().to_owned());
        let bytes = response.bytes().await.unwrap();
        if status >= 400 {
            assert_eq!(kind.as_deref(), Some("application/json"), "{status} {bytes:?}");
            assert!(bytes.is_ascii());
            let body: Value = serde_json::from_slice(&bytes).unwrap();
            assert!(body["error"].as_str().is_some_and(|text| !text.is_empty()), "{body}");
            assert!(body["code"].as_str().is_some_and(|text| !text.is_empty()), "{body}");
        }
        (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
    }

    /// A raw connection.
    pub async fn wire(&self) -> Wire {
        Wire::connect(self.address).await
    }

    /// The head of a request with the token.
    pub fn head(&self, method: &str, path: &str, more: &str) -> String {
        format!("{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n{more}\r\n", self.token)
    }

    /// A whole POST.
    pub fn posted(&self, path: &str, body: &str) -> String {
        self.head("POST", path, &format!("Content-Length: {}\r\n", body.len())) + body
    }

    /// Tells it to stop.
    pub fn stop(&mut self) {
        self.stop.take();
    }

    /// Waits until it has stopped.
    pub async fn stopped(&mut self) {
        self.stop();
        self.task.take().unwrap().await.unwrap().unwrap();
    }

    /// Something that listens on a port of every sandbox.
    pub fn serve(&self, port: u16, address: SocketAddr) {
        self.fake.services.lock().unwrap().insert(port, address);
    }

    /// The same request by the holder of another token.
    pub fn call_as(&self, token: &str, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, self.url(path)).bearer_auth(token)
    }

    /// A sandbox of workspace `default`.
    pub fn sandbox(&self) -> String {
        self.fake.add_sandbox("default")
    }
}
