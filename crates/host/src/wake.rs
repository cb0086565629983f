//! Wake: a hibernated sandbox gets a machine again, with its memory, disk and identity, and another place on the network.
//!
//! The image stays as it is until one transaction says that the sandbox has a machine: the machine writes to a clone of the
//! image's disk. So whatever fails, or whenever the host crashes, the sandbox hibernates as before; and once it runs, its
//! record names the image no more, so that the image can never be woken a second time over what was written since.
//!
//! One actor wakes a sandbox: who asks for it at the same time gets the same machine.

use std::sync::Arc;
use std::time::Instant;

use coppice_api::{BootBreakdown, ErrorClass, SandboxStatus};
use coppice_disk::{CloneError, CloneKind, clone_file_async};
use coppice_engine::{GuestSession, JailSlot, Nic, Vm, VmError, VmPlace};
use coppice_guest_proto::v1::ResumeReason;
use tracing::{info, warn};

use crate::Coded;
use crate::actor::Actor;
use crate::admission::{AdmissionError, Ask, Reservation};
use crate::entry::AccessError;
use crate::fork;
use crate::hibernate::NO_MACHINE;
use crate::host::{Shared, remove_tree};
use crate::launch::{self, LaunchError, Origin};
use crate::meter;
use crate::record::SandboxRecord;
use crate::slots;
use crate::snapshots::{self, SnapshotError};
use crate::undo::Undo;

/// Why a hibernated sandbox could not be woken. It hibernates as before.
#[derive(Debug, thiserror::Error)]
pub enum WakeError {
    /// There is no room.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// The machine that it left is still there.
    #[error("the machine that it left can't be ended")]
    Leftover(#[source] VmError),
    /// Its record names no image: a bug.
    #[error("no image is recorded for it")]
    NoImage,
    /// Its image can't be used.
    #[error("the image that holds it can't be used")]
    Image(#[source] SnapshotError),
    /// It did not start.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

impl Coded for WakeError {
    fn code(&self) -> &'static str {
        match self {
            Self::Admission(e) => e.code(),
            Self::Leftover(_) => "vm_failed",
            Self::NoImage => "image_damaged",
            Self::Image(e) => e.code(),
            Self::Launch(e) => e.code(),
        }
    }

    /// No room is no room; everything else means that it can't be used now, and is as it was.
    fn class(&self) -> ErrorClass {
        match self {
            Self::Admission(e) if e.class() != ErrorClass::Internal => ErrorClass::Capacity,
            Self::Launch(e) if e.class() == ErrorClass::Capacity => ErrorClass::Capacity,
            _ => ErrorClass::Unavailable,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Admission(e) => e.hint(),
            Self::Launch(e) => e.hint(),
            _ => Some("it still hibernates, and nothing of it is lost; what the host's log says may help".into()),
        }
    }
}

/// A machine whose guest has acknowledged, not recorded yet.
struct Woken {
    record: SandboxRecord,
    vm: Arc<dyn Vm>,
    session: GuestSession,
    room: Reservation,
    disk_len: u64,
}

impl Actor {
    /// Idempotent. What fails leaves the sandbox hibernated.
    pub(crate) async fn wake(&mut self) -> Result<(), AccessError> {
        if self.entry.live().status != SandboxStatus::Hibernated {
            return self.require(&[SandboxStatus::Running]);
        }
        let begun = Instant::now();
        let mut undo = Undo::default();
        let woken = match self.bring_back(&mut undo).await {
            Ok(woken) => woken,
            Err(e) => {
                undo.unwind().await;
                metrics::counter!("coppice_wakes_total", "outcome" => "failed").increment(1);
                let error = AccessError::Wake { id: self.id(), source: Box::new(e) };
                return Err(error);
            }
        };
        undo.commit();
        coppice_fault::point!("wake.recorded");
        let Woken { record, vm, session, room, disk_len } = woken;
        self.become_machine(vm);
        self.entry.touch();
        self.entry.update(|r| {
            (r.status, r.image, r.network, r.vm) = (record.status, record.image, record.network, record.vm);
        });
        self.entry.set_disk_len(disk_len);
        room.settle(|| {
            self.entry.set_live(|live| (live.status, live.session) = (SandboxStatus::Running, Some(session)));
        });
        // It may have died before it was watched.
        self.vm_changed().await;
        // The image has been used. The machine goes on reading its memory from the unlinked file.
        if let Err(e) = self.shared.drop_unreferenced_snapshots().await {
            warn!(error = &e as &dyn std::error::Error, "the image of a woken sandbox stays until the next start");
        }
        coppice_fault::point!("wake.image-dropped");
        let took = begun.elapsed();
        info!(?took, "woken");
        metrics::counter!("coppice_wakes_total", "outcome" => "ok").increment(1);
        metrics::histogram!("coppice_wake_seconds").record(took.as_secs_f64());
        Ok(())
    }

    async fn bring_back(&mut self, undo: &mut Undo) -> Result<Woken, WakeError> {
        self.end_machine(NO_MACHINE).await.map_err(WakeError::Leftover)?;
        let shared = Arc::clone(&self.shared);
        let asleep = self.entry.record();
        let image =
            snapshots::open(&shared, asleep.image.ok_or(WakeError::NoImage)?).await.map_err(WakeError::Image)?;
        let disk_len = image.manifest().disk.len;
        // It is one of those in the list already.
        let ask = Ask { machines: 1, memory_mib: u64::from(asleep.memory_mib), disk_len, ..Ask::default() };
        let room = shared.admission.reserve(&ask, || meter::sums(&shared))?;
        let origin = Origin::Image(Arc::new(image));

        let slot = slots::take(&shared, &asleep.egress, undo).await.map_err(LaunchError::from)?;
        let index = slot.index;
        let mut record = SandboxRecord { network: Some(slots::record(&slot, &asleep.egress)), ..asleep.clone() };

        coppice_fault::point!("wake.slot");
        let place = make_place(&shared, &record, &origin, undo).await?;
        coppice_fault::point!("wake.placed");
        let nic = Nic { tap: slot.tap, mac: slot.mac };
        let mut boot = BootBreakdown::default();
        let vm = launch::start_vm(&shared, &origin, place, (nic, JailSlot { index }), &mut boot, undo).await?;
        coppice_fault::point!("wake.started");
        let fork = fork::identity(&record);
        let session = launch::acknowledge(&vm, &record, &origin, ResumeReason::Wake, fork, &mut boot).await?;

        coppice_fault::point!("wake.acknowledged");
        (record.status, record.image, record.vm) = (SandboxStatus::Running, None, Some(vm.record()));
        record.last_used_at = self.entry.last_used();
        if let Err(e) = shared.store.put_whereabouts(&record, None).await {
            // A disk that did not answer in time may have written it all the same: the record must say what is.
            if let Err(e) = shared.store.put_whereabouts(&asleep, None).await {
                warn!(error = &e as &dyn std::error::Error, "where the sandbox is could not be recorded");
            }
            return Err(LaunchError::from(e).into());
        }
        Ok(Woken { record, vm, session, room, disk_len })
    }
}

/// A directory for its machine, and a disk of its own: a clone of the image's.
async fn make_place(
    shared: &Shared,
    record: &SandboxRecord,
    origin: &Origin,
    undo: &mut Undo,
) -> Result<VmPlace, LaunchError> {
    let (dir, run_dir) = (shared.sandbox_dir(record.id), shared.vm_dir(record.id));
    let no_space = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::StorageFull => LaunchError::NoSpace,
        _ => LaunchError::Directory(source),
    };
    tokio::fs::create_dir(&run_dir).await.map_err(no_space)?;
    undo.push("run directory", remove_tree(run_dir.clone()));
    let disk = dir.join(coppice_snapshot::DISK_FILE);
    let remove = disk.clone();
    undo.push("disk", async move {
        // Gone, or removed by the next try.
        drop(tokio::fs::remove_file(remove).await);
    });
    let kind = clone_file_async(origin.disk(), disk.clone()).await.map_err(|e| match e {
        CloneError::NoSpace { .. } => LaunchError::NoSpace,
        e => LaunchError::Disk(e),
    })?;
    if kind == CloneKind::Copy {
        warn!("the disk was copied, not cloned: the data directory's file system has no reflinks");
    }
    Ok(VmPlace { id: record.id, run_dir, disk, console_log: dir.join(launch::CONSOLE_LOG) })
}
