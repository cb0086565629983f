//! Hibernate: a sandbox leaves its machine for an image on the disk.
//!
//! The machine stands still from the capture to its end, so that the image is its last word. The order is what makes it
//! safe against a crash at any point: the image is complete and on the disk, then one transaction says that the sandbox is
//! in it, then the machine is ended. Before that transaction nothing has happened (the next start lets the machine go on
//! and removes the image), after it the machine is a stray that the next start ends.
//!
//! What it does not do: wake ([`crate::wake`]), or decide when.

use std::sync::PoisonError;
use std::time::Instant;

use coppice_api::SandboxStatus;
use coppice_engine::{CapturePlan, Captured, VmError};
use coppice_snapshot::PendingImage;
use tracing::{info, warn};
use uuid::Uuid;

use crate::actor::{Actor, OpError, Owed};
use crate::dead_vm::DeadVm;
use crate::entry::Live;
use crate::host::{Shared, remove_tree};
use crate::record::{SandboxRecord, SnapshotKind};
use crate::snapshots;

/// Why the machine of a sandbox that hibernates is not there.
pub(crate) const NO_MACHINE: &str = "it is hibernated";

/// Removes the files of a machine that is gone, and whose sandbox is somewhere else.
pub(crate) async fn remove_files(shared: &Shared, id: Uuid) {
    remove_tree(shared.vm_dir(id)).await;
    // The image, or its successor, has a clone of it. The console's log stays: it can still be read.
    let disk = shared.sandbox_dir(id).join(coppice_snapshot::DISK_FILE);
    if let Err(e) = tokio::fs::remove_file(&disk).await
        && e.kind() != std::io::ErrorKind::NotFound
    {
        warn!(path = %disk.display(), error = %e, "can't be removed");
    }
}

impl Actor {
    /// Idempotent. What fails leaves the sandbox as it was.
    pub(crate) async fn hibernate(&mut self) -> Result<(), OpError> {
        if self.entry.live().status == SandboxStatus::Hibernated {
            return Ok(());
        }
        self.require(&[SandboxStatus::Running, SandboxStatus::Paused])?;
        if self.entry.live().status == SandboxStatus::Running {
            // Nothing may run in the machine that wakes before its guest has acknowledged. One that is paused is held already;
            // the handshakes of a wake and of [`Self::stay`] release.
            self.hold().await?;
        }
        coppice_fault::point!("hibernate.held");
        let before = self.entry.live();
        // Whoever needs the machine from now on asks for it to be woken, and so waits in the mailbox until this has ended,
        // rather than speak to a guest that stands still.
        self.entry.set_live(|live| (live.status, live.session) = (SandboxStatus::Hibernated, None));
        let begun = Instant::now();
        match self.leave_machine().await {
            Ok(captured) => {
                let (took, memory_bytes) = (begun.elapsed(), captured.memory_bytes);
                info!(?took, memory_bytes, "hibernated");
                metrics::counter!("coppice_hibernated_total").increment(1);
                metrics::histogram!("coppice_hibernate_seconds").record(took.as_secs_f64());
                Ok(())
            }
            Err(e) => {
                self.stay(before).await;
                Err(e)
            }
        }
    }

    async fn leave_machine(&mut self) -> Result<Captured, OpError> {
        let id = self.id();
        let image_id = Uuid::new_v4();
        let image = PendingImage::create(&self.shared.snapshot_dir(image_id))?;
        coppice_fault::point!("hibernate.image");
        self.vm.pause().await.map_err(|source| OpError::Vm { id, what: "hibernated", source })?;
        coppice_fault::point!("hibernate.paused");
        // A capture of a machine that stands still leaves it so.
        let plan = CapturePlan { image, id: image_id, durable: true, hold: None };
        let captured = self.vm.capture(plan).await.map_err(|source| OpError::Capture { id, source })?;
        coppice_fault::point!("hibernate.captured");
        self.record_asleep(image_id, &captured).await?;
        coppice_fault::point!("hibernate.recorded");
        // It was just written and read back by nobody: no need to compare its checksums in this run.
        self.shared.verified.lock().unwrap_or_else(PoisonError::into_inner).insert(image_id);
        // For those who watch for the moment that it is recorded.
        self.entry.set_live(|_| {});
        if let Err(e) = self.end_machine(NO_MACHINE).await {
            warn!(error = &e as &dyn std::error::Error, "the machine of a hibernated sandbox can't be ended yet");
        }
        if let Err(e) = self.shared.drop_unreferenced_snapshots().await {
            warn!(error = &e as &dyn std::error::Error, "images that are no longer needed stay until the next start");
        }
        Ok(captured)
    }

    /// From here on the sandbox is in its image.
    async fn record_asleep(&mut self, image_id: Uuid, captured: &Captured) -> Result<(), OpError> {
        let awake = self.entry.record();
        let image = snapshots::record_of(&awake, &captured.image, SnapshotKind::Hibernation).await;
        let asleep = SandboxRecord {
            status: SandboxStatus::Hibernated,
            image: Some(image_id),
            network: None,
            vm: None,
            last_used_at: self.entry.last_used(),
            ..awake.clone()
        };
        if let Err(e) = self.shared.store.put_whereabouts(&asleep, Some(&image)).await {
            // A disk that did not answer in time may have written it all the same: the record must say what is.
            match self.shared.store.put_whereabouts(&awake, None).await {
                Ok(()) => {
                    self.shared.store.delete_snapshot(image_id).await?;
                    remove_tree(captured.image.dir().to_owned()).await;
                }
                Err(e) => warn!(error = &e as &dyn std::error::Error, "where the sandbox is could not be recorded"),
            }
            return Err(e.into());
        }
        self.owed = awake.network.map(|slot| Owed::Slot(slot.index));
        self.entry.update(|r| {
            (r.status, r.image, r.network, r.vm) = (SandboxStatus::Hibernated, Some(image_id), None, None);
        });
        Ok(())
    }

    /// Ends the machine that the sandbox has left, if that is not done, and gives back what it held.
    pub(crate) async fn end_machine(&mut self, why: &str) -> Result<(), VmError> {
        self.vm.kill().await?;
        coppice_fault::point!("hibernate.ended");
        // Not before the machine is gone: it holds the slot's TAP.
        self.give_back().await;
        coppice_fault::point!("hibernate.slot");
        remove_files(&self.shared, self.id()).await;
        coppice_fault::point!("hibernate.files");
        self.become_machine(DeadVm::vm(self.vm.record(), why.into()));
        Ok(())
    }

    /// It could not be hibernated, or has no successor: it is what it was.
    pub(crate) async fn stay(&mut self, before: Live) {
        if before.status != SandboxStatus::Running {
            self.entry.set_live(|live| *live = before);
            return;
        }
        let session = match self.go_on(before.session).await {
            Ok(session) => session,
            Err(e) => {
                warn!(error = crate::HostError::from(e).chain(), "does not go on after it did not leave its machine");
                None
            }
        };
        // Without a session the actor opens another one, or finds that the machine has died.
        self.entry.set_live(|live| (live.status, live.session) = (SandboxStatus::Running, session));
    }

    async fn go_on(
        &self,
        session: Option<coppice_engine::GuestSession>,
    ) -> Result<Option<coppice_engine::GuestSession>, OpError> {
        let id = self.id();
        self.vm.resume().await.map_err(|source| OpError::Vm { id, what: "resumed", source })?;
        let Some(session) = session else { return Ok(None) };
        self.put_clock_right(&session).await?;
        Ok(Some(session))
    }
}
