//! Whose the files are: the data directory belongs to the user that the server runs as, also what root puts into it.
//!
//! Root works here in directories that a less privileged user can change. So entries are changed by descriptor and never
//! through a symbolic link, and a file with several names in a directory that the user could write to is left alone: one
//! of the names may be somebody else's. It changes owners only, never permissions of what is in a directory.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Uid, chownat, fstat, openat, statat};

/// Deeper trees are not ours.
const MAX_DEPTH: usize = 64;

/// A user and its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

impl Owner {
    /// Whose a file or directory is. Symbolic links are not followed.
    ///
    /// # Errors
    /// That of `lstat`.
    pub fn of(path: &Path) -> io::Result<Self> {
        let meta = fs::symlink_metadata(path)?;
        Ok(Self { uid: meta.uid(), gid: meta.gid() })
    }

    fn has(self, stat: &Stat) -> bool {
        stat.st_uid == self.uid && stat.st_gid == self.gid
    }
}

/// Gives a file, or a directory with all that is in it on the same file system, to `owner`; what is its already costs a
/// look. Answers how many entries changed hands.
///
/// # Errors
/// The first error of reading or changing; what was given away before stays so, and trying again goes on.
pub fn give(path: &Path, owner: Owner) -> io::Result<usize> {
    let entry = openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&entry)?;
    let mut changed = 0;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        changed += give_contents(&reopen_dir(entry.as_fd())?, &stat, owner, 0)?;
    }
    changed += give_one(entry.as_fd(), &stat, owner)?;
    Ok(changed)
}

/// Gives what root made at `path` to the owner of the directory that it is in. Nothing to do for anybody else.
///
/// # Errors
/// As [`give`].
pub fn follow_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => follow(path, parent),
        None => Ok(()),
    }
}

/// Gives what root made at `path` to the owner of `dir`.
pub(crate) fn follow(path: &Path, dir: &Path) -> io::Result<()> {
    match owner_to_follow(dir)? {
        Some(owner) => give(path, owner).map(drop),
        None => Ok(()),
    }
}

/// Whom root gives what it makes in `dir`: nobody in its own directories.
pub(crate) fn owner_to_follow(dir: &Path) -> io::Result<Option<Owner>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let owner = Owner::of(dir)?;
    Ok((owner.uid != 0).then_some(owner))
}

/// `create_dir_all`, and what root makes so belongs to the owner of the directory that was there.
pub(crate) fn create_dir_all(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        create_dir_all(parent)?;
    }
    match fs::create_dir(dir) {
        Ok(()) => follow_parent(dir),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

/// The entries of a directory, and what is in them, before it changes hands itself: until then nobody else can put
/// something there.
fn give_contents(dir: &OwnedFd, dir_stat: &Stat, owner: Owner, depth: usize) -> io::Result<usize> {
    if depth > MAX_DEPTH {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the directories are nested too deep"));
    }
    let trusted = dir_stat.st_uid != owner.uid;
    let mut changed = 0;
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let stat = match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            // Somebody else's scratch file, gone meanwhile.
            Err(rustix::io::Errno::NOENT) => continue,
            stat => stat?,
        };
        let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if (owner.has(&stat) && !is_dir) || (is_dir && stat.st_dev != dir_stat.st_dev) {
            continue;
        }
        let opened = openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        let entry = match opened {
            Err(rustix::io::Errno::NOENT) => continue,
            entry => entry?,
        };
        // What is open may be another file than the one that was looked at.
        let stat = fstat(&entry)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            changed += give_contents(&reopen_dir(entry.as_fd())?, &stat, owner, depth + 1)?;
        } else if stat.st_nlink > 1 && !trusted {
            tracing::warn!(name = ?name, "a file with several names was left to its owner");
            continue;
        }
        changed += give_one(entry.as_fd(), &stat, owner)?;
    }
    Ok(changed)
}

fn give_one(entry: BorrowedFd<'_>, stat: &Stat, owner: Owner) -> io::Result<usize> {
    if owner.has(stat) {
        return Ok(0);
    }
    chownat(entry, c"", Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)), AtFlags::EMPTY_PATH)?;
    Ok(1)
}

/// A path descriptor of a directory as one that can be read.
fn reopen_dir(entry: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(openat(entry, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No user of that number exists; files can be its all the same.
    const NOBODY: Owner = Owner { uid: 1_234_567, gid: 1_234_568 };

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    #[test]
    fn a_tree_changes_hands_once_and_nothing_behind_a_link_does() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::write(&outside, "").unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/f"), "").unwrap();
        std::os::unix::fs::symlink(&outside, root.join("a/link")).unwrap();
        std::os::unix::fs::symlink(dir.path(), root.join("a/up")).unwrap();
        assert_eq!(give(&root, NOBODY).unwrap(), 6);
        for path in ["", "a", "a/b", "a/b/f", "a/link"] {
            assert_eq!(Owner::of(&root.join(path)).unwrap(), NOBODY, "{path}");
        }
        assert_eq!(Owner::of(&outside).unwrap().uid, 0);
        assert_eq!(Owner::of(dir.path()).unwrap().uid, 0);
        assert_eq!(give(&root, NOBODY).unwrap(), 0);
    }

    #[test]
    fn a_second_name_of_a_file_is_no_way_to_get_it() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        fs::write(&secret, "").unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        give(&root, NOBODY).unwrap();
        fs::hard_link(&secret, root.join("mine")).unwrap();
        fs::write(root.join("plain"), "").unwrap();
        assert_eq!(give(&root, NOBODY).unwrap(), 1);
        assert_eq!(Owner::of(&secret).unwrap().uid, 0);
        // In a directory that was root's alone, second names are root's own doing.
        let other = dir.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::hard_link(&secret, other.join("linked")).unwrap();
        give(&other, NOBODY).unwrap();
        assert_eq!(Owner::of(&secret).unwrap(), NOBODY);
    }

    #[test]
    fn what_root_makes_belongs_to_the_owner_of_the_directory() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        create_dir_all(&dir.path().join("x/y")).unwrap();
        assert_eq!(Owner::of(&dir.path().join("x/y")).unwrap().uid, 0);
        give(dir.path(), NOBODY).unwrap();
        create_dir_all(&dir.path().join("p/q")).unwrap();
        assert_eq!(Owner::of(&dir.path().join("p")).unwrap(), NOBODY);
        assert_eq!(Owner::of(&dir.path().join("p/q")).unwrap(), NOBODY);

        crate::fsync::replace_file(&dir.path().join("p/current"), b"1", 0o600).unwrap();
        assert_eq!(Owner::of(&dir.path().join("p/current")).unwrap(), NOBODY);
        let staged = crate::Staging::new(&dir.path().join("staging"), "x").unwrap();
        fs::write(staged.path().join("f"), "").unwrap();
        staged.publish(&dir.path().join("new/target")).unwrap();
        for path in ["new", "new/target", "new/target/f"] {
            assert_eq!(Owner::of(&dir.path().join(path)).unwrap(), NOBODY, "{path}");
        }
        let data = crate::DataDir::open(dir.path()).unwrap();
        assert_eq!(Owner::of(&data.sandboxes_dir()).unwrap(), NOBODY);
    }
}
