//! `coppice preview create`

use clap::Args;
use coppice_client::api::PreviewRequest;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice preview create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
    /// The port
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Seconds until it ends, up to 604800 (7 days)
    #[arg(long, default_value_t = 3600, value_name = "SECONDS", value_parser = clap::value_parser!(i64).range(1..))]
    ttl: i64,
    /// Lead to this path and what is below it only; may be given several times
    #[arg(long = "path", value_name = "PATH")]
    paths: Vec<String>,
}

pub(crate) async fn run(context: &Context<'_>, args: CreateArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let paths = (!args.paths.is_empty()).then_some(args.paths);
    let request = PreviewRequest { port: Some(args.port.into()), ttl_seconds: Some(args.ttl), paths };
    let preview = client.preview(&id, &request).await?;
    context.output.result(&preview, |_| preview.host_url.clone().unwrap_or_else(|| preview.url.clone()))?;
    context.output.note(&format!("until {}; `coppice preview revoke {id} {}` ends it", preview.expires_at, preview.id));
    Ok(())
}
