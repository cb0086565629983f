//! `coppice sandbox snapshot`

use clap::Args;

use crate::commands::Context;
use crate::error::CliError;
use crate::interrupt::or_undo;
use crate::{resolve, words};

/// Arguments of `coppice sandbox snapshot`.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
}

pub(crate) async fn run(context: &Context<'_>, args: SnapshotArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let undo = |snapshot: coppice_client::api::Snapshot| {
        let client = &client;
        async move { client.delete_snapshot(&snapshot.id).await.map(|()| format!("{} was deleted again", snapshot.id)) }
    };
    let snapshot = or_undo(client.snapshot(&id), undo).await?;
    context.output.result(&snapshot, |_| {
        let size = words::size(snapshot.size_bytes);
        let again = format!("coppice sandbox create --from-snapshot {}", words::short(&snapshot.id));
        format!("{}\nmemory and disk of {}, {size}; `{again}` goes on from it", snapshot.id, words::short(&id))
    })
}
