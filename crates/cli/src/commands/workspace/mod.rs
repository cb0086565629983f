//! `coppice workspace …`

mod delete;
mod list;
mod set_quota;
mod show;

use clap::Subcommand;
use coppice_client::api::Workspace;

use crate::commands::Context;
use crate::error::CliError;
use crate::output::Style;
use crate::table::{self, Field, Tone, plain};

/// What can be done with workspaces.
#[derive(Debug, Subcommand)]
pub enum WorkspaceCommand {
    /// List them, with what they have and may have (admins)
    #[command(visible_alias = "ls")]
    List,
    /// Show one. Default: your token's own
    #[command(visible_alias = "get")]
    Show(show::ShowArgs),
    /// Say what a workspace may have at most (admins)
    SetQuota(set_quota::SetQuotaArgs),
    /// Delete one that has no sandboxes and snapshots, and its tokens (admins)
    #[command(visible_alias = "rm")]
    Delete(delete::DeleteArgs),
}

pub(crate) async fn run(context: &Context<'_>, command: WorkspaceCommand) -> Result<(), CliError> {
    match command {
        WorkspaceCommand::List => list::run(context).await,
        WorkspaceCommand::Show(args) => show::run(context, args).await,
        WorkspaceCommand::SetQuota(args) => set_quota::run(context, args).await,
        WorkspaceCommand::Delete(args) => delete::run(context, args).await,
    }
}

/// `3 of 10`, or `3`.
fn share(has: u64, most: Option<u64>) -> Field {
    match most {
        None => plain(has.to_string()),
        Some(most) => (format!("{has} of {most}"), if has >= most { Tone::Note } else { Tone::Plain }),
    }
}

fn rows(style: Style, workspaces: &[Workspace]) -> String {
    let rows = workspaces.iter().map(|workspace| {
        let (quota, usage) = (&workspace.quota, workspace.usage);
        vec![
            plain(&workspace.name),
            share(usage.sandboxes, quota.sandboxes),
            share(usage.memory_mb, quota.memory_mb),
            plain(quota.fan_out.map_or("-".into(), |most| most.to_string())),
            share(usage.snapshots, quota.snapshots),
            share(usage.disk_mb, quota.disk_mb),
            plain(workspace.tokens.to_string()),
        ]
    });
    let header = ["workspace", "sandboxes", "memory mib", "fan-out", "snapshots", "disk mib", "tokens"];
    table::render(style, &header, rows.collect())
}
