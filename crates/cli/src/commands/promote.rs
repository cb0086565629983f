//! `coppice promote`: a fork's child becomes independent.

use clap::Args;
use coppice_client::api::PromoteRequest;

use crate::commands::Context;
use crate::error::CliError;
use crate::{resolve, words};

/// Arguments of `coppice promote`.
#[derive(Debug, Args)]
pub struct PromoteArgs {
    /// The child: its id, or a unique beginning of it
    sandbox: String,
    /// Leave the other children of the same fork alone instead of deleting them
    #[arg(long)]
    keep_siblings: bool,
}

pub(crate) async fn run(context: &Context<'_>, args: PromoteArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let request = PromoteRequest { cleanup_siblings: !args.keep_siblings, tree_id: None };
    let reply = client.promote(&id, &request).await?;
    context.output.result(&reply, |_| {
        let mut text = format!("promoted {}: it is independent now", reply.winner);
        if !reply.deleted.is_empty() {
            let list: Vec<&str> = reply.deleted.iter().map(|id| words::short(id)).collect();
            let number = words::count(list.len(), "sibling", "siblings");
            text.push_str(&format!("\ndeleted {number}: {}", list.join(", ")));
        }
        text
    })?;
    match reply.failures.iter().next() {
        None => Ok(()),
        Some((id, reason)) => {
            let number = words::count(reply.failures.len(), "sibling", "siblings");
            Err(CliError::failed("siblings_left", format!("{number} could not be deleted: {id}: {reason}"))
                .hint("they end with their TTL; or delete them with `coppice sandbox rm`"))
        }
    }
}
