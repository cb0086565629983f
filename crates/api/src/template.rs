//! Templates.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A named machine image that sandboxes are created from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Template {
    /// What `create` takes.
    pub name: String,
    /// Path of the root disk on the host.
    pub rootfs_path: String,
    /// Bytes allocated on the host.
    pub size_bytes: u64,
    /// Virtual CPUs of its sandboxes.
    pub cpu: u32,
    /// Memory of its sandboxes, MiB.
    pub memory_mb: u32,
    /// Offered to every workspace.
    pub is_global: bool,
    /// Owner; empty for a global one.
    pub workspace: String,
    /// Short title.
    pub label: String,
    /// What is in it.
    pub description: String,
    /// For grouping.
    pub category: String,
    /// The template that its recipe builds on; empty for none.
    pub base: String,
    /// Programs that it is meant for.
    pub tools: Vec<String>,
    /// Anything else, e.g. `generation`, `aliases`.
    pub meta: BTreeMap<String, String>,
}
