//! `coppice fork`: the disk only, or the whole machine moved to one child; and how the answer of any fork is shown.

use std::fmt::Write as _;

use clap::{Args, ValueEnum};
use coppice_client::Client;
use coppice_client::api::{Fork, ForkMode, ForkRequest, OnTtl};

use crate::commands::{Context, OnTtlArg, pair};
use crate::error::CliError;
use crate::interrupt::or_undo;
use crate::output::Style;
use crate::table::{self, plain};
use crate::{resolve, words};

/// Arguments of `coppice fork`.
#[derive(Debug, Args)]
pub struct ForkArgs {
    /// What to fork: its id, or a unique beginning of it
    sandbox: String,
    /// Number of children, 1 to 16; exactly 1 with `--mode warm`
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(i64).range(1..=16))]
    count: i64,
    /// What children inherit: the disk, or (warm) disk and memory, and then the one child takes the parent's place
    #[arg(long, value_enum, default_value_t = Mode::Disk)]
    mode: Mode,
    /// The same as --mode warm
    #[arg(long, conflicts_with = "mode")]
    warm: bool,
    /// What becomes of a child that was idle for its TTL. Default: the same as of the parent
    #[arg(long, value_enum, value_name = "WHAT")]
    on_ttl: Option<OnTtlArg>,
    /// For every child
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    Disk,
    Warm,
}

pub(crate) async fn run(context: &Context<'_>, args: ForkArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let mode = if args.warm || args.mode == Mode::Warm { ForkMode::Warm } else { ForkMode::Disk };
    let request = ForkRequest {
        count: Some(args.count),
        mode,
        metadata: (!args.metadata.is_empty()).then(|| args.metadata.into_iter().collect()),
        on_ttl: args.on_ttl.map(OnTtl::from),
    };
    let undo = async |fork: Fork| match (mode, fork.children.first()) {
        // The parent is stopped: the child is all there is.
        (ForkMode::Warm, Some(child)) => Ok(format!("sandbox {} has taken the place of {id} all the same", child.id)),
        _ => undo(&client, fork).await,
    };
    let fork = or_undo(client.fork(&id, &request), undo).await?;
    show(context, &fork)
}

/// Deletes the children of a fork that nobody waits for any more.
pub(crate) async fn undo(client: &Client, fork: Fork) -> Result<String, coppice_client::ClientError> {
    for child in &fork.children {
        client.delete(&child.id).await?;
    }
    Ok(format!("{} deleted again", words::count(fork.children.len(), "child was", "children were")))
}

/// Prints a fork; children that did not start make the command fail.
pub(crate) fn show(context: &Context<'_>, fork: &Fork) -> Result<(), CliError> {
    context.output.result(fork, |style| text(style, fork))?;
    match fork.errors.first() {
        None => Ok(()),
        Some(first) => {
            let number = words::count(fork.errors.len(), "child", "children");
            let message = format!("{number} did not start; number {}: {}", first.index, first.err);
            Err(CliError::failed("children_missing", message)
                .hint("the children above run; delete them if they are no use"))
        }
    }
}

/// What was inherited comes first: whoever reads only one line must not be misled.
fn text(style: Style, fork: &Fork) -> String {
    let mut text = style.strong(&fork.inherited);
    let pause = words::fine_millis(fork.parent_paused_ms);
    let mut facts = vec![format!("parent {} was paused for {pause}", words::short(&fork.parent_id))];
    if fork.memory_bytes > 0 {
        facts.push(format!("{} of memory copied", words::size(fork.memory_bytes)));
    }
    facts.push(match fork.disk_clone.as_str() {
        "reflink" => "disk cloned by reference".to_owned(),
        _ => style.note("disk copied: this host's data directory has no reflinks, which is slow"),
    });
    if !fork.flushed {
        facts.push(style.note("NOT flushed: what the guest had not yet written to its disk is missing"));
    }
    // Writing to a String cannot fail.
    write!(text, "\n{}\n\n", facts.join("; ")).unwrap_or_default();
    let rows = fork.children.iter().map(|child| {
        let index = child.metadata.get("fork_index").cloned().unwrap_or_default();
        let state = (words::status(child.status).to_owned(), words::status_tone(child.status));
        vec![plain(index), plain(&child.id), state, plain(words::millis(child.boot_ms)), plain(words::ttl(child))]
    });
    text.push_str(&table::render(style, &["#", "child", "status", "ready after", "ends after"], rows.collect()));
    text
}
