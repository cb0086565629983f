//! `coppice snapshot list`

use clap::Args;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice snapshot list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only those of this sandbox
    #[arg(long, value_name = "ID")]
    sandbox: Option<String>,
}

pub(crate) async fn run(context: &Context<'_>, args: ListArgs) -> Result<(), CliError> {
    let client = context.client()?;
    // The sandbox may be gone and its snapshots still there: then the id must be whole.
    let sandbox = match &args.sandbox {
        Some(given) => Some(resolve::sandbox(&client, given).await?),
        None => None,
    };
    let list = client.snapshots(sandbox.as_deref()).await?;
    context.output.result(&list, |style| {
        if list.is_empty() {
            "no snapshots; `coppice sandbox snapshot ID` takes one".into()
        } else {
            super::rows(style, &list)
        }
    })
}
