//! One sandbox in memory: its record, what of it is live, and the mailbox of its actor.
//!
//! Reading never waits: the record is behind a lock that is held for copies only, what is live is in a watch channel.
//! Operations that change the machine go through the mailbox, so that they never interleave; commands and files go straight
//! to the guest's session and may be many at once.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coppice_api::{ErrorClass, SandboxStatus};
use coppice_engine::{GuestSession, Vm, VmStats};
use jiff::Timestamp;
use tokio::sync::{mpsc, oneshot, watch};
use uuid::Uuid;

use crate::Coded;
use crate::actor::Op;
use crate::meter::Measured;
use crate::record::{ForkRole, SandboxRecord};
use crate::store::{Store, StoreError};
use crate::wake::WakeError;

/// How long a call waits for a session that is being opened again.
const SESSION_WAIT: Duration = Duration::from_secs(5);
/// How often a sandbox is woken for one use of it, when it is hibernated again each time before it can be used.
const WAKES: usize = 3;

/// What of a sandbox is live.
#[derive(Debug, Clone)]
pub(crate) struct Live {
    pub status: SandboxStatus,
    /// Why it failed.
    pub error: Option<String>,
    /// None while it is being opened.
    pub session: Option<GuestSession>,
}

/// One sandbox.
#[derive(Debug)]
pub(crate) struct Entry {
    pub id: Uuid,
    pub workspace: String,
    record: Mutex<SandboxRecord>,
    live: watch::Sender<Live>,
    mailbox: mpsc::Sender<Op>,
    last_used_ms: AtomicI64,
    /// Whether `last_used_ms` is newer than the record in the database.
    last_used_dirty: AtomicBool,
    in_use: AtomicU32,
    /// Held while what clients change of the record is changed and stored, so that the last one is what is stored.
    lifecycle: tokio::sync::Mutex<()>,
    /// A sibling was promoted: it goes. Changed with the record locked.
    condemned: AtomicBool,
    /// Of its guest.
    pub memory_mib: u32,
    meter: Mutex<Meter>,
    /// It could not be ended at its time: not before this is it tried again.
    end_again_ms: AtomicI64,
}

/// What is known of what its machine uses.
#[derive(Debug, Default)]
struct Meter {
    /// What is measured.
    machine: Option<Arc<dyn Vm>>,
    /// None: not yet, or it is gone.
    measured: Option<Measured>,
    /// Size of its disk, holes included, bytes.
    disk_len: u64,
}

/// Why a sandbox can't be used.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// There is none with this id, or it is another workspace's.
    #[error("sandbox {0} not found")]
    NotFound(String),
    /// It is in another state.
    #[error("sandbox {id} is {status}, not running")]
    NotRunning {
        /// Of the sandbox.
        id: Uuid,
        /// What it is.
        status: &'static str,
    },
    /// Another one took its place.
    #[error("sandbox {id} is stopped: sandbox {successor} took its place")]
    Succeeded {
        /// Of the sandbox.
        id: Uuid,
        /// Of the other one.
        successor: Uuid,
    },
    /// Its machine died.
    #[error("sandbox {id} has failed: {reason}")]
    Failed {
        /// Of the sandbox.
        id: Uuid,
        /// Why.
        reason: String,
    },
    /// It hibernates, and can't be woken.
    #[error("sandbox {id} could not be woken; it still hibernates")]
    Wake {
        /// Of the sandbox.
        id: Uuid,
        /// Why.
        #[source]
        source: Box<WakeError>,
    },
    /// Its guest doesn't answer.
    #[error("the guest of sandbox {0} does not answer")]
    NoSession(Uuid),
}

impl Coded for AccessError {
    fn code(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "sandbox_not_found",
            Self::NotRunning { .. } | Self::Succeeded { .. } => "sandbox_not_running",
            Self::Failed { .. } => "sandbox_failed",
            Self::Wake { source, .. } => source.code(),
            Self::NoSession(_) => "guest_unresponsive",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::NotFound(_) => ErrorClass::NotFound,
            Self::NotRunning { .. } | Self::Succeeded { .. } | Self::Failed { .. } => ErrorClass::Conflict,
            Self::Wake { source, .. } => source.class(),
            Self::NoSession(_) => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::NotRunning { status: "paused", .. } => Some("resume it first".into()),
            Self::NotRunning { status: "hibernated", .. } => Some("wake it first".into()),
            Self::Succeeded { successor, .. } => Some(format!("use sandbox {successor}")),
            Self::Wake { source, .. } => source.hint(),
            Self::Failed { .. } => Some("its console log may say more; delete it and create another".into()),
            _ => None,
        }
    }
}

/// The word for a status in a sentence.
pub(crate) fn status_word(status: SandboxStatus) -> &'static str {
    match status {
        SandboxStatus::Creating => "still being created",
        SandboxStatus::Running => "running",
        SandboxStatus::Paused => "paused",
        SandboxStatus::Stopping => "being deleted",
        SandboxStatus::Stopped => "stopped",
        SandboxStatus::Hibernated => "hibernated",
        SandboxStatus::Failed => "failed",
    }
}

/// Counts as use of a sandbox while it is held: a command that runs for an hour is not idleness.
#[derive(Debug)]
pub(crate) struct InUse(Arc<Entry>);

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.touch();
        self.0.in_use.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Entry {
    pub(crate) fn new(record: SandboxRecord, session: Option<GuestSession>, mailbox: mpsc::Sender<Op>) -> Arc<Self> {
        let live = Live { status: record.status, error: record.error.clone(), session };
        Arc::new(Self {
            id: record.id,
            workspace: record.workspace.clone(),
            last_used_ms: AtomicI64::new(record.last_used_at.as_millisecond()),
            last_used_dirty: AtomicBool::new(false),
            in_use: AtomicU32::new(0),
            memory_mib: record.memory_mib,
            meter: Mutex::default(),
            end_again_ms: AtomicI64::new(i64::MIN),
            lifecycle: tokio::sync::Mutex::default(),
            condemned: AtomicBool::new(false),
            record: Mutex::new(record),
            live: watch::Sender::new(live),
            mailbox,
        })
    }

    /// A copy of the record.
    pub(crate) fn record(&self) -> SandboxRecord {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the record in memory and answers a copy to be stored.
    pub(crate) fn update(&self, change: impl FnOnce(&mut SandboxRecord)) -> SandboxRecord {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut record);
        record.last_used_at = self.last_used();
        record.clone()
    }

    /// What it is doing now.
    pub(crate) fn status(&self) -> SandboxStatus {
        self.live.borrow().status
    }

    fn meter(&self) -> MutexGuard<'_, Meter> {
        self.meter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this is its machine, of which nothing was measured yet.
    pub(crate) fn set_machine(&self, machine: Arc<dyn Vm>) {
        let mut meter = self.meter();
        (meter.machine, meter.measured) = (Some(machine), None);
    }

    /// The machine that is to be measured.
    pub(crate) fn machine(&self) -> Option<Arc<dyn Vm>> {
        self.meter().machine.clone()
    }

    /// Size of its disk, bytes.
    pub(crate) fn set_disk_len(&self, len: u64) {
        self.meter().disk_len = len;
    }

    /// What a machine uses. Nothing is changed when it is another one by now.
    pub(crate) fn set_measured(&self, of: &Arc<dyn Vm>, stats: Option<VmStats>, disk_len: Option<u64>) {
        let mut meter = self.meter();
        if !meter.machine.as_ref().is_some_and(|machine| Arc::ptr_eq(machine, of)) {
            return;
        }
        meter.measured = stats.map(|stats| Measured {
            private: stats.private_bytes,
            shared: stats.pss_bytes.saturating_sub(stats.private_bytes),
        });
        meter.disk_len = disk_len.unwrap_or(meter.disk_len);
    }

    /// What its machine used when it was last measured, and the size of its disk.
    pub(crate) fn measured(&self) -> (Option<Measured>, u64) {
        let meter = self.meter();
        (meter.measured, meter.disk_len)
    }

    /// Changes what clients may change of the record at any time, and stores it. None when `change` refuses.
    pub(crate) async fn change_lifecycle(
        &self,
        store: &Store,
        change: impl FnOnce(&mut SandboxRecord) -> bool,
    ) -> Result<Option<SandboxRecord>, StoreError> {
        let _one_after_the_other = self.lifecycle.lock().await;
        let mut changed = false;
        let record = self.update(|record| changed = change(record));
        if !changed {
            return Ok(None);
        }
        store.put_lifecycle(&record).await?;
        Ok(Some(record))
    }

    /// Decides that it goes because a sibling was promoted, unless it was promoted itself. From then on it can't be.
    pub(crate) fn condemn(&self, tree: Uuid) -> bool {
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let loser = record.lineage.as_ref().is_some_and(|l| l.tree_id == tree && l.role == ForkRole::Child);
        if loser {
            self.condemned.store(true, Ordering::Relaxed);
        }
        loser
    }

    /// It could not be deleted, and so stays.
    pub(crate) fn spare(&self) {
        self.condemned.store(false, Ordering::Relaxed);
    }

    /// Whether [`Self::condemn`] came first. For a change of the record, which excludes it.
    pub(crate) fn is_condemned(&self) -> bool {
        self.condemned.load(Ordering::Relaxed)
    }

    /// What is live now.
    pub(crate) fn live(&self) -> Live {
        self.live.borrow().clone()
    }

    /// Whether another one took its place: it has nothing any more but its record.
    pub(crate) fn is_stopped(&self) -> bool {
        self.live.borrow().status == SandboxStatus::Stopped
    }

    /// Changes what is live. Only the actor does.
    pub(crate) fn set_live(&self, change: impl FnOnce(&mut Live)) {
        self.live.send_modify(change);
    }

    /// Changes of what is live.
    pub(crate) fn watch(&self) -> watch::Receiver<Live> {
        self.live.subscribe()
    }

    /// Says that the sandbox was used now.
    pub(crate) fn touch(&self) {
        self.last_used_ms.store(Timestamp::now().as_millisecond(), Ordering::Relaxed);
        self.last_used_dirty.store(true, Ordering::Relaxed);
    }

    /// Says that the sandbox is used until the answer is dropped.
    pub(crate) fn in_use(self: &Arc<Self>) -> InUse {
        self.touch();
        self.in_use.fetch_add(1, Ordering::Relaxed);
        InUse(Arc::clone(self))
    }

    /// When it was last used: now, while it is in use.
    pub(crate) fn last_used(&self) -> Timestamp {
        if self.in_use.load(Ordering::Relaxed) > 0 {
            return Timestamp::now();
        }
        Timestamp::from_millisecond(self.last_used_ms.load(Ordering::Relaxed)).unwrap_or(Timestamp::UNIX_EPOCH)
    }

    /// Whether it was idle for its TTL.
    pub(crate) fn is_expired(&self, now: Timestamp) -> bool {
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        record.expires_at(self.last_used()).is_some_and(|at| at <= now)
    }

    /// Whether it is to be ended now: it was idle for its TTL, and no try has failed just now.
    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        self.is_expired(now) && self.end_again_ms.load(Ordering::Relaxed) <= now.as_millisecond()
    }

    /// It could not be ended: it is tried again after this time.
    pub(crate) fn end_again_after(&self, wait: Duration) {
        let at = Timestamp::now().checked_add(wait).unwrap_or(Timestamp::MAX);
        self.end_again_ms.store(at.as_millisecond(), Ordering::Relaxed);
    }

    /// When it was last used, if that was not yet asked for since it changed.
    pub(crate) fn take_unsaved_last_used(&self) -> Option<Timestamp> {
        let used = self.in_use.load(Ordering::Relaxed) > 0 || self.last_used_dirty.swap(false, Ordering::Relaxed);
        used.then(|| self.last_used())
    }

    /// The guest's session, when the sandbox runs.
    pub(crate) async fn session(&self) -> Result<GuestSession, AccessError> {
        let live = self.running(|live| live.session.is_some()).await?;
        live.session.ok_or(AccessError::NoSession(self.id))
    }

    /// The machine, when it runs and has what the caller needs of it. Commands, files and connections all come by here:
    /// whatever must happen to a machine before it can be used happens here. One that hibernates is woken.
    pub(crate) async fn running(&self, has: impl Fn(&Live) -> bool) -> Result<Live, AccessError> {
        let mut live = self.settled(&has).await?;
        for _ in 0..WAKES {
            if live.status != SandboxStatus::Hibernated {
                break;
            }
            self.ask(Op::Wake).await?;
            live = self.settled(&has).await?;
        }
        match live.status {
            SandboxStatus::Running => Ok(live),
            // Nothing may be started on what is being deleted: for the caller it is gone.
            SandboxStatus::Stopping => Err(AccessError::NotFound(self.id.to_string())),
            _ => Err(self.unusable()),
        }
    }

    /// Why its status does not allow something.
    pub(crate) fn unusable(&self) -> AccessError {
        let (id, live) = (self.id, self.live());
        match (live.status, self.record().successor) {
            (SandboxStatus::Failed, _) => AccessError::Failed { id, reason: live.error.unwrap_or_default() },
            (SandboxStatus::Stopped, Some(successor)) => AccessError::Succeeded { id, successor },
            (status, _) => AccessError::NotRunning { id, status: status_word(status) },
        }
    }

    /// What is live, once that is either not running or has what the caller needs.
    async fn settled(&self, has: impl Fn(&Live) -> bool) -> Result<Live, AccessError> {
        let mut watch = self.watch();
        let usable = |live: &Live| live.status != SandboxStatus::Running || has(live);
        let live = tokio::time::timeout(SESSION_WAIT, watch.wait_for(usable)).await;
        match live {
            Ok(Ok(live)) => Ok(live.clone()),
            Ok(Err(_)) => Err(AccessError::NotFound(self.id.to_string())),
            Err(_) => Err(AccessError::NoSession(self.id)),
        }
    }

    /// Puts an operation into the mailbox and awaits its result. The operation goes on when the caller doesn't wait.
    pub(crate) async fn ask<T, E: From<AccessError>>(
        &self,
        op: impl FnOnce(oneshot::Sender<Result<T, E>>) -> Op,
    ) -> Result<T, E> {
        let (reply, answer) = oneshot::channel();
        let gone = || E::from(AccessError::NotFound(self.id.to_string()));
        self.mailbox.send(op(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}
