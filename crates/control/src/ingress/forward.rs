//! One HTTP/1.1 exchange with what listens on a port: a connection of its own, bodies streamed both ways.
//!
//! The answer is a stranger's. Its head is bounded in size and number of headers, it must be HTTP, and what it asks of
//! the connection is not done. When the client hangs up, the connection into the guest ends.

use std::error::Error;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use coppice_api::ErrorClass;
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderValue, Method, StatusCode, Uri, Version};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::task::JoinHandle;

use super::head::{self, Authorization, Place, Sender};
use super::reach::reach;
use super::{Target, authority, pipe, scheme};
use crate::Control;
use crate::error::ApiError;
use crate::observe::Guarded;
use crate::server::Peer;

/// Most bytes of a response's head, and of what is buffered of a connection.
const MAX_HEAD: usize = 64 << 10;
/// Most headers of a response.
const MAX_HEADERS: usize = 128;

/// How a request is passed on.
#[derive(Debug, Clone)]
pub(crate) struct Passing {
    pub(crate) place: Place,
    pub(crate) authorization: Authorization,
    /// Only WebSockets may leave HTTP: any other protocol might carry requests for paths that are not allowed.
    pub(crate) websockets_only: bool,
    /// Path and query that the service is asked for.
    pub(crate) target: String,
}

/// Passes a request on, and its answer back.
pub(crate) async fn forward(
    control: &Control,
    target: &Target,
    passing: Passing,
    mut request: Request,
) -> Result<Response, ApiError> {
    let uri: Uri =
        passing.target.parse().map_err(|_| ApiError::invalid("invalid_path", "the path can't be passed on"))?;
    let upgrade = head::upgrade(request.headers())
        .filter(|protocol| !passing.websockets_only || protocol.as_bytes().eq_ignore_ascii_case(b"websocket"));
    let client = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let io = TokioIo::new(reach(control, target).await?);
    let failed = |error: hyper::Error| upstream(&error, target.port);
    let (mut sender, connection) = builder().handshake(io).await.map_err(failed)?;
    let task = Task(tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a connection to a port of a sandbox ended");
        }
    }));

    let head_only = request.method() == Method::HEAD;
    let (outgoing, broken) = outgoing(control, target, &passing, uri, upgrade, request);
    let answer = sender.send_request(outgoing).await.map_err(|error| {
        if broken.load(Ordering::Relaxed) {
            return ApiError::invalid("body_broken", "the request's body ended early");
        }
        upstream(&error, target.port)
    })?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        let Some(client) = client else { return Err(not_http(target.port, "it left HTTP without being asked to")) };
        return Ok(switched(control, target, &passing, client, answer, task));
    }
    let (mut parts, body) = answer.into_parts();
    let sized = head_only || parts.status == StatusCode::NOT_MODIFIED;
    parts.headers = head::response(parts.headers, &passing.place, target.port, sized);
    parts.version = Version::HTTP_11;
    let guard = (task, sender);
    Ok(Response::from_parts(parts, Body::new(Guarded { inner: Body::new(body), _guard: guard })))
}

fn builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.max_buf_size(MAX_HEAD).max_headers(MAX_HEADERS);
    builder
}

fn outgoing(
    control: &Control,
    target: &Target,
    passing: &Passing,
    uri: Uri,
    upgrade: Option<HeaderValue>,
    request: Request,
) -> (Request, Arc<AtomicBool>) {
    let (parts, body) = request.into_parts();
    let authority = authority(&parts.uri, &parts.headers).map(str::to_owned);
    let sender = Sender {
        sandbox: &target.sandbox,
        port: target.port,
        peer: parts.extensions.get::<Peer>().map(|peer: &Peer| -> SocketAddr { peer.0 }),
        scheme: scheme(control),
        authority: authority.as_deref(),
        place: &passing.place,
        authorization: passing.authorization,
        upgrade,
    };
    let broken = Arc::new(AtomicBool::new(false));
    let mut outgoing = Request::new(Body::new(Watched { inner: body, broken: Arc::clone(&broken) }));
    *outgoing.headers_mut() = head::request(parts.headers, &sender);
    *outgoing.method_mut() = parts.method;
    *outgoing.uri_mut() = uri;
    (outgoing, broken)
}

/// The service went on with another protocol: so does the client.
fn switched(
    control: &Control,
    target: &Target,
    passing: &Passing,
    client: hyper::upgrade::OnUpgrade,
    mut answer: hyper::Response<Incoming>,
    task: Task,
) -> Response {
    let guest = hyper::upgrade::on(&mut answer);
    let protocol = answer.headers().get(UPGRADE).cloned();
    pipe::connect(control, client, async move {
        let bytes = pipe::bytes(guest).await;
        drop(task);
        bytes
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *response.headers_mut() = head::response(std::mem::take(answer.headers_mut()), &passing.place, target.port, false);
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = protocol {
        response.headers_mut().insert(UPGRADE, protocol);
    }
    response
}

/// Why there is no answer.
fn upstream(error: &hyper::Error, port: u16) -> ApiError {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    let mut timed_out = false;
    while let Some(one) = cause {
        timed_out |= one.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::TimedOut);
        cause = one.source();
    }
    if timed_out {
        let message = format!("what listens on port {port} was silent for too long");
        return ApiError::new(ErrorClass::Upstream, "port_silent", message);
    }
    if error.is_parse() || error.is_parse_too_large() {
        return not_http(port, &error.to_string());
    }
    let message = format!("what listens on port {port} ended the connection without an answer");
    ApiError::new(ErrorClass::Upstream, "port_closed", message)
        .hint("the service may have failed, or may speak another protocol than HTTP")
}

fn not_http(port: u16, why: &str) -> ApiError {
    let message = format!("what listens on port {port} did not answer in HTTP that can be passed on: {why}");
    ApiError::new(ErrorClass::Upstream, "port_bad_http", message)
        .hint("`coppice port-forward` leads to services that speak another protocol")
}

/// A connection's driver, which ends with whoever waits for the answer.
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A request's body that tells whether it broke.
struct Watched {
    inner: Body,
    broken: Arc<AtomicBool>,
}

impl HttpBody for Watched {
    type Data = bytes::Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        if matches!(polled, Poll::Ready(Some(Err(_)))) {
            self.broken.store(true, Ordering::Relaxed);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
