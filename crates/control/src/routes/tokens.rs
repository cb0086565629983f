//! Tokens of the caller's workspace.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::AppendHeaders;
use coppice_api::{CreateTokenRequest, CreatedToken, ErrorClass, Role, Token};
use http::header::CACHE_CONTROL;
use http::{HeaderName, StatusCode};

use super::Answer;
use crate::Control;
use crate::auth::Caller;
use crate::authorize::Named;
use crate::error::ApiError;
use crate::input::{Ignored, Input, Segment};
use crate::openapi::{Changes, Reads};
use crate::tokens::NewToken;

/// Longest label, characters.
const MAX_LABEL: usize = 100;
/// Longest life of a token that expires, seconds: a hundred years.
const MAX_LIFETIME: i64 = 36_525 * DAY;
const DAY: i64 = 24 * 3600;

/// A new token, which nothing between us and the client may keep.
pub(crate) type Made =
    (StatusCode, AppendHeaders<[(HeaderName, &'static str); 1]>, axum::Extension<Named>, Json<CreatedToken>);

/// Lists the workspace's tokens, oldest first, by their prefixes.
#[utoipa::path(get, path = "/v1/me/tokens", tag = "tenants",
    responses((status = 200, description = "All of them.", body = Vec<Token>), Reads))]
pub(crate) async fn list(State(control): State<Control>, caller: Caller) -> Answer<Json<Vec<Token>>> {
    let store = control.store().ok_or_else(ApiError::no_tokens)?;
    Ok(Json(store.list(caller.workspace()).await?))
}

/// Makes a token for the workspace.
///
/// The answer is the only time that it can be seen.
#[utoipa::path(post, path = "/v1/me/tokens", tag = "tenants",
    request_body(content = CreateTokenRequest, example = json!({"label": "ci", "expires_in_days": 30})),
    responses((status = 201, description = "It is valid at once.", body = CreatedToken), Changes))]
pub(crate) async fn create(
    State(control): State<Control>,
    caller: Caller,
    Input(request): Input<CreateTokenRequest>,
) -> Answer<Made> {
    make(&control, &caller, caller.workspace(), &request).await
}

/// Ends a token at once.
///
/// What it is doing at that moment goes on to its end.
#[utoipa::path(delete, path = "/v1/me/tokens/{prefix}", tag = "tenants",
    params(("prefix" = String, Path, description = "First 12 characters of the token", example = "pds_0f8fad5b")),
    responses((status = 204, description = "Nobody can use it any more."), Changes))]
pub(crate) async fn revoke(
    State(control): State<Control>,
    caller: Caller,
    Segment(prefix): Segment,
    _: Ignored,
) -> Answer<StatusCode> {
    end(&control, caller.workspace(), &prefix).await
}

/// Makes a token of a workspace.
pub(crate) async fn make(
    control: &Control,
    caller: &Caller,
    workspace: &str,
    request: &CreateTokenRequest,
) -> Answer<Made> {
    let store = control.store().ok_or_else(ApiError::no_tokens)?;
    if request.role == Role::Admin && caller.role() != Role::Admin {
        return Err(ApiError::new(ErrorClass::Forbidden, "admin_only", "only an admin makes tokens of admins"));
    }
    let new = NewToken { label: label(request)?, role: request.role, lifetime: lifetime(request)? };
    let made = store.create_token(workspace, &new).await?;
    let named = axum::Extension(Named(made.info.prefix.clone()));
    Ok((StatusCode::CREATED, AppendHeaders([(CACHE_CONTROL, "no-store")]), named, Json(made)))
}

/// Ends a token of a workspace.
pub(crate) async fn end(control: &Control, workspace: &str, prefix: &str) -> Answer<StatusCode> {
    let store = control.store().ok_or_else(ApiError::no_tokens)?;
    match store.revoke(workspace, prefix).await? {
        true => Ok(StatusCode::NO_CONTENT),
        false => Err(ApiError::not_found("token", prefix)),
    }
}

fn label(request: &CreateTokenRequest) -> Answer<String> {
    let label = request.label.as_deref().or(request.name.as_deref()).unwrap_or_default().trim();
    if label.chars().count() > MAX_LABEL || label.contains(char::is_control) {
        let message = format!("label must be at most {MAX_LABEL} characters on one line");
        return Err(ApiError::invalid("invalid_label", message));
    }
    Ok(label.to_owned())
}

fn lifetime(request: &CreateTokenRequest) -> Answer<Option<Duration>> {
    let (field, seconds) = match (request.expires_in_days, request.expires_in_seconds) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => {
            let message = "only one of expires_in_days and expires_in_seconds may be given";
            return Err(ApiError::invalid("invalid_expiry", message));
        }
        (Some(days), None) => ("expires_in_days", days.saturating_mul(DAY)),
        (None, Some(seconds)) => ("expires_in_seconds", seconds),
    };
    match u64::try_from(seconds) {
        Ok(whole) if whole > 0 && seconds <= MAX_LIFETIME => Ok(Some(Duration::from_secs(whole))),
        _ => {
            let message = format!("{field} must be more than 0, and at most a hundred years");
            Err(ApiError::invalid("invalid_expiry", message).hint("leave it out for a token that does not expire"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetimes_and_labels() {
        let days = |days| lifetime(&CreateTokenRequest { expires_in_days: Some(days), ..Default::default() });
        assert_eq!(days(30).unwrap(), Some(Duration::from_secs(30 * 24 * 3600)));
        for bad in [0, -1, i64::MAX, 40_000] {
            assert_eq!(days(bad).unwrap_err().code(), "invalid_expiry");
        }
        let both = CreateTokenRequest { expires_in_days: Some(1), expires_in_seconds: Some(1), ..Default::default() };
        assert!(lifetime(&both).is_err());
        let named = |name: &str| label(&CreateTokenRequest { name: Some(name.into()), ..Default::default() });
        assert_eq!(named(" ci ").unwrap(), "ci");
        assert!(named("a\nb").is_err() && named(&"x".repeat(101)).is_err());
    }
}
