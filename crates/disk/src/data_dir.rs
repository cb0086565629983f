//! The layout of the data directory.
//!
//! ```text
//! DATA/kernels/ID/{vmlinuz,modules/,initramfs-ID}     templates/NAME/{current,GEN/{template.json,rootfs.ext4,snapshot/}}
//!      sandboxes/ID/   snapshots/ID/   objects/   staging/   run/   coppice.db   control.db   credentials.env
//! ```
//!
//! Paths are only made by methods, from checked names. It does not make the volume under the directory ([`crate::volume`])
//! and does not know what is in the files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::clone::{CloneKind, clone_file};
use crate::name::{NameError, check_name};
use crate::ownership;
use crate::staging::{self, Staging, StagingError};
use crate::usage::{Space, UsageError, free_space};

/// The data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// It does not exist.
    #[error("the data directory {path} does not exist: run `make setup` or `coppice setup`, or give another --data-dir",
            path = path.display())]
    Missing {
        /// The directory.
        path: PathBuf,
    },
    /// Something else is there.
    #[error("{path} is not a directory: give another --data-dir", path = path.display())]
    NotADirectory {
        /// What was given.
        path: PathBuf,
    },
    /// It, or a directory in it, cannot be made or written.
    #[error("cannot use the data directory: {path} is not writable", path = path.display())]
    NotWritable {
        /// Where it failed.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Trying it out failed.
    #[error("cannot use the data directory")]
    Probe(#[from] StagingError),
}

/// An opened data directory. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataDir {
    root: PathBuf,
    reflink: bool,
}

/// Directories that exist after [`DataDir::open`].
const SUBDIRS: [&str; 7] = ["kernels", "templates", "sandboxes", "snapshots", "objects", "staging", "run"];

impl DataDir {
    /// Opens an existing directory: makes what is missing in it, removes what killed processes left in `staging`, and tries
    /// whether files can be written and share extents.
    ///
    /// # Errors
    /// [`DataDirError`].
    pub fn open(path: &Path) -> Result<Self, DataDirError> {
        let root = match fs::canonicalize(path) {
            Ok(root) if root.is_dir() => root,
            Ok(root) => return Err(DataDirError::NotADirectory { path: root }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DataDirError::Missing { path: path.into() });
            }
            Err(source) => return Err(DataDirError::NotWritable { path: path.into(), source }),
        };
        for name in SUBDIRS {
            let path = root.join(name);
            // Another process may be opening it at the same time.
            if let Err(source) = ownership::create_dir_all(&path) {
                return Err(DataDirError::NotWritable { path, source });
            }
        }
        staging::clean(&root.join("staging"))?;
        let reflink = supports_reflink(&root.join("staging"))?;
        Ok(Self { root, reflink })
    }

    /// The directory itself, absolute.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether files here can share extents. When not, every clone is a copy, and the product says so.
    #[must_use]
    pub fn reflink(&self) -> bool {
        self.reflink
    }

    /// Size and free space, bytes, as of now.
    ///
    /// # Errors
    /// [`UsageError`].
    pub fn space(&self) -> Result<Space, UsageError> {
        free_space(&self.root)
    }

    /// `kernels/`.
    #[must_use]
    pub fn kernels_dir(&self) -> PathBuf {
        self.root.join("kernels")
    }

    /// `kernels/ID/`.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn kernel_dir(&self, id: &str) -> Result<PathBuf, NameError> {
        Ok(self.kernels_dir().join(check_name(id)?))
    }

    /// `templates/`.
    #[must_use]
    pub fn templates_dir(&self) -> PathBuf {
        self.root.join("templates")
    }

    /// `templates/NAME/`: its generations and the file `current`.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn template_home(&self, name: &str) -> Result<PathBuf, NameError> {
        Ok(self.templates_dir().join(check_name(name)?))
    }

    /// `templates/NAME/GEN/`.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn template_dir(&self, name: &str, generation: &str) -> Result<PathBuf, NameError> {
        Ok(self.template_home(name)?.join(check_name(generation)?))
    }

    /// `sandboxes/`.
    #[must_use]
    pub fn sandboxes_dir(&self) -> PathBuf {
        self.root.join("sandboxes")
    }

    /// `sandboxes/ID/`.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn sandbox_dir(&self, id: &str) -> Result<PathBuf, NameError> {
        Ok(self.sandboxes_dir().join(check_name(id)?))
    }

    /// `snapshots/`.
    #[must_use]
    pub fn snapshots_dir(&self) -> PathBuf {
        self.root.join("snapshots")
    }

    /// `snapshots/ID/`.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn snapshot_dir(&self, id: &str) -> Result<PathBuf, NameError> {
        Ok(self.snapshots_dir().join(check_name(id)?))
    }

    /// `objects/`: the local object store.
    #[must_use]
    pub fn objects_dir(&self) -> PathBuf {
        self.root.join("objects")
    }

    /// `run/`: sockets and other things that mean nothing after a restart. A short path, for the 107 bytes of a socket.
    #[must_use]
    pub fn run_dir(&self) -> PathBuf {
        self.root.join("run")
    }

    /// `staging/`: where [`DataDir::stage`] works.
    #[must_use]
    pub fn staging_dir(&self) -> PathBuf {
        self.root.join("staging")
    }

    /// `coppice.db`: the records of the host.
    #[must_use]
    pub fn host_db(&self) -> PathBuf {
        self.root.join("coppice.db")
    }

    /// `control.db`: the records of control.
    #[must_use]
    pub fn control_db(&self) -> PathBuf {
        self.root.join("control.db")
    }

    /// `credentials.env`: written by `coppice up`, mode 0600.
    #[must_use]
    pub fn credentials_env(&self) -> PathBuf {
        self.root.join("credentials.env")
    }

    /// A new private directory on the same file system, to be published by rename.
    ///
    /// # Errors
    /// [`StagingError`].
    pub fn stage(&self, purpose: &str) -> Result<Staging, StagingError> {
        Staging::new(&self.staging_dir(), purpose)
    }
}

/// Tries whether files below `area` can share extents. What it makes is removed.
///
/// # Errors
/// [`StagingError`] when files cannot even be written.
pub fn supports_reflink(area: &Path) -> Result<bool, StagingError> {
    let probe = Staging::new(area, "reflink-probe")?;
    let source = probe.path().join("source");
    // Longer than any inline data of a file system, which would not be an extent.
    fs::write(&source, vec![0x5a; 64 << 10]).map_err(|error| {
        if crate::is_no_space(&error) {
            StagingError::NoSpace { path: source.clone(), source: error }
        } else {
            StagingError::Io { path: source.clone(), source: error }
        }
    })?;
    match clone_file(&source, &probe.path().join("clone")) {
        Ok(kind) => Ok(kind == CloneKind::Reflink),
        Err(error) => Err(StagingError::Io { path: source, source: io::Error::other(error) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opening_makes_the_layout_and_leaves_no_probe() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("staging/dead.1.1")).unwrap();
        let data = DataDir::open(dir.path()).unwrap();
        assert!(data.kernels_dir().is_dir() && data.sandboxes_dir().is_dir() && data.run_dir().is_dir());
        assert_eq!(fs::read_dir(data.staging_dir()).unwrap().count(), 0);
        assert!(data.space().unwrap().available > 0);
        assert_eq!(DataDir::open(dir.path()).unwrap(), data);
    }

    #[test]
    fn paths_come_only_from_checked_names() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::open(dir.path()).unwrap();
        assert!(data.sandbox_dir("../etc").is_err());
        assert!(data.template_dir("base", "..").is_err());
        assert!(data.snapshot_dir("").is_err());
        assert_eq!(data.template_dir("base", "g1").unwrap(), data.root().join("templates/base/g1"));
    }

    #[test]
    fn what_is_no_directory_is_refused_with_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let error = DataDir::open(&dir.path().join("none")).unwrap_err();
        assert!(matches!(error, DataDirError::Missing { .. }) && error.to_string().contains("make setup"));
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(matches!(DataDir::open(&file), Err(DataDirError::NotADirectory { .. })));
    }
}
