//! HTTP to a port of a sandbox, for holders of a token.

use axum::extract::{Request, State};
use axum::response::Response;

use super::Answer;
use crate::Control;
use crate::auth::Caller;
use crate::ingress::Target;
use crate::ingress::forward::{Passing, forward};
use crate::ingress::head::{Authorization, Place};
use crate::input::{HttpPort, split_path};
use crate::openapi::{OfPort, OfSandbox, Reaches};

/// Passes a request on to what listens on a port of the sandbox.
///
/// Every method, and every path below this one: `/v1/sandboxes/{id}/proxy/{port}/a/b?c` asks the service for `/a/b?c`.
/// Bodies are streamed both ways, and WebSockets and other upgrades go through. `Authorization` is this server's and is
/// not passed on; `X-Pandastack-Broker-Auth` is, as `Authorization`. The service is told `X-Forwarded-Host`, `-Proto`,
/// `-For`, `-Prefix` and `X-Fcs-Sandbox`, and asked for `Host: localhost:PORT`. It counts as use of the sandbox.
///
/// Pages get an origin of their own (`Content-Security-Policy: sandbox`), cookies a path below this one; a preview host
/// does neither.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/proxy/{port}", tag = "ports", params(OfSandbox, OfPort),
    responses((status = 200, description = "Whatever the service answers, with any status.", body = Vec<u8>,
        content_type = "application/octet-stream"), Reaches))]
pub(crate) async fn proxy(
    State(control): State<Control>,
    caller: Caller,
    HttpPort { id, port }: HttpPort,
    request: Request,
) -> Answer<Response> {
    let (prefix, rest) = split_path(request.uri(), 5);
    let target = Target { workspace: caller.workspace().to_owned(), sandbox: id, port };
    let passing = Passing {
        place: Place::Below(prefix),
        authorization: Authorization::Ours,
        websockets_only: false,
        target: rest,
    };
    forward(&control, &target, passing, request).await
}
