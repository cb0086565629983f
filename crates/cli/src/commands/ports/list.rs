//! `coppice ports list`

use clap::Args;

use super::rows;
use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice ports list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
}

pub(crate) async fn run(context: &Context<'_>, args: ListArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let ports = client.ports(&id).await?;
    if ports.is_empty() {
        context.output.note("nothing listens, and nothing is named");
    }
    context.output.result(&ports, |style| if ports.is_empty() { String::new() } else { rows(style, &ports) })
}
