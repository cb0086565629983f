//! `coppice sandbox list`

use clap::Args;

use crate::commands::Context;
use crate::error::CliError;

/// Arguments of `coppice sandbox list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Print the ids only
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) async fn run(context: &Context<'_>, args: ListArgs) -> Result<(), CliError> {
    let list = context.client()?.list().await?;
    context.output.result(&list, |style| {
        if args.quiet {
            return list.iter().map(|sandbox| format!("{}\n", sandbox.id)).collect();
        }
        if list.is_empty() {
            return "no sandboxes; `coppice sandbox create` makes one".into();
        }
        super::rows(style, &list)
    })
}
