//! What a sandbox has changed since its fork point.

use axum::Json;
use axum::extract::State;
use coppice_api::{Changes, DEFAULT_CHANGES_LISTED, MAX_CHANGES_LISTED};
use coppice_host::ChangesSpec;

use super::Answer;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::input::{Params, SandboxId};
use crate::openapi::{Compares, OfSandbox};
use crate::{Control, check};

/// What a sandbox has changed on its disk since its fork point.
///
/// Files added, modified and deleted, with their sizes, against the disk that the sandbox began with: its parent's at the
/// fork, the snapshot's, or the template's. It is read from the disk, in every state of the sandbox: nothing is woken, run or
/// flushed. So what a running guest has not written to its disk yet is missing (`flushed: false`); `POST` to the same path
/// has it written first. Other file systems than the root disk (`/run`, `/dev/shm`) are not looked at.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/changes", tag = "fork", params(OfSandbox,
        ("limit" = Option<usize>, Query, description = "Most entries in each list, 1 to 10000; 1000 by default. Counts have all"),
        ("path" = Option<String>, Query, description = "Absolute path: only this and what is in it", example = "/root")),
    responses((status = 200, description = "What differs.", body = Changes), Compares))]
pub(crate) async fn get(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    params: Params,
) -> Answer<Json<Changes>> {
    let spec = spec(&params, false)?;
    Ok(Json(control.host().changes(caller.workspace(), &id, spec).await?))
}

/// The same, after the guest has written everything to its disk.
///
/// The guest flushes and holds its file system still while the disk is cloned, as for a plain fork. A sandbox whose guest
/// does not run is answered as `GET` does, and not woken; a guest that doesn't answer in time is looked at as it is. Both say
/// `flushed: false`.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/changes", tag = "fork", params(OfSandbox,
        ("limit" = Option<usize>, Query, description = "Most entries in each list, 1 to 10000; 1000 by default. Counts have all"),
        ("path" = Option<String>, Query, description = "Absolute path: only this and what is in it", example = "/root")),
    responses((status = 200, description = "What differs.", body = Changes), Compares))]
pub(crate) async fn flush(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    params: Params,
) -> Answer<Json<Changes>> {
    let spec = spec(&params, true)?;
    Ok(Json(control.host().changes(caller.workspace(), &id, spec).await?))
}

fn spec(params: &Params, flush: bool) -> Answer<ChangesSpec> {
    let limit = match params.get("limit").filter(|text| !text.is_empty()) {
        None => DEFAULT_CHANGES_LISTED,
        Some(text) => text.parse().ok().filter(|limit| (1..=MAX_CHANGES_LISTED).contains(limit)).ok_or_else(|| {
            ApiError::invalid("invalid_limit", format!("limit must be a number from 1 to {MAX_CHANGES_LISTED}"))
        })?,
    };
    let path = params.get("path").filter(|path| !path.is_empty());
    let path = path.map(|path| check::path(Some(path))).transpose()?.unwrap_or("/");
    // Names as they are on the disk: nothing is followed, so there is no way up.
    let below: Vec<String> = path.split('/').filter(|name| !matches!(*name, "" | ".")).map(str::to_owned).collect();
    if below.iter().any(|name| name == "..") {
        return Err(ApiError::invalid("invalid_path", "path must not have `..` in it"));
    }
    Ok(ChangesSpec { limit, below, flush })
}
