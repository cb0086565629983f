//! Templates.

use axum::Json;
use axum::extract::State;
use coppice_api::{Role, Template};
use http::StatusCode;

use super::Answer;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::input::{Ignored, Params, Segment};
use crate::openapi::{Changes, Reads};
use crate::{Control, check};

/// Lists the templates that the workspace may use.
#[utoipa::path(get, path = "/v1/templates", tag = "templates",
    responses((status = 200, description = "All of them, `[]` for none.", body = Vec<Template>), Reads))]
pub(crate) async fn list(State(control): State<Control>, caller: Caller) -> Answer<Json<Vec<Template>>> {
    Ok(Json(control.host().templates(caller.workspace()).await?))
}

/// One template, by name or alias.
#[utoipa::path(get, path = "/v1/templates/{name}", tag = "templates",
    params(("name" = String, Path, description = "Name of a template", example = "base")),
    responses((status = 200, description = "The template.", body = Template), Reads))]
pub(crate) async fn get(
    State(control): State<Control>,
    caller: Caller,
    Segment(name): Segment,
) -> Answer<Json<Template>> {
    Ok(Json(control.host().template(caller.workspace(), known(&name)?).await?))
}

/// Removes a template of the workspace's own that no sandbox needs any more.
///
/// One that is offered to every workspace is removed only for an admin who says so with `global=true`.
#[utoipa::path(delete, path = "/v1/templates/{name}", tag = "templates",
    params(("name" = String, Path, description = "Name of a template"),
        ("global" = Option<bool>, Query, description = "Also one that is offered to every workspace; admins only")),
    responses((status = 204, description = "Gone."), Changes))]
pub(crate) async fn delete(
    State(control): State<Control>,
    caller: Caller,
    Segment(name): Segment,
    params: Params,
    _: Ignored,
) -> Answer<StatusCode> {
    if caller.role() == Role::Admin && params.get("global") == Some("true") {
        control.host().delete_global_template(known(&name)?).await?;
        return Ok(StatusCode::NO_CONTENT);
    }
    control.host().delete_template(caller.workspace(), known(&name)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A name that can't be a template's is no template.
fn known(name: &str) -> Answer<&str> {
    if check::is_template_name(name) { Ok(name) } else { Err(ApiError::not_found("template", name)) }
}
