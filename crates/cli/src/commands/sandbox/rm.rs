//! `coppice sandbox rm`; and deleting several things, of which some may fail.

use std::future::Future;

use clap::Args;
use coppice_client::ClientError;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::{resolve, words};

/// Arguments of `coppice sandbox rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// Their ids, or unique beginnings of them
    #[arg(required_unless_present = "all")]
    sandboxes: Vec<String>,
    /// All of the workspace
    #[arg(long, conflicts_with = "sandboxes")]
    all: bool,
}

pub(crate) async fn run(context: &Context<'_>, args: RmArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let mut ids = Vec::new();
    if args.all {
        ids.extend(client.list().await?.into_iter().map(|sandbox| sandbox.id));
    }
    // All are looked up before the first is deleted: a mistyped id deletes nothing.
    for given in &args.sandboxes {
        ids.push(resolve::sandbox(&client, given).await?);
    }
    each(context, ids, |id| {
        let client = client.clone();
        async move { client.delete(&id).await }
    })
    .await
}

/// Deletes all of them, also when some fail; then the command fails.
pub(crate) async fn each<F>(
    context: &Context<'_>,
    ids: Vec<String>,
    delete: impl Fn(String) -> F,
) -> Result<(), CliError>
where
    F: Future<Output = Result<(), ClientError>>,
{
    let results = futures::future::join_all(ids.into_iter().map(|id| {
        let deleting = delete(id.clone());
        async move { (id, deleting.await) }
    }));
    let (mut deleted, mut failed) = (Vec::new(), Vec::new());
    for (id, result) in results.await {
        match result {
            Ok(()) => deleted.push(id),
            Err(error) => failed.push((id, error)),
        }
    }
    let remark = deleted.iter().map(|id| format!("deleted {id}\n")).collect::<String>();
    context.output.done(&json!({"deleted": deleted}), &remark)?;
    let many = failed.len();
    match failed.into_iter().next() {
        None => Ok(()),
        Some((_, error)) if many == 1 => Err(error.into()),
        Some((id, error)) => {
            let message = format!("{} could not be deleted; {id}", words::count(many, "one", "of them"));
            Err(CliError::failed("not_deleted", message).because(error))
        }
    }
}
