//! Free space and allocated bytes.
//!
//! It does not reserve anything: admission does.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// What a directory's disk has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Space {
    /// Size of the file system.
    pub total: u64,
    /// What can still be written by an unprivileged process. On a loop volume it is never more than what is free on the
    /// disk that holds the volume's (sparse) image.
    pub available: u64,
}

/// A file or file system cannot be measured.
#[derive(Debug, thiserror::Error)]
#[error("cannot measure {path}", path = path.display())]
pub struct UsageError {
    /// What was to be measured.
    pub path: PathBuf,
    /// Why not.
    #[source]
    pub source: io::Error,
}

/// Free space where `path` is.
///
/// # Errors
/// [`UsageError`] when the path does not exist or cannot be asked.
pub fn free_space(path: &Path) -> Result<Space, UsageError> {
    let fail = |source: io::Error| UsageError { path: path.into(), source };
    let mut space = statvfs(path).map_err(fail)?;
    if let Some(backing) = backing_file(path).map_err(fail)?
        && let Some(holder) = backing.parent()
        && let Ok(below) = statvfs(holder)
    {
        space.available = space.available.min(below.available);
    }
    Ok(space)
}

fn statvfs(path: &Path) -> io::Result<Space> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(Space {
        total: stat.f_blocks.saturating_mul(stat.f_frsize),
        available: stat.f_bavail.saturating_mul(stat.f_frsize),
    })
}

/// The image file under the file system of `path`, when that is on a loop device.
pub(crate) fn backing_file(path: &Path) -> io::Result<Option<PathBuf>> {
    let device = path.metadata()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    match std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/loop/backing_file")) {
        Ok(name) => Ok(Some(PathBuf::from(name.trim_end_matches('\n')))),
        Err(_) => Ok(None),
    }
}

/// Bytes that a file occupies on disk; shared extents count in full for each file that holds them.
///
/// # Errors
/// [`UsageError`] when the file cannot be asked.
pub fn file_usage(path: &Path) -> Result<u64, UsageError> {
    let meta = std::fs::symlink_metadata(path).map_err(|source| UsageError { path: path.into(), source })?;
    Ok(meta.blocks().saturating_mul(512))
}

/// Bytes that a tree occupies on disk. Symbolic links are counted, not followed.
///
/// # Errors
/// [`UsageError`] for the first entry that cannot be asked.
pub fn tree_usage(root: &Path) -> Result<u64, UsageError> {
    let mut total = file_usage(root)?;
    let fail = |source| UsageError { path: root.into(), source };
    for entry in std::fs::read_dir(root).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let below = if entry.file_type().map_err(fail)?.is_dir() {
            tree_usage(&entry.path())?
        } else {
            file_usage(&entry.path())?
        };
        total = total.saturating_add(below);
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_takes_no_space() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::File::create(dir.path().join("holes")).unwrap().set_len(64 << 20).unwrap();
        std::fs::write(dir.path().join("data"), vec![1; 1 << 20]).unwrap();
        assert!(file_usage(&dir.path().join("holes")).unwrap() < 1 << 20);
        assert!(tree_usage(dir.path()).unwrap() >= 1 << 20);
        assert!(tree_usage(dir.path()).unwrap() < 8 << 20);
    }

    #[test]
    fn free_space_answers_for_a_real_directory_and_fails_for_none() {
        assert!(free_space(Path::new("/")).unwrap().total > 0);
        assert!(free_space(Path::new("/nonexistent-coppice")).is_err());
    }
}
