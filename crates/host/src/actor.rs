//! The actor of one sandbox: the only one who changes its machine, one operation after the other.
//!
//! An operation runs to its end even when whoever asked for it has gone. The actor also watches the machine: a guest that
//! powers off, a VMM that dies, a session that breaks are acted on at once.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_api::{ErrorClass, SandboxStatus};
use coppice_engine::{CaptureError, CapturePlan, Captured, DiskClone, GuestError, SessionError, Vm, VmError, VmState};
use coppice_guest_proto::limits::MAX_FREEZE_MS;
use coppice_guest_proto::v1::{QuiesceRequest, ThawRequest};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{Instrument, info, info_span, warn};
use uuid::Uuid;

use crate::Coded;
use crate::entry::{AccessError, Entry, status_word};
use crate::handshake;
use crate::host::Shared;
use crate::record::{SandboxRecord, may_become};
use crate::store::StoreError;

/// Operations that wait in a mailbox; more of them wait in front of it.
const MAILBOX: usize = 32;
/// How long a guest may take to answer again after its session broke, or after a pause.
const REOPEN: Duration = Duration::from_secs(20);
/// How often a machine that stands still after an error of the host's disk tries again.
const DISK_RETRY: Duration = Duration::from_secs(5);
/// Free space on the host that makes another try worth while, bytes.
const DISK_ROOM: u64 = 64 << 20;
/// How long a guest may take to flush and freeze its file system before it is cloned as it is.
const QUIESCE: Duration = Duration::from_secs(5);

type Reply<T> = oneshot::Sender<Result<T, OpError>>;

/// What an actor is asked to do.
#[derive(Debug)]
pub(crate) enum Op {
    Pause(Reply<()>),
    Resume(Reply<()>),
    Capture(Box<CapturePlan>, Reply<Captured>),
    CloneDisk(PathBuf, Reply<DiskCapture>),
    Delete(Reply<()>),
}

/// A disk cloned for a plain fork.
#[derive(Debug)]
pub(crate) struct DiskCapture {
    pub clone: DiskClone,
    /// Whether the guest flushed and froze its file system first.
    pub flushed: bool,
}

/// Why an operation on a machine failed.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// The sandbox can't be used for it.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// Its machine did not do it.
    #[error("sandbox {id} can't be {what}")]
    Vm {
        /// Of the sandbox.
        id: Uuid,
        /// "paused", "resumed" or "deleted".
        what: &'static str,
        /// Why.
        #[source]
        source: VmError,
    },
    /// It could not be captured. It runs on.
    #[error("sandbox {id} can't be captured; it runs on")]
    Capture {
        /// Of the sandbox.
        id: Uuid,
        /// Why.
        #[source]
        source: CaptureError,
    },
    /// Its guest does not answer.
    #[error("the guest of sandbox {id} does not answer after it was resumed")]
    Session {
        /// Of the sandbox.
        id: Uuid,
        /// Why.
        #[source]
        source: SessionError,
    },
    /// Its guest did not acknowledge the handshake.
    #[error("the guest of sandbox {id} did not acknowledge that it was resumed")]
    Handshake {
        /// Of the sandbox.
        id: Uuid,
        /// Why.
        #[source]
        source: GuestError,
    },
    /// The host's kernel has no random bytes to give to the guest.
    #[error("the host can't provide entropy for the guest")]
    Entropy(#[source] std::io::Error),
    /// Its record can't be written.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Coded for OpError {
    fn code(&self) -> &'static str {
        match self {
            Self::Access(e) => e.code(),
            Self::Vm { .. } => "vm_failed",
            Self::Capture { source: CaptureError::NoSpace, .. } => "no_storage",
            Self::Capture { .. } => "capture_failed",
            Self::Session { .. } | Self::Handshake { .. } => "guest_unresponsive",
            Self::Entropy(_) => "no_entropy",
            Self::Store(_) => "store_failed",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Access(e) => e.class(),
            Self::Capture { source: CaptureError::NoSpace, .. } => ErrorClass::Capacity,
            _ => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Access(e) => e.hint(),
            Self::Capture { source: CaptureError::NoSpace, .. } => {
                Some("delete sandboxes or snapshots, or give the data directory a larger disk".into())
            }
            _ => None,
        }
    }
}

/// A sandbox's actor, before it runs.
pub(crate) struct Actor {
    shared: Arc<Shared>,
    entry: Arc<Entry>,
    vm: Arc<dyn Vm>,
    state: watch::Receiver<VmState>,
    mailbox: mpsc::Receiver<Op>,
}

/// The two ends of a mailbox.
pub(crate) fn mailbox() -> (mpsc::Sender<Op>, mpsc::Receiver<Op>) {
    mpsc::channel(MAILBOX)
}

impl Actor {
    pub(crate) fn spawn(shared: Arc<Shared>, entry: Arc<Entry>, vm: Arc<dyn Vm>, mailbox: mpsc::Receiver<Op>) {
        // Of its own, not below the request that happened to start it.
        let span = info_span!(parent: None, "sandbox", id = %entry.id);
        let state = vm.state();
        let actor = Self { shared, entry, vm, state, mailbox };
        drop(tokio::spawn(actor.run().instrument(span)));
    }

    async fn run(mut self) {
        // The VM may have died before it was watched.
        self.vm_changed().await;
        loop {
            let session = self.entry.live().session;
            let reopen = session.is_none() && self.entry.live().status == SandboxStatus::Running;
            if reopen {
                self.reopen().await;
                continue;
            }
            tokio::select! {
                op = self.mailbox.recv() => match op {
                    None => return,
                    Some(Op::Delete(reply)) => {
                        let done = self.delete().await;
                        let ended = done.is_ok();
                        drop(reply.send(done));
                        if ended {
                            return;
                        }
                    }
                    Some(op) => self.perform(op).await,
                },
                changed = self.state.changed() => match changed {
                    Ok(()) => self.vm_changed().await,
                    Err(_) => self.fail("the engine lost the VM".into()).await,
                },
                () = tokio::time::sleep(DISK_RETRY), if self.stands_still() => self.retry_disk().await,
                () = broken(session.as_ref()) => self.entry.set_live(|live| live.session = None),
            }
        }
    }

    async fn perform(&mut self, op: Op) {
        // A reply that nobody waits for is no error: the operation was done all the same.
        match op {
            Op::Pause(reply) => drop(reply.send(self.pause().await)),
            Op::Resume(reply) => drop(reply.send(self.resume().await)),
            Op::Capture(plan, reply) => drop(reply.send(self.capture(*plan).await)),
            Op::CloneDisk(dest, reply) => drop(reply.send(self.clone_disk(dest).await)),
            Op::Delete(reply) => drop(reply.send(self.delete().await)),
        }
    }

    fn id(&self) -> Uuid {
        self.entry.id
    }

    /// Records and shows a change of status; `false` when the table doesn't have it.
    async fn become_(&self, to: SandboxStatus, error: Option<String>) -> Result<bool, StoreError> {
        let from = self.entry.live().status;
        if from == to {
            return Ok(true);
        }
        if !may_become(from, to) {
            warn!(?from, ?to, "not a transition");
            return Ok(false);
        }
        let vm = self.vm.record();
        let record = self.entry.update(|r: &mut SandboxRecord| {
            r.status = to;
            r.error.clone_from(&error);
            r.vm = Some(vm);
        });
        self.shared.store.update_sandbox(&record).await?;
        self.entry.set_live(|live| {
            live.status = to;
            live.error = error;
        });
        Ok(true)
    }

    fn require(&self, allowed: &[SandboxStatus]) -> Result<(), AccessError> {
        let live = self.entry.live();
        if allowed.contains(&live.status) {
            return Ok(());
        }
        Err(match live.status {
            SandboxStatus::Failed => AccessError::Failed { id: self.id(), reason: live.error.unwrap_or_default() },
            status => AccessError::NotRunning { id: self.id(), status: status_word(status) },
        })
    }

    async fn pause(&mut self) -> Result<(), OpError> {
        self.require(&[SandboxStatus::Running, SandboxStatus::Paused])?;
        self.vm.pause().await.map_err(|source| OpError::Vm { id: self.id(), what: "paused", source })?;
        self.become_(SandboxStatus::Paused, None).await?;
        Ok(())
    }

    /// Lets the machine run, and steps its clock before it is shown as running. A machine that stands still after an error
    /// of the host's disk goes on where it was: the write that failed is tried again.
    async fn resume(&mut self) -> Result<(), OpError> {
        if !self.stands_still() {
            self.require(&[SandboxStatus::Running, SandboxStatus::Paused])?;
        }
        if self.entry.live().status == SandboxStatus::Running {
            return Ok(());
        }
        self.vm.resume().await.map_err(|source| OpError::Vm { id: self.id(), what: "resumed", source })?;
        let session = match self.entry.live().session {
            Some(session) => session,
            None => self.open_session().await?,
        };
        let request = handshake::unpause(&self.entry.record()).map_err(OpError::Entropy)?;
        session
            .resume(request, Instant::now() + handshake::TIMEOUT)
            .await
            .map_err(|source| OpError::Handshake { id: self.id(), source })?;
        self.become_(SandboxStatus::Running, None).await?;
        Ok(())
    }

    fn stands_still(&self) -> bool {
        matches!(*self.state.borrow(), VmState::IoError(_))
    }

    /// The write that failed is tried again once there may be room. If it fails again, the machine stands still as before.
    async fn retry_disk(&mut self) {
        if !coppice_disk::free_space(self.shared.data.root()).is_ok_and(|space| space.available >= DISK_ROOM) {
            return;
        }
        match self.resume().await {
            Ok(()) => info!("goes on after an error of the host's disk"),
            Err(e) => {
                warn!(error = crate::HostError::from(e).chain(), "does not go on after an error of the host's disk")
            }
        }
    }

    async fn capture(&mut self, plan: CapturePlan) -> Result<Captured, OpError> {
        self.require(&[SandboxStatus::Running, SandboxStatus::Paused])?;
        self.vm.capture(plan).await.map_err(|source| OpError::Capture { id: self.id(), source })
    }

    /// Flush and freeze in the guest, clone in a pause, thaw. A guest that doesn't answer is cloned as it is.
    async fn clone_disk(&mut self, dest: PathBuf) -> Result<DiskCapture, OpError> {
        self.require(&[SandboxStatus::Running, SandboxStatus::Paused])?;
        let session = self.entry.live().session.filter(|_| self.entry.live().status == SandboxStatus::Running);
        let mut client = session.map(|s| s.client());
        let mut flushed = false;
        if let Some(client) = &mut client {
            let request = QuiesceRequest { max_freeze_ms: MAX_FREEZE_MS };
            match tokio::time::timeout(QUIESCE, client.quiesce(request)).await {
                Ok(Ok(reply)) => flushed = reply.into_inner().frozen,
                Ok(Err(status)) => warn!(%status, "the guest did not flush its disk"),
                Err(_) => warn!(after = ?QUIESCE, "the guest did not flush its disk in time"),
            }
        }
        let clone = self.vm.clone_disk(&dest).await;
        if let Some(mut client) = client {
            // Outside of the operation: the clone is made, and the guest's own timer thaws it if this call fails.
            drop(tokio::spawn(async move {
                if let Err(status) = client.thaw(ThawRequest {}).await {
                    warn!(%status, "thaw failed; the guest's timer will thaw");
                }
            }));
        }
        let clone = clone.map_err(|source| OpError::Capture { id: self.id(), source })?;
        Ok(DiskCapture { clone, flushed })
    }

    /// Intent first, then the machine, its files, its record.
    async fn delete(&mut self) -> Result<(), OpError> {
        self.become_(SandboxStatus::Stopping, None).await?;
        self.vm.kill().await.map_err(|source| OpError::Vm { id: self.id(), what: "deleted", source })?;
        self.shared.forget(self.id()).await?;
        info!("deleted");
        Ok(())
    }

    async fn vm_changed(&mut self) {
        let state = self.state.borrow_and_update().clone();
        let status = self.entry.live().status;
        match state {
            VmState::Dead(reason) if status != SandboxStatus::Stopping => self.fail(reason).await,
            VmState::IoError(reason) => {
                let reason = format!("the host's disk failed ({reason}); it goes on by itself once there is room");
                self.fail(reason).await;
            }
            VmState::Running if status == SandboxStatus::Failed => {
                if let Err(e) = self.become_(SandboxStatus::Running, None).await {
                    warn!(
                        error = &e as &dyn std::error::Error,
                        "the record of a recovered sandbox could not be written"
                    );
                }
            }
            _ => {}
        }
    }

    async fn fail(&mut self, reason: String) {
        warn!(reason, "sandbox failed");
        self.entry.set_live(|live| live.session = None);
        if let Err(e) = self.become_(SandboxStatus::Failed, Some(reason.clone())).await {
            warn!(error = &e as &dyn std::error::Error, "the record of a failed sandbox could not be written");
            // Shown all the same: nobody may take a dead machine for a running one.
            self.entry.set_live(|live| (live.status, live.error) = (SandboxStatus::Failed, Some(reason)));
        }
    }

    async fn open_session(&mut self) -> Result<coppice_engine::GuestSession, OpError> {
        let session = self
            .vm
            .open_session(Instant::now() + REOPEN)
            .await
            .map_err(|source| OpError::Session { id: self.id(), source })?;
        let vm = self.vm.record();
        let record = self.entry.update(|r| r.vm = Some(vm));
        self.shared.store.update_sandbox(&record).await?;
        self.entry.set_live(|live| live.session = Some(session.clone()));
        Ok(session)
    }

    /// The session broke while the machine runs: a new one, or the sandbox has failed.
    async fn reopen(&mut self) {
        match self.open_session().await {
            Ok(_) => info!("session opened again"),
            Err(e) => {
                let gone = matches!(*self.state.borrow(), VmState::Dead(_));
                if gone {
                    self.vm_changed().await;
                } else {
                    self.fail(crate::HostError::from(e).chain()).await;
                }
            }
        }
    }
}

/// Resolves when the session has broken; never without one.
async fn broken(session: Option<&coppice_engine::GuestSession>) {
    match session {
        Some(session) => session.closed().await,
        None => std::future::pending().await,
    }
}
