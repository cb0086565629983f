//! `coppice sandbox resume`

use clap::Args;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice sandbox resume`.
#[derive(Debug, Args)]
pub struct ResumeArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
}

pub(crate) async fn run(context: &Context<'_>, args: ResumeArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    client.resume(&id).await?;
    context.output.done(&json!({"id": id, "status": "running"}), &format!("resumed {id}"))
}
