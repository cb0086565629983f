//! What is recorded of sandboxes and snapshots. Plain data; the transition table of [`SandboxStatus`] is here too.

use std::collections::BTreeMap;
use std::time::Duration;

use coppice_api::{BootBreakdown, BootMode, OnTtl, Sandbox, SandboxStatus, Snapshot};
use coppice_engine::VmRecord;
use coppice_net::{Egress, SlotRecord};
use jiff::Timestamp;
use uuid::Uuid;

use crate::network;

/// Whether a sandbox may go from one status to another. Every change of status is checked against this table.
pub(crate) fn may_become(from: SandboxStatus, to: SandboxStatus) -> bool {
    use SandboxStatus::{Creating, Failed, Hibernated, Paused, Running, Stopped, Stopping};
    match from {
        Creating => matches!(to, Running | Failed | Stopping),
        Running => matches!(to, Paused | Failed | Stopping | Stopped | Hibernated),
        Paused => matches!(to, Running | Failed | Stopping | Hibernated),
        Hibernated => matches!(to, Running | Failed | Stopping),
        // A machine whose disk could not be written goes on once there is room.
        Failed => matches!(to, Running | Stopping),
        Stopped => matches!(to, Stopping),
        Stopping => false,
    }
}

/// Where a child comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lineage {
    pub tree_id: Uuid,
    pub parent_id: Uuid,
    pub index: u32,
    /// How many children the fork was to have.
    pub count: u32,
    pub role: ForkRole,
    pub kind: ForkKind,
}

/// The kind of fork that a child is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ForkKind {
    Disk,
    Tree,
    Warm,
}

impl ForkKind {
    /// Also what the child's guest is told.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Tree => "fork-tree",
            Self::Warm => "warm",
        }
    }

    pub(crate) fn boot_mode(self) -> BootMode {
        match self {
            Self::Disk => BootMode::Cold,
            Self::Tree | Self::Warm => BootMode::Snapshot,
        }
    }
}

/// Whether a child still competes with its siblings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ForkRole {
    Child,
    Promoted,
}

impl ForkRole {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Child => "child",
            Self::Promoted => "promoted",
        }
    }
}

/// One sandbox.
#[derive(Debug, Clone)]
pub(crate) struct SandboxRecord {
    pub id: Uuid,
    pub workspace: String,
    pub template: String,
    pub cpus: u32,
    pub memory_mib: u32,
    pub status: SandboxStatus,
    pub error: Option<String>,
    pub metadata: BTreeMap<String, String>,
    pub from_snapshot: Option<Uuid>,
    /// What its machine was restored from and what holds it while it hibernates.
    pub image: Option<Uuid>,
    pub boot_mode: BootMode,
    pub boot_ms: u64,
    pub boot: Option<BootBreakdown>,
    pub created_at: Timestamp,
    pub persistent: bool,
    pub ttl_seconds: u64,
    pub settled_ttl_seconds: u64,
    /// What becomes of it when it was idle for its TTL.
    pub on_ttl: OnTtl,
    /// The same once an explored child is promoted.
    pub settled_on_ttl: OnTtl,
    pub last_used_at: Timestamp,
    pub lineage: Option<Lineage>,
    /// Who took its place.
    pub successor: Option<Uuid>,
    /// What it may reach.
    pub egress: Egress,
    /// Its place on the network; none before it has one and after its machine is gone.
    pub network: Option<SlotRecord>,
    pub vm: Option<VmRecord>,
}

impl SandboxRecord {
    /// What clients see: their own metadata, and what only the server may say on top.
    pub(crate) fn to_api(&self) -> Sandbox {
        let mut metadata = self.metadata.clone();
        metadata.insert("workspace".into(), self.workspace.clone());
        if let Some(lineage) = &self.lineage {
            metadata.insert("fork_tree_id".into(), lineage.tree_id.to_string());
            metadata.insert("fork_parent_id".into(), lineage.parent_id.to_string());
            metadata.insert("fork_index".into(), lineage.index.to_string());
            metadata.insert("fork_tree_role".into(), lineage.role.as_str().into());
        }
        if let Some(successor) = self.successor {
            metadata.insert("successor".into(), successor.to_string());
        }
        Sandbox {
            id: self.id.to_string(),
            template: self.template.clone(),
            cpu: self.cpus,
            memory_mb: self.memory_mib,
            status: self.status,
            guest_ip: self.network.as_ref().map(|slot| slot.address.to_string()).unwrap_or_default(),
            network: network::show(&self.egress),
            metadata,
            from_snapshot: self.from_snapshot.map(|id| id.to_string()),
            boot_ms: self.boot_ms,
            boot_mode: self.boot_mode,
            boot: self.boot,
            created_at: self.created_at.to_string(),
            persistent: self.persistent,
            ttl_seconds: self.ttl_seconds,
            on_ttl: self.on_ttl,
            error: self.error.clone(),
        }
    }

    /// Another one has its machine, its place on the network, and what its memory was restored from.
    pub(crate) fn succeeded_by(&mut self, successor: Uuid) {
        (self.status, self.successor) = (SandboxStatus::Stopped, Some(successor));
        (self.image, self.network, self.vm) = (None, None, None);
    }

    /// Changes what it may reach, here and in what is recorded of its slot.
    pub(crate) fn set_egress(&mut self, egress: &Egress) {
        self.egress.clone_from(egress);
        if let Some(slot) = &mut self.network {
            slot.egress.clone_from(egress);
        }
    }

    /// When it has been idle for its TTL, given when it was last used. None for one that is never reaped, or not as it is.
    pub(crate) fn expires_at(&self, last_used: Timestamp) -> Option<Timestamp> {
        // Who hibernated a sandbox means to come back to it; its time goes on with its machine.
        if self.status == SandboxStatus::Hibernated {
            return None;
        }
        // What is to last is in the successor of one that is stopped.
        if self.persistent && self.status != SandboxStatus::Stopped {
            return None;
        }
        last_used.checked_add(Duration::from_secs(self.ttl_seconds)).ok()
    }
}

/// How long a snapshot lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SnapshotKind {
    /// Until the client deletes it.
    Kept,
    /// Made for a fork: until no sandbox refers to it.
    Fork,
    /// Holds a hibernated sandbox: until that wakes or is deleted.
    Hibernation,
}

impl SnapshotKind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Fork => "fork",
            Self::Hibernation => "hibernation",
        }
    }
}

/// One snapshot.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotRecord {
    pub id: Uuid,
    pub workspace: String,
    pub sandbox_id: Uuid,
    pub template: String,
    pub kind: SnapshotKind,
    pub size_bytes: u64,
    pub created_at: Timestamp,
}

impl SnapshotRecord {
    pub(crate) fn to_api(&self) -> Snapshot {
        Snapshot {
            id: self.id.to_string(),
            sandbox_id: self.sandbox_id.to_string(),
            template: self.template.clone(),
            size_bytes: self.size_bytes,
            created_at: self.created_at.to_string(),
            workspace: self.workspace.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [SandboxStatus; 7] = [
        SandboxStatus::Creating,
        SandboxStatus::Running,
        SandboxStatus::Paused,
        SandboxStatus::Stopping,
        SandboxStatus::Stopped,
        SandboxStatus::Hibernated,
        SandboxStatus::Failed,
    ];

    #[test]
    fn everything_can_be_stopped_and_nothing_comes_back_from_stopping() {
        for status in ALL {
            assert_eq!(may_become(status, SandboxStatus::Stopping), status != SandboxStatus::Stopping);
            assert!(!may_become(SandboxStatus::Stopping, status));
            assert!(!may_become(status, SandboxStatus::Creating));
            assert!(!may_become(status, status), "{status:?} to itself is no transition");
        }
    }
}
