//! The `coppice` command line: server (`up`, `setup`, `doctor`) and client (`sandbox`, `fork-tree`, `explore`, …).
//!
//! One file per command in [`commands`]; what they share is beside it: the arguments ([`args`]), the connection
//! ([`connect`]), what is printed ([`output`], [`table`], [`words`]) and how failures end ([`error`]). Standard output
//! carries results only; all else goes to standard error. It does no work of its own: the client crate talks to servers,
//! the host crate runs sandboxes.
#![forbid(unsafe_code)]

pub mod args;
pub mod commands;
mod connect;
pub mod error;
mod interrupt;
mod output;
mod progress;
mod resolve;
mod server;
mod table;
mod words;

use std::process::ExitCode;

use clap::Parser;

use crate::args::Cli;
use crate::error::CliError;
use crate::output::Output;

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return error::usage(&error, std::env::args_os().any(|arg| arg == "--json")),
    };
    let output = Output::new(&cli.global);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return CliError::failed("runtime", "could not start worker threads").because(error).end(&output),
    };
    let result = runtime.block_on(commands::run(cli, &output));
    // A read of standard input that nobody waits for any more must not hold the process.
    runtime.shutdown_background();
    match result {
        Ok(code) => code,
        Err(error) => error.end(&output),
    }
}
