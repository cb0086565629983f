//! `coppice ports close`

use clap::Args;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice ports close`.
#[derive(Debug, Args)]
pub struct CloseArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
    /// The port
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
}

pub(crate) async fn run(context: &Context<'_>, args: CloseArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    client.close_port(&id, args.port).await?;
    context.output.done(&json!({"closed": args.port}), &format!("closed {}", args.port))
}
