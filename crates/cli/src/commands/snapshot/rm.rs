//! `coppice snapshot rm`

use clap::Args;

use crate::commands::{Context, sandbox::rm};
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice snapshot rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// Their ids, or unique beginnings of them
    #[arg(required = true)]
    snapshots: Vec<String>,
}

pub(crate) async fn run(context: &Context<'_>, args: RmArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let mut ids = Vec::new();
    for given in &args.snapshots {
        ids.push(resolve::snapshot(&client, given).await?);
    }
    rm::each(context, ids, |id| {
        let client = client.clone();
        async move { client.delete_snapshot(&id).await }
    })
    .await
}
