//! The server itself: is it up, what is it, who am I.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use coppice_api::{Me, Version};
use http::header::CONTENT_TYPE;
use serde_json::{Value, json};

use crate::Control;
use crate::auth::Caller;
use crate::openapi::{self, Reads};

/// Whether the server answers.
///
/// Asks no host and needs no token.
#[utoipa::path(get, path = "/healthz", tag = "server", security(()), responses(
    (status = 200, description = "It does.", body = Value, example = json!({"status": "ok"})),
))]
pub(crate) async fn healthz() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Version of the server and of its engine.
#[utoipa::path(get, path = "/version", tag = "server", security(()), responses(
    (status = 200, description = "What runs here. Needs no token.", body = Version),
))]
pub(crate) async fn version(State(control): State<Control>) -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION").into(), engine: control.host().info().engine })
}

/// Metrics in Prometheus' text format.
///
/// Open to connections from a loopback address that were not forwarded by a proxy; others need a token.
#[utoipa::path(get, path = "/metrics", tag = "server", security((), ("token" = [])), responses(
    (status = 200, description = "All metrics of the server and its host.", body = String, content_type = "text/plain"),
    (status = 401, description = "Not from loopback, and no valid token.", body = coppice_api::ErrorBody),
))]
pub(crate) async fn metrics(State(control): State<Control>) -> Response {
    control.host().observe().await;
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], control.metrics().render()).into_response()
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "server", security(()), responses(
    (status = 200, description = "OpenAPI 3.1. Needs no token.", body = Value),
))]
pub(crate) async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], openapi::openapi_json()).into_response()
}

/// Whom the token belongs to.
#[utoipa::path(get, path = "/v1/me", tag = "server", responses(
    (status = 200, description = "The token's workspace.", body = Me), Reads,
))]
pub(crate) async fn me(caller: Caller) -> Json<Me> {
    let workspace = caller.workspace().to_owned();
    Json(Me {
        user_id: caller.token_prefix().unwrap_or("anonymous").to_owned(),
        email: String::new(),
        current_org: workspace.clone(),
        orgs: vec![workspace],
        auth_method: if caller.token_prefix().is_some() { "token" } else { "none" }.to_owned(),
    })
}
