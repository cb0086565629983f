//! The audit log, for admins.

use axum::Json;
use axum::extract::State;
use coppice_api::AuditEntry;

use super::Answer;
use crate::Control;
use crate::audit::AuditQuery;
use crate::error::ApiError;
use crate::input::Params;
use crate::openapi::Reads;

/// Entries of one answer when nothing is said, and at most.
const DEFAULT_LIMIT: u32 = 100;
const MAX_LIMIT: u32 = 1000;

/// Who changed what, newest first. Admins only.
///
/// Every request with a valid token that is not a GET, also one that was refused. The next page begins `before` the
/// last `id` of this one. The server keeps the newest 20,000 entries of each workspace, for 90 days.
#[utoipa::path(get, path = "/v1/audit", tag = "tenants", params(
        ("workspace" = Option<String>, Query, description = "Only of tokens of this workspace"),
        ("before" = Option<i64>, Query, description = "Only entries with a smaller `id`"),
        ("limit" = Option<u32>, Query, description = "At most so many, 1 to 1000; default 100")),
    responses((status = 200, description = "`[]` for none.", body = Vec<AuditEntry>), Reads))]
pub(crate) async fn list(State(control): State<Control>, params: Params) -> Answer<Json<Vec<AuditEntry>>> {
    let store = control.store().ok_or_else(ApiError::no_tokens)?;
    let limit = number(&params, "limit")?.unwrap_or(i64::from(DEFAULT_LIMIT));
    let limit = u32::try_from(limit).ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
    let query = AuditQuery {
        workspace: params.get("workspace").filter(|name| !name.is_empty()),
        before: number(&params, "before")?,
        limit: limit.ok_or_else(|| ApiError::invalid("invalid_limit", format!("limit must be 1 to {MAX_LIMIT}")))?,
    };
    Ok(Json(store.audit(query).await?))
}

fn number(params: &Params, name: &str) -> Answer<Option<i64>> {
    let given = params.get(name).filter(|text| !text.is_empty());
    let parsed = given.map(|text| text.parse().map_err(|_| name));
    parsed.transpose().map_err(|name| ApiError::invalid("invalid_query", format!("`{name}` must be a whole number")))
}
