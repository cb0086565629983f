//! Ports of a sandbox: what listens, and what clients said of it.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use coppice_api::{ErrorClass, OpenPortRequest, Port, PortSource};
use http::{HeaderMap, StatusCode, Uri};

use super::Answer;
use crate::Control;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::ingress::store::NamedPort;
use crate::ingress::{self, Target, hosts};
use crate::input::{Ignored, Input, SandboxId, SandboxPort};
use crate::openapi::{Changes, Looks, OfPort, OfSandbox};

/// Longest label, characters.
const MAX_LABEL: usize = 64;

/// Lists ports on which something in the sandbox listens, and those that clients named.
///
/// Wakes a hibernated sandbox: only its guest knows. Counts as no use otherwise. Port 22 is not listed.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/ports", tag = "ports", params(OfSandbox),
    responses((status = 200, description = "By number, `[]` for none.", body = Vec<Port>), Looks))]
pub(crate) async fn list(
    State(control): State<Control>,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
    SandboxId(id): SandboxId,
) -> Answer<Json<Vec<Port>>> {
    let detected = match control.host().ports(caller.workspace(), &id).await {
        Ok(detected) => detected,
        // Nothing listens in a machine that does not run.
        Err(error) if error.class() == ErrorClass::Conflict => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let shown = |port, named: Option<NamedPort>| show(&control, (&uri, &headers), &id, port, named);
    let named = control.config().ingress.store.ports(&id).await?;
    let mut ports: BTreeMap<u16, Port> = named.into_iter().map(|one| (one.port, shown(one.port, Some(one)))).collect();
    for found in detected.into_iter().filter(|found| ingress::port(Some(found.port.into())).is_ok()) {
        let port = ports.entry(found.port).or_insert_with(|| shown(found.port, None));
        (port.listening, port.loopback_only) = (true, found.loopback_only);
    }
    Ok(Json(ports.into_values().collect()))
}

/// Names a port, and says who may use its preview host.
///
/// Any port can be used by holders of a token without this. `public: true` lets everybody who knows the sandbox's id use
/// the port's preview host. A port that was named before is named again.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/ports", tag = "ports", params(OfSandbox),
    request_body(content = OpenPortRequest, example = json!({"port": 3000, "label": "web"})),
    responses((status = 201, description = "Remembered, until the sandbox is deleted.", body = Port), Changes))]
pub(crate) async fn open(
    State(control): State<Control>,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
    SandboxId(id): SandboxId,
    Input(request): Input<OpenPortRequest>,
) -> Answer<(StatusCode, Json<Port>)> {
    let port = ingress::port(request.port)?;
    let named = NamedPort { port, label: label(request.label)?, public: request.public.unwrap_or_default() };
    control.host().get(caller.workspace(), &id).await?;
    let target = Target { workspace: caller.workspace().to_owned(), sandbox: id.clone(), port };
    control.config().ingress.store.name(&target, &named.label, named.public).await?;
    Ok((StatusCode::CREATED, Json(show(&control, (&uri, &headers), &id, port, Some(named)))))
}

/// Forgets a port's name; its preview host is not public any more.
///
/// What listens there goes on. A port that has no name is fine.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/ports/{port}", tag = "ports", params(OfSandbox, OfPort),
    responses((status = 204, description = "Forgotten."), Changes))]
pub(crate) async fn close(
    State(control): State<Control>,
    caller: Caller,
    SandboxPort { id, port }: SandboxPort,
    _: Ignored,
) -> Answer<StatusCode> {
    control.host().get(caller.workspace(), &id).await?;
    control.config().ingress.store.unname(&id, port).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn label(given: Option<String>) -> Result<String, ApiError> {
    let label = given.map(|label| label.trim().to_owned()).filter(|label| !label.is_empty());
    let label = label.unwrap_or_else(|| "service".to_owned());
    if label.chars().count() > MAX_LABEL || label.contains(char::is_control) {
        let message = format!("label must be at most {MAX_LABEL} characters, none of them a control character");
        return Err(ApiError::invalid("invalid_label", message));
    }
    Ok(label)
}

fn show(control: &Control, (uri, headers): (&Uri, &HeaderMap), id: &str, port: u16, named: Option<NamedPort>) -> Port {
    let base = ingress::base(control, uri, headers);
    let source = if named.is_some() { PortSource::User } else { PortSource::Detected };
    Port {
        port,
        listening: false,
        loopback_only: false,
        source,
        public: named.as_ref().is_some_and(|named| named.public) || control.config().ingress.public_previews,
        label: named.map(|named| named.label),
        proxy_url: format!("{base}/v1/sandboxes/{id}/proxy/{port}/"),
        preview_url: hosts::url(control, id, port),
    }
}
