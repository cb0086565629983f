//! `coppice host …`

mod show;

use clap::Subcommand;

use crate::commands::Context;
use crate::error::CliError;

/// What can be asked of a host.
#[derive(Debug, Subcommand)]
pub enum HostCommand {
    /// Show what it has, what of it is used and promised, and how many more sandboxes fit (admins)
    Show,
}

pub(crate) async fn run(context: &Context<'_>, command: HostCommand) -> Result<(), CliError> {
    match command {
        HostCommand::Show => show::run(context).await,
    }
}
