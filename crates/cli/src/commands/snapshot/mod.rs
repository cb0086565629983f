//! `coppice snapshot …`

mod get;
mod list;
mod rm;

use clap::Subcommand;
use coppice_client::api::Snapshot;
use jiff::Timestamp;

use crate::commands::Context;
use crate::error::CliError;
use crate::output::Style;
use crate::table::{self, plain};
use crate::words;

/// What can be done with snapshots.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// List them, newest first
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    /// Show one
    Get(get::GetArgs),
    /// Delete snapshots; sandboxes made from them go on
    #[command(visible_alias = "delete")]
    Rm(rm::RmArgs),
}

pub(crate) async fn run(context: &Context<'_>, command: SnapshotCommand) -> Result<(), CliError> {
    match command {
        SnapshotCommand::List(args) => list::run(context, args).await,
        SnapshotCommand::Get(args) => get::run(context, args).await,
        SnapshotCommand::Rm(args) => rm::run(context, args).await,
    }
}

fn rows(style: Style, snapshots: &[Snapshot]) -> String {
    let now = Timestamp::now();
    let rows = snapshots.iter().map(|snapshot| {
        vec![
            plain(&snapshot.id),
            plain(words::short(&snapshot.sandbox_id)),
            plain(&snapshot.template),
            plain(words::size(snapshot.size_bytes)),
            plain(words::age(&snapshot.created_at, now)),
        ]
    });
    table::render(style, &["snapshot", "of sandbox", "template", "size", "age"], rows.collect())
}
