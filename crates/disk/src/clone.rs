//! One file becomes two: a reflink (`FICLONE`) where the file system shares extents, else an honest sparse copy.
//!
//! The kind is always part of the answer: a copy where a clone was expected turns 2 ms into seconds, and callers report it.
//! It does not flush anything, and it does not make the source stand still; callers pause or quiesce first.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// How a file was cloned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CloneKind {
    /// Extents are shared; took no time that depends on the size.
    Reflink,
    /// Data was copied, holes kept.
    Copy,
}

/// A file could not be cloned. Nothing was left behind by [`clone_file`].
#[derive(Debug, thiserror::Error)]
pub enum CloneError {
    /// The source cannot be opened or read.
    #[error("cannot read {path}", path = path.display())]
    Source {
        /// The file to clone.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The destination cannot be created; it must not exist.
    #[error("cannot create {path}", path = path.display())]
    Create {
        /// The file to make.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The disk is full.
    #[error("no space left on the disk while cloning: free some, or move the data directory to a larger disk")]
    NoSpace {
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// Cloning or copying failed.
    #[error("cannot clone the file")]
    Io {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The worker thread ended early (runtime shutdown or a bug).
    #[error("the clone was interrupted")]
    Interrupted,
}

impl CloneError {
    fn from_io(source: io::Error) -> Self {
        if crate::is_no_space(&source) { Self::NoSpace { source } } else { Self::Io { source } }
    }
}

/// Clones `src` to the new file `dst` (mode 0600), which must not exist and is removed on failure.
/// Blocking; use [`clone_file_async`] on a runtime.
///
/// # Errors
/// [`CloneError`]; nothing is left behind.
pub fn clone_file(src: &Path, dst: &Path) -> Result<CloneKind, CloneError> {
    let source = File::open(src).map_err(|source| CloneError::Source { path: src.into(), source })?;
    let target = create_new(dst)?;
    let cloned = clone_fd(&source, &target);
    if cloned.is_err() {
        remove_quietly(dst);
    }
    cloned
}

/// [`clone_file`] on a blocking thread. When the future is dropped the clone still runs to its end in the background, so
/// `dst` belongs in a directory that its owner removes.
///
/// # Errors
/// As [`clone_file`], and [`CloneError::Interrupted`].
pub async fn clone_file_async(src: PathBuf, dst: PathBuf) -> Result<CloneKind, CloneError> {
    tokio::task::spawn_blocking(move || clone_file(&src, &dst)).await.unwrap_or(Err(CloneError::Interrupted))
}

/// Creates a file that must not exist yet, readable and writable by its owner only.
///
/// # Errors
/// [`CloneError::Create`], or [`CloneError::NoSpace`].
pub fn create_new(path: &Path) -> Result<File, CloneError> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path).map_err(|source| {
        if crate::is_no_space(&source) {
            CloneError::NoSpace { source }
        } else {
            CloneError::Create { path: path.into(), source }
        }
    })
}

/// Clones between open files: for the pause window, where opening was done before. `dst` must be empty.
/// Where a copy is needed, the shared file offset of `src` is moved.
///
/// # Errors
/// [`CloneError::NoSpace`] or [`CloneError::Io`]; `dst` may then hold a part.
pub fn clone_fd(src: &File, dst: &File) -> Result<CloneKind, CloneError> {
    if reflink_fd(src, dst).map_err(CloneError::from_io)? {
        return Ok(CloneKind::Reflink);
    }
    copy_sparse(src, dst).map_err(CloneError::from_io)?;
    Ok(CloneKind::Copy)
}

/// Only the `FICLONE` call: `Ok(false)` when this pair of files cannot share extents, and nothing was done.
///
/// # Errors
/// Any other failure (no space, I/O error).
pub fn reflink_fd(src: &File, dst: &File) -> io::Result<bool> {
    match rustix::fs::ioctl_ficlone(dst, src) {
        Ok(()) => Ok(true),
        // Not the same file system, one without reflink, or a kind of file that has no extents.
        Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::NOTTY | Errno::INVAL | Errno::NOSYS) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Copies data extents and keeps holes.
fn copy_sparse(src: &File, dst: &File) -> io::Result<()> {
    let size = src.metadata()?.len();
    dst.set_len(size)?;
    let mut at = 0;
    while let Some((start, end)) = next_extent(src, at, size)? {
        copy_range(src, dst, start, end)?;
        at = end;
    }
    Ok(())
}

/// The next range of `file` at or after `from` that holds data, as far as the file system tells holes apart.
fn next_extent(file: &File, from: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    if from >= size {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // A file system that does not know holes: all of it is data.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((from, size))),
        Err(errno) => return Err(errno.into()),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    let end = end.min(size);
    Ok((start < end).then_some((start, end)))
}

/// Largest request to `copy_file_range`, bytes: bounded so that a signal or a full disk is noticed in reasonable time.
const COPY_STEP: usize = 64 << 20;
/// Buffer of the plain copy loop, bytes.
const BUFFER: usize = 1 << 20;

fn copy_range(src: &File, dst: &File, mut at: u64, end: u64) -> io::Result<()> {
    while at < end {
        let wanted = usize::try_from(end - at).unwrap_or(COPY_STEP).min(COPY_STEP);
        let (mut from, mut to) = (at, at);
        match rustix::fs::copy_file_range(src, Some(&mut from), dst, Some(&mut to), wanted) {
            // The source became shorter: what is missing reads as zeros, as after set_len.
            Ok(0) => return Ok(()),
            Ok(copied) => at += u64::try_from(copied).unwrap_or(end - at),
            Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) => {
                return copy_loop(src, dst, at, end);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn copy_loop(src: &File, dst: &File, mut at: u64, end: u64) -> io::Result<()> {
    let mut buffer = vec![0_u8; BUFFER];
    while at < end {
        let wanted = usize::try_from(end - at).unwrap_or(BUFFER).min(BUFFER);
        let read = match src.read_at(buffer.get_mut(..wanted).unwrap_or_default(), at) {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        dst.write_all_at(buffer.get(..read).unwrap_or_default(), at)?;
        at += u64::try_from(read).unwrap_or(end - at);
    }
    Ok(())
}

/// Removes a file as part of an undo; a failure is logged, since the error that caused the undo is the one to report.
pub(crate) fn remove_quietly(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "cannot remove a partial file");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    /// 256 MiB apparent, 8 KiB written.
    fn sparse_source(dir: &Path) -> PathBuf {
        let path = dir.join("src");
        let file = File::create(&path).unwrap();
        file.set_len(256 << 20).unwrap();
        file.write_all_at(&[7; 4096], 1 << 20).unwrap();
        file.write_all_at(&[9; 4096], (256 << 20) - 4096).unwrap();
        path
    }

    fn assert_same(a: &Path, b: &Path) {
        assert!(std::fs::read(a).unwrap() == std::fs::read(b).unwrap(), "contents differ");
    }

    #[test]
    fn a_clone_has_the_same_content_stays_sparse_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let src = sparse_source(dir.path());
        let dst = dir.path().join("dst");
        clone_file(&src, &dst).unwrap();
        assert_same(&src, &dst);
        let meta = dst.metadata().unwrap();
        assert_eq!(meta.permissions().mode() & 0o777, 0o600);
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
    }

    #[test]
    fn both_copy_ways_agree() {
        let dir = tempfile::tempdir().unwrap();
        let src = sparse_source(dir.path());
        let file = File::open(&src).unwrap();
        let size = file.metadata().unwrap().len();
        let by_kernel = dir.path().join("kernel");
        copy_sparse(&file, &create_new(&by_kernel).unwrap()).unwrap();
        let by_hand = dir.path().join("hand");
        let target = create_new(&by_hand).unwrap();
        target.set_len(size).unwrap();
        let mut at = 0;
        while let Some((start, end)) = next_extent(&file, at, size).unwrap() {
            copy_loop(&file, &target, start, end).unwrap();
            at = end;
        }
        assert_same(&src, &by_kernel);
        assert_same(&src, &by_hand);
        assert!(by_hand.metadata().unwrap().blocks() * 512 < 1 << 20);
    }

    #[test]
    fn an_existing_destination_is_kept_and_refused() {
        let dir = tempfile::tempdir().unwrap();
        let src = sparse_source(dir.path());
        let dst = dir.path().join("dst");
        std::fs::write(&dst, b"mine").unwrap();
        assert!(matches!(clone_file(&src, &dst), Err(CloneError::Create { .. })));
        assert_eq!(std::fs::read(&dst).unwrap(), b"mine");
    }

    #[test]
    fn a_missing_source_makes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let dst = dir.path().join("dst");
        assert!(matches!(clone_file(&dir.path().join("none"), &dst), Err(CloneError::Source { .. })));
        assert!(!dst.exists());
    }

    #[test]
    fn a_failed_copy_leaves_no_destination() {
        let dir = tempfile::tempdir().unwrap();
        let dst = dir.path().join("dst");
        // A directory opens, but can be neither cloned nor copied.
        clone_file(dir.path(), &dst).unwrap_err();
        assert!(!dst.exists());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn any_pattern_of_holes_survives(
            size in 1_u64..3_000_000,
            writes in proptest::collection::vec((0_u64..3_000_000, 1_u8..), 0..8),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let (src, dst) = (dir.path().join("a"), dir.path().join("b"));
            let file = File::options().read(true).write(true).create_new(true).open(&src).unwrap();
            file.set_len(size).unwrap();
            for (offset, byte) in writes {
                file.write_all_at(&[byte], offset % size).unwrap();
            }
            copy_sparse(&file, &create_new(&dst).unwrap()).unwrap();
            prop_assert!(std::fs::read(&src).unwrap() == std::fs::read(&dst).unwrap());
        }
    }
}
