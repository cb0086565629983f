//! From an image or a disk to a sandbox whose guest has acknowledged: the one path that create and every fork take.
//!
//! Intent is recorded first, every acquired thing registers its undo, and nobody sees the sandbox before its guest has
//! acknowledged the resume handshake. What it does not do: admission, and making the image.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_api::{BootBreakdown, ErrorClass, SandboxStatus};
use coppice_disk::{CloneError, CloneKind, clone_file_async};
use coppice_engine::{
    BootError, BootSpec, GuestError, GuestSession, JailSlot, Nic, Rebind, RestoreError, SessionError, Vm, VmPlace,
};
use coppice_guest_proto::v1::{ForkIdentity, ResumeReason};
use coppice_net::NetError;
use coppice_snapshot::{MachineImage, MachineSpec};
use tokio::task::JoinHandle;
use tracing::{Instrument, debug, info_span, warn};
use uuid::Uuid;

use crate::Coded;
use crate::actor::{Actor, Begin, Op, mailbox};
use crate::admission::Reservation;
use crate::entry::Entry;
use crate::fork_point;
use crate::handshake;
use crate::host::Shared;
use crate::record::SandboxRecord;
use crate::slots;
use crate::store::StoreError;
use crate::undo::Undo;

/// How long a restored guest may take to answer.
const RESTORE_DEADLINE: Duration = Duration::from_secs(25);
/// How long a guest may take to boot. Without hardware virtualization and with sixteen at once it takes a while.
const BOOT_DEADLINE: Duration = Duration::from_secs(120);

/// The file in a sandbox's directory that its serial console is appended to.
pub(crate) const CONSOLE_LOG: &str = "console.log";

/// What a sandbox starts from.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    /// Memory, devices and disk.
    Image(Arc<MachineImage>),
    /// A disk to boot on.
    Disk { disk: PathBuf, machine: MachineSpec },
}

impl Origin {
    /// The disk that the sandbox's own is a clone of.
    pub(crate) fn disk(&self) -> PathBuf {
        match self {
            Self::Image(image) => image.disk_path(),
            Self::Disk { disk, .. } => disk.clone(),
        }
    }
}

/// A sandbox to be started.
#[derive(Debug)]
pub(crate) struct Launch {
    /// With status `creating`.
    pub record: SandboxRecord,
    pub origin: Origin,
    pub reason: ResumeReason,
    pub fork: Option<ForkIdentity>,
    /// When the request came.
    pub requested: Instant,
    /// The room that was set aside for it.
    pub room: Option<Reservation>,
}

/// Why a sandbox did not start. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// Its record can't be written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its directories can't be made.
    #[error("the sandbox's directory can't be made")]
    Directory(#[source] std::io::Error),
    /// The host's disk is full.
    #[error("insufficient host storage for the sandbox")]
    NoSpace,
    /// Its disk can't be cloned.
    #[error("the sandbox's disk can't be made")]
    Disk(#[from] CloneError),
    /// It has no place on the network, or not one with the policy that it must have.
    #[error("the sandbox can't be given a network")]
    Network(#[from] NetError),
    /// The image did not come to life.
    #[error("the sandbox could not be restored")]
    Restore(#[from] RestoreError),
    /// The machine did not boot.
    #[error("the sandbox could not be booted")]
    Boot(#[from] BootError),
    /// Its guest did not answer.
    #[error("the sandbox's guest did not answer; the sandbox was removed")]
    Session(#[from] SessionError),
    /// Its guest did not acknowledge.
    #[error("the sandbox's guest did not acknowledge the resume handshake; the sandbox was removed")]
    Handshake(#[from] GuestError),
    /// The host's kernel has no random bytes to give to the guest.
    #[error("the host can't provide entropy for the guest")]
    Entropy(#[source] std::io::Error),
    /// A bug: the task that started it panicked.
    #[error("starting the sandbox was interrupted")]
    Interrupted,
}

impl Coded for LaunchError {
    fn code(&self) -> &'static str {
        match self {
            Self::Store(_) => "store_failed",
            Self::Directory(_) | Self::Disk(_) => "disk_failed",
            Self::NoSpace => "no_storage",
            Self::Network(NetError::Exhausted { .. }) => "no_network_slot",
            Self::Network(_) => "network_failed",
            Self::Restore(RestoreError::Image(_)) => "image_damaged",
            Self::Restore(RestoreError::Incompatible { .. }) => "image_incompatible",
            Self::Restore(_) => "restore_failed",
            Self::Boot(_) => "boot_failed",
            Self::Session(_) | Self::Handshake(_) => "guest_unresponsive",
            Self::Entropy(_) => "no_entropy",
            Self::Interrupted => "interrupted",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::NoSpace | Self::Network(NetError::Exhausted { .. }) => ErrorClass::Capacity,
            _ => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::NoSpace => Some("delete sandboxes or snapshots, or give the data directory a larger disk".into()),
            Self::Network(NetError::Exhausted { .. }) => Some(
                "delete sandboxes that are no longer needed, or raise the limit of `coppice up --max-sandboxes`".into(),
            ),
            Self::Restore(RestoreError::Image(_)) => {
                Some("`coppice template build` makes a damaged template again".into())
            }
            _ => None,
        }
    }
}

/// A sandbox that runs but that nobody was told of yet. Dropping it deletes the sandbox: a caller that hung up leaves
/// nothing behind.
#[derive(Debug)]
pub(crate) struct Launched {
    entry: Option<Arc<Entry>>,
}

impl Launched {
    /// Whether nobody has deleted it yet.
    pub(crate) fn is_there(&self, shared: &Shared) -> bool {
        self.entry.as_ref().is_some_and(|entry| shared.has(entry.id))
    }

    /// The caller has it.
    pub(crate) fn claim(mut self) -> Option<Arc<Entry>> {
        self.entry.take()
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        if let Some(entry) = self.entry.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            drop(runtime.spawn(async move {
                if let Err(e) = entry.ask(Op::Delete).await {
                    warn!(id = %entry.id, error = %e, "a sandbox that nobody waits for could not be deleted");
                }
            }));
        }
    }
}

/// Starts a sandbox in a task of its own, so that it is never left half-made when the caller goes.
pub(crate) fn spawn(shared: &Arc<Shared>, mut launch: Launch) -> JoinHandle<Result<Launched, LaunchError>> {
    let span = info_span!("launch", id = %launch.record.id);
    let shared = Arc::clone(shared);
    tokio::spawn(
        async move {
            let mut undo = Undo::default();
            // Given back when all that failed is undone, or moved to the list of sandboxes.
            let mut room = launch.room.take();
            match start(&shared, launch, &mut room, &mut undo).await {
                Ok(launched) => {
                    undo.commit();
                    Ok(launched)
                }
                Err(e) => {
                    undo.unwind().await;
                    Err(e)
                }
            }
        }
        .instrument(span),
    )
}

async fn start(
    shared: &Arc<Shared>,
    launch: Launch,
    room: &mut Option<Reservation>,
    undo: &mut Undo,
) -> Result<Launched, LaunchError> {
    let Launch { mut record, origin, reason, fork, requested, room: _ } = launch;
    let id = record.id;
    let mut boot = BootBreakdown::default();
    let since = Instant::now();

    // Before the record, which names it. One that no record names is reclaimed at the next start.
    let slot = slots::take(shared, &record.egress, undo).await?;
    let index = slot.index;
    record.network = Some(slots::record(&slot, &record.egress));
    coppice_fault::point!("launch.slot");

    record_intent(shared, &record, undo).await?;
    coppice_fault::point!("launch.recorded");

    let place = make_place(shared, id, &origin).await?;
    let disk_len = tokio::fs::metadata(&place.disk).await.map_or(0, |found| found.len());
    coppice_fault::point!("launch.placed");
    boot.prepare = millis(since.elapsed());

    let nic = Nic { tap: slot.tap, mac: slot.mac };
    let vm = start_vm(shared, &origin, place, (nic, JailSlot { index }), &mut boot, undo).await?;
    coppice_fault::point!("launch.started");

    let session = acknowledge(&vm, &record, &origin, reason, fork, &mut boot).await?;

    coppice_fault::point!("launch.acknowledged");
    record.status = SandboxStatus::Running;
    record.vm = Some(vm.record());
    record.boot = Some(boot);
    record.boot_ms = u64::try_from(requested.elapsed().as_millis()).unwrap_or(u64::MAX);
    record.last_used_at = jiff::Timestamp::now();
    shared.store.update_sandbox(&record).await?;
    coppice_fault::point!("launch.running");
    debug!(?boot, boot_ms = record.boot_ms, "running");
    metrics::histogram!("coppice_boot_seconds", "mode" => mode(&origin)).record(requested.elapsed().as_secs_f64());

    let (sender, receiver) = mailbox();
    let entry = Entry::new(record, Some(session), sender);
    entry.set_disk_len(disk_len);
    match room.take() {
        Some(room) => room.settle(|| shared.insert(Arc::clone(&entry))),
        None => shared.insert(Arc::clone(&entry)),
    }
    Actor::spawn(Arc::clone(shared), Arc::clone(&entry), vm, receiver, Begin::AsItIs);
    Ok(Launched { entry: Some(entry) })
}

/// The record of a sandbox that is to be, before there is anything of it.
pub(crate) async fn record_intent(
    shared: &Arc<Shared>,
    record: &SandboxRecord,
    undo: &mut Undo,
) -> Result<(), StoreError> {
    let (forget, id) = (Arc::clone(shared), record.id);
    undo.push("record and files", async move {
        if let Err(e) = forget.forget(id).await {
            warn!(error = %e, "the record of a sandbox that did not start can't be removed");
        }
    });
    shared.store.insert_sandbox(record).await
}

/// Directories, and a disk of its own.
pub(crate) async fn make_place(shared: &Shared, id: Uuid, origin: &Origin) -> Result<VmPlace, LaunchError> {
    let (dir, run_dir) = (shared.sandbox_dir(id), shared.vm_dir(id));
    for path in [&dir, &run_dir] {
        tokio::fs::create_dir(path).await.map_err(|source| match source.kind() {
            std::io::ErrorKind::StorageFull => LaunchError::NoSpace,
            _ => LaunchError::Directory(source),
        })?;
    }
    coppice_fault::point!("launch.directories");
    let disk = dir.join(coppice_snapshot::DISK_FILE);
    let kind = clone_file_async(origin.disk(), disk.clone()).await.map_err(|e| match e {
        CloneError::NoSpace { .. } => LaunchError::NoSpace,
        e => LaunchError::Disk(e),
    })?;
    if kind == CloneKind::Copy {
        warn!("the disk was copied, not cloned: the data directory's file system has no reflinks");
    }
    fork_point::keep(origin.disk(), dir.clone()).await;
    Ok(VmPlace { id, run_dir, disk, console_log: dir.join(CONSOLE_LOG) })
}

/// The machine, which is not known to be of any use yet.
pub(crate) async fn start_vm(
    shared: &Shared,
    origin: &Origin,
    place: VmPlace,
    (nic, jail): (Nic, JailSlot),
    boot: &mut BootBreakdown,
    undo: &mut Undo,
) -> Result<Arc<dyn Vm>, LaunchError> {
    let since = Instant::now();
    let vm: Arc<dyn Vm> = match origin {
        Origin::Image(image) => {
            let kernel = shared.guest_kernel(&image.manifest().machine);
            shared.engine.restore(image, Rebind { place, kernel, nic, jail }).await?
        }
        Origin::Disk { machine, .. } => {
            let kernel = shared.guest_kernel(machine);
            shared.engine.boot(BootSpec { place, machine: machine.clone(), kernel, nic, jail }).await?
        }
    };
    let kill = Arc::clone(&vm);
    undo.push("vm", async move {
        if let Err(e) = kill.kill().await {
            warn!(error = %e, "the VM of a sandbox that did not start can't be ended");
        }
    });
    match vm.record().restore {
        Some(t) => (boot.spawn, boot.load) = (millis(t.spawn), millis(t.load)),
        None => boot.spawn = millis(since.elapsed()),
    }
    Ok(vm)
}

/// Fail closed: no answer, no sandbox.
pub(crate) async fn acknowledge(
    vm: &Arc<dyn Vm>,
    record: &SandboxRecord,
    origin: &Origin,
    reason: ResumeReason,
    fork: Option<ForkIdentity>,
    boot: &mut BootBreakdown,
) -> Result<GuestSession, LaunchError> {
    let patience = match origin {
        Origin::Image(_) => RESTORE_DEADLINE,
        Origin::Disk { .. } => BOOT_DEADLINE,
    };
    let since = Instant::now();
    let session = vm.open_session(since + patience).await?;
    boot.session = millis(since.elapsed());
    let since = Instant::now();
    let request = handshake::fresh(record, reason, fork).map_err(LaunchError::Entropy)?;
    handshake::perform(&session, record, request, since + handshake::TIMEOUT).await?;
    boot.handshake = millis(since.elapsed());
    Ok(session)
}

fn mode(origin: &Origin) -> &'static str {
    match origin {
        Origin::Image(_) => "snapshot",
        Origin::Disk { .. } => "cold",
    }
}

/// Milliseconds, to a hundredth.
pub(crate) fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 100_000.0).round() / 100.0
}
