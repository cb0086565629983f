//! One candidate in its own copy of the sandbox: run, look what changed, score. Never fails: what goes wrong is part of the
//! branch.

use std::time::Duration;

use coppice_api::{ChangedKind, ExecRequest};

use super::{Branch, Candidate, ExploreOptions, select};
use crate::{ChangesQuery, Client, ClientError, ExecEvent};

/// Bytes kept of each stream's end.
const TAIL: usize = 4096;
/// Most entries in each list of what changed.
const LISTED: usize = 100;

pub(super) async fn run(client: &Client, id: &str, candidate: &Candidate, options: &ExploreOptions) -> Branch {
    let mut branch = Branch { label: candidate.label.clone(), sandbox_id: id.to_owned(), ..Branch::default() };
    let ended = command(client, id, candidate, options.timeout, &mut branch).await;
    let timed_out = ended.as_ref().is_err_and(ClientError::is_timeout);
    // Before the score, which may leave files of its own.
    if options.changes && (ended.is_ok() || timed_out) {
        look(client, id, &mut branch).await;
    }
    if let Err(error) = ended {
        branch.timed_out = timed_out;
        branch.error = Some(error.to_string());
        return branch;
    }
    if branch.exit_code == Some(0) {
        match score(client, id, options).await {
            Ok(score) => {
                branch.score = score;
                branch.viable = true;
            }
            Err(reason) => branch.error = Some(reason),
        }
    }
    branch
}

/// Runs the candidate's command; its output is kept up to the tails even when it breaks.
async fn command(
    client: &Client,
    id: &str,
    candidate: &Candidate,
    timeout: Duration,
    branch: &mut Branch,
) -> Result<(), ClientError> {
    let request = ExecRequest {
        cmd: candidate.command.clone(),
        timeout_seconds: Some(timeout.as_secs_f64()),
        ..ExecRequest::default()
    };
    let mut stream = client.exec_stream(id, &request).await?;
    while let Some(event) = stream.next().await {
        match event? {
            ExecEvent::Stdout(text) => push_tail(&mut branch.stdout_tail, &text),
            ExecEvent::Stderr(text) => push_tail(&mut branch.stderr_tail, &text),
            ExecEvent::Exit(exit) => {
                branch.exit_code = Some(exit.exit_code);
                branch.duration_ms = exit.duration_ms;
            }
        }
    }
    Ok(())
}

async fn score(client: &Client, id: &str, options: &ExploreOptions) -> Result<f64, String> {
    let Some(command) = &options.score else { return Ok(1.0) };
    let request = ExecRequest {
        cmd: command.clone(),
        timeout_seconds: Some(options.timeout.as_secs_f64()),
        ..ExecRequest::default()
    };
    let reply = client.exec(id, &request).await.map_err(|error| format!("the score command failed: {error}"))?;
    if reply.exit_code != 0 {
        return Err(format!("the score command ended with exit code {}", reply.exit_code));
    }
    select::score(&reply.stdout)
}

/// What the candidate changed. That it can't be told is no failure of the branch.
async fn look(client: &Client, id: &str, branch: &mut Branch) {
    let query = ChangesQuery { limit: Some(LISTED), flush: true, ..ChangesQuery::default() };
    match client.changes(id, &query).await {
        Ok(changes) => {
            let entries = changes.added.iter().chain(&changes.modified);
            let files = entries.filter(|entry| entry.kind != ChangedKind::Dir);
            branch.files_changed = files.map(|entry| entry.path.clone()).collect();
            branch.files_changed.sort();
            branch.changes = Some(changes);
        }
        Err(error) => branch.changes_error = Some(error.to_string()),
    }
}

/// Appends, and drops from the front what is beyond [`TAIL`] bytes.
fn push_tail(tail: &mut String, text: &str) {
    tail.push_str(text);
    if let Some(mut cut) = tail.len().checked_sub(TAIL).filter(|cut| *cut > 0) {
        while !tail.is_char_boundary(cut) {
            cut += 1;
        }
        tail.drain(..cut);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_is_bounded_and_text() {
        let mut tail = String::new();
        for _ in 0..5000 {
            push_tail(&mut tail, "é");
        }
        push_tail(&mut tail, "x");
        assert!(tail.len() <= TAIL && tail.len() > TAIL - 4, "{}", tail.len());
        assert!(tail.ends_with("éx"));
        push_tail(&mut tail, &"y".repeat(3 * TAIL));
        assert_eq!(tail, "y".repeat(TAIL));
    }
}
