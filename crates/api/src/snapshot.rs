//! Snapshots.

use serde::{Deserialize, Serialize};

/// Memory, device state and disk of a sandbox at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Snapshot {
    /// Lowercase UUID.
    pub id: String,
    /// The sandbox it was taken of, which may be gone.
    pub sandbox_id: String,
    /// That sandbox's template.
    pub template: String,
    /// Bytes allocated on the host; extents shared with other images are counted.
    pub size_bytes: u64,
    /// RFC 3339.
    pub created_at: String,
    /// Owner.
    pub workspace: String,
}

/// Answer of `POST …/snapshots`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CreatedSnapshot {
    /// The snapshot.
    #[serde(flatten)]
    pub snapshot: Snapshot,
    /// Its `id` again: some clients read this name.
    pub snapshot_id: String,
}
