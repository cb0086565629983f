//! What is known of every request: an id, a span, metrics.
//!
//! Times are to the response's head: a stream's length is the command's business.

use std::time::Instant;

use axum::body::{Body, HttpBody};
use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use tracing::Instrument as _;
use tracing::field::Empty;
use uuid::Uuid;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest id of a client's that is taken over.
const MAX_REQUEST_ID: usize = 128;

/// The id of a request: an extension of it.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) String);

/// The middleware.
pub(crate) async fn observe(mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    request.extensions_mut().insert(RequestId(id.to_str().unwrap_or_default().to_owned()));
    let method = method(request.method());
    let path = request.extensions().get::<MatchedPath>().map_or("unmatched", MatchedPath::as_str).to_owned();
    let span =
        tracing::info_span!("request", method, path, id = id.to_str().unwrap_or_default(), status = Empty, ms = Empty);
    let mut watch = Watch { method, path, start: Instant::now(), status: None };
    let in_flight = InFlight::new();
    let response = next.run(request).instrument(span.clone()).await;
    let status = response.status().as_u16();
    span.record("status", status).record("ms", watch.start.elapsed().as_secs_f64() * 1e3);
    span.in_scope(|| tracing::debug!("answered"));
    watch.status = Some(status);
    drop(watch);
    let mut response = response.map(|inner| Body::new(Guarded { inner, _guard: in_flight }));
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// The client's own id if it is short and printable, or a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let usable = |value: &&HeaderValue| {
        !value.is_empty() && value.len() <= MAX_REQUEST_ID && value.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    headers.get(REQUEST_ID).filter(usable).cloned().unwrap_or_else(|| {
        let mut buffer = Uuid::encode_buffer();
        let text = Uuid::new_v4().hyphenated().encode_lower(&mut buffer);
        HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("unknown"))
    })
}

/// A label of few values: a client may invent methods.
fn method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "OTHER",
    }
}

/// Counts a request when it is answered, or dropped because its client went away (status 499).
struct Watch {
    method: &'static str,
    path: String,
    start: Instant,
    status: Option<u16>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let status = self.status.unwrap_or(499).to_string();
        let (method, path) = (self.method, self.path.clone());
        metrics::histogram!("coppice_http_request_duration_seconds", "method" => method, "path" => path.clone())
            .record(self.start.elapsed().as_secs_f64());
        metrics::counter!("coppice_http_requests_total", "method" => method, "path" => path, "status" => status)
            .increment(1);
    }
}

/// Counts a request as in flight until the last byte of its response is gone.
struct InFlight;

impl InFlight {
    fn new() -> Self {
        metrics::gauge!("coppice_http_requests_in_flight").increment(1);
        Self
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        metrics::gauge!("coppice_http_requests_in_flight").decrement(1);
    }
}

/// A body that holds something until it has been sent or dropped.
pub(crate) struct Guarded<G> {
    pub(crate) inner: Body,
    pub(crate) _guard: G,
}

impl<G: Unpin> HttpBody for Guarded<G> {
    type Data = bytes::Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
        std::pin::Pin::new(&mut self.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.inner.size_hint()
    }
}
