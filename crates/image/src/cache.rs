//! The cache of downloads and built root file systems, outside the data directory: a new data directory is quick, and
//! `make clean` costs no download.
//!
//! ```text
//! CACHE/debs/   CACHE/kernels/{current.json,*.deb}   CACHE/rootfs/KEY/{rootfs.ext4,rootfs.json}   CACHE/logs/   CACHE/staging/
//! ```
//!
//! Everything in it can be deleted at any time; it is made again. It holds nothing that a running machine uses.

use std::io;
use std::path::{Path, PathBuf};

use coppice_disk::staging::{self, Staging, StagingError};

/// Where the cache is unless the operator says otherwise.
pub const DEFAULT_CACHE: &str = "/var/cache/coppice";

/// The cache directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the cache directory {path}: give another --cache-dir, or run as root", path = path.display())]
pub struct CacheError {
    /// What failed.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// An opened cache.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens or makes a cache, and removes what killed builds left in it.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn open(root: &Path) -> Result<Self, CacheError> {
        let fail = |path: &Path, source| CacheError { path: path.into(), source };
        for name in ["debs", "kernels", "rootfs", "logs", "staging"] {
            let path = root.join(name);
            std::fs::create_dir_all(&path).map_err(|source| fail(&path, source))?;
        }
        let root = root.canonicalize().map_err(|source| fail(root, source))?;
        let staging = root.join("staging");
        staging::clean(&staging).map_err(|error| fail(&staging, io::Error::other(error)))?;
        Ok(Self { root })
    }

    /// Debian packages that were downloaded for root file systems.
    #[must_use]
    pub fn debs_dir(&self) -> PathBuf {
        self.root.join("debs")
    }

    /// Kernel packages.
    #[must_use]
    pub fn kernels_dir(&self) -> PathBuf {
        self.root.join("kernels")
    }

    /// The root file system with this key, when it was built.
    #[must_use]
    pub fn rootfs_dir(&self, key: &str) -> PathBuf {
        self.root.join("rootfs").join(key)
    }

    /// A build log, new and empty names are up to the caller.
    #[must_use]
    pub fn log(&self, name: &str) -> PathBuf {
        self.root.join("logs").join(format!("{name}.log"))
    }

    /// A new private directory in the cache.
    ///
    /// # Errors
    /// [`StagingError`].
    pub fn stage(&self, purpose: &str) -> Result<Staging, StagingError> {
        Staging::new(&self.root.join("staging"), purpose)
    }
}
