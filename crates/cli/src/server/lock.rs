//! One `coppice up` per data directory: a lock that dies with its process, in a file that says which process that is.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::CliError;

const FILE: &str = "up.lock";

/// Held as long as it lives.
#[derive(Debug)]
pub struct UpLock {
    _file: File,
}

impl UpLock {
    /// Takes the lock of a data directory.
    pub fn take(data_dir: &Path) -> Result<Self, CliError> {
        let path = data_dir.join(FILE);
        let failed = |error: std::io::Error| {
            CliError::failed("lock", format!("can't use the lock file {}", path.display())).because(error)
        };
        let mut file = open(&path).map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(taken(data_dir, &mut file)),
            Err(errno) => return Err(failed(errno.into())),
        }
        file.set_len(0).and_then(|()| write!(file, "{}", std::process::id())).map_err(failed)?;
        Ok(Self { _file: file })
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
    file.read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn taken(data_dir: &Path, file: &mut File) -> CliError {
    let who = pid(file).map(|pid| format!(", process {pid}")).unwrap_or_default();
    let message = format!("another `coppice up` uses {}{who}", data_dir.display());
    CliError::failed("already_up", message).hint(
        "use that one (its credentials.env says where it is), stop it, or give \
                                                  another --data-dir",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_one_is_told_who_is_first() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(holder(dir.path()), None);
        let first = UpLock::take(dir.path()).unwrap();
        let error = UpLock::take(dir.path()).unwrap_err();
        assert_eq!(error.code(), "already_up");
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        assert_eq!(holder(dir.path()), Some(std::process::id()));
        drop(first);
        assert_eq!(holder(dir.path()), None);
        UpLock::take(dir.path()).unwrap();
    }
}
