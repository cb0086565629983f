//! Captures and pauses with every process of the guest held, so that none runs in a copy before its guest has acknowledged.
//!
//! Held right before the machine stops (by the engine, in a capture); released in the original as soon as it runs again,
//! not only when the image is written. In a copy the guest itself releases, at the end of its handshake. A hold that fails
//! refuses the operation, with the guest as it was.

use std::future::Future;
use std::time::{Duration, Instant};

use coppice_engine::{GuestError, GuestSession, VmState};
use coppice_guest_proto::v1::ThawRequest;
use tokio::sync::watch;
use tonic::Code;
use tracing::warn;

use crate::handshake;
use crate::record::SandboxRecord;

/// How long a guest may take to say that it goes on.
const GO_ON: Duration = Duration::from_secs(5);
/// How long a guest may take to thaw its file system.
const THAW: Duration = Duration::from_secs(5);

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

/// Lets everything go on in a machine that stood still: its clock did, too, and is put right first.
pub(crate) async fn go_on(session: &GuestSession, record: &SandboxRecord) -> Result<(), GuestError> {
    match handshake::unpause(record) {
        Ok(request) => handshake::perform(session, record, request, Instant::now() + GO_ON).await,
        Err(error) => {
            warn!(error = &error as &dyn std::error::Error, "the clock of a captured machine is not put right");
            release(session).await
        }
    }
}

/// Lets everything go on that a daemon that was killed may have left standing: the file system first, for which processes wait.
pub(crate) async fn let_go(session: &GuestSession, record: &SandboxRecord) -> Result<(), GuestError> {
    thaw(session).await;
    go_on(session, record).await
}

/// Lets the file system be written again. One that does not answer has a timer of its own.
pub(crate) async fn thaw(session: &GuestSession) {
    match tokio::time::timeout(THAW, session.client().thaw(ThawRequest {})).await {
        Ok(Ok(_)) => {}
        Ok(Err(status)) => warn!(%status, "thaw failed; the guest's timer will thaw"),
        Err(_) => warn!(after = ?THAW, "the guest did not thaw in time; its timer will"),
    }
}

/// Runs `capture`, which holds the machine's processes, and lets them go on. Answers also how that went.
pub(crate) async fn gone_on_after<T>(
    session: &GuestSession,
    record: &SandboxRecord,
    mut state: watch::Receiver<VmState>,
    capture: impl Future<Output = T>,
) -> (T, Result<(), GuestError>) {
    // Not a word before the machine is seen to run again: what is on its way to a machine that stops is in its copies, too.
    let early = async {
        state.wait_for(|state| *state == VmState::Paused).await.ok()?;
        state.wait_for(|state| *state == VmState::Running).await.ok()?;
        Some(go_on(session, record).await)
    };
    let mut capture = std::pin::pin!(capture);
    tokio::select! {
        captured = &mut capture => (captured, go_on(session, record).await),
        released = early => {
            let captured = capture.await;
            match released {
                Some(released) => (captured, released),
                None => (captured, go_on(session, record).await),
            }
        }
    }
}
