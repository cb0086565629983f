//! Snapshots.

use axum::extract::State;
use axum::{Extension, Json};
use coppice_api::{CreatedSnapshot, Snapshot};
use http::StatusCode;

use super::Answer;
use crate::Control;
use crate::auth::Caller;
use crate::authorize::Named;
use crate::input::{Ignored, Params, SandboxId, SnapshotId, uuid};
use crate::openapi::{Changes, Creates, OfSandbox, OfSnapshot, Reads};
use crate::quota::{self, Wish};

/// Captures a sandbox's memory, device state and disk at one instant. It runs on.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/snapshots", tag = "snapshots", params(OfSandbox),
    responses((status = 201, description = "Captured.", body = CreatedSnapshot), Creates))]
pub(crate) async fn create(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    _: Ignored,
) -> Answer<(StatusCode, Extension<Named>, Json<CreatedSnapshot>)> {
    let work = |control: Control, workspace: String| {
        let id = id.clone();
        async move { Ok(control.host().snapshot(&workspace, &id).await?) }
    };
    let snapshot = quota::make(&control, &caller, Wish::Snapshot(&id), work).await?;
    Ok((
        StatusCode::CREATED,
        Extension(Named(snapshot.id.clone())),
        Json(CreatedSnapshot { snapshot_id: snapshot.id.clone(), snapshot }),
    ))
}

/// Lists the workspace's snapshots, newest first.
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots",
    params(("sandbox_id" = Option<String>, Query, description = "Only of this sandbox")),
    responses((status = 200, description = "All of them, `[]` for none.", body = Vec<Snapshot>), Reads))]
pub(crate) async fn list(
    State(control): State<Control>,
    caller: Caller,
    params: Params,
) -> Answer<Json<Vec<Snapshot>>> {
    let sandbox = match params.get("sandbox_id").filter(|id| !id.is_empty()).map(uuid) {
        None => None,
        Some(Some(id)) => Some(id),
        // No sandbox has such an id, so none has a snapshot.
        Some(None) => return Ok(Json(Vec::new())),
    };
    Ok(Json(control.host().list_snapshots(caller.workspace(), sandbox.as_deref()).await?))
}

/// One snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{id}", tag = "snapshots", params(OfSnapshot),
    responses((status = 200, description = "The snapshot.", body = Snapshot), Reads))]
pub(crate) async fn get(
    State(control): State<Control>,
    caller: Caller,
    SnapshotId(id): SnapshotId,
) -> Answer<Json<Snapshot>> {
    Ok(Json(control.host().get_snapshot(caller.workspace(), &id).await?))
}

/// Removes a snapshot. Sandboxes made from it go on.
#[utoipa::path(delete, path = "/v1/snapshots/{id}", tag = "snapshots", params(OfSnapshot),
    responses((status = 204, description = "Gone."), Changes))]
pub(crate) async fn delete(
    State(control): State<Control>,
    caller: Caller,
    SnapshotId(id): SnapshotId,
    _: Ignored,
) -> Answer<StatusCode> {
    control.host().delete_snapshot(caller.workspace(), &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
