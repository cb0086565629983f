//! Forking, and choosing among the children.

use axum::Json;
use axum::extract::State;
use coppice_api::{Fork, ForkMode, ForkRequest, ForkTreeRequest, OnTtl, PromoteReply, PromoteRequest};
use coppice_host::ForkSpec;
use http::StatusCode;

use super::Answer;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::input::{Input, SandboxId};
use crate::openapi::{Changes, Creates, OfSandbox};
use crate::quota::{self, Moved, Wish};
use crate::{Control, check};

/// Forks a sandbox's disk, or moves the sandbox to a child.
///
/// Mode `disk`: children boot from a copy of the parent's disk, what it had not yet written out included. Memory and processes
/// stay behind.
///
/// Mode `warm`: exactly one child goes on with the parent's memory, processes, disk, address and connections. The parent is
/// stopped once the child's guest has acknowledged; its record stays, with the child's id as `metadata.successor`. If the fork
/// fails the parent runs on. A client that hangs up does not undo it.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork", tag = "fork", params(OfSandbox),
    request_body(content = Option<ForkRequest>, description = "Empty: one child.",
        example = json!({"count": 2, "metadata": {"try": "b"}})),
    responses((status = 201, description = "At least one child runs.", body = Fork), Creates))]
pub(crate) async fn fork(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    Input(request): Input<ForkRequest>,
) -> Answer<(StatusCode, Json<Fork>)> {
    let spec = spec(request.count, request.metadata, request.on_ttl)?;
    if request.mode == ForkMode::Warm {
        return warm(&control, &caller, id, spec).await;
    }
    let wish = Wish::Fork(&id, spec.count.unsigned_abs());
    let work = |control: Control, workspace: String| {
        let id = id.clone();
        async move { Ok(control.host().fork_disk(&workspace, &id, spec).await?) }
    };
    answer(quota::make(&control, &caller, wish, work).await?)
}

async fn warm(control: &Control, caller: &Caller, id: String, spec: ForkSpec) -> Answer<(StatusCode, Json<Fork>)> {
    if spec.count != 1 {
        let message =
            format!("count is {}; a warm fork makes exactly one child, which takes its parent's place", spec.count);
        return Err(ApiError::invalid("invalid_count", message)
            .hint("POST fork-tree makes up to 16 children, and leaves the parent running"));
    }
    let sandbox = id.clone();
    let work = |control: Control, workspace: String| async move {
        Ok(Moved(control.host().fork_warm(&workspace, &sandbox, spec).await?))
    };
    answer(quota::make(control, caller, Wish::Successor(&id), work).await?.0)
}

/// Forks a running sandbox: memory, processes and disk.
///
/// Children continue from one instant of the parent, which runs on. They are in `metadata.fork_index` order.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork-tree", tag = "fork", params(OfSandbox),
    request_body(content = Option<ForkTreeRequest>, description = "Empty: one child.",
        example = json!({"count": 3, "metadata": {"explore": "1", "explore_ttl": "600"}})),
    responses((status = 201, description = "At least one child runs; `errors` names those that don't.", body = Fork),
        Creates))]
pub(crate) async fn fork_tree(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    Input(request): Input<ForkTreeRequest>,
) -> Answer<(StatusCode, Json<Fork>)> {
    let spec = spec(request.count, request.metadata, request.on_ttl)?;
    let wish = Wish::Fork(&id, spec.count.unsigned_abs());
    let work = |control: Control, workspace: String| {
        let id = id.clone();
        async move { Ok(control.host().fork_tree(&workspace, &id, spec).await?) }
    };
    answer(quota::make(&control, &caller, wish, work).await?)
}

fn spec(
    count: Option<i64>,
    metadata: Option<std::collections::BTreeMap<String, String>>,
    on_ttl: Option<OnTtl>,
) -> Answer<ForkSpec> {
    let metadata = metadata.unwrap_or_default();
    check::metadata(&metadata)?;
    Ok(ForkSpec { count: check::count(count)?, metadata, on_ttl })
}

/// Clients make a garbage sandbox of a success without a child, so there is none.
fn answer(fork: Fork) -> Answer<(StatusCode, Json<Fork>)> {
    if fork.children.is_empty() {
        let why = fork.errors.first().map_or("the host gave no reason", |error| error.err.as_str());
        let message = format!("no child of the fork started: {why}");
        return Err(ApiError::new(coppice_api::ErrorClass::Internal, "fork_without_children", message));
    }
    Ok((StatusCode::CREATED, Json(fork)))
}

/// Makes a child independent of the fork it came from, and deletes its siblings when asked.
///
/// Idempotent: a second call answers the same with nothing deleted. Siblings that can't be deleted are in `failures`.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/promote", tag = "fork", params(OfSandbox),
    request_body(content = Option<PromoteRequest>, description = "Empty: siblings stay.",
        example = json!({"cleanup_siblings": true})),
    responses((status = 200, description = "It goes on by itself.", body = PromoteReply), Changes))]
pub(crate) async fn promote(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    Input(mut request): Input<PromoteRequest>,
) -> Answer<Json<PromoteReply>> {
    request.tree_id = request.tree_id.filter(|tree| !tree.is_empty());
    Ok(Json(control.host().promote(caller.workspace(), &id, request).await?))
}
