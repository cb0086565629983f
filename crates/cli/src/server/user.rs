//! The system user that the server runs as, and what is its.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use coppice_broker::half::Identity;
use coppice_disk::command::Command;
use coppice_disk::{DataDir, Event, Owner, Progress, ownership};

use crate::error::CliError;

/// Whom the server runs as, all of it but the little that needs root. The data directory is its.
pub const SERVER: &str = "coppice";

/// Whether the user exists.
#[must_use]
pub fn exists(name: &str) -> bool {
    Identity::of_user(name).is_ok_and(|found| found.is_some())
}

/// The user's numbers.
pub fn find(name: &str) -> Result<Identity, CliError> {
    let found = Identity::of_user(name)
        .map_err(|error| CliError::failed("user", format!("user {name} can't be used")).because(error))?;
    found.ok_or_else(|| {
        CliError::failed("no_user", format!("there is no user {name}, which the server runs as"))
            .hint("`make setup` or `coppice setup` makes it")
    })
}

/// Gives it the data directory, which is nobody else's from then on but root's. What is its already costs a look; what
/// root publishes there later becomes its by itself.
pub async fn give(data: DataDir, user: Identity) -> Result<(), CliError> {
    let failed = |error: std::io::Error, data: &DataDir| {
        let message = format!("{} can't be given to user {SERVER}", data.root().display());
        CliError::failed("data_dir", message).because(error)
    };
    let given = tokio::task::spawn_blocking(move || {
        let owner = Owner { uid: user.uid, gid: user.gid };
        fs::set_permissions(data.root(), Permissions::from_mode(0o700))
            .and_then(|()| ownership::give(data.root(), owner))
            .map_err(|error| failed(error, &data))
    });
    let number = given.await.unwrap_or_else(|error| {
        Err(CliError::failed("data_dir", "the data directory can't be given").because(error))
    })?;
    if number > 0 {
        tracing::info!(entries = number, user = SERVER, "the data directory has a new owner");
    }
    Ok(())
}

/// Makes it when it is missing: no login, no home. Blocking.
pub fn ensure(name: &str, progress: &dyn Progress) -> Result<(), CliError> {
    if exists(name) {
        progress.report(Event::Kept { what: &format!("user {name}") });
        return Ok(());
    }
    Command::new("useradd")
        .args(["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"])
        .args(["--shell", "/usr/sbin/nologin", name])
        .run(progress)
        .map_err(|error| CliError::failed("user", format!("can't make the user {name}")).because(error))?;
    progress.report(Event::Done { what: &format!("made the system user {name}") });
    Ok(())
}
