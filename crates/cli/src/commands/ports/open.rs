//! `coppice ports open`

use clap::Args;
use coppice_client::api::OpenPortRequest;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice ports open`.
#[derive(Debug, Args)]
pub struct OpenArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
    /// The port
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// What to call it
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    /// Let everybody who knows the sandbox's id use the port's preview host, without a token
    #[arg(long)]
    public: bool,
}

pub(crate) async fn run(context: &Context<'_>, args: OpenArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let request = OpenPortRequest { port: Some(args.port.into()), label: args.label, public: Some(args.public) };
    let port = client.open_port(&id, &request).await?;
    if args.public && port.preview_url.is_none() {
        context.output.note("this server has no preview hosts: start it with --preview-suffix");
    }
    context.output.result(&port, |_| port.preview_url.clone().unwrap_or_else(|| port.proxy_url.clone()))
}
