//! Making a change to a directory last: `fsync` of files and of their directories, atomic replacement of small files.
//!
//! It does not order writes across files; callers do, by the order of their calls.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Flushes the entries of a directory.
///
/// # Errors
/// The error of `open` or `fsync`.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Flushes the directory that holds `path`.
///
/// # Errors
/// The error of `open` or `fsync`.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => sync_dir(Path::new(".")),
        Some(parent) => sync_dir(parent),
        None => Ok(()),
    }
}

/// Flushes every regular file and directory under `root`, contents before the directory that names them.
/// Symbolic links are not followed.
///
/// # Errors
/// The first error of reading or flushing.
pub fn sync_tree(root: &Path) -> io::Result<()> {
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sync_tree(&entry.path())?;
        } else if kind.is_file() {
            File::open(entry.path())?.sync_all()?;
        }
    }
    sync_dir(root)
}

/// Replaces the file at `path` by `contents` with the given permission bits: after a crash it is the old or the new one.
/// Written by root, it belongs to the owner of the directory.
///
/// # Errors
/// The first error; the temporary file is then removed.
pub fn replace_file(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".new-{}", std::process::id()));
    let temporary = path.with_file_name(name);
    let written = (|| {
        // What a crashed process with the same id left would block create_new for ever.
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        if let Some(owner) = path.parent().map(crate::ownership::owner_to_follow).transpose()?.flatten() {
            std::os::unix::fs::fchown(&file, Some(owner.uid), Some(owner.gid))?;
        }
        file.write_all(contents)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    if let Err(error) = written {
        crate::clone::remove_quietly(&temporary);
        return Err(error);
    }
    sync_parent(path)
}
