//! Ctrl-C and SIGTERM: a command that is asked to stop leaves nothing half-made.

use std::future::Future;
use std::time::Duration;

use coppice_client::ClientError;
use tokio::signal::unix::{SignalKind, signal};

use crate::error::CliError;

/// How long a call that makes something may still take after an interruption, so that what it made can be deleted. After
/// that the connection is closed, and the server undoes what it had begun.
const GRACE: Duration = Duration::from_secs(5);

/// Completes when the process is asked to stop. Once it was polled, the signals no longer end the process by themselves.
pub async fn interrupted() {
    let wait = |kind| async move {
        match signal(kind) {
            Ok(mut stream) => {
                stream.recv().await;
            }
            // Without a handler the signal ends the process as it always did.
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        () = wait(SignalKind::interrupt()) => {}
        () = wait(SignalKind::terminate()) => {}
    }
}

/// Runs `make`. After an interruption it may still finish, and then `undo` is run on what it made.
pub async fn or_undo<T, F>(
    make: impl Future<Output = Result<T, ClientError>>,
    undo: impl FnOnce(T) -> F,
) -> Result<T, CliError>
where
    F: Future<Output = Result<String, ClientError>>,
{
    tokio::pin!(make);
    tokio::select! {
        made = &mut make => return made.map_err(CliError::from),
        () = interrupted() => {}
    }
    match tokio::time::timeout(GRACE, make).await {
        Ok(Ok(made)) => Err(CliError::Interrupted(Some(undo(made).await?))),
        Ok(Err(_)) => Err(CliError::Interrupted(Some("nothing was made".into()))),
        Err(_) => Err(CliError::Interrupted(Some("the server was told, and undoes what it had begun".into()))),
    }
}
