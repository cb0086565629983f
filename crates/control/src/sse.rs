//! Server-sent events in the shape that the published parsers can read: `event:` before `data:`, one line of ASCII
//! JSON per frame, LF only, comments in silence, a charset, and an end that is always clean.

use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http::HeaderValue;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use serde::Serialize;

use crate::json;

/// A comment, which every parser skips.
const PING: Bytes = Bytes::from_static(b": ping\n\n");

/// One event.
pub(crate) fn frame<T: Serialize>(event: &str, data: &T) -> Bytes {
    let data = json::ascii(data).unwrap_or_else(|_| b"{}".to_vec());
    let mut frame = Vec::with_capacity(event.len() + data.len() + 16);
    for part in [b"event: ", event.as_bytes(), b"\ndata: ", &data, b"\n\n"] {
        frame.extend_from_slice(part);
    }
    frame.into()
}

/// The response. It ends when `frames` does, and says something at least every `keepalive`.
pub(crate) fn response(frames: impl Stream<Item = Bytes> + Send + 'static, keepalive: Duration) -> Response {
    let body = futures::stream::unfold(Box::pin(frames), move |mut frames| async move {
        let piece = match tokio::time::timeout(keepalive, frames.next()).await {
            Ok(frame) => frame?,
            Err(_) => PING,
        };
        Some((Ok::<_, std::convert::Infallible>(piece), frames))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies of the nginx family hold a response back otherwise.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
