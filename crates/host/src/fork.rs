//! What both kinds of fork share: checking the request, the children's records, starting them, and the answer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use coppice_api::{ErrorClass, Fork, ForkError as ChildError, MAX_FORK_COUNT, OnTtl, Sandbox, SandboxStatus};
use coppice_disk::StagingError;
use coppice_guest_proto::v1::{ForkIdentity, ResumeReason};
use coppice_net::SlotRecord;
use jiff::Timestamp;
use uuid::Uuid;

use crate::actor::OpError;
use crate::admission::{AdmissionError, Ask, Reservation};
use crate::api::ForkSpec;
use crate::create::{CreateError, check_metadata, check_ttl};
use crate::entry::{AccessError, Entry};
use crate::host::Shared;
use crate::launch::{self, Launch, LaunchError, Launched, Origin};
use crate::meter;
use crate::record::{ForkKind, ForkRole, Lineage, SandboxRecord};
use crate::store::StoreError;
use crate::{Coded, HostError};

/// Why a sandbox was not forked. The parent runs on, and no child is left.
#[derive(Debug, thiserror::Error)]
pub enum ForkError {
    /// Number of children out of range.
    #[error("count is {0}; a fork makes from 1 to {MAX_FORK_COUNT} children")]
    Count(i64),
    /// Number of children of a warm fork.
    #[error("count is {0}; a warm fork makes exactly one child, which takes its parent's place")]
    OneChild(i64),
    /// `explore_ttl` is not a number of seconds.
    #[error("metadata.explore_ttl is {0:?}; it must be a whole number of seconds, more than 0")]
    ExploreTtl(String),
    /// The metadata can't be kept.
    #[error(transparent)]
    Metadata(#[from] CreateError),
    /// The parent can't be used.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// There is no room.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// The parent could not be captured.
    #[error(transparent)]
    Capture(#[from] OpError),
    /// The capture's directory can't be made.
    #[error("the capture can't be stored")]
    Store(#[from] StoreError),
    /// The image's directory can't be made.
    #[error("the capture can't be stored")]
    Image(#[from] coppice_snapshot::CreateImageError),
    /// The directory for a disk can't be made.
    #[error("the clone of the disk can't be stored")]
    Staging(#[from] StagingError),
    /// No child started.
    #[error("none of the {count} children started; the first one's reason")]
    NoChild {
        /// How many were asked for.
        count: u32,
        /// Why the first did not.
        #[source]
        source: LaunchError,
    },
    /// A bug: the task that forked panicked.
    #[error("the fork was interrupted")]
    Interrupted,
}

impl Coded for ForkError {
    fn code(&self) -> &'static str {
        match self {
            Self::Count(_) | Self::OneChild(_) => "bad_fork_count",
            Self::ExploreTtl(_) => "bad_ttl",
            Self::Metadata(e) => e.code(),
            Self::Access(e) => e.code(),
            Self::Admission(e) => e.code(),
            Self::Capture(e) => e.code(),
            Self::Store(_) => "store_failed",
            Self::Staging(StagingError::NoSpace { .. }) => "no_storage",
            Self::Image(_) | Self::Staging(_) => "capture_failed",
            Self::NoChild { source, .. } => source.code(),
            Self::Interrupted => "interrupted",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Count(_) | Self::OneChild(_) | Self::ExploreTtl(_) => ErrorClass::Caller,
            Self::Metadata(e) => e.class(),
            Self::Access(e) => e.class(),
            Self::Admission(e) => e.class(),
            Self::Capture(e) => e.class(),
            Self::NoChild { source, .. } => source.class(),
            Self::Staging(StagingError::NoSpace { .. }) => ErrorClass::Capacity,
            Self::Store(_) | Self::Image(_) | Self::Staging(_) | Self::Interrupted => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Metadata(e) => e.hint(),
            Self::Access(e) => e.hint(),
            Self::Admission(e) => e.hint(),
            Self::Capture(e) => e.hint(),
            Self::NoChild { source, .. } => source.hint(),
            Self::OneChild(_) => Some("POST fork-tree makes up to 16 children, and leaves the parent running".into()),
            _ => None,
        }
    }
}

/// A checked request.
#[derive(Debug)]
pub(crate) struct Order {
    pub count: u32,
    pub parent: SandboxRecord,
    pub tree_id: Uuid,
    metadata: BTreeMap<String, String>,
    ttl_seconds: u64,
    settled_ttl_seconds: u64,
    on_ttl: OnTtl,
    settled_on_ttl: OnTtl,
    pub requested: Instant,
}

/// Checks everything that can be wrong with the request, before anything is made.
pub(crate) fn check(shared: &Shared, parent: &Entry, spec: ForkSpec) -> Result<Order, ForkError> {
    let count = u32::try_from(spec.count).ok().filter(|count| (1..=MAX_FORK_COUNT).contains(count));
    let count = count.ok_or(ForkError::Count(spec.count))?;
    let metadata = check_metadata(Some(spec.metadata))?;
    let record = parent.record();
    // Children outlive neither their parent's TTL nor the server's default unless asked to.
    let settled = record.ttl_seconds.min(shared.default_ttl.as_secs());
    let ttl_seconds = match metadata.get("explore_ttl") {
        None => settled,
        Some(text) => text
            .trim()
            .parse::<i64>()
            .ok()
            .and_then(|ttl| check_ttl(ttl).ok())
            .ok_or_else(|| ForkError::ExploreTtl(text.chars().take(40).collect()))?,
    };
    let settled_on_ttl = spec.on_ttl.unwrap_or(record.on_ttl);
    // Losers die: what is explored is only kept when it was chosen, or when the request says so.
    let on_ttl = match metadata.contains_key("explore_ttl") {
        true => spec.on_ttl.unwrap_or_default(),
        false => settled_on_ttl,
    };
    // One that hibernates is woken by its actor.
    if !matches!(parent.live().status, SandboxStatus::Running | SandboxStatus::Hibernated) {
        return Err(parent.unusable().into());
    }
    Ok(Order {
        count,
        parent: parent.record(),
        tree_id: Uuid::new_v4(),
        metadata,
        ttl_seconds,
        settled_ttl_seconds: settled,
        on_ttl,
        settled_on_ttl,
        requested: Instant::now(),
    })
}

impl Order {
    /// Sets room aside for all children, or refuses.
    pub(crate) async fn admit(&self, shared: &Shared, kind: ForkKind) -> Result<Reservation, AdmissionError> {
        let disk = shared.sandbox_dir(self.parent.id).join(coppice_snapshot::DISK_FILE);
        let ask = Ask {
            machines: u64::from(self.count),
            // A successor takes its parent's place among those that count.
            listed: kind != ForkKind::Warm,
            memory_mib: u64::from(self.parent.memory_mib),
            disk_len: tokio::fs::metadata(&disk).await.map_or(0, |found| found.len()),
            image: kind != ForkKind::Disk,
        };
        shared.admission.reserve(&ask, || meter::sums(shared))
    }

    /// Records of the children, in index order.
    pub(crate) fn children(&self, kind: ForkKind, image: Option<Uuid>) -> Vec<SandboxRecord> {
        let now = Timestamp::now();
        (0..self.count)
            .map(|index| SandboxRecord {
                id: Uuid::new_v4(),
                workspace: self.parent.workspace.clone(),
                template: self.parent.template.clone(),
                cpus: self.parent.cpus,
                memory_mib: self.parent.memory_mib,
                status: SandboxStatus::Creating,
                error: None,
                metadata: self.metadata.clone(),
                from_snapshot: None,
                image,
                boot_mode: kind.boot_mode(),
                boot_ms: 0,
                boot: None,
                created_at: now,
                persistent: false,
                ttl_seconds: self.ttl_seconds,
                settled_ttl_seconds: self.settled_ttl_seconds,
                on_ttl: self.on_ttl,
                settled_on_ttl: self.settled_on_ttl,
                last_used_at: now,
                lineage: Some(Lineage {
                    tree_id: self.tree_id,
                    parent_id: self.parent.id,
                    index,
                    count: self.count,
                    role: ForkRole::Child,
                    kind,
                }),
                successor: None,
                egress: self.parent.egress.clone(),
                network: None,
                vm: None,
            })
            .collect()
    }

    /// The record of the one that takes its parent's place. It lives as long as that would have: it is the same machine, so
    /// that nothing lives longer or shorter for having been forked, unless it was asked for.
    pub(crate) fn successor(&self, parent: &SandboxRecord, image: Uuid, network: SlotRecord) -> Option<SandboxRecord> {
        let mut record = self.children(ForkKind::Warm, Some(image)).pop()?;
        if !self.metadata.contains_key("explore_ttl") {
            record.persistent = parent.persistent;
            record.ttl_seconds = parent.ttl_seconds;
            record.settled_ttl_seconds = parent.settled_ttl_seconds;
        }
        record.egress.clone_from(&parent.egress);
        record.network = Some(network);
        Some(record)
    }

    /// Starts all children at once. Those that started are in index order; at least one is.
    pub(crate) async fn start(
        &self,
        shared: &Arc<Shared>,
        records: Vec<SandboxRecord>,
        origin: &Origin,
        room: &mut Reservation,
    ) -> Result<(Vec<Launched>, Vec<ChildError>), ForkError> {
        let launches: Vec<_> = records
            .into_iter()
            .map(|record| {
                let fork = identity(&record);
                let origin = origin.clone();
                let (requested, room) = (self.requested, Some(room.one()));
                launch::spawn(shared, Launch { record, origin, reason: ResumeReason::Fork, fork, requested, room })
            })
            .collect();
        let (mut started, mut failed) = (Vec::new(), Vec::new());
        for (launched, index) in futures::future::join_all(launches).await.into_iter().zip(0..) {
            match launched.unwrap_or(Err(LaunchError::Interrupted)) {
                Ok(launched) => started.push(launched),
                Err(e) => failed.push((index, e)),
            }
        }
        metrics::counter!("coppice_fork_children_total", "outcome" => "ok").increment(started.len() as u64);
        metrics::counter!("coppice_fork_children_total", "outcome" => "failed").increment(failed.len() as u64);
        if started.is_empty() {
            let source = failed.into_iter().next().map_or(LaunchError::Interrupted, |(_, e)| e);
            return Err(ForkError::NoChild { count: self.count, source });
        }
        let failed =
            failed.into_iter().map(|(index, e)| ChildError { index, err: HostError::from(e).chain() }).collect();
        Ok((started, failed))
    }
}

/// What the guest of a child is told of its fork.
pub(crate) fn identity(child: &SandboxRecord) -> Option<ForkIdentity> {
    let lineage = child.lineage.as_ref()?;
    Some(ForkIdentity {
        parent: lineage.parent_id.to_string(),
        tree: lineage.tree_id.to_string(),
        index: lineage.index,
        count: lineage.count,
        mode: lineage.kind.as_str().to_owned(),
    })
}

/// A complete fork that nobody was told of yet: dropping it deletes the children.
#[derive(Debug)]
pub(crate) struct Forked {
    pub children: Vec<Launched>,
    pub answer: Fork,
}

impl Forked {
    /// The caller has the children.
    pub(crate) fn claim(mut self) -> Fork {
        let entries = self.children.into_iter().filter_map(Launched::claim);
        self.answer.children = entries.map(|entry| entry.record().to_api()).collect::<Vec<Sandbox>>();
        self.answer
    }
}
