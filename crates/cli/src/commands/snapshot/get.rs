//! `coppice snapshot get`

use clap::Args;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice snapshot get`.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// Its id, or a unique beginning of it
    snapshot: String,
}

pub(crate) async fn run(context: &Context<'_>, args: GetArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::snapshot(&client, &args.snapshot).await?;
    let snapshot = client.get_snapshot(&id).await?;
    context.output.result(&snapshot, |style| super::rows(style, std::slice::from_ref(&snapshot)))
}
