//! Snapshots that clients keep.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use coppice_api::{ErrorClass, Snapshot};
use coppice_engine::CapturePlan;
use coppice_snapshot::{CreateImageError, MachineImage, OpenImageError, PendingImage};
use uuid::Uuid;

use crate::Coded;
use crate::actor::{Op, OpError};
use crate::entry::AccessError;
use crate::host::{Shared, remove_tree};
use crate::record::{SandboxRecord, SnapshotKind, SnapshotRecord};
use crate::store::StoreError;

/// Why a snapshot was not made or found.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// There is none with this id, or it is another workspace's.
    #[error("snapshot {0} not found")]
    NotFound(String),
    /// The sandbox can't be used.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The sandbox could not be captured.
    #[error(transparent)]
    Capture(#[from] OpError),
    /// Its directory can't be made.
    #[error("the snapshot can't be stored")]
    Create(#[from] CreateImageError),
    /// Its files can't be used.
    #[error("snapshot {id} can't be used")]
    Open {
        /// Of the snapshot.
        id: Uuid,
        /// Why.
        #[source]
        source: Box<OpenImageError>,
    },
    /// The records can't be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A bug: the task that made it panicked.
    #[error("the snapshot was interrupted")]
    Interrupted,
}

impl Coded for SnapshotError {
    fn code(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "snapshot_not_found",
            Self::Access(e) => e.code(),
            Self::Capture(e) => e.code(),
            Self::Create(_) => "capture_failed",
            Self::Open { .. } => "image_damaged",
            Self::Store(_) => "store_failed",
            Self::Interrupted => "interrupted",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::NotFound(_) => ErrorClass::NotFound,
            Self::Access(e) => e.class(),
            Self::Capture(e) => e.class(),
            _ => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Access(e) => e.hint(),
            Self::Capture(e) => e.hint(),
            _ => None,
        }
    }
}

pub(crate) async fn create(shared: &Arc<Shared>, workspace: &str, id: &str) -> Result<Snapshot, SnapshotError> {
    let entry = shared.entry(workspace, id)?;
    let in_use = entry.in_use();
    let shared = Arc::clone(shared);
    let made = tokio::spawn(async move {
        let _in_use = in_use;
        let snapshot = Uuid::new_v4();
        let image = PendingImage::create(&shared.snapshot_dir(snapshot))?;
        coppice_fault::point!("snapshot.image");
        let plan = CapturePlan { image, id: snapshot, durable: true, hold: None };
        let captured = entry.ask(|reply| Op::Capture(Box::new(plan), reply)).await?;
        coppice_fault::point!("snapshot.captured");
        let record = record_of(&entry.record(), &captured.image, SnapshotKind::Kept).await;
        if let Err(e) = shared.store.put_snapshot(&record).await {
            remove_tree(captured.image.dir().to_owned()).await;
            return Err(e.into());
        }
        coppice_fault::point!("snapshot.recorded");
        metrics::counter!("coppice_snapshots_total").increment(1);
        Ok(record.to_api())
    });
    made.await.map_err(|_| SnapshotError::Interrupted)?
}

/// The record of an image that was just captured of a sandbox.
pub(crate) async fn record_of(sandbox: &SandboxRecord, image: &MachineImage, kind: SnapshotKind) -> SnapshotRecord {
    let dir = image.dir().to_owned();
    let measured = tokio::task::spawn_blocking(move || coppice_disk::tree_usage(&dir)).await;
    SnapshotRecord {
        id: image.manifest().id,
        workspace: sandbox.workspace.clone(),
        sandbox_id: sandbox.id,
        template: sandbox.template.clone(),
        kind,
        // 0 when it can't be measured, which is no reason to fail.
        size_bytes: measured.ok().and_then(Result::ok).unwrap_or(0),
        created_at: image.manifest().captured_at,
    }
}

pub(crate) async fn get(shared: &Shared, workspace: &str, id: &str) -> Result<SnapshotRecord, SnapshotError> {
    let not_found = || SnapshotError::NotFound(id.chars().take(64).collect());
    let parsed: Uuid = id.parse().map_err(|_| not_found())?;
    let found = shared.store.snapshot(parsed).await?;
    // What holds a hibernated sandbox is that sandbox, and no snapshot to anyone else.
    let found = found.filter(|snapshot| snapshot.kind != SnapshotKind::Hibernation);
    found.filter(|snapshot| snapshot.workspace == workspace).ok_or_else(not_found)
}

/// Holds the files of a snapshot while a machine is started from them: a delete takes the record at once, and the last
/// holder takes the files.
#[derive(Debug)]
pub(crate) struct Lease {
    dir: PathBuf,
    deleted: AtomicBool,
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Without a runtime the process is ending: the next start removes what no record knows.
        if self.deleted.load(Ordering::Relaxed)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            drop(runtime.spawn(remove_tree(std::mem::take(&mut self.dir))));
        }
    }
}

/// Before the record is looked for: whoever deletes it either finds the lease or is seen.
pub(crate) fn lease(shared: &Shared, id: Uuid) -> Arc<Lease> {
    let mut leases = shared.leases.lock().unwrap_or_else(PoisonError::into_inner);
    leases.retain(|_, lease| lease.strong_count() > 0);
    let held = leases.get(&id).and_then(Weak::upgrade);
    held.unwrap_or_else(|| {
        let lease = Arc::new(Lease { dir: shared.snapshot_dir(id), deleted: AtomicBool::new(false) });
        leases.insert(id, Arc::downgrade(&lease));
        lease
    })
}

/// Opens a snapshot's image; the first time in this run all of its checksums are compared.
pub(crate) async fn open(shared: &Shared, id: Uuid) -> Result<MachineImage, SnapshotError> {
    let dir = shared.snapshot_dir(id);
    let known = shared.verified.lock().unwrap_or_else(PoisonError::into_inner).contains(&id);
    let opened = tokio::task::spawn_blocking(move || {
        let image = MachineImage::open(&dir)?;
        if !known {
            image.verify()?;
        }
        Ok(image)
    });
    let opened = opened.await.map_err(|_| SnapshotError::Interrupted)?;
    let image = opened.map_err(|source| SnapshotError::Open { id, source: Box::new(source) })?;
    shared.verified.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    Ok(image)
}

pub(crate) async fn list(
    shared: &Shared,
    workspace: &str,
    sandbox_id: Option<&str>,
) -> Result<Vec<Snapshot>, SnapshotError> {
    let all = shared.store.snapshots().await?;
    let wanted = |s: &SnapshotRecord| {
        s.workspace == workspace
            && s.kind == SnapshotKind::Kept
            && sandbox_id.is_none_or(|id| s.sandbox_id.to_string() == id)
    };
    Ok(all.iter().filter(|s| wanted(s)).map(SnapshotRecord::to_api).collect())
}

/// The record goes first: a crash then leaves a directory that the next start removes, never a record without files.
pub(crate) async fn delete(shared: &Shared, workspace: &str, id: &str) -> Result<(), SnapshotError> {
    let snapshot = get(shared, workspace, id).await?;
    if !shared.store.delete_snapshot(snapshot.id).await? {
        return Err(SnapshotError::NotFound(snapshot.id.to_string()));
    }
    shared.verified.lock().unwrap_or_else(PoisonError::into_inner).remove(&snapshot.id);
    coppice_fault::point!("delete-snapshot.record");
    let held = shared.leases.lock().unwrap_or_else(PoisonError::into_inner).get(&snapshot.id).and_then(Weak::upgrade);
    match held {
        Some(lease) => lease.deleted.store(true, Ordering::Relaxed),
        None => remove_tree(shared.snapshot_dir(snapshot.id)).await,
    }
    coppice_fault::point!("delete-snapshot.files");
    Ok(())
}
