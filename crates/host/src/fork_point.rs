//! The disk that a sandbox began with, for as long as the sandbox lives.
//!
//! A second name of the image that its own disk is a clone of: images are immutable, so it costs no bytes, and deleting the
//! snapshot, baking the template anew or promoting a sibling does not take it away. It goes with the sandbox's directory.
//! A hibernation does not touch it: a sandbox that wakes has the fork point that it always had.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use coppice_api::{ForkPoint, ForkPointKind};
use jiff::Timestamp;
use tracing::warn;

use crate::record::SandboxRecord;

const FILE: &str = "fork-point.ext4";

/// Keeps the image that a new sandbox's disk was cloned from. A sandbox without one works as well, but can't say what
/// has changed in it.
pub(crate) async fn keep(image: PathBuf, sandbox_dir: PathBuf) {
    let to = sandbox_dir.join(FILE);
    let kept = tokio::task::spawn_blocking(move || share(&image, &to)).await;
    let kept = kept.unwrap_or_else(|_| Err(io::Error::other("interrupted")));
    if let Err(error) = kept {
        warn!(%error, "the disk that a sandbox began with can't be kept: what changes in it can't be told");
    }
}

/// Where a name can't be given (somebody else's file, or too many names), a clone that shares the bytes. Never a copy.
fn share(image: &Path, to: &Path) -> io::Result<()> {
    let Err(refused) = std::fs::hard_link(image, to) else { return Ok(()) };
    let image = File::open(image)?;
    let clone = coppice_disk::clone::create_new(to).map_err(io::Error::other)?;
    match coppice_disk::reflink_fd(&image, &clone) {
        Ok(true) => Ok(()),
        Ok(false) => std::fs::remove_file(to).and(Err(refused)),
        Err(error) => std::fs::remove_file(to).and(Err(error)),
    }
}

/// The image, and what it is. Blocking.
pub(crate) fn open(sandbox_dir: &Path, record: &SandboxRecord) -> io::Result<(File, ForkPoint)> {
    let image = File::open(sandbox_dir.join(FILE))?;
    // Nobody writes to an image: its last change is when it was made.
    let made = image.metadata()?.modified()?;
    let at = Timestamp::try_from(made).map_err(io::Error::other)?;
    let (kind, id) = match (&record.lineage, record.from_snapshot) {
        (Some(lineage), _) => (ForkPointKind::Fork, lineage.parent_id.to_string()),
        (None, Some(snapshot)) => (ForkPointKind::Snapshot, snapshot.to_string()),
        (None, None) => (ForkPointKind::Template, record.template.clone()),
    };
    Ok((image, ForkPoint { kind, id, at: at.to_string() }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[tokio::test]
    async fn an_image_is_kept_without_its_bytes_and_outlives_its_first_name() {
        let dir = tempfile::tempdir().unwrap();
        let (image, sandbox) = (dir.path().join("image"), dir.path().join("sandbox"));
        std::fs::create_dir(&sandbox).unwrap();
        std::fs::write(&image, "disk").unwrap();
        keep(image.clone(), sandbox.clone()).await;
        assert_eq!(sandbox.join(FILE).metadata().unwrap().nlink(), 2);
        std::fs::remove_file(image).unwrap();
        assert_eq!(std::fs::read_to_string(sandbox.join(FILE)).unwrap(), "disk");
        // What can't be kept is no reason to fail, and leaves nothing.
        keep(dir.path().join("none"), dir.path().to_owned()).await;
        assert!(!dir.path().join(FILE).exists());
    }
}
