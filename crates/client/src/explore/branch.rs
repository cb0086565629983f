//! One candidate in its own copy of the sandbox: mark the time, run, look what changed, score. Never fails: what goes wrong
//! is part of the branch.

use std::time::Duration;

use coppice_api::ExecRequest;

use super::{Branch, Candidate, ExploreOptions, select};
use crate::{Client, ClientError, ExecEvent};

/// Bytes kept of each stream's end.
const TAIL: usize = 4096;
/// For the commands around the candidate's own.
const AROUND: f64 = 20.0;
/// Most changed files that are named.
const MAX_FILES: usize = 200;

/// File times advance in ticks of a few milliseconds, and `-newer` is strict: a file written right after the marker could
/// have the marker's own time. So the marker is set a little into the past. (Where `touch` knows no fractions: the present.)
const MARK: &str = "m=/tmp/.coppice-explore-marker; touch -d '-0.02 seconds' $m 2>/dev/null || touch $m";

pub(super) async fn run(client: &Client, id: &str, candidate: &Candidate, options: &ExploreOptions) -> Branch {
    let mut branch = Branch { label: candidate.label.clone(), sandbox_id: id.to_owned(), ..Branch::default() };
    let capture = !options.capture_roots.is_empty();
    if capture && let Err(error) = around(client, id, MARK.to_owned()).await {
        branch.error = Some(format!("could not mark the start: {error}"));
        return branch;
    }
    if let Err(error) = command(client, id, candidate, options.timeout, &mut branch).await {
        branch.timed_out = error.is_timeout();
        branch.error = Some(error.to_string());
        return branch;
    }
    if capture {
        match around(client, id, find(&options.capture_roots)).await {
            Ok(stdout) => branch.files_changed = stdout.lines().take(MAX_FILES).map(str::to_owned).collect(),
            Err(error) => branch.error = Some(format!("could not look for changed files: {error}")),
        }
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

async fn around(client: &Client, id: &str, cmd: String) -> Result<String, ClientError> {
    let request = ExecRequest { cmd, timeout_seconds: Some(AROUND), ..ExecRequest::default() };
    client.exec(id, &request).await.map(|reply| reply.stdout)
}

fn find(roots: &[String]) -> String {
    let roots: Vec<String> = roots.iter().map(|root| quote(root)).collect();
    let newer = "-xdev -type f -newer /tmp/.coppice-explore-marker";
    format!("find {} {newer} 2>/dev/null | head -n {MAX_FILES}", roots.join(" "))
}

/// For `/bin/sh`.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
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

    #[test]
    fn roots_are_quoted() {
        assert!(find(&["/a b".into(), "/it's".into()]).starts_with(r"find '/a b' '/it'\''s' -xdev"));
    }
}
