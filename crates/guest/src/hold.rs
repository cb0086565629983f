//! Holding the processes of a machine that is about to be captured or paused, and releasing them.
//!
//! Nothing but the agent may run in a copy before its handshake is done: it would see the original's identity and draw
//! the numbers that its siblings draw. So the host has everything held before it stops the machine; in the original it
//! gives the word to go on, in a copy the end of the handshake does.
//!
//! There is no timer, unlike in [`crate::quiesce`]: its clock would go on in a restored copy, where firing before a slow
//! handshake would be the very thing that the hold is to prevent. A host that dies in between tells the guest to go on
//! when it has come back.
//!
//! Commands that are being started meanwhile wait before they are forked ([`Hold::enter`]): a child that joined a held
//! group would stand still between fork and exec, with the agent waiting for it.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use coppice_guest_proto::{limits::MAX_HOLD_WAIT_MS, v1};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tonic::Status;

use crate::system::System;

/// Lets a command be started while it exists.
pub(crate) type Entered = OwnedRwLockReadGuard<()>;

/// See the module.
pub(crate) struct Hold {
    system: Arc<dyn System>,
    gate: Arc<RwLock<()>>,
    /// The gate is closed while this is something.
    closed: Mutex<Option<OwnedRwLockWriteGuard<()>>>,
    /// Holds and releases take turns.
    turn: tokio::sync::Mutex<()>,
}

impl Hold {
    pub(crate) fn new(system: Arc<dyn System>) -> Self {
        Self { system, gate: Arc::default(), closed: Mutex::new(None), turn: tokio::sync::Mutex::default() }
    }

    /// Waits until commands may be started, and keeps holds out until the guard is dropped.
    pub(crate) async fn enter(&self) -> Entered {
        self.gate.clone().read_owned().await
    }

    /// Holds everything, or nothing. Goes to its end even if the call is dropped.
    pub(crate) async fn hold(self: &Arc<Self>, request: v1::HoldRequest) -> Result<v1::HoldReply, Status> {
        let hold = Arc::clone(self);
        let held = tokio::spawn(async move { hold.run(request).await });
        held.await.map_err(|e| Status::internal(format!("the agent failed: {e}")))?
    }

    async fn run(&self, request: v1::HoldRequest) -> Result<v1::HoldReply, Status> {
        let limit = match request.max_wait_ms {
            0 => MAX_HOLD_WAIT_MS,
            ms => ms.min(MAX_HOLD_WAIT_MS),
        };
        let limit = Duration::from_millis(limit.into());
        let _turn = self.turn.lock().await;
        if self.lock().is_some() {
            return Ok(v1::HoldReply {});
        }
        let late = |_| Status::aborted(format!("a command that is being started was not ready within {limit:?}"));
        let guard = tokio::time::timeout(limit, self.gate.clone().write_owned()).await.map_err(late)?;
        let system = self.system.clone();
        let held = tokio::task::spawn_blocking(move || system.hold_processes(limit)).await;
        match held.unwrap_or_else(|e| Err(io::Error::other(e))) {
            Ok(()) => {
                *self.lock() = Some(guard);
                Ok(v1::HoldReply {})
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                Err(Status::aborted(format!("not every process stood still within {limit:?}")))
            }
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                Err(Status::failed_precondition("the machine can't hold processes: it has no cgroup v2 freezer"))
            }
            Err(error) => Err(Status::aborted(format!("holding processes: {error}"))),
        }
    }

    /// Lets everything go on, if it was held.
    pub(crate) async fn release(&self) -> Result<v1::ReleaseReply, Status> {
        let _turn = self.turn.lock().await;
        let mut closed = self.lock();
        if closed.is_none() {
            return Ok(v1::ReleaseReply { was_held: false });
        }
        // The gate opens after: it stays closed when this fails.
        self.system.release_processes().map_err(|e| Status::internal(format!("releasing processes: {e}")))?;
        *closed = None;
        Ok(v1::ReleaseReply { was_held: true })
    }

    fn lock(&self) -> MutexGuard<'_, Option<OwnedRwLockWriteGuard<()>>> {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::{Effect, RecordingSystem};

    fn hold() -> (Arc<Hold>, Arc<RecordingSystem>) {
        let system = Arc::new(RecordingSystem::new("/nonexistent"));
        (Arc::new(Hold::new(system.clone())), system)
    }

    #[tokio::test]
    async fn commands_wait_while_held() {
        let (hold, system) = hold();
        hold.hold(v1::HoldRequest::default()).await.unwrap();
        hold.hold(v1::HoldRequest::default()).await.unwrap();
        let waiting = tokio::spawn({
            let hold = hold.clone();
            async move { drop(hold.enter().await) }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!waiting.is_finished());
        assert!(hold.release().await.unwrap().was_held);
        waiting.await.unwrap();
        assert!(!hold.release().await.unwrap().was_held);
        assert_eq!(system.effects(), [Effect::HoldProcesses, Effect::ReleaseProcesses]);
    }

    #[tokio::test]
    async fn a_command_that_does_not_start_keeps_a_hold_out() {
        let (hold, system) = hold();
        let entered = hold.enter().await;
        let refused = hold.hold(v1::HoldRequest { max_wait_ms: 20 }).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Aborted);
        drop(entered);
        assert_eq!(system.effects(), []);
        hold.hold(v1::HoldRequest { max_wait_ms: 20 }).await.unwrap();
    }

    #[tokio::test]
    async fn what_cannot_be_held_is_not_half_held() {
        let (hold, system) = hold();
        for (errno, code) in
            [(libc::ETIMEDOUT, tonic::Code::Aborted), (libc::EOPNOTSUPP, tonic::Code::FailedPrecondition)]
        {
            system.fail_hold(Some(errno));
            assert_eq!(hold.hold(v1::HoldRequest::default()).await.unwrap_err().code(), code);
            drop(hold.enter().await);
        }
    }
}
