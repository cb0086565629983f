//! `coppice workspace delete`

use clap::Args;
use serde_json::json;

use crate::commands::{Context, token::workspace_name};
use crate::error::CliError;

/// Arguments of `coppice workspace delete`.
#[derive(Debug, Args)]
pub struct DeleteArgs {
    /// Its name
    #[arg(value_parser = workspace_name)]
    name: String,
}

pub(crate) async fn run(context: &Context<'_>, args: DeleteArgs) -> Result<(), CliError> {
    context.client()?.delete_workspace(&args.name).await?;
    context.output.done(&json!({"deleted": [args.name]}), &format!("deleted {}", args.name))
}
