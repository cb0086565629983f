//! `coppice sandbox get`

use clap::Args;

use crate::commands::Context;
use crate::error::CliError;
use crate::{resolve, words};

/// Arguments of `coppice sandbox get`.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
}

pub(crate) async fn run(context: &Context<'_>, args: GetArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let sandbox = client.get(&id).await?;
    context.output.result(&sandbox, |style| {
        let mut text = super::rows(style, std::slice::from_ref(&sandbox));
        text.push_str(&format!("\n{} CPU, {} MiB; ready after ", sandbox.cpu, sandbox.memory_mb));
        text.push_str(&words::millis(sandbox.boot_ms));
        text.push_str(&format!("\negress: {}", words::egress(&sandbox.network.egress)));
        for (name, value) in &sandbox.metadata {
            text.push_str(&format!("\n{name}: {}", value.replace(char::is_control, " ")));
        }
        if let Some(error) = &sandbox.error {
            text.push_str(&format!("\n{}", style.bad(error)));
        }
        text
    })
}
