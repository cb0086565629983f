//! What of a workspace counts for its quotas: what is there, and what one more sandbox would be.
//!
//! Sizes are those that files can grow to, not what is allocated now: a limit that is decided before a sandbox is made
//! must hold for what its guest writes afterwards. Deciding is control's.

use std::path::{Path, PathBuf};

use coppice_api::{CreateSandboxRequest, ErrorClass, SandboxStatus};
use coppice_snapshot::{DISK_FILE, MEMORY_FILE};

use crate::Coded;
use crate::api::{Held, Holdings};
use crate::create::{self, CreateError};
use crate::host::Shared;
use crate::record::SnapshotKind;
use crate::store::StoreError;

/// Why it can't be said.
#[derive(Debug, thiserror::Error)]
pub enum HoldingsError {
    /// The records can't be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What a create starts from can't be used.
    #[error(transparent)]
    Source(#[from] CreateError),
    /// A bug: the task that measured panicked.
    #[error("measuring the workspace was interrupted")]
    Interrupted,
}

impl Coded for HoldingsError {
    fn code(&self) -> &'static str {
        match self {
            Self::Store(e) => e.code(),
            Self::Source(e) => e.code(),
            Self::Interrupted => "interrupted",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Source(e) => e.class(),
            Self::Store(_) | Self::Interrupted => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Source(e) => e.hint(),
            Self::Store(_) | Self::Interrupted => None,
        }
    }
}

pub(crate) async fn of(shared: &Shared, workspace: &str) -> Result<Holdings, HoldingsError> {
    // Snapshots first: one that is taken meanwhile is still counted by whoever takes it.
    let snapshots = shared.store.snapshots().await?;
    let snapshots = snapshots.into_iter().filter(|s| s.workspace == workspace && s.kind == SnapshotKind::Kept);
    let snapshots: Vec<_> = snapshots.map(|s| (s.id.to_string(), shared.snapshot_dir(s.id))).collect();
    let sandboxes = shared.all().into_iter().filter(|entry| entry.workspace == workspace);
    let sandboxes: Vec<_> = sandboxes
        // What one that is stopped had is its successor's.
        .filter(|entry| !entry.is_stopped())
        .map(|entry| {
            let record = entry.record();
            // One that hibernates has its disk in the image that holds it.
            let held = record.image.filter(|_| record.status == SandboxStatus::Hibernated);
            let dir = held.map_or_else(|| shared.sandbox_dir(entry.id), |image| shared.snapshot_dir(image));
            (entry.id.to_string(), u64::from(record.memory_mib), dir)
        })
        .collect();
    let measured = tokio::task::spawn_blocking(move || Holdings {
        sandboxes: sandboxes.into_iter().map(|(id, memory_mib, dir)| sandbox(id, memory_mib, &dir)).collect(),
        snapshots: snapshots.into_iter().map(snapshot).collect(),
    });
    measured.await.map_err(|_| HoldingsError::Interrupted)
}

pub(crate) async fn of_new(
    shared: &Shared,
    workspace: &str,
    request: &CreateSandboxRequest,
) -> Result<Held, HoldingsError> {
    let source = create::resolve(shared, workspace, request).await?;
    let manifest = source.image.manifest();
    Ok(Held {
        id: String::new(),
        memory_mib: u64::from(manifest.machine.memory_mib),
        disk_mib: manifest.disk.len.div_ceil(1 << 20),
    })
}

fn sandbox(id: String, memory_mib: u64, dir: &Path) -> Held {
    Held { id, memory_mib, disk_mib: size(dir, DISK_FILE).div_ceil(1 << 20) }
}

fn snapshot((id, dir): (String, PathBuf)) -> Held {
    let (memory, disk) = (size(&dir, MEMORY_FILE), size(&dir, DISK_FILE));
    Held { id, memory_mib: memory >> 20, disk_mib: (memory + disk).div_ceil(1 << 20) }
}

/// 0 for one that is being deleted.
fn size(dir: &Path, file: &str) -> u64 {
    std::fs::metadata(dir.join(file)).map_or(0, |found| found.len())
}
