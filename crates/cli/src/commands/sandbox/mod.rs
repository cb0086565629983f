//! `coppice sandbox …`

mod changes;
mod cp;
mod create;
mod exec;
mod get;
mod hibernate;
mod list;
mod logs;
mod network;
mod pause;
mod resume;
pub(crate) mod rm;
mod snapshot;
mod ttl;
mod wake;

use std::process::ExitCode;

use clap::Subcommand;
use coppice_client::api::Sandbox;
use jiff::Timestamp;

use crate::commands::{Context, plain};
use crate::error::CliError;
use crate::output::Style;
use crate::table;
use crate::words;

/// What can be done with sandboxes. Ids may be given as unique beginnings.
#[derive(Debug, Subcommand)]
pub enum SandboxCommand {
    /// Create one from a template or a snapshot; it is usable when this returns
    Create(create::CreateArgs),
    /// List them, oldest first
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    /// Show one
    Get(get::GetArgs),
    /// Run a command in one; ends with the command's exit code
    Exec(exec::ExecArgs),
    /// Print the console log
    Logs(logs::LogsArgs),
    /// Copy files and directories in and out
    Cp(cp::CpArgs),
    /// Show which files it has added, modified and deleted since it was forked or created
    Changes(changes::ChangesArgs),
    /// Delete sandboxes
    #[command(visible_alias = "delete")]
    Rm(rm::RmArgs),
    /// Show or change what it may reach
    Network(network::NetworkArgs),
    /// Show or change when it ends, and how
    Ttl(ttl::TtlArgs),
    /// Stop its virtual CPUs
    Pause(pause::PauseArgs),
    /// Let them run on
    Resume(resume::ResumeArgs),
    /// Keep it on the server's disk and end its machine; any use wakes it
    Hibernate(hibernate::HibernateArgs),
    /// Bring a hibernated one back; it is usable when this returns
    Wake(wake::WakeArgs),
    /// Keep memory and disk as they are now; it runs on
    Snapshot(snapshot::SnapshotArgs),
}

pub(crate) async fn run(context: &Context<'_>, command: SandboxCommand) -> Result<ExitCode, CliError> {
    let done = match command {
        SandboxCommand::Create(args) => create::run(context, args).await,
        SandboxCommand::Snapshot(args) => snapshot::run(context, args).await,
        SandboxCommand::Exec(args) => return plain(exec::run(context, args)).await,
        SandboxCommand::List(args) => plain(list::run(context, args)).await,
        SandboxCommand::Get(args) => plain(get::run(context, args)).await,
        SandboxCommand::Logs(args) => plain(logs::run(context, args)).await,
        SandboxCommand::Cp(args) => plain(cp::run(context, args)).await,
        SandboxCommand::Changes(args) => plain(changes::run(context, args)).await,
        SandboxCommand::Rm(args) => plain(rm::run(context, args)).await,
        SandboxCommand::Network(args) => plain(network::run(context, args)).await,
        SandboxCommand::Ttl(args) => plain(ttl::run(context, args)).await,
        SandboxCommand::Pause(args) => plain(pause::run(context, args)).await,
        SandboxCommand::Resume(args) => plain(resume::run(context, args)).await,
        SandboxCommand::Hibernate(args) => plain(hibernate::run(context, args)).await,
        SandboxCommand::Wake(args) => plain(wake::run(context, args)).await,
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn rows(style: Style, sandboxes: &[Sandbox]) -> String {
    let now = Timestamp::now();
    let rows = sandboxes.iter().map(|sandbox| {
        let parent = sandbox.metadata.get("fork_parent_id").map(|id| words::short(id)).unwrap_or_default();
        vec![
            table::plain(&sandbox.id),
            table::plain(&sandbox.template),
            (words::status(sandbox.status).to_owned(), words::status_tone(sandbox.status)),
            table::plain(words::age(&sandbox.created_at, now)),
            table::plain(words::ttl(sandbox)),
            table::plain(parent),
        ]
    });
    table::render(style, &["sandbox", "template", "status", "age", "ends after", "forked from"], rows.collect())
}
