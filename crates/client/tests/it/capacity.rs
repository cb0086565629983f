//! Asking again when there is no room: what is, and what must not be.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::fake::{Server, reply, sandbox};
use axum::http::HeaderValue;
use axum::response::Response;
use coppice_client::api::CreateSandboxRequest;
use coppice_client::{Refusal, RetryPolicy};
use serde_json::json;

fn refuse(status: u16, retry_after: Option<&'static str>) -> Response {
    let mut response = reply(status, &json!({"error": "no room", "code": "no_capacity"}));
    if let Some(after) = retry_after {
        response.headers_mut().insert("retry-after", HeaderValue::from_static(after));
    }
    response
}

/// Refuses the first `times` requests.
async fn server(times: u32, status: u16, retry_after: Option<&'static str>) -> Server {
    let count = Arc::new(AtomicU32::new(0));
    Server::start(move |_| {
        let refused = count.fetch_add(1, Ordering::SeqCst) < times;
        async move { if refused { refuse(status, retry_after) } else { reply(201, &sandbox("A", &json!({}))) } }
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_means_nothing_exists_is_asked_again() {
    for (status, after) in [(503, Some("0")), (507, None), (429, Some("0"))] {
        let server = server(2, status, after).await;
        let told: Arc<Mutex<Vec<Refusal>>> = Arc::default();
        let log = told.clone();
        let policy = RetryPolicy {
            on_wait: Some(Arc::new(move |refusal| log.lock().unwrap().push(refusal.clone()))),
            ..RetryPolicy::default()
        };
        let made = server.client().with_retry(policy).create(&CreateSandboxRequest::default()).await;
        assert_eq!(made.unwrap().id, "A", "{status}");
        assert_eq!(server.lines().len(), 3);
        let told = told.lock().unwrap();
        assert_eq!(told.iter().map(|refusal| refusal.attempt).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(told[0].error.message, "no room");
    }
}

#[tokio::test]
async fn anything_else_is_final() {
    for (status, after) in [(503, None), (429, None), (500, Some("0")), (502, Some("0")), (504, Some("0"))] {
        let server = server(1, status, after).await;
        let error = server.client().create(&CreateSandboxRequest::default()).await.unwrap_err();
        assert_eq!(error.status(), Some(status));
        assert_eq!(server.lines().len(), 1, "{status} {after:?}");
    }
}

#[tokio::test]
async fn a_budget_of_zero_and_other_calls_ask_once() {
    let full = server(9, 507, None).await;
    let policy = RetryPolicy { budget: Duration::ZERO, on_wait: None };
    let error = full.client().with_retry(policy).create(&CreateSandboxRequest::default()).await.unwrap_err();
    assert_eq!((error.status(), error.code()), (Some(507), "no_capacity"));
    assert_eq!(full.lines().len(), 1);

    let busy = server(9, 503, Some("0")).await;
    assert!(busy.client().snapshot("A").await.is_err());
    assert_eq!(busy.lines().len(), 1);
}
