//! The OpenAPI document: made from the handlers and the wire types, served, and committed as `docs/openapi.json`.

use std::collections::BTreeMap;

use axum::routing::any;
use coppice_api::{ErrorBody, StreamChunk, StreamError, StreamExit};
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ContentBuilder, Ref, RefOr, Required, Response, ResponseBuilder};
use utoipa::{IntoParams, IntoResponses, Modify, OpenApi, PartialSchema as _};
use utoipa_axum::routes;

use crate::authorize::{
    ADMIN, ADMIN_NEW_WORKSPACE, ADMIN_WORKSPACE, CREATE, FORK, LINK, MEMBER, METRICS, OPEN, Routes, SANDBOX, SNAPSHOT,
    TEMPLATE, TOKEN, WORKSPACE,
};
use crate::routes::{
    audit, changes, exec, fork, fs, host, logs, meta, network, ports, previews, proxy, sandboxes, snapshots, templates,
    tokens, tunnel, workspaces,
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Coppice",
        description = "A self-hosted microVM cloud whose first-class operation is forking a running machine.\n\n\
            Every error is `{\"error\":\"sentence\",\"code\":\"stable_snake_case\",\"hint\":\"optional\"}`. \
            503 with `Retry-After`, 507, and 429 with `Retry-After` mean that nothing was made. \
            Every response has an `x-request-id`. A JSON body may be empty where all its fields have defaults; \
            `Content-Type` is not looked at.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    security(("token" = [])),
    components(schemas(ErrorBody, StreamChunk, StreamExit, StreamError)),
    modifiers(&Token),
    tags(
        (name = "sandboxes", description = "microVMs with their own kernel, disk and identity"),
        (name = "exec", description = "commands, and the console log"),
        (name = "files", description = "files in a sandbox"),
        (name = "ports", description = "what listens in a sandbox: HTTP, links, raw TCP"),
        (name = "fork", description = "copies of a sandbox, and choosing among them"),
        (name = "snapshots", description = "one instant of a sandbox, kept"),
        (name = "templates", description = "named machine images"),
        (name = "tenants", description = "tokens, workspaces, quotas, and who changed what"),
        (name = "server", description = "the server itself"),
    )
)]
struct Document;

struct Token;

impl Modify for Token {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .bearer_format("pds_ and 32 hex digits")
            .description(Some("The server writes the first token to credentials.env in its data directory."))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
    }
}

/// All routes with their descriptions, and who may call each.
pub(crate) fn routes() -> Routes {
    Routes::new(Document::openapi())
        .add(OPEN, routes!(meta::healthz))
        .add(OPEN, routes!(meta::version))
        .add(METRICS, routes!(meta::metrics))
        .add(OPEN, routes!(meta::openapi))
        .add(MEMBER, routes!(meta::me))
        .add(MEMBER, routes!(tokens::list, tokens::create))
        .add(TOKEN, routes!(tokens::revoke))
        .add(CREATE, routes!(sandboxes::create))
        .add(MEMBER, routes!(sandboxes::list))
        .add(SANDBOX, routes!(sandboxes::get, sandboxes::delete))
        .add(SANDBOX, routes!(sandboxes::pause))
        .add(SANDBOX, routes!(sandboxes::resume))
        .add(SANDBOX, routes!(sandboxes::hibernate))
        .add(SANDBOX, routes!(sandboxes::wake))
        .add(SANDBOX, routes!(sandboxes::lifecycle, sandboxes::set_lifecycle))
        .add(SANDBOX, routes!(network::get, network::set))
        .add(SANDBOX, routes!(exec::exec))
        .add(SANDBOX, routes!(exec::stream))
        .add(SANDBOX, routes!(logs::logs))
        .add(SANDBOX, routes!(fs::read, fs::write, fs::remove))
        .add(SANDBOX, routes!(fs::dir))
        .add(SANDBOX, routes!(fs::stat))
        .add(SANDBOX, routes!(changes::get, changes::flush))
        .add(FORK, routes!(fork::fork))
        .add(FORK, routes!(fork::fork_tree))
        .add(SANDBOX, routes!(fork::promote))
        .add(SANDBOX, routes!(snapshots::create))
        .add(MEMBER, routes!(snapshots::list))
        .add(SNAPSHOT, routes!(snapshots::get, snapshots::delete))
        .add(SANDBOX, routes!(ports::list, ports::open))
        .add(SANDBOX, routes!(ports::close))
        .any(SANDBOX, routes!(proxy::proxy), &["/", "/{*rest}"], any(proxy::proxy))
        .add(SANDBOX, routes!(tunnel::tunnel))
        .add(SANDBOX, routes!(previews::create))
        .add(SANDBOX, routes!(previews::create_token))
        .add(SANDBOX, routes!(previews::list))
        .add(SANDBOX, routes!(previews::revoke))
        .any(LINK, routes!(previews::follow), &["/", "/{*rest}"], any(previews::follow))
        .add(MEMBER, routes!(templates::list))
        .add(TEMPLATE, routes!(templates::get, templates::delete))
        .add(ADMIN, routes!(workspaces::list))
        .add(WORKSPACE, routes!(workspaces::get))
        .add(ADMIN_WORKSPACE, routes!(workspaces::set_quota, workspaces::delete))
        .add(ADMIN_WORKSPACE, routes!(workspaces::tokens))
        .add(ADMIN_NEW_WORKSPACE, routes!(workspaces::create_token))
        .add(ADMIN_WORKSPACE, routes!(workspaces::revoke_token))
        .add(ADMIN, routes!(host::show))
        .add(ADMIN, routes!(audit::list))
}

/// The document, indented, with a line feed at its end: the contents of `docs/openapi.json`.
#[must_use]
pub fn openapi_json() -> String {
    let (_, document, _) = routes().into_parts();
    // A document made of literals can be written; an empty file would fail the drift check.
    document.to_pretty_json().map(|json| json + "\n").unwrap_or_default()
}

/// The `{id}` of a sandbox's path.
pub(crate) struct OfSandbox;
/// The `{id}` of a snapshot's path.
pub(crate) struct OfSnapshot;

/// The `{port}` of a path.
pub(crate) struct OfPort;

impl IntoParams for OfPort {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let port = ParameterBuilder::new().name("port").parameter_in(ParameterIn::Path).required(Required::True);
        vec![port.description(Some("TCP port in the sandbox")).schema(Some(u16::schema())).build()]
    }
}

impl IntoParams for OfSandbox {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![id("UUID of a sandbox")]
    }
}

impl IntoParams for OfSnapshot {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![id("UUID of a snapshot")]
    }
}

fn id(description: &str) -> Parameter {
    ParameterBuilder::new()
        .name("id")
        .parameter_in(ParameterIn::Path)
        .required(Required::True)
        .description(Some(description))
        .schema(Some(String::schema()))
        .build()
}

/// Failures of reads.
pub(crate) struct Reads;
/// Failures of changes to what exists.
pub(crate) struct Changes;
/// Failures of what makes sandboxes or snapshots.
pub(crate) struct Creates;
/// Failures of looking into a sandbox, which wakes it.
pub(crate) struct Looks;
/// Failures of comparing a sandbox's disk.
pub(crate) struct Compares;
/// Failures of running commands.
pub(crate) struct Runs;
/// Failures of uploads.
pub(crate) struct Writes;

impl IntoResponses for Reads {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 403, 404, 409, 500])
    }
}

impl IntoResponses for Looks {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 403, 404, 409, 500, 503, 507])
    }
}

impl IntoResponses for Compares {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 404, 409, 500, 503, 507])
    }
}

impl IntoResponses for Changes {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 403, 404, 409, 413, 500, 503, 507])
    }
}

impl IntoResponses for Creates {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 404, 409, 413, 429, 500, 503, 507])
    }
}

impl IntoResponses for Runs {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 404, 409, 413, 500, 503, 504, 507])
    }
}

/// Failures of reaching a port.
pub(crate) struct Reaches;
/// Failures of following a link.
pub(crate) struct Follows;

impl IntoResponses for Reaches {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 404, 500, 502, 503, 507])
    }
}

impl IntoResponses for Follows {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 403, 404, 500, 502, 503, 507])
    }
}

impl IntoResponses for Writes {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 404, 408, 409, 413, 500, 503, 507])
    }
}

fn errors(statuses: &[u16]) -> BTreeMap<String, RefOr<Response>> {
    statuses.iter().map(|status| (status.to_string(), RefOr::T(error(*status)))).collect()
}

fn error(status: u16) -> Response {
    let description = match status {
        400 => "The request is wrong; the sentence names the field and the rule.",
        401 => "No valid token.",
        403 => "Known, but not allowed.",
        404 => "No such thing, or another workspace's.",
        408 => "The request's body stopped arriving.",
        409 => "Not in the state that it is in.",
        413 => "Larger than a limit.",
        429 => {
            "A quota of the workspace, which waiting does not lift; or, with Retry-After, too many creates in a moment. Nothing was made."
        }
        502 => "What listens in the sandbox, or nothing that does, failed the request.",
        503 => {
            "Busy for now, with Retry-After: nothing was made or started. Without it: the sandbox could not be woken, and still hibernates."
        }
        504 => "The command's timeout passed; the sentence contains `timeout`.",
        507 => "The host has no room: nothing was made.",
        _ => "A failure of the server's.",
    };
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
    ResponseBuilder::new().description(description).content("application/json", content).build()
}
