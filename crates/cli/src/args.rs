//! The command line as types: global options, and the tree of commands.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::commands;

/// Where a server keeps its data when nothing else is said.
pub const DEFAULT_DATA_DIR: &str = "/var/lib/coppice";

/// Fork running virtual machines.
///
/// Start a server on this host with `coppice up`; every other command talks to a server. Exit codes: 0 done, 1 failed,
/// 2 the command line is wrong; `sandbox exec` gives the command's own.
#[derive(Debug, Parser)]
#[command(name = "coppice", version, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    /// For every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Print JSON to standard output, and errors as JSON to standard error
    #[arg(long, global = true)]
    pub json: bool,
    /// Address of the server, e.g. <http://127.0.0.1:8080>. Default: what the data directory's credentials.env says
    #[arg(long, global = true, env = "PANDASTACK_API", value_name = "URL")]
    pub api: Option<String>,
    /// As `--api`, from the environment only
    #[arg(long, global = true, env = "COPPICE_API", hide = true, value_name = "URL")]
    pub coppice_api: Option<String>,
    /// Token for it. Default: what the data directory's credentials.env says
    #[arg(long, global = true, env = "PANDASTACK_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,
    /// As `--api-key`, from the environment only
    #[arg(long, global = true, env = "COPPICE_API_KEY", hide = true, hide_env_values = true, value_name = "KEY")]
    pub coppice_api_key: Option<String>,
    /// Data directory of the server on this host
    #[arg(long, global = true, env = "COPPICE_DATA_DIR", default_value = DEFAULT_DATA_DIR, value_name = "DIR")]
    pub data_dir: PathBuf,
    /// Seconds to keep asking a server that has no room, for create and fork
    #[arg(
        long,
        global = true,
        env = "PANDASTACK_MAX_CREATE_RETRY_SECONDS",
        default_value_t = 60,
        value_name = "SECONDS"
    )]
    pub wait_for_room: u64,
    /// When to use colours
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto, value_name = "WHEN")]
    pub color: ColorChoice,
    /// From the environment only: no colours
    #[arg(long, global = true, env = "NO_COLOR", hide = true, value_name = "ANY")]
    pub no_color: Option<String>,
}

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    /// On a terminal, unless `NO_COLOR` is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The commands.
#[derive(Debug, Subcommand)]
#[command(subcommand_value_name = "COMMAND")]
pub enum Command {
    /// Start the server on this host, and print how to reach it
    Up(Box<commands::up::UpArgs>),
    /// Make this host ready: data directory, guest kernel, templates
    Setup(commands::setup::SetupArgs),
    /// Say what this host can do, what is missing, and what to do about it
    Doctor(commands::doctor::DoctorArgs),
    /// Print the OpenAPI document of the HTTP API
    Openapi,
    /// Create sandboxes, run commands in them, copy files, delete them
    #[command(subcommand, visible_alias = "sb")]
    Sandbox(commands::sandbox::SandboxCommand),
    /// Fork the disk of a sandbox: children boot on a copy
    Fork(commands::fork::ForkArgs),
    /// Fork a running sandbox, memory and disk: children go on from the same instant
    ForkTree(commands::fork_tree::ForkTreeArgs),
    /// Make a fork's child independent
    Promote(commands::promote::PromoteArgs),
    /// Try several commands, each in its own copy of a running sandbox, and keep the best
    Explore(commands::explore::ExploreArgs),
    /// List and name the ports of a sandbox
    #[command(subcommand)]
    Ports(commands::ports::PortsCommand),
    /// Make, list and revoke links that lead to a port of a sandbox without a token
    #[command(subcommand)]
    Preview(commands::preview::PreviewCommand),
    /// Let ports of this machine lead to ports of a sandbox
    PortForward(commands::port_forward::PortForwardArgs),
    /// Draw which sandbox was forked from which
    Tree,
    /// Build, list, show and delete templates
    #[command(subcommand)]
    Template(commands::template::TemplateCommand),
    /// List, show and delete snapshots
    #[command(subcommand)]
    Snapshot(commands::snapshot::SnapshotCommand),
    /// Make, list and revoke tokens, by which a server knows its callers
    #[command(subcommand)]
    Token(commands::token::TokenCommand),
    /// Look after workspaces: tenants that see nothing of each other
    #[command(subcommand)]
    Workspace(commands::workspace::WorkspaceCommand),
    /// What the host has, and what fits on it still
    #[command(subcommand)]
    Host(commands::host::HostCommand),
    /// Show who changed what (admins)
    Audit(commands::audit::AuditArgs),
    /// Print the versions of this program and of the server
    Version,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_tree_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
