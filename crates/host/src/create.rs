//! Create: a sandbox from a template's baked snapshot, or from a snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use coppice_api::{
    BootMode, CreateSandboxRequest, ErrorClass, MAX_METADATA_BYTES, Sandbox, SandboxStatus, is_reserved_metadata,
};
use coppice_guest_proto::v1::ResumeReason;
use coppice_net::EgressError;
use coppice_snapshot::MachineImage;
use jiff::Timestamp;
use uuid::Uuid;

use crate::Coded;
use crate::admission::{AdmissionError, Ask};
use crate::host::Shared;
use crate::launch::{self, Launch, LaunchError, Origin};
use crate::meter;
use crate::network;
use crate::record::SandboxRecord;
use crate::snapshots::{self, SnapshotError};
use crate::templates::{self, TemplateError};

/// The template of a request that names none.
const DEFAULT_TEMPLATE: &str = "base";
/// Longest TTL, seconds: ten years.
const MAX_TTL: i64 = 10 * 365 * 24 * 3600;

/// Why a sandbox was not created. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// TTL out of range.
    #[error("ttl_seconds is {0}; it must be from 1 to {MAX_TTL}. Leave it out for the default, or set persistent")]
    Ttl(i64),
    /// Too much metadata.
    #[error("metadata has {0} bytes; at most {MAX_METADATA_BYTES} are kept")]
    Metadata(usize),
    /// Volumes are not there yet.
    #[error("volumes can't be attached by this version")]
    Volumes,
    /// Its network policy can not be one.
    #[error(transparent)]
    Network(#[from] EgressError),
    /// The template can't be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The snapshot can't be used.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// There is no room.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// It did not start.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

impl Coded for CreateError {
    fn code(&self) -> &'static str {
        match self {
            Self::Ttl(_) => "bad_ttl",
            Self::Metadata(_) => "metadata_too_large",
            Self::Volumes => "volumes_unsupported",
            Self::Network(e) => e.code(),
            Self::Template(TemplateError::NotFound { .. }) => "unknown_template",
            Self::Template(e) => e.code(),
            Self::Snapshot(e) => e.code(),
            Self::Admission(e) => e.code(),
            Self::Launch(e) => e.code(),
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            // The sandbox's template is a field of the request, not a resource in its path.
            Self::Ttl(_) | Self::Metadata(_) | Self::Volumes | Self::Template(TemplateError::NotFound { .. }) => {
                ErrorClass::Caller
            }
            Self::Network(e) => e.class(),
            Self::Template(e) => e.class(),
            Self::Snapshot(e) => e.class(),
            Self::Admission(e) => e.class(),
            Self::Launch(e) => e.class(),
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Network(e) => e.hint(),
            Self::Template(e) => e.hint(),
            Self::Snapshot(e) => e.hint(),
            Self::Admission(e) => e.hint(),
            Self::Launch(e) => e.hint(),
            _ => None,
        }
    }
}

/// Checks a TTL of a client's.
pub(crate) fn check_ttl(ttl: i64) -> Result<u64, CreateError> {
    u64::try_from(ttl).ok().filter(|_| (1..=MAX_TTL).contains(&ttl)).ok_or(CreateError::Ttl(ttl))
}

/// A client's metadata without the keys that only the server may set.
pub(crate) fn check_metadata(
    metadata: Option<BTreeMap<String, String>>,
) -> Result<BTreeMap<String, String>, CreateError> {
    let mut metadata = metadata.unwrap_or_default();
    metadata.retain(|key, _| !is_reserved_metadata(key));
    let bytes = metadata.iter().map(|(k, v)| k.len() + v.len()).sum();
    if bytes > MAX_METADATA_BYTES { Err(CreateError::Metadata(bytes)) } else { Ok(metadata) }
}

/// Where a create starts from.
pub(crate) struct Source {
    pub(crate) image: Arc<MachineImage>,
    template: String,
    snapshot: Option<Uuid>,
    lease: Option<Arc<snapshots::Lease>>,
}

pub(crate) async fn resolve(
    shared: &Shared,
    workspace: &str,
    request: &CreateSandboxRequest,
) -> Result<Source, CreateError> {
    // Clients send their default template along with a snapshot: the snapshot wins.
    if let Some(id) = request.from_snapshot.as_deref().filter(|id| !id.is_empty()) {
        let lease = id.parse().ok().map(|id| snapshots::lease(shared, id));
        let snapshot = snapshots::get(shared, workspace, id).await?;
        let image = Arc::new(snapshots::open(shared, snapshot.id).await?);
        return Ok(Source { image, template: snapshot.template, snapshot: Some(snapshot.id), lease });
    }
    let name = request.template.as_deref().filter(|name| !name.is_empty()).unwrap_or(DEFAULT_TEMPLATE);
    let (image, template) = templates::image(shared, name).await?;
    Ok(Source { image, template, snapshot: None, lease: None })
}

pub(crate) async fn create(
    shared: &Arc<Shared>,
    workspace: &str,
    request: CreateSandboxRequest,
) -> Result<Sandbox, CreateError> {
    let requested = Instant::now();
    if request.volumes.as_ref().is_some_and(|volumes| !volumes.is_empty()) {
        return Err(CreateError::Volumes);
    }
    let ttl_seconds = request.ttl_seconds.map_or(Ok(shared.default_ttl.as_secs()), check_ttl)?;
    let metadata = check_metadata(request.metadata.clone())?;
    let egress = network::parse(request.network.as_ref())?.unwrap_or_default();
    let source = resolve(shared, workspace, &request).await?;
    let manifest = source.image.manifest();
    let machine = &manifest.machine;
    let ask = Ask {
        machines: 1,
        listed: true,
        memory_mib: u64::from(machine.memory_mib),
        disk_len: manifest.disk.len,
        image: false,
    };
    let room = Some(shared.admission.reserve(&ask, || meter::sums(shared))?);

    let now = Timestamp::now();
    let record = SandboxRecord {
        id: Uuid::new_v4(),
        workspace: workspace.to_owned(),
        template: source.template,
        cpus: machine.cpus,
        memory_mib: machine.memory_mib,
        status: SandboxStatus::Creating,
        error: None,
        metadata,
        from_snapshot: source.snapshot,
        image: source.snapshot,
        boot_mode: BootMode::Snapshot,
        boot_ms: 0,
        boot: None,
        created_at: now,
        persistent: request.persistent.unwrap_or(false),
        ttl_seconds,
        settled_ttl_seconds: ttl_seconds,
        on_ttl: request.on_ttl.unwrap_or_default(),
        settled_on_ttl: request.on_ttl.unwrap_or_default(),
        last_used_at: now,
        lineage: None,
        successor: None,
        egress,
        network: None,
        vm: None,
    };
    let reason = if source.snapshot.is_some() { ResumeReason::Restore } else { ResumeReason::Create };
    let origin = Origin::Image(source.image);
    let launching = launch::spawn(shared, Launch { record, origin, reason, fork: None, requested, room });
    let lease = source.lease;
    // Held until the machine has its files open, also when the caller goes.
    let launched = tokio::spawn(async move {
        let launched = launching.await;
        drop(lease);
        launched
    });
    let launched = launched.await.and_then(|launched| launched);
    let outcome = launched.map_err(|_| LaunchError::Interrupted).and_then(|launched| launched);
    let label = if outcome.is_ok() { "ok" } else { "failed" };
    metrics::counter!("coppice_creates_total", "outcome" => label).increment(1);
    coppice_fault::point!("create.made");
    let entry = outcome?.claim().ok_or(LaunchError::Interrupted)?;
    Ok(entry.record().to_api())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_can_not_speak_for_the_server() {
        let sent = ["workspace", "fork_tree_id", "fork_parent_id", "fork_index", "fork_anything", "successor", "mine"];
        let sent = sent.iter().map(|k| ((*k).to_owned(), "x".to_owned())).collect();
        let kept = check_metadata(Some(sent)).unwrap();
        assert_eq!(kept.keys().collect::<Vec<_>>(), ["mine"]);
        let long = [("k".to_owned(), "v".repeat(MAX_METADATA_BYTES))].into();
        assert!(matches!(check_metadata(Some(long)), Err(CreateError::Metadata(_))));
    }

    #[test]
    fn a_ttl_is_positive_and_finite() {
        for bad in [0, -1, i64::MIN, i64::MAX, MAX_TTL + 1] {
            assert!(matches!(check_ttl(bad), Err(CreateError::Ttl(_))));
        }
        assert_eq!(check_ttl(1).unwrap(), 1);
    }
}
