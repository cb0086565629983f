//! Forking, and choosing among the children.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{OnTtl, Sandbox};

/// Most children of one call.
pub const MAX_FORK_COUNT: u32 = 16;

/// What a fork's children inherit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ForkMode {
    /// The disk, flushed. Children boot.
    #[default]
    #[serde(alias = "cold")]
    Disk,
    /// Disk and memory; one child, which takes the parent's place.
    Warm,
}

/// Body of `POST /v1/sandboxes/{id}/fork`; an empty body is all defaults.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ForkRequest {
    /// 1 to 16; default 1. Exactly 1 with `warm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<i64>,
    /// Default `disk`.
    #[serde(default)]
    pub mode: ForkMode,
    /// For every child.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// What becomes of a child that was idle for its TTL. Absent: the same as of the parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_ttl: Option<OnTtl>,
}

/// Body of `POST /v1/sandboxes/{id}/fork-tree`; an empty body is all defaults.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ForkTreeRequest {
    /// 1 to 16; default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<i64>,
    /// For every child. `explore_ttl` (seconds, as text) becomes their TTL, until one is promoted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// What becomes of a child that was idle for its TTL. Absent: the same as of the parent; with an `explore_ttl`, `delete`
    /// until it is promoted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_ttl: Option<OnTtl>,
}

/// Answer of `fork` and `fork-tree`: at least one child, in index order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Fork {
    /// The children that run, complete, by `metadata.fork_index`.
    pub children: Vec<Sandbox>,
    /// Children that did not start, if any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<ForkError>,
    /// The sandbox that was forked.
    pub parent_id: String,
    /// The snapshot that the children were restored from, for as long as one of them needs it; absent for a `disk` fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    /// What the children of this call have in common; see `promote`.
    pub tree_id: String,
    /// The instant that the children continue from, RFC 3339.
    pub at: String,
    /// How long the parent was paused, milliseconds. Of a `warm` fork: until its child had taken over.
    pub parent_paused_ms: f64,
    /// `reflink`, or `copy` where the file system has no reflinks (slow).
    pub disk_clone: String,
    /// Whether the parent's unwritten data was flushed and its file system frozen before a `disk` fork. Always true
    /// otherwise: children have the memory that the data is in.
    pub flushed: bool,
    /// `disk`, `fork-tree` or `warm`.
    pub mode: String,
    /// One line: what the children inherited and what they did not.
    pub inherited: String,
    /// Guest memory that was copied from the parent, bytes.
    pub memory_bytes: u64,
    /// Bytes of it that were written to the image of the children: long stretches of zeros are not.
    #[serde(default)]
    pub memory_written_bytes: u64,
    /// What the capture's time was made of; absent for a `disk` fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture: Option<CaptureBreakdown>,
}

/// What the time of a capture was made of, milliseconds. All but `publish` is inside the pause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CaptureBreakdown {
    /// Until the virtual CPUs had stopped and block I/O was drained.
    pub stop: f64,
    /// Writing device state.
    pub devices: f64,
    /// Cloning the disk.
    pub disk: f64,
    /// Finding and copying the memory that the parent owns.
    pub memory: f64,
    /// After the pause: writing the copy to the image.
    pub publish: f64,
}

/// A child that did not start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ForkError {
    /// Which of the call.
    pub index: u32,
    /// Why.
    pub err: String,
}

/// Body of `POST /v1/sandboxes/{id}/promote`; an empty body is all defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct PromoteRequest {
    /// Delete the other children of the same fork.
    #[serde(default)]
    pub cleanup_siblings: bool,
    /// Must be the winner's own tree when given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_id: Option<String>,
}

/// Answer of `promote`. Repeating the call gives the same answer with nothing deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct PromoteReply {
    /// The sandbox that goes on by itself.
    pub winner: String,
    /// The fork that it came from; empty for a sandbox that is no child.
    pub tree_id: String,
    /// Siblings that were deleted.
    pub deleted: Vec<String>,
    /// Siblings that could not be deleted, and why.
    pub failures: BTreeMap<String, String>,
}
