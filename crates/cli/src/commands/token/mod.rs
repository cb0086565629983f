//! `coppice token …`

mod create;
mod list;
mod revoke;

use clap::Subcommand;

use crate::commands::Context;
use crate::error::CliError;

/// What can be done with tokens.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make one, and print it: the only time that it can be seen
    Create(create::CreateArgs),
    /// List them, by their first characters
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    /// End some at once
    #[command(visible_alias = "rm")]
    Revoke(revoke::RevokeArgs),
}

pub(crate) async fn run(context: &Context<'_>, command: TokenCommand) -> Result<(), CliError> {
    match command {
        TokenCommand::Create(args) => create::run(context, args).await,
        TokenCommand::List(args) => list::run(context, args).await,
        TokenCommand::Revoke(args) => revoke::run(context, args).await,
    }
}

/// A workspace's name on the command line.
pub(crate) fn workspace_name(text: &str) -> Result<String, String> {
    if coppice_client::api::is_workspace_name(text) {
        return Ok(text.to_owned());
    }
    Err("it must be 1 to 63 of a-z, 0-9 and -, the first no -".into())
}
