//! One sandbox in memory: its record, what of it is live, and the mailbox of its actor.
//!
//! Reading never waits: the record is behind a lock that is held for copies only, what is live is in a watch channel.
//! Operations that change the machine go through the mailbox, so that they never interleave; commands and files go straight
//! to the guest's session and may be many at once.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coppice_api::{ErrorClass, SandboxStatus};
use coppice_engine::GuestSession;
use jiff::Timestamp;
use tokio::sync::{mpsc, oneshot, watch};
use uuid::Uuid;

use crate::Coded;
use crate::actor::Op;
use crate::record::SandboxRecord;
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
            Self::NotRunning { .. } => "sandbox_not_running",
            Self::Failed { .. } => "sandbox_failed",
            Self::Wake { source, .. } => source.code(),
            Self::NoSession(_) => "guest_unresponsive",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::NotFound(_) => ErrorClass::NotFound,
            Self::NotRunning { .. } | Self::Failed { .. } => ErrorClass::Conflict,
            Self::Wake { source, .. } => source.class(),
            Self::NoSession(_) => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::NotRunning { status: "paused", .. } => Some("resume it first".into()),
            Self::NotRunning { status: "hibernated", .. } => Some("wake it first".into()),
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

    /// What is live now.
    pub(crate) fn live(&self) -> Live {
        self.live.borrow().clone()
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
            SandboxStatus::Failed => Err(AccessError::Failed { id: self.id, reason: live.error.unwrap_or_default() }),
            // Nothing may be started on what is being deleted: for the caller it is gone.
            SandboxStatus::Stopping => Err(AccessError::NotFound(self.id.to_string())),
            status => Err(AccessError::NotRunning { id: self.id, status: status_word(status) }),
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

    /// Wakes it if it hibernates, and does nothing otherwise: for operations that go through the mailbox.
    pub(crate) async fn awake(&self) -> Result<(), AccessError> {
        if self.live().status != SandboxStatus::Hibernated {
            return Ok(());
        }
        self.ask(Op::Wake).await
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
