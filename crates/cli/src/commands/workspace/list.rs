//! `coppice workspace list`

use crate::commands::Context;
use crate::error::CliError;

pub(crate) async fn run(context: &Context<'_>) -> Result<(), CliError> {
    let list = context.client()?.workspaces().await?;
    context.output.result(&list, |style| super::rows(style, &list))
}
