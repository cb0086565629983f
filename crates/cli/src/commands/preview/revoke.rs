//! `coppice preview revoke`

use clap::Args;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice preview revoke`.
#[derive(Debug, Args)]
pub struct RevokeArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
    /// Ids of links
    #[arg(required = true)]
    links: Vec<String>,
}

pub(crate) async fn run(context: &Context<'_>, args: RevokeArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    for link in &args.links {
        client.revoke_preview(&id, link).await?;
    }
    let remark: String = args.links.iter().map(|link| format!("revoked {link}\n")).collect();
    context.output.done(&json!({"revoked": args.links}), &remark)
}
