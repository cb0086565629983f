//! `coppice template …`

mod build;
mod delete;
mod list;
mod show;

use clap::Subcommand;

use crate::commands::Context;
use crate::error::CliError;

/// What can be done with templates.
#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// Make those that are missing or out of date, on this host (needs root)
    Build(build::BuildArgs),
    /// List those that sandboxes can be created from
    #[command(visible_alias = "ls")]
    List,
    /// Show one
    #[command(visible_alias = "get")]
    Show(show::ShowArgs),
    /// Delete one that no sandbox needs any more
    #[command(visible_alias = "rm")]
    Delete(delete::DeleteArgs),
}

pub(crate) async fn run(context: &Context<'_>, command: TemplateCommand) -> Result<(), CliError> {
    match command {
        TemplateCommand::Build(args) => build::run(context, args).await,
        TemplateCommand::List => list::run(context).await,
        TemplateCommand::Show(args) => show::run(context, args).await,
        TemplateCommand::Delete(args) => delete::run(context, args).await,
    }
}
