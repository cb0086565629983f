//! An ext4 image from a directory tree, by `mke2fs -d`: no mount, no loop device, no guest involved.
//!
//! The image is the same for the same tree as far as e2fsprogs allows: UUID, hash seed, feature set and (where the
//! installed version honours `SOURCE_DATE_EPOCH`) times are fixed; host defaults in `/etc/mke2fs.conf` are ignored. It
//! does not read images back.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::clone::remove_quietly;
use crate::command::{Command, CommandError};
use crate::progress::Progress;

/// Smallest image that is built, bytes: below it the journal does not fit.
pub const MIN_SIZE: u64 = 64 << 20;
/// Longest label, bytes; a limit of ext4.
pub const MAX_LABEL: usize = 16;
/// Fixed feature set: what Debian 12's kernel and e2fsprogs agree on. The journal stays: guests are killed at will.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,\
                        large_file,huge_file,dir_nlink,extra_isize,metadata_csum";
/// The time that e2fsprogs writes where it would write now, where it can be told (seconds since the epoch).
const EPOCH: &str = "1735689600";

/// An image was not built; nothing is left at its path.
#[derive(Debug, thiserror::Error)]
pub enum Ext4Error {
    /// The size or the label is outside the limits of the format.
    #[error(
        "cannot build an ext4 image of {size} bytes labelled {label:?}: at least {MIN_SIZE} bytes in whole MiB, and \
             a label of at most {MAX_LABEL} bytes"
    )]
    Invalid {
        /// The asked size.
        size: u64,
        /// The asked label.
        label: String,
    },
    /// The image file cannot be created; it must not exist.
    #[error("cannot create {path}", path = path.display())]
    Create {
        /// The image.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The tree does not fit into the size.
    #[error("the files do not fit into an image of {} MiB: raise disk_mb in the recipe", size >> 20)]
    TooSmall {
        /// The asked size.
        size: u64,
        /// What mke2fs said.
        #[source]
        source: CommandError,
    },
    /// The host's disk is full.
    #[error("no space left on the disk for {path}", path = path.display())]
    NoSpace {
        /// The image.
        path: PathBuf,
        /// What failed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// mke2fs failed.
    #[error("cannot build the ext4 image {path}", path = path.display())]
    Tool {
        /// The image.
        path: PathBuf,
        /// What it said.
        #[source]
        source: CommandError,
    },
}

/// Builds the sparse ext4 image `image` (a new file, mode 0600) of `size` bytes from the tree at `root`.
///
/// # Errors
/// [`Ext4Error`]; the image is then removed.
pub fn build_ext4(root: &Path, image: &Path, size: u64, label: &str, progress: &dyn Progress) -> Result<(), Ext4Error> {
    if size < MIN_SIZE || !size.is_multiple_of(1 << 20) || label.len() > MAX_LABEL {
        return Err(Ext4Error::Invalid { size, label: label.into() });
    }
    let no_space = |source: io::Error| Ext4Error::NoSpace { path: image.into(), source: source.into() };
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(image).map_err(|source| {
        if crate::is_no_space(&source) { no_space(source) } else { Ext4Error::Create { path: image.into(), source } }
    })?;
    let built = file
        .set_len(size)
        .map_err(|source| Ext4Error::Create { path: image.into(), source })
        .and_then(|()| fill(root, image, size, label, progress))
        .and_then(|()| file.sync_all().map_err(no_space));
    if built.is_err() {
        remove_quietly(image);
    }
    built
}

fn fill(root: &Path, image: &Path, size: u64, label: &str, progress: &dyn Progress) -> Result<(), Ext4Error> {
    // The inode tables are known to be zero in a new sparse file, so "not lazy" costs nothing here and spares every guest
    // the kernel thread that would zero them. The same holds for the journal.
    let extended = format!(
        "root_owner=0:0,lazy_itable_init=0,lazy_journal_init=1,hash_seed={}",
        fixed_uuid("coppice ext4 hash seed", label)
    );
    Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-O", FEATURES, "-b", "4096", "-I", "256", "-i", "16384", "-m", "0"])
        .args(["-J", "size=16", "-L", label, "-U", &fixed_uuid("coppice ext4 uuid", label), "-E", &extended, "-d"])
        .arg(root)
        .arg(image)
        .env("MKE2FS_CONFIG", "/dev/null")
        .env("SOURCE_DATE_EPOCH", EPOCH)
        .env("E2FSPROGS_FAKE_TIME", EPOCH)
        .limit(Duration::from_secs(600))
        .run(progress)
        .map(drop)
        .map_err(|source| classify(image, size, source))
}

/// mke2fs has one exit status for everything; only its words tell a full image from a full disk.
fn classify(image: &Path, size: u64, source: CommandError) -> Ext4Error {
    let CommandError::Failed { tail, .. } = &source else {
        return Ext4Error::Tool { path: image.into(), source };
    };
    let says = |words: &str| tail.iter().any(|line| line.contains(words));
    if says("Could not allocate") || says("ext2 filesystem") {
        Ext4Error::TooSmall { size, source }
    } else if says("No space left on device") {
        Ext4Error::NoSpace { path: image.into(), source: source.into() }
    } else {
        Ext4Error::Tool { path: image.into(), source }
    }
}

/// A UUID (version 8) that depends on the label only.
fn fixed_uuid(context: &str, label: &str) -> String {
    let hash = blake3::derive_key(context, label.as_bytes());
    let mut number = hash.first_chunk::<16>().map_or(0, |bytes| u128::from_be_bytes(*bytes));
    number &= !((0xf << 76) | (0x3 << 62));
    number |= (0x8 << 76) | (0x2 << 62);
    let hex = format!("{number:032x}");
    let part = |range: std::ops::Range<usize>| hex.get(range).unwrap_or_default().to_owned();
    [part(0..8), part(8..12), part(12..16), part(16..20), part(20..32)].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Quiet;

    fn debugfs(image: &Path, request: &str) -> String {
        Command::new("debugfs").args(["-R", request]).arg(image).run(&Quiet).unwrap().join("\n")
    }

    #[test]
    fn a_tree_becomes_a_sparse_journaled_image_without_lazy_tables() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("etc")).unwrap();
        std::fs::write(root.join("etc/motd"), "hello from the tree\n").unwrap();
        std::os::unix::fs::symlink("/etc/shadow", root.join("link")).unwrap();
        let image = dir.path().join("image");
        build_ext4(&root, &image, 256 << 20, "test", &Quiet).unwrap();
        assert!(debugfs(&image, "cat /etc/motd").ends_with("hello from the tree"));
        assert!(debugfs(&image, "stat link").contains("Type: symlink"), "a link is stored, not followed");
        let log = dir.path().join("dumpe2fs.log");
        Command::new("dumpe2fs").arg(&image).log(&log).run(&Quiet).unwrap();
        let header = std::fs::read_to_string(log).unwrap();
        for wanted in ["has_journal", "Reserved block count:     0", "ITABLE_ZEROED"] {
            assert!(header.contains(wanted), "{wanted} not in {header}");
        }
        assert!(crate::file_usage(&image).unwrap() < 8 << 20);
        Command::new("e2fsck").args(["-fn"]).arg(&image).run(&Quiet).unwrap();
    }

    #[test]
    fn a_tree_that_does_not_fit_is_a_typed_error_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir(&root).unwrap();
        std::fs::write(root.join("big"), vec![1; 80 << 20]).unwrap();
        let image = dir.path().join("image");
        let error = build_ext4(&root, &image, MIN_SIZE, "test", &Quiet).unwrap_err();
        assert!(matches!(error, Ext4Error::TooSmall { .. }), "{error:?}");
        assert!(!image.exists());
    }

    #[test]
    fn limits_are_checked_and_an_existing_file_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        for (size, label) in [(1 << 20, "x"), (MIN_SIZE + 1, "x"), (MIN_SIZE, "a label too long")] {
            let label = format!("{label}{}", if label.len() > 1 { "!" } else { "" });
            assert!(matches!(build_ext4(dir.path(), &image, size, &label, &Quiet), Err(Ext4Error::Invalid { .. })));
        }
        std::fs::write(&image, "mine").unwrap();
        assert!(matches!(build_ext4(dir.path(), &image, MIN_SIZE, "x", &Quiet), Err(Ext4Error::Create { .. })));
        assert_eq!(std::fs::read(&image).unwrap(), b"mine");
    }

    #[test]
    fn the_uuid_is_fixed_and_well_formed() {
        let uuid = fixed_uuid("c", "base");
        assert_eq!(uuid, fixed_uuid("c", "base"));
        assert_ne!(uuid, fixed_uuid("c", "other"));
        assert_eq!(uuid.len(), 36);
        assert_eq!(uuid.as_bytes()[14], b'8');
    }
}
