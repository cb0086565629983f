//! The actor of one sandbox: the only one who changes its machine, one operation after the other.
//!
//! An operation runs to its end even when whoever asked for it has gone. The actor also watches the machine: a guest that
//! powers off, a VMM that dies, a session that breaks are acted on at once.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_api::{ErrorClass, Fork, OnTtl, SandboxStatus};
use coppice_engine::{CaptureError, CapturePlan, Captured, DiskClone, GuestError, SessionError, Vm, VmError, VmState};
use coppice_guest_proto::limits::MAX_FREEZE_MS;
use coppice_guest_proto::v1::QuiesceRequest;
use coppice_net::{Egress, NetError, Seat};
use coppice_snapshot::MachineSpec;
use jiff::Timestamp;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{Instrument, info, info_span, warn};
use uuid::Uuid;

use crate::Coded;
use crate::admission::Reservation;
use crate::entry::{AccessError, Entry};
use crate::fork::{ForkError, Order};
use crate::handshake;
use crate::hold;
use crate::host::Shared;
use crate::record::{SandboxRecord, may_become};
use crate::slots;
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
    Hibernate(Reply<()>),
    /// For whoever uses a sandbox, whatever for.
    Wake(oneshot::Sender<Result<(), AccessError>>),
    Capture(Box<CapturePlan>, Reply<Captured>),
    CloneDisk(PathBuf, Reply<DiskCapture>),
    /// Puts a child in its place.
    ForkWarm(Box<(Order, Reservation)>, oneshot::Sender<Result<Fork, ForkError>>),
    /// Changes what it may reach.
    SetEgress(Egress, Reply<()>),
    Delete(Reply<()>),
    /// Ends it as its `on_ttl` says, if it is still idle.
    Expire(Reply<Expired>),
}

/// What became of a sandbox that had been idle for its TTL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expired {
    Deleted,
    Hibernated,
    /// It was used meanwhile, or stands still until the host's disk has room: as it was.
    Stays,
}

/// A disk cloned for a plain fork.
#[derive(Debug)]
pub(crate) struct DiskCapture {
    pub clone: DiskClone,
    /// Whether the guest flushed and froze its file system first.
    pub flushed: bool,
    /// The machine that has the disk.
    pub machine: MachineSpec,
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
        /// "paused", "resumed", "hibernated", "forked" or "deleted".
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
    /// The directory of its image can't be made.
    #[error("the capture can't be stored")]
    Image(#[from] coppice_snapshot::CreateImageError),
    /// Its guest does not answer.
    #[error("the guest of sandbox {id} does not answer after it was resumed")]
    Session {
        /// Of the sandbox.
        id: Uuid,
        /// Why.
        #[source]
        source: SessionError,
    },
    /// The processes in its guest can't be held.
    #[error("the processes of sandbox {id} can't be held for it; it runs on")]
    Hold {
        /// Of the sandbox.
        id: Uuid,
        /// Why.
        #[source]
        source: GuestError,
    },
    /// The processes in its guest were held and don't go on.
    #[error("the processes of sandbox {id} can't be told to go on")]
    Release {
        /// Of the sandbox.
        id: Uuid,
        /// Why.
        #[source]
        source: GuestError,
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
    /// What it may reach can't be changed.
    #[error("what sandbox {id} may reach can't be changed; it is as before")]
    Egress {
        /// Of the sandbox.
        id: Uuid,
        /// Why.
        #[source]
        source: NetError,
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
            Self::Capture { .. } | Self::Image(_) => "capture_failed",
            Self::Hold { .. } => "processes_not_held",
            Self::Session { .. } | Self::Handshake { .. } | Self::Release { .. } => "guest_unresponsive",
            Self::Egress { .. } => "network_failed",
            Self::Entropy(_) => "no_entropy",
            Self::Store(_) => "store_failed",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Access(e) => e.class(),
            Self::Capture { source: CaptureError::NoSpace, .. } => ErrorClass::Capacity,
            Self::Hold { .. } => ErrorClass::Conflict,
            _ => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Access(e) => e.hint(),
            Self::Hold { .. } => Some(
                "nothing was made; try again when no process in the sandbox waits for its disk, and make a sandbox of a \
                 template baked by this version if it says Unimplemented"
                    .into(),
            ),
            Self::Capture { source: CaptureError::NoSpace, .. } => {
                Some("delete sandboxes or snapshots, or give the data directory a larger disk".into())
            }
            _ => None,
        }
    }
}

/// A sandbox's actor, before it runs.
pub(crate) struct Actor {
    pub(crate) shared: Arc<Shared>,
    pub(crate) entry: Arc<Entry>,
    pub(crate) vm: Arc<dyn Vm>,
    state: watch::Receiver<VmState>,
    /// What a machine that the sandbox has left still holds of the network, until that is gone.
    pub(crate) owed: Option<Owed>,
    mailbox: mpsc::Receiver<Op>,
}

/// What is given back once a machine is gone: not before, as it holds a TAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owed {
    /// A slot.
    Slot(u32),
    /// A seat of a slot, whose other one its successor has.
    Seat(u32, Seat),
}

/// What an actor does first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begin {
    /// It looks after the machine as it is.
    AsItIs,
    /// A capture that did not end has left the machine standing still: it goes on.
    GoOn,
}

/// The two ends of a mailbox.
pub(crate) fn mailbox() -> (mpsc::Sender<Op>, mpsc::Receiver<Op>) {
    mpsc::channel(MAILBOX)
}

impl Actor {
    pub(crate) fn spawn(
        shared: Arc<Shared>,
        entry: Arc<Entry>,
        vm: Arc<dyn Vm>,
        mailbox: mpsc::Receiver<Op>,
        begin: Begin,
    ) {
        // Of its own, not below the request that happened to start it.
        let span = info_span!(parent: None, "sandbox", id = %entry.id);
        entry.set_machine(Arc::clone(&vm));
        let state = vm.state();
        let actor = Self { shared, entry, vm, state, owed: None, mailbox };
        drop(tokio::spawn(actor.run(begin).instrument(span)));
    }

    async fn run(mut self, begin: Begin) {
        if begin == Begin::GoOn
            && let Err(e) = self.go_on_late().await
        {
            // What became of it is seen below.
            warn!(error = crate::HostError::from(e).chain(), "does not go on after a capture that did not end");
        }
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
                    Some(Op::Expire(reply)) => {
                        let done = self.expire().await;
                        let ended = matches!(done, Ok(Expired::Deleted));
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
            Op::Hibernate(reply) => drop(reply.send(self.hibernate().await)),
            Op::Wake(reply) => drop(reply.send(self.wake().await)),
            Op::Capture(plan, reply) => drop(reply.send(self.capture(*plan).await)),
            Op::CloneDisk(dest, reply) => drop(reply.send(self.clone_disk(dest).await)),
            Op::ForkWarm(order, reply) => {
                let (order, room) = *order;
                drop(reply.send(self.fork_warm(order, room).await));
            }
            Op::SetEgress(egress, reply) => drop(reply.send(self.set_egress(egress).await)),
            Op::Delete(reply) => drop(reply.send(self.delete().await)),
            Op::Expire(reply) => drop(reply.send(self.expire().await)),
        }
    }

    pub(crate) fn id(&self) -> Uuid {
        self.entry.id
    }

    /// From now on this is its machine.
    pub(crate) fn become_machine(&mut self, vm: Arc<dyn Vm>) {
        self.state = vm.state();
        self.entry.set_machine(Arc::clone(&vm));
        self.vm = vm;
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

    /// For operations that need a machine. Here, and not by whoever asks: nothing comes between the two.
    pub(crate) async fn awake(&mut self) -> Result<(), AccessError> {
        match self.entry.live().status {
            SandboxStatus::Hibernated => self.wake().await,
            _ => Ok(()),
        }
    }

    pub(crate) fn require(&self, allowed: &[SandboxStatus]) -> Result<(), AccessError> {
        if allowed.contains(&self.entry.live().status) { Ok(()) } else { Err(self.entry.unusable()) }
    }

    async fn pause(&mut self) -> Result<(), OpError> {
        self.require(&[SandboxStatus::Running, SandboxStatus::Paused])?;
        if self.entry.live().status == SandboxStatus::Paused {
            return Ok(());
        }
        // What is captured while it is paused is held then, and after the pause nothing runs before the clock is right.
        let session = self.hold().await?;
        coppice_fault::point!("pause.held");
        if let Err(source) = self.vm.pause().await {
            let released = hold::release(&session).await;
            self.note_release(released);
            return Err(OpError::Vm { id: self.id(), what: "paused", source });
        }
        coppice_fault::point!("pause.paused");
        self.become_(SandboxStatus::Paused, None).await?;
        coppice_fault::point!("pause.recorded");
        Ok(())
    }

    /// Holds the guest's processes: see [`crate::hold`].
    pub(crate) async fn hold(&mut self) -> Result<coppice_engine::GuestSession, OpError> {
        let session = self.session().await?;
        let held = hold::hold(&session).await;
        if let Err(GuestError::Timeout(_)) = held {
            // Whether anything is held is unknown: the next session finds out.
            self.entry.set_live(|live| live.session = None);
        }
        held.map_err(|source| OpError::Hold { id: self.id(), source })?;
        Ok(session)
    }

    /// A release that failed is made up for by the next session, or by the handshake of a machine that stands still.
    fn note_release(&self, released: Result<(), GuestError>) {
        if let Err(error) = released
            && !self.stands_still()
        {
            warn!(error = &error as &dyn std::error::Error, "the guest does not say that its processes go on");
            self.entry.set_live(|live| live.session = None);
        }
    }

    /// Lets the machine run, and steps its clock before it is shown as running. A machine that stands still after an error
    /// of the host's disk goes on where it was: the write that failed is tried again.
    async fn resume(&mut self) -> Result<(), OpError> {
        self.awake().await?;
        if !self.stands_still() {
            self.require(&[SandboxStatus::Running, SandboxStatus::Paused])?;
        }
        if self.entry.live().status == SandboxStatus::Running {
            return Ok(());
        }
        self.vm.resume().await.map_err(|source| OpError::Vm { id: self.id(), what: "resumed", source })?;
        coppice_fault::point!("resume.resumed");
        let session = self.session().await?;
        self.put_clock_right(&session).await?;
        coppice_fault::point!("resume.acknowledged");
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

    async fn capture(&mut self, mut plan: CapturePlan) -> Result<Captured, OpError> {
        self.awake().await?;
        self.require(&[SandboxStatus::Running, SandboxStatus::Paused])?;
        let captured = if self.entry.live().status == SandboxStatus::Paused {
            self.vm.capture(plan).await
        } else {
            let session = self.session().await?;
            plan.hold = Some(session.clone());
            let (captured, released) =
                hold::gone_on_after(&session, &self.entry.record(), self.vm.state(), self.vm.capture(plan)).await;
            self.note_release(released);
            captured
        };
        captured.map_err(|source| match source {
            CaptureError::Hold(source) => OpError::Hold { id: self.id(), source },
            source => OpError::Capture { id: self.id(), source },
        })
    }

    /// Flush and freeze in the guest, clone in a pause, thaw. A guest that doesn't answer is cloned as it is.
    async fn clone_disk(&mut self, dest: PathBuf) -> Result<DiskCapture, OpError> {
        self.awake().await?;
        self.require(&[SandboxStatus::Running, SandboxStatus::Paused])?;
        let session = self.entry.live().session.filter(|_| self.entry.live().status == SandboxStatus::Running);
        let mut flushed = false;
        if let Some(session) = &session {
            let request = QuiesceRequest { max_freeze_ms: MAX_FREEZE_MS };
            match tokio::time::timeout(QUIESCE, session.client().quiesce(request)).await {
                Ok(Ok(reply)) => flushed = reply.into_inner().frozen,
                Ok(Err(status)) => warn!(%status, "the guest did not flush its disk"),
                Err(_) => warn!(after = ?QUIESCE, "the guest did not flush its disk in time"),
            }
        }
        coppice_fault::point!("fork-disk.quiesced");
        let clone = self.vm.clone_disk(&dest).await;
        if let Some(session) = session {
            // Awaited: what comes next may be a capture, which must not catch processes that wait for the disk.
            hold::thaw(&session).await;
            if flushed {
                // It stood still for a few milliseconds only, but so it does each time.
                let gone_on = hold::go_on(&session, &self.entry.record()).await;
                self.note_release(gone_on);
            }
        }
        let clone = clone.map_err(|source| OpError::Capture { id: self.id(), source })?;
        Ok(DiskCapture { clone, flushed, machine: self.vm.record().machine })
    }

    /// Recorded first, then in force; taken back if it can't be put in force. A machine that is gone has no slot: there it
    /// is recorded only.
    async fn set_egress(&mut self, egress: Egress) -> Result<(), OpError> {
        if self.entry.live().status == SandboxStatus::Stopping {
            return Err(AccessError::NotFound(self.id().to_string()).into());
        }
        let before = self.entry.record().egress;
        let done = self.record_egress(&egress).await;
        let done = match (done, self.entry.record().network) {
            (Ok(()), Some(slot)) => slots::set_egress(&self.shared, slot.index, &egress)
                .await
                .map_err(|source| OpError::Egress { id: self.id(), source }),
            (done, _) => done.map_err(OpError::from),
        };
        if done.is_err()
            && let Err(e) = self.record_egress(&before).await
        {
            warn!(error = &e as &dyn std::error::Error, "the record of a policy could not be taken back");
        }
        done
    }

    async fn record_egress(&self, egress: &Egress) -> Result<(), StoreError> {
        let record = self.entry.update(|record| record.set_egress(egress));
        self.shared.store.put_network(&record).await
    }

    /// Intent first, then the machine, its files, its record.
    async fn delete(&mut self) -> Result<(), OpError> {
        self.become_(SandboxStatus::Stopping, None).await?;
        coppice_fault::point!("delete.intended");
        self.vm.kill().await.map_err(|source| OpError::Vm { id: self.id(), what: "deleted", source })?;
        coppice_fault::point!("delete.ended");
        // Not before the machine is gone: it holds the slot's TAP.
        if let Some(slot) = self.entry.record().network {
            slots::put(&self.shared, slot.index).await;
        }
        self.give_back().await;
        coppice_fault::point!("delete.slot");
        self.shared.forget(self.id()).await?;
        coppice_fault::point!("delete.forgotten");
        info!("deleted");
        Ok(())
    }

    /// Looked at again here, where no other operation is under way: who used it after the reaper had looked keeps it.
    async fn expire(&mut self) -> Result<Expired, OpError> {
        if !self.entry.is_expired(Timestamp::now()) {
            return Ok(Expired::Stays);
        }
        let status = self.entry.live().status;
        match self.entry.record().on_ttl {
            OnTtl::Hibernate if matches!(status, SandboxStatus::Running | SandboxStatus::Paused) => {
                self.hibernate().await.map(|()| Expired::Hibernated)
            }
            // It goes on by itself once there is room, and then it hibernates.
            OnTtl::Hibernate if self.stands_still() => Ok(Expired::Stays),
            // Also one that is to be kept and has nothing left that could be: its machine is gone.
            OnTtl::Hibernate | OnTtl::Delete => self.delete().await.map(|()| Expired::Deleted),
        }
    }

    /// What a machine held that is gone now.
    pub(crate) async fn give_back(&mut self) {
        match self.owed.take() {
            Some(Owed::Slot(index)) => slots::put(&self.shared, index).await,
            Some(Owed::Seat(index, seat)) => slots::unseat(&self.shared, index, seat).await,
            None => {}
        }
    }

    pub(crate) async fn vm_changed(&mut self) {
        let state = self.state.borrow_and_update().clone();
        let status = self.entry.live().status;
        if matches!(status, SandboxStatus::Hibernated | SandboxStatus::Stopped) {
            // It is in its image, or in its successor's machine. What becomes of the machine that it left is of no concern to it.
            return;
        }
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

    async fn session(&mut self) -> Result<coppice_engine::GuestSession, OpError> {
        match self.entry.live().session {
            Some(session) => Ok(session),
            None => self.open_session().await,
        }
    }

    /// Lets a machine go on that stood still for nobody knows how long: with its clock put right before anybody uses it.
    async fn go_on_late(&self) -> Result<(), OpError> {
        let id = self.id();
        self.vm.resume().await.map_err(|source| OpError::Vm { id, what: "resumed", source })?;
        let session = self.connect().await?;
        hold::thaw(&session).await;
        self.put_clock_right(&session).await?;
        self.entry.set_live(|live| live.session = Some(session));
        Ok(())
    }

    /// And lets its processes go on.
    pub(crate) async fn put_clock_right(&self, session: &coppice_engine::GuestSession) -> Result<(), OpError> {
        let record = self.entry.record();
        let request = handshake::unpause(&record).map_err(OpError::Entropy)?;
        let done = handshake::perform(session, &record, request, Instant::now() + handshake::TIMEOUT).await;
        done.map_err(|source| OpError::Handshake { id: self.id(), source })
    }

    async fn open_session(&mut self) -> Result<coppice_engine::GuestSession, OpError> {
        let session = self.connect().await?;
        if self.entry.live().status == SandboxStatus::Running {
            // A capture or a disk fork may have been cut short: by the end of the daemon that made it, say.
            let gone_on = hold::let_go(&session, &self.entry.record()).await;
            gone_on.map_err(|source| OpError::Release { id: self.id(), source })?;
        }
        self.entry.set_live(|live| live.session = Some(session.clone()));
        Ok(session)
    }

    /// A session in which nothing that is held was released yet.
    async fn connect(&self) -> Result<coppice_engine::GuestSession, OpError> {
        let session = self
            .vm
            .open_session(Instant::now() + REOPEN)
            .await
            .map_err(|source| OpError::Session { id: self.id(), source })?;
        let vm = self.vm.record();
        let record = self.entry.update(|r| r.vm = Some(vm));
        self.shared.store.update_sandbox(&record).await?;
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
