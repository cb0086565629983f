//! `coppice audit`: who changed what.

use clap::Args;
use coppice_client::AuditQuery;
use jiff::Timestamp;

use crate::commands::{Context, token::workspace_name};
use crate::error::CliError;
use crate::table::{self, Tone, plain};
use crate::words;

/// Arguments of `coppice audit`.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Only what tokens of this workspace did
    #[arg(long, value_name = "NAME", value_parser = workspace_name)]
    workspace: Option<String>,
    /// Only entries before the one with this id
    #[arg(long, value_name = "ID")]
    before: Option<i64>,
    /// At most so many
    #[arg(long, short = 'n', default_value_t = 50, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
}

pub(crate) async fn run(context: &Context<'_>, args: AuditArgs) -> Result<(), CliError> {
    let query = AuditQuery { workspace: args.workspace.as_deref(), before: args.before, limit: Some(args.limit) };
    let list = context.client()?.audit(query).await?;
    context.output.result(&list, |style| {
        if list.is_empty() {
            return "nothing was changed".into();
        }
        let now = Timestamp::now();
        let rows = list.iter().map(|entry| {
            let tone = if entry.status < 400 { Tone::Good } else { Tone::Bad };
            vec![
                plain(entry.id.to_string()),
                plain(words::age(&entry.at, now)),
                plain(&entry.workspace),
                plain(&entry.token),
                (entry.status.to_string(), tone),
                plain(format!("{} {}", entry.method, entry.route)),
                plain(&entry.resource),
            ]
        });
        table::render(style, &["id", "age", "workspace", "token", "status", "what", "of"], rows.collect())
    })
}
