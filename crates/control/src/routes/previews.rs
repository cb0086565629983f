//! Signed links to ports of sandboxes: making, listing, revoking, following.

use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use coppice_api::{MAX_PREVIEW_TTL_SECONDS, Preview, PreviewLink, PreviewRequest};
use http::{HeaderMap, StatusCode, Uri};
use uuid::Uuid;

use super::Answer;
use crate::Control;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::ingress::forward::{Passing, forward};
use crate::ingress::head::{Authorization, Place};
use crate::ingress::link::{Claim, LinkError, resolve};
use crate::ingress::store::{Link, now, time};
use crate::ingress::{self, Target, hosts, paths};
use crate::input::{Ignored, Input, LinkToken, SandboxId, SandboxLink, split_path};
use crate::openapi::{Changes, Follows, OfSandbox, Reads};

/// Life of a link that says nothing else.
const DEFAULT_TTL: Duration = Duration::from_secs(3600);

/// Makes a link that leads to a port without another token.
///
/// It is signed, ends by itself, can be revoked, and ends with the sandbox. With `paths` it leads to these paths and
/// what is below them only, however a path is spelled.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/preview", tag = "ports", params(OfSandbox),
    request_body(content = PreviewRequest, example = json!({"port": 3000, "ttl_seconds": 600, "paths": ["/docs"]})),
    responses((status = 200, description = "The link. Its token can't be seen again.", body = Preview), Changes))]
pub(crate) async fn create(
    State(control): State<Control>,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
    SandboxId(id): SandboxId,
    Input(request): Input<PreviewRequest>,
) -> Answer<Json<Preview>> {
    make(&control, &caller, (&uri, &headers), id, request).await
}

/// The same as `POST …/preview`.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/preview-token", tag = "ports", params(OfSandbox),
    request_body(content = PreviewRequest, example = json!({"port": 3000})),
    responses((status = 200, description = "The link. Its token can't be seen again.", body = Preview), Changes))]
pub(crate) async fn create_token(
    State(control): State<Control>,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
    SandboxId(id): SandboxId,
    Input(request): Input<PreviewRequest>,
) -> Answer<Json<Preview>> {
    make(&control, &caller, (&uri, &headers), id, request).await
}

async fn make(
    control: &Control,
    caller: &Caller,
    (uri, headers): (&Uri, &HeaderMap),
    sandbox: String,
    request: PreviewRequest,
) -> Answer<Json<Preview>> {
    let port = ingress::port(request.port)?;
    let ttl = request.ttl_seconds.unwrap_or(DEFAULT_TTL.as_secs().cast_signed());
    if !(1..=MAX_PREVIEW_TTL_SECONDS).contains(&ttl) {
        let message = format!("ttl_seconds must be 1 to {MAX_PREVIEW_TTL_SECONDS}, and is {ttl}");
        return Err(ApiError::invalid("invalid_ttl", message));
    }
    let paths = paths::prefixes(request.paths.unwrap_or_default())?;
    control.host().get(caller.workspace(), &sandbox).await?;
    let store = &control.config().ingress.store;
    let claim = Claim { id: Uuid::new_v4(), expires_at: now() + ttl };
    let token = store.key().await?.sign(claim);
    let target = Target { workspace: caller.workspace().to_owned(), sandbox, port };
    let link = Link { target, paths };
    store.add_link(claim.id, &link, claim.expires_at).await?;
    let Link { target: Target { sandbox, .. }, paths } = link;
    // A link with paths leads to the first of them.
    let start = paths.first().map_or("/", String::as_str);
    Ok(Json(Preview {
        id: claim.id.to_string(),
        url: format!("{}/v1/p/{token}{start}", ingress::base(control, uri, headers)),
        host_url: hosts::url(control, &sandbox, port).map(|host| format!("{host}{start}?{}={token}", hosts::TOKEN)),
        token,
        sandbox_id: sandbox,
        port,
        paths,
        expires_at: time(claim.expires_at),
    }))
}

/// Lists the valid links to a sandbox, oldest first, without their tokens.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/previews", tag = "ports", params(OfSandbox),
    responses((status = 200, description = "All of them, `[]` for none.", body = Vec<PreviewLink>), Reads))]
pub(crate) async fn list(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
) -> Answer<Json<Vec<PreviewLink>>> {
    control.host().get(caller.workspace(), &id).await?;
    Ok(Json(control.config().ingress.store.links(&id).await?))
}

/// Revokes a link. New requests by it are refused at once; connections that it opened go on.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/previews/{link}", tag = "ports",
    params(OfSandbox, ("link" = String, Path, description = "UUID of a link")),
    responses((status = 204, description = "Revoked."), Changes))]
pub(crate) async fn revoke(
    State(control): State<Control>,
    caller: Caller,
    SandboxLink { id, link }: SandboxLink,
    _: Ignored,
) -> Answer<StatusCode> {
    control.host().get(caller.workspace(), &id).await?;
    let known = match Uuid::try_parse(&link) {
        Ok(link) => control.config().ingress.store.revoke(&id, link).await?,
        Err(_) => false,
    };
    if known { Ok(StatusCode::NO_CONTENT) } else { Err(ApiError::not_found("preview", &link)) }
}

/// Follows a link.
///
/// Every method, and every path below this one. Needs no other token. As `…/proxy/{port}`, but that `Authorization` is
/// the service's own. 400: this is no link; 401: it was forged, has expired, was revoked, or its sandbox is gone; 403: it
/// does not lead to this path.
#[utoipa::path(get, path = "/v1/p/{token}", tag = "ports", security(()),
    params(("token" = String, Path, description = "Token of a link")),
    responses((status = 200, description = "Whatever the service answers, with any status.", body = Vec<u8>,
        content_type = "application/octet-stream"), Follows))]
pub(crate) async fn follow(
    State(control): State<Control>,
    LinkToken(token): LinkToken,
    request: Request,
) -> Answer<Response> {
    let Link { target, paths } = resolve(&control, &token).await?;
    let (prefix, rest) = split_path(request.uri(), 3);
    let path = rest.split('?').next().unwrap_or_default();
    if !paths::opens(&paths, path) {
        return Err(LinkError::OtherPath.into());
    }
    let passing = Passing {
        place: Place::Below(prefix),
        authorization: Authorization::Services,
        websockets_only: !paths.is_empty(),
        target: rest,
    };
    forward(&control, &target, passing, request).await
}
