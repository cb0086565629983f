//! Captures and pauses with every process of the guest held, so that none runs in a copy before its guest has acknowledged.
//!
//! Held right before the machine stops (by the engine, in a capture); released in the original as soon as it runs again,
//! not only when the image is written. In a copy the guest itself releases, at the end of its handshake. A hold that fails
//! refuses the operation, with the guest as it was.

use std::future::Future;

use coppice_engine::{GuestError, GuestSession, VmState};
use tokio::sync::watch;
use tonic::Code;

/// Holds everything or nothing: after a failure the guest was told to let go what it may have held all the same.
pub(crate) async fn hold(session: &GuestSession) -> Result<(), GuestError> {
    let held = session.hold().await;
    // An answer says that nothing is held; silence doesn't.
    if matches!(held, Err(GuestError::Timeout(_))) {
        release(session).await?;
    }
    held
}

/// Lets everything go on. An agent of before there were holds has none.
pub(crate) async fn release(session: &GuestSession) -> Result<(), GuestError> {
    match session.release().await {
        Err(GuestError::Status(status)) if status.code() == Code::Unimplemented => Ok(()),
        other => other,
    }
}

/// Runs `capture`, which holds the machine's processes, and releases them. Answers also how the release went.
pub(crate) async fn released_after<T>(
    session: &GuestSession,
    mut state: watch::Receiver<VmState>,
    capture: impl Future<Output = T>,
) -> (T, Result<(), GuestError>) {
    // Not a word before the machine is seen to run again: what is on its way to a machine that stops is in its copies, too.
    let early = async {
        state.wait_for(|state| *state == VmState::Paused).await.ok()?;
        state.wait_for(|state| *state == VmState::Running).await.ok()?;
        Some(release(session).await)
    };
    let mut capture = std::pin::pin!(capture);
    tokio::select! {
        captured = &mut capture => (captured, release(session).await),
        released = early => {
            let captured = capture.await;
            match released {
                Some(released) => (captured, released),
                None => (captured, release(session).await),
            }
        }
    }
}
