//! What `coppice setup` prepares, found for tests and benches that use an engine without a host.
//!
//! It makes nothing: what is missing is named, and the caller says **skipped, because**.

use std::path::{Path, PathBuf};

use coppice_engine::GuestKernel;

/// Where `coppice setup` puts kernels.
pub const DATA: &str = "/var/lib/coppice";
/// Where it keeps built root file systems.
pub const CACHE: &str = "/var/cache/coppice";

/// Files of a real guest.
#[derive(Debug, Clone)]
pub struct Assets {
    /// Kernel and initramfs.
    pub kernel: GuestKernel,
    /// A root file system; clone it.
    pub rootfs: PathBuf,
}

/// The newest of each.
///
/// # Errors
/// A sentence that names what is missing.
pub fn find() -> Result<Assets, String> {
    let (kernels, roots) = (Path::new(DATA).join("kernels"), Path::new(CACHE).join("rootfs"));
    let missing =
        |what: &str, at: &Path| format!("there is no {what} below {}; `coppice setup` makes it", at.display());
    Ok(Assets {
        kernel: GuestKernel {
            vmlinuz: newest(&kernels, "vmlinuz").ok_or_else(|| missing("guest kernel", &kernels))?,
            initramfs: newest(&kernels, "initramfs-").ok_or_else(|| missing("initramfs", &kernels))?,
        },
        rootfs: newest(&roots, "rootfs.ext4").ok_or_else(|| missing("root file system", &roots))?,
    })
}

/// The newest file below `folder` whose name begins with `prefix`.
fn newest(folder: &Path, prefix: &str) -> Option<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(newest(&path, prefix));
        } else if entry.file_name().to_string_lossy().starts_with(prefix) {
            found.push(path);
        }
    }
    found.into_iter().max_by_key(|path| path.metadata().and_then(|meta| meta.modified()).ok())
}
