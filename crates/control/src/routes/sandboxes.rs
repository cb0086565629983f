//! Sandboxes: making, looking, ending, pausing, hibernating, TTL.

use axum::extract::State;
use axum::{Extension, Json};
use coppice_api::{CreateSandboxRequest, Lifecycle, LifecyclePatch, Sandbox, SandboxStatus, StatusReply};
use http::StatusCode;

use super::Answer;
use crate::auth::Caller;
use crate::authorize::Named;
use crate::ingress::reach::forget;
use crate::input::{Ignored, Input, SandboxId};
use crate::openapi::{Changes, Creates, OfSandbox, Reads};
use crate::quota::{self, Wish};
use crate::{Control, check};

/// Creates a sandbox from a template or a snapshot.
///
/// Answers when its guest is usable: the next exec works at once. With `from_snapshot`, `template` is ignored.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes",
    request_body(content = Option<CreateSandboxRequest>, description = "Empty: the default template.",
        example = json!({"template": "code-interpreter", "metadata": {"task": "42"}, "ttl_seconds": 600})),
    responses((status = 201, description = "It runs.", body = Sandbox), Creates))]
pub(crate) async fn create(
    State(control): State<Control>,
    caller: Caller,
    Input(request): Input<CreateSandboxRequest>,
) -> Answer<(StatusCode, Extension<Named>, Json<Sandbox>)> {
    let request = check::create(request)?;
    let work = |control: Control, workspace: String| {
        let request = request.clone();
        async move { Ok(control.host().create(&workspace, request).await?) }
    };
    let sandbox = quota::make(&control, &caller, Wish::Create(&request), work).await?;
    Ok((StatusCode::CREATED, Extension(Named(sandbox.id.clone())), Json(sandbox)))
}

/// Lists the workspace's sandboxes, oldest first.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes",
    responses((status = 200, description = "All of them, `[]` for none.", body = Vec<Sandbox>), Reads))]
pub(crate) async fn list(State(control): State<Control>, caller: Caller) -> Answer<Json<Vec<Sandbox>>> {
    Ok(Json(control.host().list(caller.workspace()).await?))
}

/// One sandbox. Never wakes it.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(OfSandbox),
    responses((status = 200, description = "The sandbox.", body = Sandbox), Reads))]
pub(crate) async fn get(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
) -> Answer<Json<Sandbox>> {
    Ok(Json(control.host().get(caller.workspace(), &id).await?))
}

/// Ends and removes a sandbox. A second call is 404.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(OfSandbox),
    responses((status = 204, description = "Gone."), Changes))]
pub(crate) async fn delete(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    _: Ignored,
) -> Answer<StatusCode> {
    control.host().delete(caller.workspace(), &id).await?;
    forget(&control, &id).await;
    Ok(StatusCode::NO_CONTENT)
}

/// Stops a sandbox's virtual CPUs. Idempotent.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pause", tag = "sandboxes", params(OfSandbox),
    responses((status = 204, description = "Paused."), Changes))]
pub(crate) async fn pause(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    _: Ignored,
) -> Answer<StatusCode> {
    control.host().pause(caller.workspace(), &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lets a paused sandbox run on, with its clock put right. Idempotent.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/resume", tag = "sandboxes", params(OfSandbox),
    responses((status = 204, description = "Running."), Changes))]
pub(crate) async fn resume(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    _: Ignored,
) -> Answer<StatusCode> {
    control.host().resume(caller.workspace(), &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Keeps a sandbox on the disk, with memory and processes as they are, and ends its machine. Idempotent.
///
/// It has no address meanwhile, and is not deleted for being idle. Whatever uses it wakes it first: commands, files, ports,
/// connections, snapshots and forks of it. Reading its record, lifecycle, policy or log does not.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/hibernate", tag = "sandboxes", params(OfSandbox),
    responses((status = 200, description = "It hibernates.", body = StatusReply,
        example = json!({"status": "hibernated"})), Changes))]
pub(crate) async fn hibernate(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    _: Ignored,
) -> Answer<Json<StatusReply>> {
    control.host().hibernate(caller.workspace(), &id).await?;
    Ok(Json(StatusReply { status: SandboxStatus::Hibernated }))
}

/// Brings a hibernated sandbox back. Idempotent.
///
/// Answers when its guest is usable: the same machine with the same names, its clock put right, on another address. Its
/// connections of before have ended. What fails leaves it hibernated.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/wake", tag = "sandboxes", params(OfSandbox),
    responses((status = 200, description = "It runs.", body = StatusReply,
        example = json!({"status": "running"})), Changes))]
pub(crate) async fn wake(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    _: Ignored,
) -> Answer<Json<StatusReply>> {
    control.host().wake(caller.workspace(), &id).await?;
    Ok(Json(StatusReply { status: SandboxStatus::Running }))
}

/// A sandbox's TTL, and for how long it has not been used.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/lifecycle", tag = "sandboxes", params(OfSandbox),
    responses((status = 200, description = "The lifecycle.", body = Lifecycle), Reads))]
pub(crate) async fn lifecycle(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
) -> Answer<Json<Lifecycle>> {
    Ok(Json(control.host().lifecycle(caller.workspace(), &id).await?))
}

/// Changes a sandbox's TTL, or whether it has one.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}/lifecycle", tag = "sandboxes", params(OfSandbox),
    request_body(content = LifecyclePatch, description = "What is absent stays.",
        example = json!({"ttl_seconds": 600})),
    responses((status = 200, description = "The lifecycle as it is now.", body = Lifecycle), Changes))]
pub(crate) async fn set_lifecycle(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    Input(patch): Input<LifecyclePatch>,
) -> Answer<Json<Lifecycle>> {
    Ok(Json(control.host().set_lifecycle(caller.workspace(), &id, check::lifecycle(patch)?).await?))
}
