//! Promote: one child goes on by itself, its siblings may go.

use std::collections::BTreeMap;
use std::sync::Arc;

use coppice_api::{ErrorClass, PromoteReply, PromoteRequest};
use tracing::info;

use crate::actor::Op;
use crate::entry::{AccessError, Entry};
use crate::host::Shared;
use crate::record::{ForkRole, Lineage, SandboxRecord};
use crate::store::StoreError;
use crate::{Coded, HostError};

/// Why nothing was promoted.
#[derive(Debug, thiserror::Error)]
pub enum PromoteError {
    /// No such sandbox.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The tree named is not the winner's.
    #[error("tree {given} is not the tree of sandbox {winner}, which is {own}")]
    ForeignTree {
        /// Id of the winner.
        winner: String,
        /// From the request.
        given: String,
        /// The winner's, or "none".
        own: String,
    },
    /// There are no siblings to clean up.
    #[error("sandbox {0} is not a child of a fork: it has no siblings to clean up")]
    NotAChild(String),
    /// It can't be recorded.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Coded for PromoteError {
    fn code(&self) -> &'static str {
        match self {
            Self::Access(e) => e.code(),
            Self::ForeignTree { .. } => "foreign_tree",
            Self::NotAChild(_) => "not_a_fork_child",
            Self::Store(_) => "store_failed",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Access(e) => e.class(),
            Self::ForeignTree { .. } | Self::NotAChild(_) => ErrorClass::Caller,
            Self::Store(_) => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Access(e) => e.hint(),
            _ => None,
        }
    }
}

pub(crate) async fn promote(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    request: PromoteRequest,
) -> Result<PromoteReply, PromoteError> {
    let winner = shared.entry(workspace, id)?;
    let lineage = winner.record().lineage;
    let own = lineage.as_ref().map(|lineage| lineage.tree_id.to_string());
    if let Some(given) = request.tree_id.filter(|given| !given.is_empty())
        && own.as_deref() != Some(given.as_str())
    {
        let own = own.unwrap_or_else(|| "none".into());
        return Err(PromoteError::ForeignTree { winner: winner.id.to_string(), given, own });
    }
    if winner.is_stopped() {
        return Err(winner.unusable().into());
    }
    let Some(lineage) = lineage else {
        if request.cleanup_siblings {
            return Err(PromoteError::NotAChild(winner.id.to_string()));
        }
        return Ok(reply(&winner, String::new()));
    };
    settle(shared, &winner).await?;
    coppice_fault::point!("promote.settled");
    let mut answer = reply(&winner, lineage.tree_id.to_string());
    if request.cleanup_siblings {
        for (sibling, deleted) in delete_siblings(shared, &winner, &lineage).await {
            match deleted {
                // Gone by itself meanwhile: neither ours nor a failure.
                Err(e) if e.class() == ErrorClass::NotFound => {}
                Err(e) => drop(answer.failures.insert(sibling, e.chain())),
                Ok(()) => answer.deleted.push(sibling),
            }
        }
    }
    coppice_fault::point!("promote.deleted");
    info!(winner = %winner.id, deleted = answer.deleted.len(), failures = answer.failures.len(), "promoted");
    Ok(answer)
}

fn reply(winner: &Entry, tree_id: String) -> PromoteReply {
    PromoteReply { winner: winner.id.to_string(), tree_id, deleted: Vec::new(), failures: BTreeMap::new() }
}

/// The winner is an independent sandbox from now on: the TTL of the exploration no longer applies. One that is on its way
/// out, because a sibling was promoted a moment before, is gone.
async fn settle(shared: &Shared, winner: &Entry) -> Result<(), PromoteError> {
    winner.touch();
    let change = |record: &mut SandboxRecord| {
        if winner.is_condemned() {
            return false;
        }
        (record.ttl_seconds, record.on_ttl) = (record.settled_ttl_seconds, record.settled_on_ttl);
        record.metadata.remove("explore_ttl");
        if let Some(lineage) = &mut record.lineage {
            lineage.role = ForkRole::Promoted;
        }
        true
    };
    match winner.change_lifecycle(&shared.store, change).await? {
        Some(_) => Ok(()),
        None => Err(AccessError::NotFound(winner.id.to_string()).into()),
    }
}

/// Only children of the same fork and workspace, and only those that were not promoted themselves; and whoever took the place
/// of one of them by a warm fork.
async fn delete_siblings(shared: &Shared, winner: &Entry, lineage: &Lineage) -> Vec<(String, Result<(), HostError>)> {
    let is_loser = |entry: &Arc<Entry>| {
        entry.id != winner.id && entry.workspace == winner.workspace && entry.condemn(lineage.tree_id)
    };
    let all = shared.all();
    let mut losers: Vec<Arc<Entry>> = all.iter().filter(|entry| is_loser(entry)).map(Arc::clone).collect();
    let mut next = 0;
    while let Some(loser) = losers.get(next) {
        let is_its_successor = |entry: &&Arc<Entry>| {
            loser.record().successor == Some(entry.id)
                && entry.record().lineage.is_some_and(|lineage| lineage.role == ForkRole::Child)
        };
        losers.extend(all.iter().find(is_its_successor).map(Arc::clone));
        next += 1;
    }
    futures::future::join_all(losers.into_iter().map(|entry| async move {
        let deleted = entry.ask(Op::Delete).await.map_err(HostError::from);
        if deleted.is_err() {
            entry.spare();
        }
        (entry.id.to_string(), deleted)
    }))
    .await
}
