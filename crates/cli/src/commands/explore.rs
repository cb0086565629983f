//! `coppice explore`: several commands, each in its own copy of a running sandbox; the best copy is kept.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coppice_client::{Branch, Candidate, ExploreError, ExploreOptions, ExploreOutcome, explore_until};

use crate::commands::{Context, pair};
use crate::error::CliError;
use crate::interrupt::interrupted;
use crate::output::Style;
use crate::table::{self, Field, Tone, plain};
use crate::{resolve, words};

/// Characters of a branch's last line that the table shows.
const TAIL: usize = 60;

/// Arguments of `coppice explore`.
#[derive(Debug, Args)]
pub struct ExploreArgs {
    /// What to fork: its id, or a unique beginning of it. It runs on, untouched
    sandbox: String,
    /// A candidate; give it once per candidate, up to 16 times. The command is run by /bin/sh -c
    #[arg(short, long = "try", value_name = "LABEL=COMMAND", value_parser = pair, required = true)]
    tries: Vec<(String, String)>,
    /// Run in each branch whose command succeeded; the last line it prints is the score, the highest wins
    #[arg(long, value_name = "COMMAND")]
    score: Option<String>,
    /// Candidates that run at the same time
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    concurrency: u8,
    /// Seconds for each candidate
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Idle seconds after which the server deletes a branch that nobody cares for
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    ttl: u64,
    /// Keep the winner as a branch, until its TTL, instead of promoting it
    #[arg(long)]
    no_promote: bool,
}

pub(crate) async fn run(context: &Context<'_>, args: ExploreArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let candidates: Vec<Candidate> =
        args.tries.iter().cloned().map(|(label, command)| Candidate { label, command }).collect();
    let output = *context.output;
    let mut options = ExploreOptions {
        concurrency: usize::from(args.concurrency),
        timeout: Duration::from_secs(args.timeout),
        score: args.score,
        ttl: Duration::from_secs(args.ttl),
        promote: !args.no_promote,
        on_branch: Some(Arc::new(move |branch: &Branch| output.note(&progress(branch)))),
        ..ExploreOptions::default()
    };
    options.on_fork = Some(Arc::new(move |fork| {
        let number = words::count(fork.children.len(), "branch", "branches");
        output.note(&fork.inherited);
        output.note(&format!("{number} ready; parent was paused for {}", words::fine_millis(fork.parent_paused_ms)));
    }));
    match explore_until(&client, &id, &candidates, &options, interrupted()).await {
        Ok(outcome) => {
            output.result(&outcome, |style| text(style, &outcome))?;
            leftovers(&outcome, options.promote)
        }
        Err(ExploreError::NoViableBranch(outcome)) => {
            output.result(&outcome, |style| text(style, &outcome))?;
            Err(ExploreError::NoViableBranch(outcome).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// What was to die and did not, or was to be promoted and was not, makes the command fail.
fn leftovers(outcome: &ExploreOutcome, promote: bool) -> Result<(), CliError> {
    let Some((id, reason)) = outcome.failures.iter().next() else { return Ok(()) };
    let code = if promote && !outcome.promoted { "promote_failed" } else { "losers_left" };
    let hint = "what is left ends with its TTL; `coppice promote ID` or `coppice sandbox rm ID` can be repeated";
    Err(CliError::failed(code, format!("{id} {reason}")).hint(hint))
}

fn progress(branch: &Branch) -> String {
    let time = words::millis(branch.duration_ms);
    match (branch.exit_code, &branch.error) {
        _ if branch.timed_out => format!("  {}: timed out", branch.label),
        (Some(code), _) => format!("  {}: exit code {code} after {time}", branch.label),
        (None, Some(error)) => format!("  {}: {error}", branch.label),
        (None, None) => format!("  {}: did not end", branch.label),
    }
}

fn text(style: Style, outcome: &ExploreOutcome) -> String {
    let header = ["", "label", "exit", "score", "time", "files changed", "last output", "sandbox"];
    let rows = outcome.branches.iter().map(|branch| row(outcome, branch)).collect();
    let mut text = table::render(style, &header, rows);
    text.push('\n');
    let line = match (&outcome.winner, &outcome.winner_id) {
        (Some(label), Some(id)) if outcome.promoted => {
            style.good(&format!("winner: {label}, now an independent sandbox: {id}"))
        }
        (Some(label), Some(id)) => style.good(&format!("winner: {label}, still a branch with a TTL: {id}")),
        _ => style.bad("no winner: no branch succeeded"),
    };
    // Writing to a String cannot fail.
    write!(text, "\n{line}").unwrap_or_default();
    if !outcome.deleted.is_empty() {
        let ids: Vec<&str> = outcome.deleted.iter().map(|id| words::short(id)).collect();
        let number = words::count(ids.len(), "branch", "branches");
        write!(text, "\ndeleted {number}: {}", ids.join(", ")).unwrap_or_default();
    }
    let fork = words::millis(outcome.fork_ms);
    let pause = words::fine_millis(outcome.parent_paused_ms);
    let parent = words::short(&outcome.parent_id);
    write!(text, "\nforking took {fork}; parent {parent} was paused for {pause} and runs on").unwrap_or_default();
    text
}

fn row(outcome: &ExploreOutcome, branch: &Branch) -> Vec<Field> {
    let winner = outcome.winner.as_ref() == Some(&branch.label);
    let exit = match branch.exit_code {
        _ if branch.timed_out => ("timeout".to_owned(), Tone::Bad),
        Some(0) => ("0".to_owned(), Tone::Good),
        Some(code) => (code.to_string(), Tone::Bad),
        None => ("-".to_owned(), Tone::Bad),
    };
    let output = match &branch.error {
        Some(error) => (words::last_line(error, TAIL), Tone::Bad),
        None => {
            let tail = if branch.stdout_tail.trim().is_empty() { &branch.stderr_tail } else { &branch.stdout_tail };
            plain(words::last_line(tail, TAIL))
        }
    };
    let sandbox = if branch.sandbox_id.is_empty() { "-" } else { words::short(&branch.sandbox_id) };
    vec![
        (if winner { "*" } else { "" }.to_owned(), Tone::Good),
        (branch.label.clone(), if winner { Tone::Good } else { Tone::Plain }),
        exit,
        plain(format!("{}", branch.score)),
        plain(words::millis(branch.duration_ms)),
        changed(branch),
        output,
        plain(sandbox),
    ]
}

/// `2 added, 1 modified: a.py, b.py, …`
fn changed(branch: &Branch) -> Field {
    let Some(changes) = &branch.changes else {
        let unknown = if branch.changes_error.is_some() { "unknown" } else { "-" };
        return (unknown.to_owned(), Tone::Dim);
    };
    let mut text = words::changes(&changes.counts);
    let names: Vec<_> =
        branch.files_changed.iter().take(2).map(|path| path.rsplit('/').next().unwrap_or(path)).collect();
    if !names.is_empty() {
        let more = if branch.files_changed.len() > 2 { ", …" } else { "" };
        text.push_str(&format!(": {}{more}", words::name(&names.join(", "))));
    }
    plain(text)
}

#[cfg(test)]
mod tests {
    use coppice_client::api::{ChangeBytes, ChangeCounts, Changes, ForkPoint, ForkPointKind};

    use super::*;

    fn changes() -> Changes {
        let since = ForkPoint { kind: ForkPointKind::Fork, id: "p".into(), at: String::new() };
        Changes {
            sandbox_id: String::new(),
            since,
            at: String::new(),
            flushed: true,
            added: Vec::new(),
            modified: Vec::new(),
            deleted: Vec::new(),
            counts: ChangeCounts { added: 3, deleted: 1, ..ChangeCounts::default() },
            bytes: ChangeBytes::default(),
            truncated: false,
            incomplete: None,
            note: None,
        }
    }

    #[test]
    fn the_table_marks_the_winner_and_says_what_died() {
        let branch = |label: &str, code: i32| Branch {
            label: label.into(),
            sandbox_id: format!("{label}0000000-1"),
            exit_code: Some(code),
            score: if code == 0 { 1.0 } else { 0.0 },
            duration_ms: 12,
            files_changed: vec!["/root/a.py".into(), "/root/b".into(), "/c".into()],
            changes: Some(changes()),
            stdout_tail: "ok\n".into(),
            ..Branch::default()
        };
        let outcome = ExploreOutcome {
            tree_id: "T".into(),
            parent_id: "p0000000-1".into(),
            inherited: "x".into(),
            parent_paused_ms: 1.25,
            fork_ms: 300,
            branches: vec![branch("a", 1), branch("b", 0)],
            winner: Some("b".into()),
            winner_id: Some("b0000000-1".into()),
            promoted: true,
            deleted: vec!["a0000000-1".into()],
            failures: std::collections::BTreeMap::new(),
        };
        let text = text(Style { color: false }, &outcome);
        assert!(text.contains("*  b      0     1      12 ms  3 added, 1 deleted: a.py, b, …"), "{text}");
        assert!(text.contains("winner: b, now an independent sandbox: b0000000-1"));
        assert!(text.contains("deleted 1 branch: a0000000"));
        assert!(leftovers(&outcome, true).is_ok());
    }
}
