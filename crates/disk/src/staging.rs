//! Directories that appear complete or not at all.
//!
//! A [`Staging`] is a private directory under a staging area, locked while its maker lives. It is published by rename
//! (write, fsync, rename, fsync of the parent) or removed when dropped. What a killed process left is told from what a
//! living one is making by the lock, so cleaning never races a build. It does not copy: the target must be on the same
//! file system.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;

use crate::{fsync, ownership};

/// A directory was not staged or published.
#[derive(Debug, thiserror::Error)]
pub enum StagingError {
    /// Making or removing something failed.
    #[error("cannot prepare {path}", path = path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The disk is full.
    #[error("no space left on the disk for {path}", path = path.display())]
    NoSpace {
        /// Where.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// Something is published there already; it was left as it is.
    #[error("{path} exists already", path = path.display())]
    Exists {
        /// The target.
        path: PathBuf,
    },
}

impl StagingError {
    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| {
            if crate::is_no_space(&source) { Self::NoSpace { path, source } } else { Self::Io { path, source } }
        }
    }
}

/// A directory in the making. Dropping it removes it.
#[derive(Debug)]
pub struct Staging {
    path: PathBuf,
    /// Holds the lock that says that the maker lives.
    lock: File,
    published: bool,
}

static COUNTER: AtomicU64 = AtomicU64::new(0);

impl Staging {
    /// Makes a new directory (mode 0755) in `area`, which is made when it does not exist.
    ///
    /// # Errors
    /// [`StagingError::Io`], [`StagingError::NoSpace`].
    pub fn new(area: &Path, purpose: &str) -> Result<Self, StagingError> {
        ownership::create_dir_all(area).map_err(StagingError::at(area))?;
        let purpose: String = purpose.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(40).collect();
        loop {
            let serial = COUNTER.fetch_add(1, Ordering::Relaxed);
            let path = area.join(format!("{purpose}.{}.{serial}", std::process::id()));
            match DirBuilder::new().mode(0o755).create(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(StagingError::at(&path)(error)),
            }
            // A cleaner in another process can see the directory before the lock is ours, and takes it away: then another
            // name is tried.
            let lock = match File::open(&path) {
                Ok(lock) => lock,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(StagingError::at(&path)(error)),
            };
            let locked = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
            if locked && path.is_dir() {
                return Ok(Self { path, lock, published: false });
            }
        }
    }

    /// Where to write.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Flushes all of it and moves it to `target`, which must not exist; its parents are made. Published by root, it
    /// belongs to the owner of the directory that it is published in.
    ///
    /// # Errors
    /// [`StagingError`]; the staged directory is then removed and the target is as it was.
    pub fn publish(mut self, target: &Path) -> Result<(), StagingError> {
        let at = || StagingError::at(target);
        if let Some(parent) = target.parent() {
            ownership::create_dir_all(parent).map_err(at())?;
            ownership::follow(&self.path, parent).map_err(at())?;
        }
        fsync::sync_tree(&self.path).map_err(at())?;
        match rustix::fs::renameat_with(CWD, &self.path, CWD, target, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Err(StagingError::Exists { path: target.into() }),
            Err(errno) => return Err(at()(errno.into())),
        }
        self.published = true;
        // From here the directory belongs to its new place; nobody cleans there by the lock.
        rustix::fs::flock(&self.lock, FlockOperation::Unlock).map_err(|errno| at()(errno.into()))?;
        fsync::sync_parent(target).map_err(at())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a staging directory");
        }
    }
}

/// Takes over the directories for `purpose` in `area` whose makers no longer live: what they hold can be looked at and
/// undone, and dropping the values removes them.
///
/// # Errors
/// [`StagingError::Io`] when the area cannot be read; a directory that cannot be taken over is logged and left.
pub fn abandoned(area: &Path, purpose: &str) -> Result<Vec<Staging>, StagingError> {
    let prefix = format!("{purpose}.");
    let mut taken = Vec::new();
    for path in entries(area)? {
        let ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix));
        if !ours {
            continue;
        }
        match take_over(&path) {
            Ok(Some(lock)) => taken.push(Staging { path, lock, published: false }),
            Ok(None) => {}
            Err(error) => tracing::warn!(path = %path.display(), %error, "cannot take over a staging directory"),
        }
    }
    Ok(taken)
}

fn entries(area: &Path) -> Result<Vec<PathBuf>, StagingError> {
    let entries = match fs::read_dir(area) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(StagingError::at(area)(error)),
    };
    entries.map(|entry| entry.map(|entry| entry.path()).map_err(StagingError::at(area))).collect()
}

/// The lock of a directory whose maker is gone; `None` while it lives.
fn take_over(dir: &Path) -> io::Result<Option<File>> {
    let lock = File::open(dir)?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(lock)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Removes what makers that no longer live left in `area`; returns how many entries that were.
///
/// # Errors
/// [`StagingError::Io`] when the area cannot be read; an entry that cannot be removed is logged and left.
pub fn clean(area: &Path) -> Result<usize, StagingError> {
    let mut removed = 0;
    for path in entries(area)? {
        match clean_one(&path) {
            Ok(true) => removed += 1,
            Ok(false) => {}
            Err(error) => tracing::warn!(path = %path.display(), %error, "cannot clean a staging directory"),
        }
    }
    Ok(removed)
}

fn clean_one(path: &Path) -> io::Result<bool> {
    let meta = fs::symlink_metadata(path)?;
    if !meta.is_dir() {
        rustix::fs::unlinkat(CWD, path, AtFlags::empty())?;
        return Ok(true);
    }
    // The lock is held until the directory is gone, so that nobody else takes it over meanwhile.
    let Some(_lock) = take_over(path)? else { return Ok(false) };
    fs::remove_dir_all(path).map(|()| true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_whole_or_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (area, target) = (dir.path().join("staging"), dir.path().join("a/b"));
        let staged = Staging::new(&area, "x/../y").unwrap();
        assert_eq!(staged.path().parent().unwrap(), area);
        fs::create_dir(staged.path().join("d")).unwrap();
        fs::write(staged.path().join("d/f"), "1").unwrap();
        staged.publish(&target).unwrap();
        assert_eq!(fs::read_to_string(target.join("d/f")).unwrap(), "1");

        let dropped = Staging::new(&area, "x").unwrap();
        fs::write(dropped.path().join("f"), "2").unwrap();
        drop(dropped);
        assert_eq!(fs::read_dir(&area).unwrap().count(), 0);
    }

    #[test]
    fn an_existing_target_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (area, target) = (dir.path().join("staging"), dir.path().join("t"));
        fs::create_dir(&target).unwrap();
        let staged = Staging::new(&area, "x").unwrap();
        assert!(matches!(staged.publish(&target), Err(StagingError::Exists { .. })));
        assert_eq!(fs::read_dir(&area).unwrap().count(), 0);
    }

    #[test]
    fn cleaning_spares_what_is_being_made() {
        let dir = tempfile::tempdir().unwrap();
        let area = dir.path().join("staging");
        let alive = Staging::new(&area, "alive").unwrap();
        fs::create_dir(area.join("dead.1.2")).unwrap();
        fs::write(area.join("dead.1.2/f"), "x").unwrap();
        std::os::unix::fs::symlink("/etc", area.join("link")).unwrap();
        assert_eq!(clean(&area).unwrap(), 2);
        assert!(alive.path().is_dir());
        assert!(Path::new("/etc/passwd").exists());
        assert_eq!(clean(&dir.path().join("none")).unwrap(), 0);
    }

    #[test]
    fn what_a_dead_maker_left_can_be_looked_at_before_it_goes() {
        let dir = tempfile::tempdir().unwrap();
        let area = dir.path();
        let _alive = Staging::new(area, "bake").unwrap();
        for name in ["bake.1.1", "sandbox.1.1"] {
            fs::create_dir(area.join(name)).unwrap();
        }
        fs::write(area.join("bake.1.1/record"), "x").unwrap();
        let taken = abandoned(area, "bake").unwrap();
        assert_eq!(taken.len(), 1);
        assert_eq!(fs::read_to_string(taken[0].path().join("record")).unwrap(), "x");
        assert_eq!(abandoned(area, "bake").unwrap().len(), 0, "taken only once");
        drop(taken);
        assert!(!area.join("bake.1.1").exists() && area.join("sandbox.1.1").exists());
    }
}
