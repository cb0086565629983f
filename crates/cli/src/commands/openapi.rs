//! `coppice openapi`: the description of the HTTP API.

use crate::commands::Context;
use crate::error::CliError;

pub(crate) fn run(context: &Context<'_>) -> Result<(), CliError> {
    context.output.text(&coppice_control::openapi_json())
}
