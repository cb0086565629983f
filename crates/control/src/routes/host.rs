//! What this host has, for those who run it.

use axum::Json;
use axum::extract::State;
use coppice_api::HostReport;

use super::Answer;
use crate::Control;
use crate::openapi::Reads;

/// What the host has, what of it is used and promised, and how many more sandboxes fit. Admins only.
///
/// The numbers that a create, a fork and a wake are decided by, of one moment.
#[utoipa::path(get, path = "/v1/host", tag = "server",
    responses((status = 200, description = "Sizes in bytes where they don't say otherwise.", body = HostReport), Reads))]
pub(crate) async fn show(State(control): State<Control>) -> Answer<Json<HostReport>> {
    Ok(Json(control.host().report().await?))
}
