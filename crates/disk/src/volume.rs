//! The volume under a data directory: nothing where the disk can share extents, else an XFS file system in a sparse
//! image file, attached to a loop device (direct I/O, so that nothing is cached twice) and mounted at the directory.
//!
//! Idempotent, and the same call after a reboot attaches and mounts again. The loop device is marked to go away with the
//! mount. Each act is undone when a later one fails. It does not grow an image, and it never formats anything but the new
//! image that it made itself.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::mount::{MountFlags, UnmountFlags};

use crate::clone::remove_quietly;
use crate::command::{Command, CommandError};
use crate::data_dir::supports_reflink;
use crate::progress::{Event, Progress};
use crate::staging::StagingError;
use crate::usage::backing_file;

/// Apparent size of a new image, bytes. It is sparse: only what is written takes space.
pub const DEFAULT_SIZE: u64 = 64 << 30;
/// Smallest size that mkfs.xfs takes, bytes.
pub const MIN_SIZE: u64 = 300 << 20;

/// What to make when the disk cannot share extents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeSpec {
    /// The image file; `None` is `PATH.xfs` next to the directory.
    pub image: Option<PathBuf>,
    /// Apparent size of a new image, bytes, at least [`MIN_SIZE`]. An existing image keeps its size.
    pub size: u64,
}

impl Default for VolumeSpec {
    fn default() -> Self {
        Self { image: None, size: DEFAULT_SIZE }
    }
}

impl VolumeSpec {
    /// The image file for a data directory.
    #[must_use]
    pub fn image_for(&self, dir: &Path) -> PathBuf {
        self.image.clone().unwrap_or_else(|| {
            let mut name = dir.file_name().unwrap_or_default().to_os_string();
            name.push(".xfs");
            dir.with_file_name(name)
        })
    }
}

/// How the data directory came to share extents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeState {
    /// Its file system does by itself, or the volume is mounted already: nothing was done.
    Ready,
    /// The image was attached and mounted.
    Mounted {
        /// The image file.
        image: PathBuf,
        /// It was made now.
        created: bool,
    },
}

/// The volume was not made; nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// Not root.
    #[error("attaching and mounting a volume needs root: run it with sudo, or put the data directory on XFS or btrfs")]
    NotRoot,
    /// The size is too small.
    #[error("a volume of {size} bytes is too small: at least {MIN_SIZE}")]
    TooSmall {
        /// The asked size.
        size: u64,
    },
    /// The directory holds files that the mount would hide.
    #[error("{dir} is not empty, and its file system cannot share extents: empty it, or give another --data-dir",
            dir = dir.display())]
    NotEmpty {
        /// The data directory.
        dir: PathBuf,
    },
    /// Making the directory or the image failed.
    #[error("cannot prepare {path}", path = path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Trying the file system out failed.
    #[error("cannot try the data directory")]
    Probe(#[from] StagingError),
    /// mkfs.xfs failed.
    #[error("cannot make an XFS file system in {image}", image = image.display())]
    Format {
        /// The image file.
        image: PathBuf,
        /// Why.
        #[source]
        source: CommandError,
    },
    /// No loop device could be attached.
    #[error("cannot attach {image} to a loop device: a container may lack /dev/loop-control; put the data directory on XFS \
             or btrfs instead", image = image.display())]
    Attach {
        /// The image file.
        image: PathBuf,
        /// Why.
        #[source]
        source: CommandError,
    },
    /// The kernel did not mount it.
    #[error("cannot mount {image} at {dir}: does this kernel have XFS? is the image damaged (xfs_repair)?",
            image = image.display(), dir = dir.display())]
    Mount {
        /// The image file.
        image: PathBuf,
        /// The data directory.
        dir: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is in use.
    #[error("cannot unmount {dir}: stop what uses it (`coppice up`, sandboxes)", dir = dir.display())]
    Busy {
        /// The data directory.
        dir: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl VolumeError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}

/// Makes sure that files in `dir` can share extents; makes `dir` when it does not exist. Blocking.
///
/// # Errors
/// [`VolumeError`]; then nothing that this call made is left (an image that was there before stays).
pub fn ensure_volume(dir: &Path, spec: &VolumeSpec, progress: &dyn Progress) -> Result<VolumeState, VolumeError> {
    if spec.size < MIN_SIZE {
        return Err(VolumeError::TooSmall { size: spec.size });
    }
    fs::create_dir_all(dir).map_err(VolumeError::io(dir))?;
    let dir = &fs::canonicalize(dir).map_err(VolumeError::io(dir))?;
    let image = spec.image_for(dir);
    let here_already = backing_file(dir).map_err(VolumeError::io(dir))?.is_some_and(|backing| backing == image);
    if here_already || supports_reflink(dir)? {
        progress.report(Event::Kept { what: &format!("{} can share extents", dir.display()) });
        return Ok(VolumeState::Ready);
    }
    if !rustix::process::geteuid().is_root() {
        return Err(VolumeError::NotRoot);
    }
    if fs::read_dir(dir).map_err(VolumeError::io(dir))?.next().is_some() {
        return Err(VolumeError::NotEmpty { dir: dir.clone() });
    }
    let created = !image.exists();
    if created {
        create_image(&image, spec.size, progress)?;
    }
    let mounted = attach_and_mount(&image, dir, progress);
    if mounted.is_err() && created {
        remove_quietly(&image);
    }
    mounted.map(|()| VolumeState::Mounted { image, created })
}

/// The image appears under its name only when the file system in it is complete.
fn create_image(image: &Path, size: u64, progress: &dyn Progress) -> Result<(), VolumeError> {
    let what = format!("making {} ({} GiB at most, sparse)", image.display(), size >> 30);
    progress.report(Event::Step { what: &what });
    let partial = image.with_extension(format!("xfs.partial-{}", std::process::id()));
    let made = format_image(&partial, size, progress)
        .and_then(|()| fs::rename(&partial, image).map_err(VolumeError::io(image)))
        .and_then(|()| crate::fsync::sync_parent(image).map_err(VolumeError::io(image)));
    match made {
        Ok(()) => progress.report(Event::Done { what: &format!("made {}", image.display()) }),
        Err(_) => remove_quietly(&partial),
    }
    made
}

fn format_image(partial: &Path, size: u64, progress: &dyn Progress) -> Result<(), VolumeError> {
    let file =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(partial).map_err(VolumeError::io(partial))?;
    file.set_len(size).map_err(VolumeError::io(partial))?;
    // 4 KiB sectors fit loop devices of both sector sizes, whatever the disk below has.
    Command::new("mkfs.xfs")
        .args(["-q", "-f", "-L", "coppice", "-s", "size=4096", "-m", "reflink=1,crc=1", "-K"])
        .arg(partial)
        .limit(Duration::from_secs(120))
        .run(progress)
        .map_err(|source| VolumeError::Format { image: partial.into(), source })?;
    file.sync_all().map_err(VolumeError::io(partial))
}

fn attach_and_mount(image: &Path, dir: &Path, progress: &dyn Progress) -> Result<(), VolumeError> {
    let what = format!("mounting {} at {}", image.display(), dir.display());
    progress.report(Event::Step { what: &what });
    // One that a killed set-up left attached is used, rather than a second device over the same image.
    let device = match attached_device(image)? {
        Some(device) => device,
        None => attach(image, progress)?,
    };
    let flags = MountFlags::NOATIME | MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    let mounted = rustix::mount::mount(&device, dir, "xfs", flags, None).map_err(|errno| VolumeError::Mount {
        image: image.into(),
        dir: dir.into(),
        source: errno.into(),
    });
    // After a mount this marks the device to go when the mount goes; after a failed one it goes now.
    let released = Command::new("losetup").arg("-d").arg(&device).run(progress);
    mounted?;
    if let Err(source) = released {
        if let Err(errno) = rustix::mount::unmount(dir, UnmountFlags::empty()) {
            tracing::warn!(%errno, dir = %dir.display(), "cannot unmount");
        }
        return Err(VolumeError::Attach { image: image.into(), source });
    }
    progress.report(Event::Done { what: &format!("mounted {} at {}", image.display(), dir.display()) });
    Ok(())
}

fn attach(image: &Path, progress: &dyn Progress) -> Result<PathBuf, VolumeError> {
    let losetup =
        |args: &[&str]| Command::new("losetup").args(args).args(["--find", "--show"]).arg(image).run(progress);
    // Direct I/O needs a device whose sectors are no smaller than those of the disk below.
    let attached = losetup(&["--direct-io=on"]).or_else(|_| losetup(&["--direct-io=on", "--sector-size=4096"]));
    let attached = attached.or_else(|_| {
        let what = "the disk below does not take direct I/O: the volume's data is cached twice";
        progress.report(Event::Notice { what });
        losetup(&[])
    });
    let lines = attached.map_err(|source| VolumeError::Attach { image: image.into(), source })?;
    Ok(PathBuf::from(lines.last().map_or("", |line| line.trim())))
}

/// The loop device that has this image attached, found in sysfs.
fn attached_device(image: &Path) -> Result<Option<PathBuf>, VolumeError> {
    let meta = image.metadata().map_err(VolumeError::io(image))?;
    let entries = match fs::read_dir("/sys/block") {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(VolumeError::io(Path::new("/sys/block"))(error)),
    };
    for entry in entries.filter_map(Result::ok) {
        let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let backing = backing.trim_end_matches('\n');
        let same = fs::metadata(backing).is_ok_and(|other| (other.dev(), other.ino()) == (meta.dev(), meta.ino()));
        if same {
            return Ok(Some(Path::new("/dev").join(entry.file_name())));
        }
    }
    Ok(None)
}

/// Unmounts the volume at `dir`; its loop device goes with it, the image file stays. Nothing mounted: nothing done.
///
/// # Errors
/// [`VolumeError::Busy`] while something uses it.
pub fn detach(dir: &Path, spec: &VolumeSpec) -> Result<bool, VolumeError> {
    let dir = &fs::canonicalize(dir).map_err(VolumeError::io(dir))?;
    if backing_file(dir).map_err(VolumeError::io(dir))? != Some(spec.image_for(dir)) {
        return Ok(false);
    }
    File::open(dir).and_then(|file| Ok(rustix::fs::syncfs(&file)?)).map_err(VolumeError::io(dir))?;
    rustix::mount::unmount(dir, UnmountFlags::empty())
        .map_err(|errno| VolumeError::Busy { dir: dir.clone(), source: errno.into() })?;
    Ok(true)
}

/// Gives space that deleted files took in the image back to the disk below. Returns without doing anything when `dir` is
/// not on a volume of ours.
///
/// # Errors
/// [`CommandError`] of `fstrim`.
pub fn trim(dir: &Path, progress: &dyn Progress) -> Result<(), CommandError> {
    if !matches!(backing_file(dir), Ok(Some(_))) {
        return Ok(());
    }
    Command::new("fstrim").arg(dir).limit(Duration::from_secs(600)).run(progress).map(drop)
}
