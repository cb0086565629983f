//! Quiesce and thaw: sync, then freeze the root file system, for at most so long.
//!
//! Each freeze has a thread of its own, which syncs, freezes, waits for the word or for the time limit, and thaws. It
//! needs nothing from the runtime while the file system is frozen, so a runtime whose threads all wait for the disk
//! can't keep it frozen. While it is, nothing in the agent writes to the disk (its log goes to the console).

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::Duration,
};

use coppice_guest_proto::{limits::MAX_FREEZE_MS, v1};
use tokio::sync::oneshot;
use tonic::Status;

use crate::system::System;

/// The word to thaw; answered once it is done.
type Word = oneshot::Sender<()>;

/// The state of the root file system.
pub(crate) struct Quiesce {
    system: Arc<dyn System>,
    state: Arc<Mutex<State>>,
}

enum State {
    Thawed,
    /// Being frozen, or frozen: the word goes here.
    Frozen(Sender<Word>),
}

impl Quiesce {
    pub(crate) fn new(system: Arc<dyn System>) -> Self {
        Self { system, state: Arc::new(Mutex::new(State::Thawed)) }
    }

    /// Syncs and freezes. Answers `frozen: false` where the file system can't be frozen; it is synced then all the same.
    pub(crate) async fn freeze(&self, request: v1::QuiesceRequest) -> Result<v1::QuiesceReply, Status> {
        let limit = match request.max_freeze_ms {
            0 => MAX_FREEZE_MS,
            ms => ms.min(MAX_FREEZE_MS),
        };
        let limit = Duration::from_millis(limit.into());
        let (word, words) = channel();
        {
            let mut state = lock(&self.state);
            if matches!(*state, State::Frozen(_)) {
                return Err(Status::failed_precondition("the file system is frozen already"));
            }
            *state = State::Frozen(word);
        }
        let (tx, rx) = oneshot::channel();
        let (system, state) = (self.system.clone(), self.state.clone());
        let thread = std::thread::Builder::new().name("quiesce".to_owned()).spawn(move || {
            let word = hold(&*system, limit, &words, tx);
            *lock(&state) = State::Thawed;
            // Answered when the next freeze can start; so is a word that came just now.
            word.into_iter().chain(words.try_iter()).for_each(answer);
        });
        if let Err(error) = thread {
            *lock(&self.state) = State::Thawed;
            return Err(Status::resource_exhausted(format!("no thread to freeze with: {error}")));
        }
        let frozen = rx.await.map_err(|_| Status::internal("the freeze failed"))?;
        Ok(v1::QuiesceReply { frozen })
    }

    /// Thaws, if frozen.
    pub(crate) async fn thaw(&self) -> v1::ThawReply {
        let (tx, rx) = oneshot::channel();
        let was_frozen = match &*lock(&self.state) {
            State::Frozen(word) => word.send(tx).is_ok(),
            State::Thawed => false,
        };
        if was_frozen {
            // An error means that the thread has ended: thawed too.
            rx.await.unwrap_or_default();
        }
        v1::ThawReply { was_frozen }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn answer(word: Word) {
    // The caller may have gone away.
    word.send(()).ok();
}

/// One freeze, from sync to thaw. Returns the word that ended it.
fn hold(system: &dyn System, limit: Duration, words: &Receiver<Word>, reply: oneshot::Sender<bool>) -> Option<Word> {
    system.sync();
    if reply.is_closed() {
        // Cancelled during the sync: nobody would thaw before the limit.
        return None;
    }
    if let Err(error) = system.freeze() {
        tracing::warn!("can't freeze the root file system: {error}");
        reply.send(false).ok();
        return None;
    }
    let word = match reply.send(true) {
        Ok(()) => words.recv_timeout(limit),
        Err(_) => Err(RecvTimeoutError::Disconnected),
    };
    if let Err(error) = system.thaw() {
        tracing::error!("can't thaw the root file system: {error}");
    }
    if matches!(word, Err(RecvTimeoutError::Timeout)) {
        tracing::warn!("root file system thawed by the timer after {limit:?}");
    }
    word.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::{Effect, RecordingSystem};

    fn quiesce() -> (Quiesce, Arc<RecordingSystem>) {
        let system = Arc::new(RecordingSystem::new("/nonexistent"));
        (Quiesce::new(system.clone()), system)
    }

    #[tokio::test]
    async fn synced_frozen_and_thawed_by_the_word() {
        let (quiesce, system) = quiesce();
        assert!(quiesce.freeze(v1::QuiesceRequest { max_freeze_ms: 5_000 }).await.unwrap().frozen);
        assert_eq!(system.effects(), [Effect::Sync, Effect::Freeze]);
        let again = quiesce.freeze(v1::QuiesceRequest::default()).await.unwrap_err();
        assert_eq!(again.code(), tonic::Code::FailedPrecondition);
        assert!(quiesce.thaw().await.was_frozen);
        assert_eq!(system.effects(), [Effect::Sync, Effect::Freeze, Effect::Thaw]);
    }

    #[tokio::test]
    async fn thawed_by_the_timer() {
        let (quiesce, system) = quiesce();
        assert!(quiesce.freeze(v1::QuiesceRequest { max_freeze_ms: 20 }).await.unwrap().frozen);
        while system.effects().last() != Some(&Effect::Thaw) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!quiesce.thaw().await.was_frozen);
        assert!(quiesce.freeze(v1::QuiesceRequest { max_freeze_ms: 20 }).await.unwrap().frozen);
    }
}
