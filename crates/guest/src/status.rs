//! From I/O errors to gRPC statuses, and the checks on paths that every file call shares.

use std::{
    ffi::OsStr,
    io,
    path::{Component, Path, PathBuf},
};

use coppice_guest_proto::limits::MAX_PATH;
use rustix::io::Errno;
use tonic::Status;

/// The status for an error of an operation on `what`.
pub(crate) fn from_io(what: &dyn std::fmt::Display, error: &io::Error) -> Status {
    let Some(errno) = error.raw_os_error().map(Errno::from_raw_os_error) else {
        return Status::internal(format!("{what}: {error}"));
    };
    match errno {
        Errno::NOENT => Status::not_found(format!("{what}: no such file or directory")),
        Errno::ISDIR => Status::failed_precondition(format!("{what}: is a directory")),
        Errno::NOTDIR => Status::failed_precondition(format!("{what}: not a directory")),
        Errno::LOOP | Errno::NOTEMPTY | Errno::EXIST | Errno::BUSY | Errno::TXTBSY | Errno::NXIO | Errno::AGAIN => {
            Status::failed_precondition(format!("{what}: {error}"))
        }
        Errno::ACCESS | Errno::PERM | Errno::ROFS => Status::permission_denied(format!("{what}: {error}")),
        Errno::NAMETOOLONG | Errno::INVAL => Status::invalid_argument(format!("{what}: {error}")),
        Errno::NOSPC | Errno::DQUOT => {
            Status::resource_exhausted(format!("{what}: no space left on the sandbox's disk"))
        }
        Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::FBIG => {
            Status::resource_exhausted(format!("{what}: {error}"))
        }
        _ => Status::internal(format!("{what}: {error}")),
    }
}

/// Checks a path of the protocol and resolves it below `root`.
///
/// `root` is `/` in a sandbox, where nothing has to be confined (the host asks as the sandbox's root user). In a fake it
/// is a directory, and `..` can't leave it; symbolic links can, which is good enough for a test.
pub(crate) fn check_path(root: &Path, path: &str) -> Result<PathBuf, Status> {
    if path.len() > MAX_PATH {
        return Err(Status::invalid_argument(format!("the path is longer than {MAX_PATH} bytes")));
    }
    if !path.starts_with('/') {
        return Err(Status::invalid_argument(format!("{path:?} is not an absolute path")));
    }
    if path.contains('\0') {
        return Err(Status::invalid_argument("the path contains a NUL byte"));
    }
    if root == Path::new("/") {
        // Without the trailing slash, which would make even lstat follow a link.
        return Ok(Path::new(path).components().collect());
    }
    let mut resolved = PathBuf::new();
    for component in Path::new(path).components() {
        match component {
            Component::Normal(name) => resolved.push(name),
            Component::ParentDir => {
                resolved.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    Ok(if resolved.as_os_str() == OsStr::new("") { root.to_owned() } else { root.join(resolved) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bad_paths_are_invalid_arguments() {
        for bad in ["", "a", "./a", "/a\0b", &format!("/{}", "a".repeat(MAX_PATH))] {
            assert_eq!(check_path(Path::new("/"), bad).unwrap_err().code(), tonic::Code::InvalidArgument, "{bad:?}");
        }
        assert_eq!(check_path(Path::new("/"), "/a/../b").unwrap(), Path::new("/a/../b"));
        assert_eq!(check_path(Path::new("/r"), "/").unwrap(), Path::new("/r"));
    }

    proptest! {
        #[test]
        fn a_path_in_a_fake_stays_below_its_root(path in "/([a.]{0,3}/){0,6}[a.]{0,3}") {
            let resolved = check_path(Path::new("/r"), &path).unwrap();
            prop_assert!(resolved.starts_with("/r"));
            prop_assert!(!resolved.components().any(|c| c == Component::ParentDir));
        }
    }
}
