//! A full disk is told as such, and nothing is left on it. Needs root, for a small tmpfs; skipped, with the reason, without.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use coppice_disk::{CloneError, DataDir, Ext4Error, Quiet, StagingError, build_ext4, clone_file, free_space};
use rustix::mount::{MountFlags, UnmountFlags};

/// 8 MiB at a temporary directory.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        match rustix::mount::mount("none", dir.path(), "tmpfs", MountFlags::empty(), c"size=8m") {
            Ok(()) => Some(Self(dir)),
            Err(errno) => {
                println!("skipped, because a tmpfs cannot be mounted: {errno}");
                None
            }
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn files(&self) -> usize {
        std::fs::read_dir(self.path()).unwrap().count()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Err(errno) = rustix::mount::unmount(self.path(), UnmountFlags::DETACH) {
            eprintln!("cleaning up: {errno}");
        }
    }
}

#[test]
fn a_clone_that_does_not_fit_says_so_and_leaves_nothing() {
    let Some(disk) = SmallDisk::mount() else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let source = elsewhere.path().join("source");
    std::fs::write(&source, vec![1; 16 << 20]).unwrap();
    let error = clone_file(&source, &disk.path().join("clone")).unwrap_err();
    assert!(matches!(error, CloneError::NoSpace { .. }), "{error:?}");
    assert_eq!(disk.files(), 0);
    assert!(free_space(disk.path()).unwrap().available > 7 << 20);
}

#[test]
fn an_ext4_image_that_does_not_fit_says_so_and_leaves_nothing() {
    let Some(disk) = SmallDisk::mount() else { return };
    let tree = tempfile::tempdir().unwrap();
    std::fs::write(tree.path().join("big"), vec![1; 16 << 20]).unwrap();
    let error = build_ext4(tree.path(), &disk.path().join("image"), 256 << 20, "x", &Quiet).unwrap_err();
    assert!(matches!(error, Ext4Error::NoSpace { .. }), "{error:?}");
    assert_eq!(disk.files(), 0);
}

#[test]
fn a_data_directory_on_a_full_disk_says_so() {
    let Some(disk) = SmallDisk::mount() else { return };
    let data = DataDir::open(disk.path()).unwrap();
    let filler = disk.path().join("filler");
    assert!(std::fs::write(&filler, vec![1; 16 << 20]).is_err());
    let error = DataDir::open(disk.path()).unwrap_err();
    assert!(matches!(&error, coppice_disk::DataDirError::Probe(StagingError::NoSpace { .. })), "{error:?}");
    assert_eq!(std::fs::read_dir(data.staging_dir()).unwrap().count(), 0);
}
