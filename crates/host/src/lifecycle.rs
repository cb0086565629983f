//! Delete, pause, resume, hibernate, wake, and the TTL of a sandbox.

use std::sync::Arc;

use coppice_api::{ErrorClass, Lifecycle, LifecyclePatch};
use jiff::Timestamp;

use crate::Coded;
use crate::actor::{Op, OpError};
use crate::create::{CreateError, check_ttl};
use crate::entry::{AccessError, Entry};
use crate::host::Shared;
use crate::record::SandboxRecord;
use crate::store::StoreError;

/// Why a TTL was not changed.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    /// No such sandbox.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// Not a TTL.
    #[error(transparent)]
    Ttl(#[from] CreateError),
    /// It can't be recorded.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Coded for LifecycleError {
    fn code(&self) -> &'static str {
        match self {
            Self::Access(e) => e.code(),
            Self::Ttl(e) => e.code(),
            Self::Store(_) => "store_failed",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Access(e) => e.class(),
            Self::Ttl(e) => e.class(),
            Self::Store(_) => ErrorClass::Internal,
        }
    }
}

pub(crate) async fn delete(shared: &Arc<Shared>, workspace: &str, id: &str) -> Result<(), OpError> {
    shared.entry(workspace, id)?.ask(Op::Delete).await
}

pub(crate) async fn pause(shared: &Arc<Shared>, workspace: &str, id: &str) -> Result<(), OpError> {
    let entry = shared.entry(workspace, id)?;
    entry.touch();
    entry.ask(Op::Pause).await
}

pub(crate) async fn resume(shared: &Arc<Shared>, workspace: &str, id: &str) -> Result<(), OpError> {
    let entry = shared.entry(workspace, id)?;
    entry.touch();
    entry.ask(Op::Resume).await
}

pub(crate) async fn hibernate(shared: &Arc<Shared>, workspace: &str, id: &str) -> Result<(), OpError> {
    let entry = shared.entry(workspace, id)?;
    entry.touch();
    entry.ask(Op::Hibernate).await
}

pub(crate) async fn wake(shared: &Arc<Shared>, workspace: &str, id: &str) -> Result<(), AccessError> {
    let entry = shared.entry(workspace, id)?;
    entry.touch();
    entry.ask(Op::Wake).await
}

pub(crate) fn get(shared: &Shared, workspace: &str, id: &str) -> Result<Lifecycle, AccessError> {
    let entry = shared.entry(workspace, id)?;
    Ok(show(&entry))
}

fn show(entry: &Entry) -> Lifecycle {
    let record = entry.record();
    let idle = Timestamp::now().duration_since(entry.last_used()).as_secs();
    Lifecycle {
        ttl_seconds: record.ttl_seconds,
        on_ttl: record.on_ttl,
        persistent: record.persistent,
        idle_seconds: u64::try_from(idle).unwrap_or(0),
    }
}

pub(crate) async fn set(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    patch: LifecyclePatch,
) -> Result<Lifecycle, LifecycleError> {
    let entry = shared.entry(workspace, id)?;
    let ttl = patch.ttl_seconds.map(check_ttl).transpose()?;
    entry.touch();
    let change = |record: &mut SandboxRecord| {
        if let Some(ttl) = ttl {
            (record.ttl_seconds, record.settled_ttl_seconds) = (ttl, ttl);
        }
        if let Some(on_ttl) = patch.on_ttl {
            (record.on_ttl, record.settled_on_ttl) = (on_ttl, on_ttl);
        }
        if let Some(persistent) = patch.persistent {
            record.persistent = persistent;
        }
        true
    };
    entry.change_lifecycle(&shared.store, change).await?;
    Ok(show(&entry))
}
