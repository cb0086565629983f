//! Promote: one child goes on by itself, its siblings may go.

use std::collections::BTreeMap;
use std::sync::Arc;

use coppice_api::{ErrorClass, PromoteReply, PromoteRequest};
use tracing::info;

use crate::actor::Op;
use crate::entry::{AccessError, Entry};
use crate::host::Shared;
use crate::record::{ForkRole, Lineage};
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
    let Some(lineage) = lineage else {
        if request.cleanup_siblings {
            return Err(PromoteError::NotAChild(winner.id.to_string()));
        }
        return Ok(reply(&winner, String::new()));
    };
    settle(shared, &winner).await?;
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
    info!(winner = %winner.id, deleted = answer.deleted.len(), failures = answer.failures.len(), "promoted");
    Ok(answer)
}

fn reply(winner: &Entry, tree_id: String) -> PromoteReply {
    PromoteReply { winner: winner.id.to_string(), tree_id, deleted: Vec::new(), failures: BTreeMap::new() }
}

/// The winner is an independent sandbox from now on: the TTL of the exploration no longer applies.
async fn settle(shared: &Shared, winner: &Entry) -> Result<(), StoreError> {
    winner.touch();
    let record = winner.update(|record| {
        record.ttl_seconds = record.settled_ttl_seconds;
        record.metadata.remove("explore_ttl");
        if let Some(lineage) = &mut record.lineage {
            lineage.role = ForkRole::Promoted;
        }
    });
    shared.store.put_lifecycle(&record).await
}

/// Only children of the same fork and workspace, and only those that were not promoted themselves.
async fn delete_siblings(shared: &Shared, winner: &Entry, lineage: &Lineage) -> Vec<(String, Result<(), HostError>)> {
    let is_loser = |entry: &Arc<Entry>| {
        let sibling = entry.record().lineage;
        entry.id != winner.id
            && entry.workspace == winner.workspace
            && sibling.is_some_and(|s| s.tree_id == lineage.tree_id && s.role == ForkRole::Child)
    };
    let losers = shared.all().into_iter().filter(is_loser);
    futures::future::join_all(losers.map(|entry| async move {
        let deleted = entry.ask(Op::Delete).await.map_err(HostError::from);
        (entry.id.to_string(), deleted)
    }))
    .await
}
