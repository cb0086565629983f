//! Raw disk images on a host: reflink clones, ext4 building, the data directory and the volume it may live on.
//!
//! | module | what it is for |
//! |---|---|
//! | [`clone`] | one file becomes two: reflink, or an honest sparse copy |
//! | [`data_dir`] | the layout of the data directory; paths only from checked names |
//! | [`staging`] | directories that appear complete or not at all |
//! | [`volume`] | an XFS loop volume where the disk has no reflink |
//! | [`ext4`] | an ext4 image from a directory, without mounting |
//! | [`ext4_read`] | what is in an ext4 image, without mounting and without trusting it |
//! | [`changes`] | how the files of two such images differ |
//! | [`ownership`] | whose the files are, also what root puts there |
//! | [`usage`] | free space, allocated bytes |
//! | [`command`] | bounded subprocesses whose output goes to a log |
//! | [`progress`] | what a long operation tells the person who waits |
//!
//! It does not know what the images mean (templates, snapshots: `image`, `snapshot`), never mounts a file system that a
//! guest can write, and never follows symbolic links inside a tree that is not its own.

pub mod changes;
pub mod clone;
pub mod command;
pub mod data_dir;
pub mod ext4;
pub mod ext4_read;
pub mod fsync;
pub mod name;
pub mod ownership;
pub mod progress;
pub mod staging;
pub mod usage;
pub mod volume;

pub use clone::{CloneError, CloneKind, clone_fd, clone_file, clone_file_async, reflink_fd};
pub use data_dir::{DataDir, DataDirError};
pub use ext4::{Ext4Error, build_ext4};
pub use name::{NameError, check_name};
pub use ownership::Owner;
pub use progress::{Event, Progress, Quiet};
pub use staging::{Staging, StagingError};
pub use usage::{Space, UsageError, file_usage, free_space, tree_usage};
pub use volume::{VolumeError, VolumeSpec, VolumeState, detach, ensure_volume};

use std::io;

/// Whether an I/O error says that the disk, or the user's quota on it, is full.
#[must_use]
pub fn is_no_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
