//! `coppice sandbox pause`

use clap::Args;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice sandbox pause`.
#[derive(Debug, Args)]
pub struct PauseArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
}

pub(crate) async fn run(context: &Context<'_>, args: PauseArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    client.pause(&id).await?;
    context.output.done(&json!({"id": id, "status": "paused"}), &format!("paused {id}"))
}
