//! `coppice preview …`

mod create;
mod list;
mod revoke;

use clap::Subcommand;

use crate::commands::Context;
use crate::error::CliError;

/// What can be done with links to ports of sandboxes.
#[derive(Debug, Subcommand)]
pub enum PreviewCommand {
    /// Make a link; it ends by itself, and with the sandbox
    Create(create::CreateArgs),
    /// List the valid links to a sandbox
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    /// End links
    Revoke(revoke::RevokeArgs),
}

pub(crate) async fn run(context: &Context<'_>, command: PreviewCommand) -> Result<(), CliError> {
    match command {
        PreviewCommand::Create(args) => create::run(context, args).await,
        PreviewCommand::List(args) => list::run(context, args).await,
        PreviewCommand::Revoke(args) => revoke::run(context, args).await,
    }
}
