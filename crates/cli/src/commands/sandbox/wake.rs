//! `coppice sandbox wake`

use clap::Args;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice sandbox wake`.
#[derive(Debug, Args)]
pub struct WakeArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
}

pub(crate) async fn run(context: &Context<'_>, args: WakeArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let reply = client.wake(&id).await?;
    context.output.done(&json!({"id": id, "status": reply.status}), &format!("woke {id}"))
}
