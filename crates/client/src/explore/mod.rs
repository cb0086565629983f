//! Explore: fork a running sandbox once per candidate, run each candidate in its own copy, keep the best.
//!
//! One fork-tree, so that every branch starts from the same instant; at most `concurrency` candidates at a time; the
//! winner is promoted and the losers are deleted. Losers die in any case: every child carries a TTL, so a client that
//! crashes leaks nothing for longer than that, and an interruption deletes them at once.
//!
//! It does not judge: the score is the exit code, or what the caller's score command prints.

mod branch;
mod select;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::time::{Duration, Instant};

use coppice_api::{Changes, ExecRequest, Fork, MAX_FORK_COUNT, PromoteRequest, Sandbox};
use futures::StreamExt;
use serde::Serialize;

use crate::{Client, ClientError, Hook};

/// One thing to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Names it in the outcome.
    pub label: String,
    /// Run by `/bin/sh -c` in its own copy of the sandbox.
    pub command: String,
}

/// How to explore.
#[derive(Clone)]
pub struct ExploreOptions {
    /// Candidates that run at the same time.
    pub concurrency: usize,
    /// For each candidate's command, and for its score command.
    pub timeout: Duration,
    /// Run in the child after a command that succeeded; the last line that it prints is the score. Absent: 1 for exit
    /// code 0, else 0.
    pub score: Option<String>,
    /// After which a child that nobody cares for is deleted by the server.
    pub ttl: Duration,
    /// Promote the winner. Otherwise it stays a child, until its TTL.
    pub promote: bool,
    /// Look what each candidate changed on its disk.
    pub changes: bool,
    /// Told of each branch as it ends.
    pub on_branch: Option<Hook<Branch>>,
    /// Told once, when all children are ready.
    pub on_fork: Option<Hook<Fork>>,
}

impl Default for ExploreOptions {
    fn default() -> Self {
        Self {
            concurrency: 4,
            timeout: Duration::from_secs(60),
            score: None,
            ttl: Duration::from_secs(600),
            promote: true,
            changes: true,
            on_branch: None,
            on_fork: None,
        }
    }
}

impl fmt::Debug for ExploreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExploreOptions")
            .field("concurrency", &self.concurrency)
            .field("timeout", &self.timeout)
            .field("score", &self.score)
            .field("ttl", &self.ttl)
            .field("promote", &self.promote)
            .field("changes", &self.changes)
            .finish_non_exhaustive()
    }
}

/// What became of one candidate.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Branch {
    /// The candidate's.
    pub label: String,
    /// The child that it ran in; empty when that did not start.
    pub sandbox_id: String,
    /// Of its command; absent when that did not end by itself.
    pub exit_code: Option<i32>,
    /// Higher is better; 0 for a branch that can't win.
    pub score: f64,
    /// Of its command, in the guest.
    pub duration_ms: u64,
    /// Paths of what is no directory among the first that were added and modified.
    pub files_changed: Vec<String>,
    /// What its command changed on its disk: counts, and the first 100 of each kind.
    pub changes: Option<Changes>,
    /// Why that can't be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes_error: Option<String>,
    /// End of its standard output.
    pub stdout_tail: String,
    /// End of its standard error.
    pub stderr_tail: String,
    /// It ran into its deadline and was killed.
    pub timed_out: bool,
    /// Why it can't win, beyond its exit code; or what could not be found out about it.
    pub error: Option<String>,
    /// It may win: its command ended with 0 and, if there is a score command, that gave a number.
    pub viable: bool,
}

/// What came of an exploration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExploreOutcome {
    /// Of the fork-tree.
    pub tree_id: String,
    /// The sandbox that was explored; it runs on, untouched.
    pub parent_id: String,
    /// What the branches inherited, in one line.
    pub inherited: String,
    /// How long the parent was paused, milliseconds.
    pub parent_paused_ms: f64,
    /// From the fork's request until every child was ready, milliseconds.
    pub fork_ms: u64,
    /// One per candidate, in their order.
    pub branches: Vec<Branch>,
    /// Label of the best branch; none when no branch is viable.
    pub winner: Option<String>,
    /// Its sandbox.
    pub winner_id: Option<String>,
    /// The winner is an independent sandbox now.
    pub promoted: bool,
    /// Children that were deleted.
    pub deleted: Vec<String>,
    /// Children that could not be deleted or promoted, and why. Those not promoted end with their TTL.
    pub failures: BTreeMap<String, String>,
}

/// Why there is no winner.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExploreError {
    /// The candidates or options can't be explored; nothing was sent.
    #[error("{0}")]
    Invalid(String),
    /// The fork failed; there are no children.
    #[error("could not fork the sandbox to explore")]
    Fork(#[source] ClientError),
    /// No candidate's command succeeded. All children were deleted.
    #[error("no branch succeeded: {}", select::summary(&.0.branches))]
    NoViableBranch(Box<ExploreOutcome>),
    /// It was asked to stop, and deleted all children.
    #[error("interrupted; {} of the branches were deleted{}", .deleted.len(), select::left_over(.failures))]
    Interrupted {
        /// Children that were deleted.
        deleted: Vec<String>,
        /// Children that could not be deleted, and why; the server deletes them when their TTL is over.
        failures: BTreeMap<String, String>,
    },
}

/// How long the parent may take to write to its disk what it has, seconds.
const FLUSH: f64 = 5.0;
/// How long an interrupted exploration waits for the answer of its fork, before it hangs up.
const LAST_ANSWER: Duration = Duration::from_secs(5);

/// [`explore_until`] without an interruption.
pub async fn explore(
    client: &Client,
    sandbox_id: &str,
    candidates: &[Candidate],
    options: &ExploreOptions,
) -> Result<ExploreOutcome, ExploreError> {
    explore_until(client, sandbox_id, candidates, options, std::future::pending()).await
}

/// Tries every candidate in its own copy of the sandbox, and promotes the one with the highest score (then the shortest,
/// then the first by label). When `interrupt` completes before all have ended, all children are deleted.
pub async fn explore_until(
    client: &Client,
    sandbox_id: &str,
    candidates: &[Candidate],
    options: &ExploreOptions,
    interrupt: impl Future<Output = ()> + Send,
) -> Result<ExploreOutcome, ExploreError> {
    check(candidates, options)?;
    tokio::pin!(interrupt);
    if options.changes {
        tokio::select! {
            () = flush(client, sandbox_id) => {}
            () = &mut interrupt => {
                return Err(ExploreError::Interrupted { deleted: Vec::new(), failures: BTreeMap::new() });
            }
        }
    }
    let start = Instant::now();
    let count = u32::try_from(candidates.len()).unwrap_or(u32::MAX);
    let metadata =
        BTreeMap::from([("explore".into(), "1".into()), ("explore_ttl".into(), options.ttl.as_secs().to_string())]);
    let mut forking = std::pin::pin!(client.fork_tree(sandbox_id, count, metadata));
    let fork = tokio::select! {
        fork = &mut forking => fork.map_err(ExploreError::Fork)?,
        () = &mut interrupt => {
            // Hanging up makes the server undo what it had begun, but not what it has answered: its answer may be on its way.
            let (deleted, failures) = match tokio::time::timeout(LAST_ANSWER, forking).await {
                Ok(Ok(fork)) => delete_all(client, ids(&fork.children)).await,
                Ok(Err(_)) | Err(_) => Default::default(),
            };
            return Err(ExploreError::Interrupted { deleted, failures });
        }
    };
    let fork_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    if let Some(tell) = &options.on_fork {
        tell(&fork);
    }
    let branches = tokio::select! {
        branches = run_all(client, &fork, candidates, options) => branches,
        () = &mut interrupt => {
            let (deleted, failures) = delete_all(client, ids(&fork.children)).await;
            return Err(ExploreError::Interrupted { deleted, failures });
        }
    };
    settle(client, fork, fork_ms, branches, options).await
}

/// What the parent has not written to its disk yet is not on the disks that the branches begin with: a file of it that a branch
/// edits would be told as one that it added. Best effort: nothing but that depends on it.
async fn flush(client: &Client, sandbox_id: &str) {
    let request = ExecRequest { cmd: "sync".into(), timeout_seconds: Some(FLUSH), ..ExecRequest::default() };
    drop(client.exec(sandbox_id, &request).await);
}

fn check(candidates: &[Candidate], options: &ExploreOptions) -> Result<(), ExploreError> {
    let invalid = |reason: String| Err(ExploreError::Invalid(reason));
    let most = usize::try_from(MAX_FORK_COUNT).unwrap_or(usize::MAX);
    if candidates.is_empty() || candidates.len() > most {
        return invalid(format!("there must be 1 to {most} candidates, not {}", candidates.len()));
    }
    let mut labels = BTreeSet::new();
    for candidate in candidates {
        if candidate.label.trim().is_empty() || candidate.command.trim().is_empty() {
            return invalid("every candidate needs a label and a command".into());
        }
        if !labels.insert(&candidate.label) {
            return invalid(format!("two candidates have the label {:?}", candidate.label));
        }
    }
    if options.concurrency == 0 || options.timeout.is_zero() || options.ttl < Duration::from_secs(1) {
        return invalid("concurrency, timeout and TTL must be more than 0".into());
    }
    Ok(())
}

async fn run_all(client: &Client, fork: &Fork, candidates: &[Candidate], options: &ExploreOptions) -> Vec<Branch> {
    let children = pair(fork, candidates.len());
    let runs: Vec<_> = candidates
        .iter()
        .zip(children)
        .enumerate()
        .map(|(index, (candidate, child))| async move {
            let branch = match child {
                Some(child) => branch::run(client, &child.id, candidate, options).await,
                None => Branch {
                    label: candidate.label.clone(),
                    error: Some(select::why_missing(fork, index)),
                    ..Branch::default()
                },
            };
            if let Some(tell) = &options.on_branch {
                tell(&branch);
            }
            (index, branch)
        })
        .collect();
    let mut branches: Vec<_> = futures::stream::iter(runs).buffer_unordered(options.concurrency).collect().await;
    branches.sort_by_key(|(index, _)| *index);
    branches.into_iter().map(|(_, branch)| branch).collect()
}

/// The child of each candidate: by its index in the fork, or by position where a child has none.
fn pair(fork: &Fork, count: usize) -> Vec<Option<&Sandbox>> {
    let mut slots: Vec<Option<&Sandbox>> = vec![None; count];
    let mut rest = Vec::new();
    for child in &fork.children {
        let index = child.metadata.get("fork_index").and_then(|index| index.parse::<usize>().ok());
        match index.and_then(|index| slots.get_mut(index)).filter(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(child),
            None => rest.push(child),
        }
    }
    let mut rest = rest.into_iter();
    for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
        *slot = rest.next();
    }
    slots
}

fn ids(children: &[Sandbox]) -> Vec<String> {
    children.iter().map(|child| child.id.clone()).collect()
}

/// Promotes the winner and deletes the rest.
async fn settle(
    client: &Client,
    fork: Fork,
    fork_ms: u64,
    branches: Vec<Branch>,
    options: &ExploreOptions,
) -> Result<ExploreOutcome, ExploreError> {
    let winner = select::winner(&branches).map(|branch| (branch.label.clone(), branch.sandbox_id.clone()));
    let (winner, winner_id) = winner.unzip();
    let mut outcome = ExploreOutcome {
        tree_id: fork.tree_id,
        parent_id: fork.parent_id,
        inherited: fork.inherited,
        parent_paused_ms: fork.parent_paused_ms,
        fork_ms,
        branches,
        winner,
        winner_id,
        promoted: false,
        deleted: Vec::new(),
        failures: BTreeMap::new(),
    };
    if let Some(id) = outcome.winner_id.clone().filter(|_| options.promote) {
        let request = PromoteRequest { cleanup_siblings: true, tree_id: Some(outcome.tree_id.clone()) };
        match client.promote(&id, &request).await {
            Ok(reply) => {
                outcome.promoted = true;
                outcome.deleted = reply.deleted;
            }
            Err(error) => {
                outcome.failures.insert(id, format!("could not be promoted: {error}"));
            }
        }
    }
    // Whatever promote did not delete, for whatever reason.
    let mut left = ids(&fork.children);
    left.retain(|id| Some(id) != outcome.winner_id.as_ref() && !outcome.deleted.contains(id));
    let (deleted, failures) = delete_all(client, left).await;
    outcome.deleted.extend(deleted);
    outcome.failures.extend(failures);
    if outcome.winner.is_some() { Ok(outcome) } else { Err(ExploreError::NoViableBranch(Box::new(outcome))) }
}

/// Deletes them all at once; one that is gone already counts as deleted.
async fn delete_all(client: &Client, ids: Vec<String>) -> (Vec<String>, BTreeMap<String, String>) {
    let results = futures::future::join_all(ids.into_iter().map(|id| async move {
        let result = client.delete(&id).await;
        (id, result)
    }));
    let (mut deleted, mut failures) = (Vec::new(), BTreeMap::new());
    for (id, result) in results.await {
        match result {
            Ok(()) => deleted.push(id),
            Err(error) if error.is_not_found() => deleted.push(id),
            Err(error) => {
                failures.insert(id, format!("could not be deleted: {error}"));
            }
        }
    }
    (deleted, failures)
}
