//! Templates.

use axum::Json;
use axum::extract::State;
use coppice_api::Template;
use http::StatusCode;

use super::Answer;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::input::{Ignored, Segment};
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

/// Removes a template that no sandbox needs any more.
#[utoipa::path(delete, path = "/v1/templates/{name}", tag = "templates",
    params(("name" = String, Path, description = "Name of a template")),
    responses((status = 204, description = "Gone."), Changes))]
pub(crate) async fn delete(
    State(control): State<Control>,
    caller: Caller,
    Segment(name): Segment,
    _: Ignored,
) -> Answer<StatusCode> {
    control.host().delete_template(caller.workspace(), known(&name)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A name that can't be a template's is no template.
fn known(name: &str) -> Answer<&str> {
    if check::is_template_name(name) { Ok(name) } else { Err(ApiError::not_found("template", name)) }
}
