//! `coppice preview list`

use clap::Args;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;
use crate::table::{self, plain};

/// Arguments of `coppice preview list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
}

pub(crate) async fn run(context: &Context<'_>, args: ListArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let links = client.previews(&id).await?;
    if links.is_empty() {
        context.output.note("there are no links");
    }
    context.output.result(&links, |style| {
        let rows = links.iter().map(|link| {
            let paths = if link.paths.is_empty() { "all".to_owned() } else { link.paths.join(" ") };
            vec![plain(&link.id), plain(link.port.to_string()), plain(paths), plain(&link.expires_at)]
        });
        if links.is_empty() {
            return String::new();
        }
        table::render(style, &["link", "port", "paths", "until"], rows.collect())
    })
}
