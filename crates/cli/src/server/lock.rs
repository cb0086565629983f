//! One `coppice up` per data directory: a lock that dies with its processes, in a file that says which process that is.
//!
//! Both halves of a server hold it, so that a new one never meets what is left of the one before: when the process in the
//! file was killed, the other half ends by itself, and that is waited for.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::CliError;

pub(crate) const FILE: &str = "up.lock";
/// How long the other half of a server that was killed may take to be gone.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a server that is being killed may still look as if it ran.
const DYING: Duration = Duration::from_millis(500);
/// How often it is looked at.
const INTERVAL: Duration = Duration::from_millis(10);

/// Held as long as it lives.
#[derive(Debug)]
pub struct UpLock {
    file: File,
}

impl UpLock {
    /// Takes the lock of a data directory.
    pub async fn take(data_dir: &Path) -> Result<Self, CliError> {
        let path = data_dir.join(FILE);
        let failed = |error: std::io::Error| {
            CliError::failed("lock", format!("can't use the lock file {}", path.display())).because(error)
        };
        let mut file = open(&path).map_err(failed)?;
        let begin = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) => {}
                Err(errno) => return Err(failed(errno.into())),
            }
            let holder = pid(&mut file);
            let patience = if holder.is_none_or(runs) { DYING } else { PATIENCE };
            if begin.elapsed() > patience {
                return Err(taken(data_dir, holder));
            }
            tokio::time::sleep(INTERVAL).await;
        }
        let write = |file: &mut File| {
            file.set_len(0)?;
            file.rewind()?;
            write!(file, "{}", std::process::id())
        };
        write(&mut file).map_err(failed)?;
        Ok(Self { file })
    }

    /// The same lock for another process: it is held until both are gone.
    pub fn share(&self) -> std::io::Result<OwnedFd> {
        Ok(self.file.try_clone()?.into())
    }
}

/// The process that holds the lock, if one does and says so.
#[must_use]
pub fn holder(data_dir: &Path) -> Option<u32> {
    let mut file = File::open(data_dir.join(FILE)).ok()?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => pid(&mut file),
        _ => None,
    }
}

fn open(path: &PathBuf) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

fn pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Whether a process is there and has not ended.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

fn taken(data_dir: &Path, holder: Option<u32>) -> CliError {
    let who = holder.map(|pid| format!(", process {pid}")).unwrap_or_default();
    let message = format!("another `coppice up` uses {}{who}", data_dir.display());
    CliError::failed("already_up", message).hint(
        "use that one (its credentials.env says where it is), stop it, or give \
                                                  another --data-dir",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_second_one_is_told_who_is_first() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(holder(dir.path()), None);
        let first = UpLock::take(dir.path()).await.unwrap();
        let error = UpLock::take(dir.path()).await.unwrap_err();
        assert_eq!(error.code(), "already_up");
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        assert_eq!(holder(dir.path()), Some(std::process::id()));
        drop(first);
        assert_eq!(holder(dir.path()), None);
        UpLock::take(dir.path()).await.unwrap();
    }

    #[tokio::test]
    async fn the_other_half_of_one_that_was_killed_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let first = UpLock::take(dir.path()).await.unwrap();
        let other_half = first.share().unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        std::fs::write(dir.path().join(FILE), ended.id().to_string()).unwrap();
        drop(first);
        // Longer than one that runs is given.
        let wait = 2 * DYING;
        let begin = Instant::now();
        let (second, ()) = tokio::join!(UpLock::take(dir.path()), async {
            tokio::time::sleep(wait).await;
            drop(other_half);
        });
        second.unwrap();
        assert!(begin.elapsed() >= wait && begin.elapsed() < PATIENCE);
        assert_eq!(holder(dir.path()), None);
    }
}
