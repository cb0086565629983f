//! `coppice token revoke`

use clap::Args;

use super::workspace_name;
use crate::commands::{Context, sandbox::rm};
use crate::error::CliError;

/// First characters of a token that lists show.
const PREFIX: usize = 12;

/// Arguments of `coppice token revoke`.
#[derive(Debug, Args)]
pub struct RevokeArgs {
    /// Their first characters, as `token list` shows them
    #[arg(required = true)]
    tokens: Vec<String>,
    /// Of this workspace (admins). Default: your token's own
    #[arg(long, value_name = "NAME", value_parser = workspace_name)]
    workspace: Option<String>,
}

pub(crate) async fn run(context: &Context<'_>, args: RevokeArgs) -> Result<(), CliError> {
    let client = context.client()?;
    // A whole token names itself too, and must not travel as a part of a URL, which logs keep.
    let prefixes: Vec<String> = args.tokens.iter().map(|token| token.chars().take(PREFIX).collect()).collect();
    rm::each(context, prefixes, |prefix| {
        let (client, workspace) = (client.clone(), args.workspace.clone());
        async move { client.revoke_token(workspace.as_deref(), &prefix).await }
    })
    .await
}
