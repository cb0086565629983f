//! `coppice workspace show`

use clap::Args;

use crate::commands::{Context, token::workspace_name};
use crate::error::CliError;

/// Arguments of `coppice workspace show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Its name
    #[arg(value_parser = workspace_name)]
    name: Option<String>,
}

pub(crate) async fn run(context: &Context<'_>, args: ShowArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let name = match args.name {
        Some(name) => name,
        None => client.me().await?.current_org,
    };
    let workspace = client.workspace(&name).await?;
    context.output.result(&workspace, |style| super::rows(style, std::slice::from_ref(&workspace)))
}
