//! The machine image format: one directory that holds what one machine was at one instant.
//!
//! ```text
//! DIR/manifest.json   what the rest is; written last, by rename, so that a directory with a manifest is complete
//! DIR/memory          guest memory, one sparse file; holes are zero pages
//! DIR/devices         device and CPU state, in the engine's own format
//! DIR/disk.ext4       the root disk
//! ```
//!
//! Images are immutable once their manifest exists. This crate reads, writes and verifies them; it does not capture
//! (that is the engine's) and does not decide when one may be removed (that is the host's).
#![forbid(unsafe_code)]

mod image;
mod manifest;
pub mod sealed;
mod verify;

pub use image::{CreateImageError, MachineImage, OpenImageError, PendingImage};
pub use manifest::{Accel, EngineKind, FORMAT, FORMAT_VERSION, FileInfo, MachineSpec, Manifest, ManifestError};
pub use verify::{Digest, VerifyError, digest_sparse_file};

/// File name of the manifest in an image directory.
pub const MANIFEST_FILE: &str = "manifest.json";
/// File name of the guest memory in an image directory.
pub const MEMORY_FILE: &str = "memory";
/// File name of the device state in an image directory.
pub const DEVICES_FILE: &str = "devices";
/// File name of the root disk in an image directory.
pub const DISK_FILE: &str = "disk.ext4";
