//! Answers that may take longer than a client waits for the first byte.
//!
//! Published clients give up after 30 s without one. Work that is not done after a while gets its `200` and, from then
//! on, a space now and then: white space before a JSON value is legal. The price is that the status is committed: see
//! `late`.

use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt as _, Stream, StreamExt as _};
use http::HeaderValue;
use http::header::CONTENT_TYPE;
use tokio::time::{sleep, timeout};

/// When padding starts, and how often it is repeated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Padding {
    /// From the start of the work.
    pub(crate) after: Duration,
    /// Between two spaces.
    pub(crate) every: Duration,
}

/// The work's outcome as a response: by `early` while the status is open; after that the bytes that `late` makes of
/// it, or, where it makes none, an aborted body, which no client takes for an answer.
pub(crate) async fn respond<O: Send + 'static>(
    work: impl Future<Output = O> + Send + 'static,
    padding: Padding,
    early: fn(O) -> Response,
    late: fn(O) -> Option<Bytes>,
) -> Response {
    let mut work = work.boxed();
    if let Ok(outcome) = timeout(padding.after, &mut work).await {
        return early(outcome);
    }
    let mut response = Response::new(Body::from_stream(padded(work.map(late).boxed(), padding.every)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn padded(
    work: BoxFuture<'static, Option<Bytes>>,
    every: Duration,
) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Send {
    const SPACE: Bytes = Bytes::from_static(b" ");
    let rest = futures::stream::unfold(Some(work), move |work| async move {
        let mut work = work?;
        tokio::select! {
            biased;
            outcome = &mut work => {
                let last = outcome.ok_or_else(|| std::io::Error::other("failed after the status was sent"));
                Some((last, None))
            }
            () = sleep(every) => Some((Ok(SPACE), Some(work))),
        }
    });
    futures::stream::once(async { Ok(SPACE) }).chain(rest)
}
