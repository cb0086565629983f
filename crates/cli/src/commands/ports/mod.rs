//! `coppice ports …`

mod close;
mod list;
mod open;

use clap::Subcommand;
use coppice_client::api::Port;

use crate::commands::Context;
use crate::error::CliError;
use crate::output::Style;
use crate::table::{self, Field, Tone, plain};

/// What can be done with the ports of a sandbox.
#[derive(Debug, Subcommand)]
pub enum PortsCommand {
    /// List what listens in the sandbox, and what was named
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    /// Name a port, and say who may use its preview host
    Open(open::OpenArgs),
    /// Forget a port's name; its preview host needs a token or a link again
    Close(close::CloseArgs),
}

pub(crate) async fn run(context: &Context<'_>, command: PortsCommand) -> Result<(), CliError> {
    match command {
        PortsCommand::List(args) => list::run(context, args).await,
        PortsCommand::Open(args) => open::run(context, args).await,
        PortsCommand::Close(args) => close::run(context, args).await,
    }
}

fn rows(style: Style, ports: &[Port]) -> String {
    let rows = ports.iter().map(|port| {
        vec![
            plain(port.port.to_string()),
            plain(port.label.clone().unwrap_or_default()),
            state(port),
            plain(if port.public { "everybody" } else { "token or link" }),
            plain(port.preview_url.clone().unwrap_or_else(|| port.proxy_url.clone())),
        ]
    });
    table::render(style, &["port", "label", "state", "open to", "url"], rows.collect())
}

fn state(port: &Port) -> Field {
    match (port.listening, port.loopback_only) {
        (true, false) => ("listens".to_owned(), Tone::Good),
        (true, true) => ("listens on loopback only".to_owned(), Tone::Note),
        (false, _) => ("nothing listens".to_owned(), Tone::Dim),
    }
}
