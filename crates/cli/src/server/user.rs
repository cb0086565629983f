//! The system user that VMs run as.

use coppice_disk::command::Command;
use coppice_disk::{Event, Progress};

use crate::error::CliError;

/// Whether the user exists.
#[must_use]
pub fn exists(name: &str) -> bool {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    passwd.lines().any(|line| line.split(':').next() == Some(name))
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
    progress.report(Event::Done { what: &format!("made the system user {name}, which VMs run as") });
    Ok(())
}
