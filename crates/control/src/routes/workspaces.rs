//! Workspaces: who the tenants are and what they may have. For admins, but for a look at one's own.

use axum::Json;
use axum::extract::Path;
use axum::extract::State;
use coppice_api::{CreateTokenRequest, CreatedToken, ErrorClass, Quota, Token, Workspace, is_workspace_name};
use http::StatusCode;

use super::{Answer, tokens};
use crate::auth::Caller;
use crate::error::ApiError;
use crate::input::{Ignored, Input, Segment};
use crate::openapi::{Changes, Reads};
use crate::tokens::TokenStore;
use crate::workspaces::WorkspaceRow;
use crate::{Control, DEFAULT_WORKSPACE, quota};

fn store(control: &Control) -> Answer<&TokenStore> {
    control.store().ok_or_else(ApiError::no_tokens)
}

async fn shown(control: &Control, row: WorkspaceRow) -> Answer<Workspace> {
    let holdings = control.host().holdings(&row.name).await?;
    let WorkspaceRow { name, created_at, quota, tokens } = row;
    Ok(Workspace { name, created_at, quota, usage: quota::usage(&holdings), tokens })
}

async fn one(control: &Control, name: &str) -> Answer<Workspace> {
    let row = store(control)?.workspace(name).await?;
    shown(control, row.ok_or_else(|| ApiError::not_found("workspace", name))?).await
}

/// Lists all workspaces, by name. Admins only.
#[utoipa::path(get, path = "/v1/workspaces", tag = "tenants",
    responses((status = 200, description = "All of them.", body = Vec<Workspace>), Reads))]
pub(crate) async fn list(State(control): State<Control>) -> Answer<Json<Vec<Workspace>>> {
    let mut all = Vec::new();
    for row in store(&control)?.workspaces().await? {
        all.push(shown(&control, row).await?);
    }
    Ok(Json(all))
}

/// One workspace: what it may have, and what it has. A member sees its own only.
#[utoipa::path(get, path = "/v1/workspaces/{name}", tag = "tenants",
    params(("name" = String, Path, description = "Name of a workspace", example = "default")),
    responses((status = 200, description = "The workspace.", body = Workspace), Reads))]
pub(crate) async fn get(State(control): State<Control>, Segment(name): Segment) -> Answer<Json<Workspace>> {
    Ok(Json(one(&control, &name).await?))
}

/// Sets a workspace's quota. Admins only.
///
/// What is absent has no limit but the host's. What the workspace has beyond a limit stays; nothing comes on top. Over
/// a limit a request is 429 without `Retry-After`, code `quota_exceeded`, and nothing is made.
#[utoipa::path(put, path = "/v1/workspaces/{name}", tag = "tenants",
    params(("name" = String, Path, description = "Name of a workspace", example = "default")),
    request_body(content = Quota, example = json!({"sandboxes": 20, "memory_mb": 16384, "fan_out": 8})),
    responses((status = 200, description = "As it is now.", body = Workspace), Changes))]
pub(crate) async fn set_quota(
    State(control): State<Control>,
    Segment(name): Segment,
    Input(quota): Input<Quota>,
) -> Answer<Json<Workspace>> {
    if !store(&control)?.set_quota(&name, &quota).await? {
        return Err(ApiError::not_found("workspace", &name));
    }
    Ok(Json(one(&control, &name).await?))
}

/// Removes a workspace that has no sandboxes and no snapshots, and its tokens. Admins only.
#[utoipa::path(delete, path = "/v1/workspaces/{name}", tag = "tenants",
    params(("name" = String, Path, description = "Name of a workspace")),
    responses((status = 204, description = "Gone."), Changes))]
pub(crate) async fn delete(
    State(control): State<Control>,
    caller: Caller,
    Segment(name): Segment,
    _: Ignored,
) -> Answer<StatusCode> {
    let store = store(&control)?;
    if name == DEFAULT_WORKSPACE || name == caller.workspace() {
        let message = format!("workspace {name} can't be deleted: it is the server's own, or that of your token");
        return Err(ApiError::new(ErrorClass::Conflict, "workspace_in_use", message));
    }
    let delete = async { Ok(store.delete_workspace(&name).await?) };
    match control.quotas().while_empty(control.host(), &name, delete).await? {
        true => Ok(StatusCode::NO_CONTENT),
        false => Err(ApiError::not_found("workspace", &name)),
    }
}

/// Lists the tokens of a workspace, oldest first. Admins only.
#[utoipa::path(get, path = "/v1/workspaces/{name}/tokens", tag = "tenants",
    params(("name" = String, Path, description = "Name of a workspace")),
    responses((status = 200, description = "All of them.", body = Vec<Token>), Reads))]
pub(crate) async fn tokens(State(control): State<Control>, Segment(name): Segment) -> Answer<Json<Vec<Token>>> {
    Ok(Json(store(&control)?.list(&name).await?))
}

/// Makes a token for a workspace, and the workspace with its first token. Admins only.
#[utoipa::path(post, path = "/v1/workspaces/{name}/tokens", tag = "tenants",
    params(("name" = String, Path, description = "[a-z0-9][a-z0-9-]{0,62}", example = "team-a")),
    request_body(content = CreateTokenRequest, example = json!({"label": "ci", "role": "member"})),
    responses((status = 201, description = "It is valid at once.", body = CreatedToken), Changes))]
pub(crate) async fn create_token(
    State(control): State<Control>,
    caller: Caller,
    Segment(name): Segment,
    Input(request): Input<CreateTokenRequest>,
) -> Answer<tokens::Made> {
    if !is_workspace_name(&name) {
        let shown: String = name.chars().take(80).collect();
        let message = format!("{shown:?} can't be the name of a workspace");
        return Err(
            ApiError::invalid("invalid_workspace_name", message).hint("1 to 63 of a-z, 0-9 and -, the first no -")
        );
    }
    tokens::make(&control, &caller, &name, &request).await
}

/// Ends a token of a workspace at once. Admins only.
#[utoipa::path(delete, path = "/v1/workspaces/{name}/tokens/{prefix}", tag = "tenants",
    params(("name" = String, Path, description = "Name of a workspace"),
        ("prefix" = String, Path, description = "First 12 characters of the token")),
    responses((status = 204, description = "Nobody can use it any more."), Changes))]
pub(crate) async fn revoke_token(
    State(control): State<Control>,
    path: Result<Path<(String, String)>, axum::extract::rejection::PathRejection>,
    uri: http::Uri,
    _: Ignored,
) -> Answer<StatusCode> {
    let Ok(Path((name, prefix))) = path else { return Err(ApiError::route_not_found(uri.path())) };
    tokens::end(&control, &name, &prefix).await
}
