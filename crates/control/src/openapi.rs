//! The OpenAPI document: made from the handlers and the wire types, served, and committed as `docs/openapi.json`.

use std::collections::BTreeMap;

use coppice_api::{ErrorBody, StreamChunk, StreamError, StreamExit};
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ContentBuilder, Ref, RefOr, Required, Response, ResponseBuilder};
use utoipa::{IntoParams, IntoResponses, Modify, OpenApi, PartialSchema as _};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Control;
use crate::routes::{exec, fork, fs, logs, meta, sandboxes, snapshots, templates};

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
        (name = "fork", description = "copies of a sandbox, and choosing among them"),
        (name = "snapshots", description = "one instant of a sandbox, kept"),
        (name = "templates", description = "named machine images"),
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

/// All routes with their descriptions.
pub(crate) fn routes() -> OpenApiRouter<Control> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(meta::healthz))
        .routes(routes!(meta::version))
        .routes(routes!(meta::metrics))
        .routes(routes!(meta::openapi))
        .routes(routes!(meta::me))
        .routes(routes!(sandboxes::create, sandboxes::list))
        .routes(routes!(sandboxes::get, sandboxes::delete))
        .routes(routes!(sandboxes::pause))
        .routes(routes!(sandboxes::resume))
        .routes(routes!(sandboxes::lifecycle, sandboxes::set_lifecycle))
        .routes(routes!(exec::exec))
        .routes(routes!(exec::stream))
        .routes(routes!(logs::logs))
        .routes(routes!(fs::read, fs::write, fs::remove))
        .routes(routes!(fs::dir))
        .routes(routes!(fs::stat))
        .routes(routes!(fork::fork))
        .routes(routes!(fork::fork_tree))
        .routes(routes!(fork::promote))
        .routes(routes!(snapshots::create))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::get, snapshots::delete))
        .routes(routes!(templates::list))
        .routes(routes!(templates::get, templates::delete))
}

/// The document, indented, with a line feed at its end: the contents of `docs/openapi.json`.
#[must_use]
pub fn openapi_json() -> String {
    let (_, document) = routes().split_for_parts();
    // A document made of literals can be written; an empty file would fail the drift check.
    document.to_pretty_json().map(|json| json + "\n").unwrap_or_default()
}

/// The `{id}` of a sandbox's path.
pub(crate) struct OfSandbox;
/// The `{id}` of a snapshot's path.
pub(crate) struct OfSnapshot;

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
/// Failures of running commands.
pub(crate) struct Runs;
/// Failures of uploads.
pub(crate) struct Writes;

impl IntoResponses for Reads {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 404, 409, 500])
    }
}

impl IntoResponses for Changes {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 403, 404, 409, 413, 500, 503])
    }
}

impl IntoResponses for Creates {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 404, 409, 413, 429, 500, 503, 507])
    }
}

impl IntoResponses for Runs {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        errors(&[400, 401, 404, 409, 413, 500, 503, 504])
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
        429 => "A limit of the workspace's own, which waiting does not lift.",
        503 => "Busy for now, with Retry-After: nothing was made or started.",
        504 => "The command's timeout passed; the sentence contains `timeout`.",
        507 => "The host has no room: nothing was made.",
        _ => "A failure of the server's.",
    };
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
    ResponseBuilder::new().description(description).content("application/json", content).build()
}
