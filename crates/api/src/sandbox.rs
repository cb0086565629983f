//! Sandboxes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Network, NetworkRequest};

/// Metadata keys that only the server sets; a client's values for them are ignored.
pub const RESERVED_METADATA: [&str; 6] =
    ["workspace", "fork_tree_id", "fork_tree_role", "fork_parent_id", "fork_index", "successor"];

/// Most bytes of a sandbox's metadata, keys and values together.
pub const MAX_METADATA_BYTES: usize = 16 << 10;

/// Whether a client's metadata may not set this key.
#[must_use]
pub fn is_reserved_metadata(key: &str) -> bool {
    RESERVED_METADATA.contains(&key) || key.starts_with("fork_")
}

/// What a sandbox is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxStatus {
    /// Being made.
    Creating,
    /// Its guest answers.
    Running,
    /// Its virtual CPUs are stopped.
    Paused,
    /// Being deleted.
    Stopping,
    /// Its machine is gone, its record stays until its TTL: `metadata.successor` is the sandbox that took its place.
    Stopped,
    /// On disk, without a VMM.
    Hibernated,
    /// Its machine died or can't go on; `error` says why.
    Failed,
}

/// How a sandbox's machine was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BootMode {
    /// Kernel and init booted.
    Cold,
    /// Restored from a snapshot.
    Snapshot,
}

/// What becomes of a sandbox that was idle for its TTL.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnTtl {
    /// It is deleted.
    #[default]
    Delete,
    /// It hibernates, until it is used again or deleted. One whose machine has failed is deleted all the same.
    Hibernate,
}

/// What the time to the acknowledged handshake was made of, milliseconds. What a whole request needed once for all of its
/// children (admission, the capture of their parent) comes before and is not in here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct BootBreakdown {
    /// Cloning the disk, making directories, recording the intent.
    pub prepare: f64,
    /// Until the VMM process answered.
    pub spawn: f64,
    /// Until device state was loaded and the virtual CPUs ran; for a cold boot 0.
    pub load: f64,
    /// Until the guest's agent answered the session's preamble; for a cold boot that is kernel and init.
    pub session: f64,
    /// The resume handshake.
    pub handshake: f64,
}

/// One microVM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Sandbox {
    /// Lowercase UUID.
    pub id: String,
    /// The template that it (or its first ancestor) was created from.
    pub template: String,
    /// Virtual CPUs.
    pub cpu: u32,
    /// Memory, MiB.
    pub memory_mb: u32,
    /// What it is doing.
    pub status: SandboxStatus,
    /// Address in the sandbox network; empty while it has none.
    pub guest_ip: String,
    /// What it may reach.
    #[serde(default)]
    pub network: Network,
    /// The client's own, and the server's `fork_*` keys.
    pub metadata: BTreeMap<String, String>,
    /// The snapshot that it was created from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_snapshot: Option<String>,
    /// From the request to the guest's acknowledgement, milliseconds.
    pub boot_ms: u64,
    /// How it was started.
    pub boot_mode: BootMode,
    /// What of `boot_ms` was this sandbox's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootBreakdown>,
    /// RFC 3339.
    pub created_at: String,
    /// Never reaped.
    pub persistent: bool,
    /// Idle seconds after which `on_ttl` is done.
    pub ttl_seconds: u64,
    /// What becomes of it then.
    #[serde(default)]
    pub on_ttl: OnTtl,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Body of `POST /v1/sandboxes`. Unknown fields are ignored, as are `cpu` and `memory_mb`: those are the template's.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CreateSandboxRequest {
    /// Template name; ignored with `from_snapshot`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The client's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Idle seconds after which it is deleted; more than 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
    /// What becomes of it then; default `delete`. Children of a fork inherit it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_ttl: Option<OnTtl>,
    /// Never reap it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// Restore this snapshot instead of a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_snapshot: Option<String>,
    /// What it may reach. Absent: the internet. Children of a fork inherit it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkRequest>,
    /// Not supported yet: a non-empty list is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub volumes: Option<Vec<serde_json::Value>>,
}

/// Answer of `POST …/hibernate` and `…/wake`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct StatusReply {
    /// What it is now.
    pub status: SandboxStatus,
}

/// Answer of `GET` and `PATCH …/lifecycle`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Lifecycle {
    /// Idle seconds after which `on_ttl` is done.
    pub ttl_seconds: u64,
    /// What becomes of it then.
    #[serde(default)]
    pub on_ttl: OnTtl,
    /// Never reaped.
    pub persistent: bool,
    /// Seconds since it was last used. What is in progress (a command, a file, a connection to a port) is use, for as long as
    /// it lasts; looking at a sandbox is none.
    pub idle_seconds: u64,
}

/// Body of `PATCH …/lifecycle`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct LifecyclePatch {
    /// More than 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
    /// What becomes of it when it was idle for so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_ttl: Option<OnTtl>,
    /// Never reap it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
}

/// Answer of `GET /v1/me`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Me {
    /// Who the token belongs to.
    pub user_id: String,
    /// Empty: a self-hosted token has none.
    pub email: String,
    /// Workspace of the token.
    pub current_org: String,
    /// Workspaces that it may use.
    pub orgs: Vec<String>,
    /// `token`.
    pub auth_method: String,
}

/// Answer of `GET /version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Version {
    /// Of this build.
    pub version: String,
    /// Engine of the host, e.g. `qemu 7.2.22 (tcg)`.
    pub engine: String,
}
