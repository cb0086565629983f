//! One file per command: its arguments and what it does.

pub mod audit;
pub mod doctor;
pub mod explore;
pub mod fork;
pub mod fork_tree;
pub mod host;
pub mod openapi;
pub mod port_forward;
pub mod ports;
pub mod preview;
pub mod promote;
pub mod sandbox;
pub mod setup;
pub mod snapshot;
pub mod template;
pub mod token;
pub mod tree;
pub mod up;
pub mod version;
pub mod workspace;

use std::process::ExitCode;

use coppice_client::Client;
use coppice_client::api::OnTtl;

use crate::args::{Cli, Command, Global};
use crate::connect;
use crate::error::CliError;
use crate::interrupt::interrupted;
use crate::output::Output;

/// What becomes of a sandbox that was idle for its TTL, on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum OnTtlArg {
    /// It is deleted.
    Delete,
    /// It hibernates, until it is used again or deleted.
    Hibernate,
}

impl From<OnTtlArg> for OnTtl {
    fn from(arg: OnTtlArg) -> Self {
        match arg {
            OnTtlArg::Delete => Self::Delete,
            OnTtlArg::Hibernate => Self::Hibernate,
        }
    }
}

/// What a command can reach.
pub(crate) struct Context<'a> {
    pub(crate) global: &'a Global,
    pub(crate) output: &'a Output,
}

impl Context<'_> {
    /// A client of the server that the options name.
    pub(crate) fn client(&self) -> Result<Client, CliError> {
        connect::client(self.global, *self.output)
    }
}

/// Runs a command to its end.
pub async fn run(cli: Cli, output: &Output) -> Result<ExitCode, CliError> {
    let context = Context { global: &cli.global, output };
    // Boxed: the futures of all commands in one would be large.
    let done = match cli.command {
        Command::Up(args) => return Box::pin(up::run(&context, *args)).await,
        Command::Setup(args) => plain(setup::run(&context, args)).await,
        Command::Doctor(args) => plain(doctor::run(&context, args)).await,
        Command::Openapi => openapi::run(&context),
        Command::Fork(args) => Box::pin(fork::run(&context, args)).await,
        Command::ForkTree(args) => Box::pin(fork_tree::run(&context, args)).await,
        Command::Explore(args) => Box::pin(explore::run(&context, args)).await,
        Command::Promote(args) => plain(promote::run(&context, args)).await,
        Command::Sandbox(command) => return Box::pin(sandbox::run(&context, command)).await,
        Command::Template(command) => plain(template::run(&context, command)).await,
        Command::Snapshot(command) => plain(snapshot::run(&context, command)).await,
        Command::Ports(command) => plain(ports::run(&context, command)).await,
        Command::Preview(command) => plain(preview::run(&context, command)).await,
        Command::PortForward(args) => Box::pin(port_forward::run(&context, args)).await,
        Command::Token(command) => plain(token::run(&context, command)).await,
        Command::Workspace(command) => plain(workspace::run(&context, command)).await,
        Command::Host(command) => plain(host::run(&context, command)).await,
        Command::Audit(args) => plain(audit::run(&context, args)).await,
        Command::Tree => plain(tree::run(&context)).await,
        Command::Version => plain(version::run(&context)).await,
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// A command that an interruption may drop anywhere: what it holds is undone by dropping it.
pub(crate) async fn plain<T>(command: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    tokio::select! {
        done = Box::pin(command) => done,
        () = interrupted() => Err(CliError::Interrupted(None)),
    }
}

/// `NAME=VALUE` on the command line.
pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    let Some((name, value)) = text.split_once('=') else { return Err("it must be NAME=VALUE".into()) };
    if name.trim().is_empty() {
        return Err("the name before = is empty".into());
    }
    Ok((name.to_owned(), value.to_owned()))
}
