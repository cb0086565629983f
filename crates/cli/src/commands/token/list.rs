//! `coppice token list`

use clap::Args;
use jiff::Timestamp;

use super::workspace_name;
use crate::commands::Context;
use crate::error::CliError;
use crate::table::{self, Tone, plain};
use crate::words;

/// Arguments of `coppice token list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Of this workspace (admins). Default: your token's own
    #[arg(long, value_name = "NAME", value_parser = workspace_name)]
    workspace: Option<String>,
}

pub(crate) async fn run(context: &Context<'_>, args: ListArgs) -> Result<(), CliError> {
    let list = context.client()?.tokens(args.workspace.as_deref()).await?;
    context.output.result(&list, |style| {
        if list.is_empty() {
            return "no tokens; `coppice token create LABEL` makes one".into();
        }
        let now = Timestamp::now();
        let rows = list.iter().map(|token| {
            let used =
                token.last_used_at.as_deref().map_or("never".into(), |at| format!("{} ago", words::age(at, now)));
            vec![
                plain(&token.prefix),
                plain(token.role.as_str()),
                plain(&token.label),
                plain(words::age(&token.created_at, now)),
                plain(used),
                ends(token.expires_at.as_deref(), now),
            ]
        });
        table::render(style, &["token", "role", "label", "age", "used", "ends"], rows.collect())
    })
}

fn ends(at: Option<&str>, now: Timestamp) -> table::Field {
    match at.map(str::parse::<Timestamp>) {
        None => ("never".into(), Tone::Dim),
        Some(Ok(at)) if at <= now => ("expired".into(), Tone::Bad),
        Some(Ok(at)) => {
            let left = u64::try_from(at.as_second() - now.as_second()).unwrap_or_default();
            plain(format!("in {}", words::duration(std::time::Duration::from_secs(left))))
        }
        Some(Err(_)) => plain("?"),
    }
}
