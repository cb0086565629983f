//! Raw TCP to a port of a sandbox.

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderValue, StatusCode};

use super::Answer;
use crate::Control;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::ingress::reach::reach;
use crate::ingress::{Target, head, pipe};
use crate::input::SandboxPort;
use crate::openapi::{OfPort, OfSandbox, Reaches};

/// What the connection goes on with.
const TCP: HeaderValue = HeaderValue::from_static("tcp");

/// Opens a TCP connection to any port of the sandbox.
///
/// Send `Connection: Upgrade` and `Upgrade: tcp`. After 101 every byte goes through as it is, both ways; an end of one
/// way leaves the other open. One connection each. It counts as use of the sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/tunnel/{port}", tag = "ports", params(OfSandbox, OfPort),
    responses((status = 101, description = "From here on it is the service's connection."),
        (status = 200, description = "Never."),
        (status = 426, description = "The request does not ask for `Upgrade: tcp`.", body = coppice_api::ErrorBody),
        Reaches))]
pub(crate) async fn tunnel(
    State(control): State<Control>,
    caller: Caller,
    SandboxPort { id, port }: SandboxPort,
    mut request: Request,
) -> Answer<Response> {
    if head::upgrade(request.headers()).is_none_or(|protocol| !protocol.as_bytes().eq_ignore_ascii_case(b"tcp")) {
        let mut response =
            ApiError::upgrade_required("this route needs `Connection: Upgrade` and `Upgrade: tcp`").into_response();
        response.headers_mut().insert(UPGRADE, TCP);
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        return Ok(response);
    }
    let target = Target { workspace: caller.workspace().to_owned(), sandbox: id, port };
    // Whoever asks gets the refusal as an answer: 101 means that something accepted the connection.
    let guest = reach(&control, &target).await?;
    pipe::connect(&control, hyper::upgrade::on(&mut request), std::future::ready(Ok(guest)));
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(UPGRADE, TCP);
    Ok(response)
}
