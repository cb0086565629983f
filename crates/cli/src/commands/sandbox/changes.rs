//! `coppice sandbox changes`

use clap::Args;
use coppice_client::ChangesQuery;
use coppice_client::api::{
    ChangedAspect, ChangedKind, ChangedPath, Changes, DEFAULT_CHANGES_LISTED, ForkPointKind, MAX_CHANGES_LISTED,
};
use jiff::Timestamp;

use crate::commands::Context;
use crate::error::CliError;
use crate::output::Style;
use crate::table::{self, Field, Tone, plain};
use crate::{resolve, words};

/// Arguments of `coppice sandbox changes`.
#[derive(Debug, Args)]
pub struct ChangesArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
    /// Only this absolute path and what is in it
    #[arg(long, value_name = "PATH")]
    path: Option<String>,
    /// Most entries of each kind; counts have all
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CHANGES_LISTED, value_parser = listed)]
    limit: usize,
    /// Look at the disk as it is, without having a running guest write to it what it has not written yet
    #[arg(long)]
    no_flush: bool,
}

fn listed(text: &str) -> Result<usize, String> {
    let limit = text.parse().ok().filter(|limit| (1..=MAX_CHANGES_LISTED).contains(limit));
    limit.ok_or_else(|| format!("must be a number from 1 to {MAX_CHANGES_LISTED}"))
}

pub(crate) async fn run(context: &Context<'_>, args: ChangesArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let query = ChangesQuery { limit: Some(args.limit), path: args.path, flush: !args.no_flush };
    let changes = client.changes(&id, &query).await?;
    context.output.result(&changes, |style| text(style, &changes))
}

fn text(style: Style, changes: &Changes) -> String {
    let lists =
        [("A", Tone::Good, &changes.added), ("M", Tone::Note, &changes.modified), ("D", Tone::Bad, &changes.deleted)];
    let rows = lists.iter().flat_map(|(letter, tone, list)| list.iter().map(|entry| row(letter, *tone, entry)));
    let rows: Vec<_> = rows.collect();
    let mut text = String::new();
    if !rows.is_empty() {
        text = table::render(style, &["", "path", "size", "what"], rows);
        text.push_str("\n\n");
    }
    let since = match changes.since.kind {
        ForkPointKind::Fork => format!("the fork of {}", words::short(&changes.since.id)),
        ForkPointKind::Snapshot => format!("snapshot {}", words::short(&changes.since.id)),
        ForkPointKind::Template => format!("template {}", changes.since.id),
    };
    let age = words::age(&changes.since.at, Timestamp::now());
    let (counts, added) = (words::changes(&changes.counts), words::size(changes.bytes.added));
    text.push_str(&style.strong(&format!("{counts} since {since}, {age} ago; {added} added")));
    if changes.truncated {
        text.push_str("\nnot all are listed: --limit and --path choose");
    }
    if changes.counts.earlier > 0 {
        let number = changes.counts.earlier;
        let earlier = format!("{number} more are older than it: its parent had not written them to its disk yet");
        text.push_str(&format!("\n{}", style.dim(&earlier)));
    }
    for said in [&changes.incomplete, &changes.note].into_iter().flatten() {
        text.push_str(&format!("\n{}", style.note(&words::name(said))));
    }
    text
}

fn row(letter: &str, tone: Tone, entry: &ChangedPath) -> Vec<Field> {
    let slash = if entry.kind == ChangedKind::Dir { "/" } else { "" };
    let size = match (entry.kind, entry.size_before) {
        (ChangedKind::File | ChangedKind::Symlink, Some(before)) if before != entry.size => {
            format!("{} (was {})", words::size(entry.size), words::size(before))
        }
        (ChangedKind::File | ChangedKind::Symlink, _) => words::size(entry.size),
        _ => String::new(),
    };
    let what: Vec<_> = entry.changed.iter().map(|aspect| aspect_word(*aspect)).collect();
    vec![(letter.to_owned(), tone), plain(words::name(&entry.path) + slash), plain(size), plain(what.join(", "))]
}

fn aspect_word(aspect: ChangedAspect) -> &'static str {
    match aspect {
        ChangedAspect::Content => "content",
        ChangedAspect::Type => "type",
        ChangedAspect::Mode => "mode",
        ChangedAspect::Owner => "owner",
        ChangedAspect::Target => "target",
        ChangedAspect::Device => "device",
        ChangedAspect::Attributes => "attributes",
    }
}

#[cfg(test)]
mod tests {
    use coppice_client::api::{ChangeBytes, ChangeCounts, ForkPoint};

    use super::*;

    #[test]
    fn names_of_a_guest_are_shown_and_do_nothing() {
        let entry = |path: &str, kind, size_before, changed| ChangedPath {
            path: path.into(),
            kind,
            size: 2048,
            size_before,
            mode: "0644".into(),
            changed,
        };
        let evil = entry("/x\u{1b}[2J\nD /etc", ChangedKind::File, None, vec![]);
        let changes = Changes {
            sandbox_id: "s".into(),
            since: ForkPoint { kind: ForkPointKind::Fork, id: "aaaaaaaa-1".into(), at: Timestamp::now().to_string() },
            at: String::new(),
            flushed: false,
            added: vec![entry("/d", ChangedKind::Dir, None, vec![]), evil],
            modified: vec![entry("/m", ChangedKind::File, Some(1), vec![ChangedAspect::Content, ChangedAspect::Mode])],
            deleted: Vec::new(),
            counts: ChangeCounts { added: 2, modified: 1, deleted: 0, earlier: 4 },
            bytes: ChangeBytes { added: 2048, modified: 2048, deleted: 0 },
            truncated: true,
            incomplete: None,
            note: Some("as of what was on the disk".into()),
        };
        let shown = text(Style { color: false }, &changes);
        let expected = [
            "PATH SIZE WHAT",
            "A /d/",
            r"A /x\u{1b}[2J\nD /etc 2.0 KiB",
            "M /m 2.0 KiB (was 1 B) content, mode",
            "",
            "2 added, 1 modified since the fork of aaaaaaaa, 0 s ago; 2.0 KiB added",
            "not all are listed: --limit and --path choose",
            "4 more are older than it: its parent had not written them to its disk yet",
            "as of what was on the disk",
        ];
        let lines: Vec<_> = shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines, expected, "{shown}");
    }
}
