//! What a sandbox may reach.

use axum::Json;
use axum::extract::State;
use coppice_api::{Network, NetworkRequest};

use super::Answer;
use crate::Control;
use crate::auth::Caller;
use crate::input::{Input, SandboxId};
use crate::openapi::{Changes, OfSandbox, Reads};

/// What a sandbox may reach. Never wakes it.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/network", tag = "sandboxes", params(OfSandbox),
    responses((status = 200, description = "The policy.", body = Network), Reads))]
pub(crate) async fn get(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
) -> Answer<Json<Network>> {
    Ok(Json(control.host().network(caller.workspace(), &id).await?))
}

/// Changes what a sandbox may reach.
///
/// The new policy holds when this answers; connections that it does not allow are cut off.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}/network", tag = "sandboxes", params(OfSandbox),
    request_body(content = NetworkRequest, description = "What is absent stays.",
        example = json!({"egress": {"allow": ["203.0.113.0/24", "example.org:443", "*.example.org"]}})),
    responses((status = 200, description = "The policy as it is now.", body = Network), Changes))]
pub(crate) async fn set(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    Input(request): Input<NetworkRequest>,
) -> Answer<Json<Network>> {
    Ok(Json(control.host().set_network(caller.workspace(), &id, request).await?))
}
