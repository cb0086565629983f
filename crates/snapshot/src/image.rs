//! An image directory: made as a [`PendingImage`], complete as a [`MachineImage`].

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::manifest::{MAX_MANIFEST, Manifest, ManifestError};
use crate::verify::{Digest, VerifyError, digest_sparse_file};
use crate::{DEVICES_FILE, DISK_FILE, MANIFEST_FILE, MEMORY_FILE};

/// A complete, immutable image. Holding one says that it was complete when it was opened; who removes images must know
/// that nothing refers to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineImage {
    dir: PathBuf,
    manifest: Manifest,
}

/// Why an image can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenImageError {
    /// There is no image there.
    #[error("there is no machine image at {0}")]
    Missing(PathBuf),
    /// The manifest can't be read.
    #[error("the manifest at {path} can't be read")]
    Read {
        /// Path of the manifest.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The manifest is not usable.
    #[error("the machine image at {path} can't be used")]
    Manifest {
        /// Path of the manifest.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: ManifestError,
    },
    /// A file of it is not what the manifest says.
    #[error("the machine image at {path} is damaged")]
    Damaged {
        /// Path of the image.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: VerifyError,
    },
}

/// Why an image can't be completed.
#[derive(Debug, thiserror::Error)]
pub enum CreateImageError {
    /// A file of it can't be written.
    #[error("the machine image at {path} can't be written")]
    Write {
        /// Path that was written.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Its manifest would not be valid.
    #[error("the manifest of the machine image would not be valid")]
    Manifest(#[from] ManifestError),
}

impl MachineImage {
    /// Opens an image: manifest decoded, every file there with its length, device state verified by checksum. Memory and
    /// disk contents are not read; see [`Self::verify`].
    ///
    /// # Errors
    /// Names what is missing or damaged.
    pub fn open(dir: &Path) -> Result<Self, OpenImageError> {
        let path = dir.join(MANIFEST_FILE);
        let bytes = read_bounded(&path, MAX_MANIFEST).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => OpenImageError::Missing(dir.to_owned()),
            _ => OpenImageError::Read { path: path.clone(), source },
        })?;
        let manifest = Manifest::decode(&bytes).map_err(|source| OpenImageError::Manifest { path, source })?;
        let image = Self { dir: dir.to_owned(), manifest };
        image.check(false).map_err(|source| OpenImageError::Damaged { path: dir.to_owned(), source })?;
        Ok(image)
    }

    /// Reads all of the image and compares every checksum that the manifest has.
    ///
    /// # Errors
    /// Names the file that differs.
    pub fn verify(&self) -> Result<(), OpenImageError> {
        self.check(true).map_err(|source| OpenImageError::Damaged { path: self.dir.clone(), source })
    }

    fn check(&self, contents: bool) -> Result<(), VerifyError> {
        let m = &self.manifest;
        for (file, info, always) in
            [(MEMORY_FILE, &m.memory, false), (DEVICES_FILE, &m.devices, true), (DISK_FILE, &m.disk, false)]
        {
            let read = |source| VerifyError::Read { file, source };
            let handle = File::open(self.dir.join(file)).map_err(read)?;
            let found = handle.metadata().map_err(read)?.len();
            if found != info.len {
                return Err(VerifyError::Length { file, expected: info.len, found });
            }
            if let (Some(expected), true) = (info.digest, contents || always) {
                let found = digest_sparse_file(&handle).map_err(read)?;
                if found != expected {
                    return Err(VerifyError::Checksum { file, expected, found });
                }
            }
        }
        Ok(())
    }

    /// What the image holds.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The image directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Guest memory.
    #[must_use]
    pub fn memory_path(&self) -> PathBuf {
        self.dir.join(MEMORY_FILE)
    }

    /// Device state.
    #[must_use]
    pub fn devices_path(&self) -> PathBuf {
        self.dir.join(DEVICES_FILE)
    }

    /// Root disk.
    #[must_use]
    pub fn disk_path(&self) -> PathBuf {
        self.dir.join(DISK_FILE)
    }
}

/// An image directory whose files are being written. It is nothing until [`PendingImage::complete`]; the directory is
/// removed when this is dropped before.
#[derive(Debug)]
pub struct PendingImage {
    dir: PathBuf,
    completed: bool,
}

impl PendingImage {
    /// Makes the directory, which must not exist yet. Its parent must.
    ///
    /// # Errors
    /// What making it said.
    pub fn create(dir: &Path) -> Result<Self, CreateImageError> {
        fs::create_dir(dir).map_err(|source| CreateImageError::Write { path: dir.to_owned(), source })?;
        Ok(Self { dir: dir.to_owned(), completed: false })
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Path of guest memory to be written.
    #[must_use]
    pub fn memory_path(&self) -> PathBuf {
        self.dir.join(MEMORY_FILE)
    }

    /// Path of device state to be written.
    #[must_use]
    pub fn devices_path(&self) -> PathBuf {
        self.dir.join(DEVICES_FILE)
    }

    /// Path of the root disk to be written.
    #[must_use]
    pub fn disk_path(&self) -> PathBuf {
        self.dir.join(DISK_FILE)
    }

    /// Digest of one of the files written so far.
    ///
    /// # Errors
    /// What reading it said.
    pub fn digest(path: &Path) -> Result<Digest, CreateImageError> {
        File::open(path)
            .and_then(|file| digest_sparse_file(&file))
            .map_err(|source| CreateImageError::Write { path: path.to_owned(), source })
    }

    /// Writes the manifest, which makes the image complete. With `durable` everything is on disk before the manifest is
    /// (write, fsync, rename, fsync of the directory); without, a crash of the host machine may lose the image but never
    /// leaves one that opens with wrong device state.
    ///
    /// # Errors
    /// What writing said; nothing is left behind.
    pub fn complete(mut self, manifest: Manifest, durable: bool) -> Result<MachineImage, CreateImageError> {
        let bytes = manifest.encode()?;
        let write = |path: PathBuf| move |source| CreateImageError::Write { path, source };
        if durable {
            for path in [self.memory_path(), self.devices_path(), self.disk_path()] {
                File::open(&path).and_then(|f| f.sync_all()).map_err(write(path))?;
            }
        }
        let path = self.dir.join(MANIFEST_FILE);
        let temporary = self.dir.join("manifest.json.new");
        let mut file = File::create(&temporary).map_err(write(temporary.clone()))?;
        file.write_all(&bytes).map_err(write(temporary.clone()))?;
        if durable {
            file.sync_all().map_err(write(temporary.clone()))?;
        }
        fs::rename(&temporary, &path).map_err(write(path.clone()))?;
        if durable {
            File::open(&self.dir).and_then(|d| d.sync_all()).map_err(write(self.dir.clone()))?;
        }
        self.completed = true;
        Ok(MachineImage { dir: self.dir.clone(), manifest })
    }
}

impl Drop for PendingImage {
    fn drop(&mut self) {
        if !self.completed {
            // Best effort: what is left after a crash is reclaimed at startup, by the missing manifest.
            drop(fs::remove_dir_all(&self.dir));
        }
    }
}

fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Accel, EngineKind, FileInfo, MachineSpec};

    fn make(parent: &Path) -> MachineImage {
        let pending = PendingImage::create(&parent.join("image")).unwrap();
        File::create(pending.memory_path()).unwrap().set_len(128 << 20).unwrap();
        fs::write(pending.devices_path(), b"device state").unwrap();
        fs::write(pending.disk_path(), b"disk").unwrap();
        let info = |path: PathBuf| FileInfo {
            len: fs::metadata(&path).unwrap().len(),
            digest: Some(PendingImage::digest(&path).unwrap()),
        };
        let manifest = Manifest {
            id: uuid::Uuid::new_v4(),
            captured_at: jiff::Timestamp::now(),
            engine: EngineKind::Fake,
            engine_version: "1".into(),
            accel: Accel::Tcg,
            machine: MachineSpec {
                cpus: 1,
                memory_mib: 128,
                kernel: "k".into(),
                initramfs: "i".into(),
                cmdline: String::new(),
            },
            channel_port: 0,
            memory: info(pending.memory_path()),
            devices: info(pending.devices_path()),
            disk: info(pending.disk_path()),
        };
        pending.complete(manifest, true).unwrap()
    }

    #[test]
    fn a_complete_image_opens_and_verifies() {
        let dir = tempfile::tempdir().unwrap();
        let image = make(dir.path());
        assert_eq!(MachineImage::open(image.dir()).unwrap(), image);
        image.verify().unwrap();
    }

    #[test]
    fn damage_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let image = make(dir.path());
        fs::write(image.disk_path(), b"dusk").unwrap();
        let chain = image.verify().unwrap_err();
        assert!(matches!(chain, OpenImageError::Damaged { source: VerifyError::Checksum { file: DISK_FILE, .. }, .. }));
        fs::write(image.devices_path(), b"device statE").unwrap();
        let chain = MachineImage::open(image.dir()).unwrap_err();
        assert!(matches!(
            chain,
            OpenImageError::Damaged { source: VerifyError::Checksum { file: DEVICES_FILE, .. }, .. }
        ));
        fs::write(image.devices_path(), b"").unwrap();
        let chain = MachineImage::open(image.dir()).unwrap_err();
        assert!(matches!(chain, OpenImageError::Damaged { source: VerifyError::Length { .. }, .. }));
        fs::remove_file(image.dir().join(MANIFEST_FILE)).unwrap();
        assert!(matches!(MachineImage::open(image.dir()), Err(OpenImageError::Missing(_))));
    }

    #[test]
    fn an_image_that_was_not_completed_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let pending = PendingImage::create(&path).unwrap();
        fs::write(pending.memory_path(), b"x").unwrap();
        drop(pending);
        assert!(!path.exists());
    }
}
