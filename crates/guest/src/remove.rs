//! Remove: deletes a file or a whole tree, without following symbolic links and without recursion.
//!
//! A tree may be deeper than any stack or path length. So a directory that is not empty is not descended into: its own
//! directories are moved up to the top of the tree, and the top is worked on until it is empty. Everything is done
//! relative to two open directories, so no path can lead elsewhere.

use std::{
    ffi::{CStr, CString},
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use coppice_guest_proto::v1::{RemoveReply, RemoveRequest};
use rustix::{
    fs::{AtFlags, CWD, Dir, Mode, OFlags},
    io::Errno,
};
use tonic::Status;

use crate::{service::Agent, status::from_io};

/// Serves the call.
pub(crate) async fn remove(agent: &Agent, request: RemoveRequest) -> Result<RemoveReply, Status> {
    let path = agent.path(&request.path)?;
    if path == agent.system.root() || path.file_name().is_none() {
        return Err(Status::invalid_argument(format!("{}: can't be removed", request.path)));
    }
    agent.blocking(move || remove_all(&path).map_err(|e| from_io(&request.path, &e))).await?;
    Ok(RemoveReply {})
}

fn remove_all(path: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.is_dir() {
        return fs::remove_file(path);
    }
    let top = open_dir(CWD, &CString::new(path.as_os_str().as_encoded_bytes())?)?;
    let mut moved = 0u64;
    loop {
        let names = entries(&top)?;
        if names.is_empty() {
            return fs::remove_dir(path);
        }
        for name in names {
            remove_entry(&top, &name, &mut moved)?;
        }
    }
}

/// Removes an entry of the top directory; the directories in it are moved to the top instead.
fn remove_entry(top: &OwnedFd, name: &CStr, moved: &mut u64) -> io::Result<()> {
    if unlink(top.as_fd(), name)? {
        return Ok(());
    }
    let dir = open_dir(top.as_fd(), name)?;
    for inner in entries(&dir)? {
        if unlink(dir.as_fd(), &inner)? {
            continue;
        }
        loop {
            let free = CString::new(format!(".coppice-removed-{moved}"))?;
            *moved += 1;
            match rustix::fs::renameat_with(&dir, &*inner, top, &*free, rustix::fs::RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                other => break other?,
            }
        }
    }
    match rustix::fs::unlinkat(top, name, AtFlags::REMOVEDIR) {
        // Something was put in meanwhile: the next round sees it.
        Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes an entry that is not a directory, or an empty one. False for a directory that is not empty.
fn unlink(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(true),
        // Linux says EISDIR where POSIX says EPERM.
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
        // It was not a directory after all: the first refusal holds.
        Err(Errno::NOTDIR) => Err(Errno::PERM.into()),
        Err(error) => Err(error.into()),
    }
}

fn open_dir(at: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(at, name, flags, Mode::empty())?)
}

/// Names in a directory, a bounded number: what is left is seen in the next round.
fn entries(dir: &OwnedFd) -> io::Result<Vec<CString>> {
    const MAX: usize = 4096;
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            names.push(name.to_owned());
        }
        if names.len() == MAX {
            break;
        }
    }
    Ok(names)
}
