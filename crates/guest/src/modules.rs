//! Loads the kernel modules that the initramfs lists in `/modules.order`: one path a line, uncompressed, in order.
//!
//! No dependency resolution and no parameters: who builds the initramfs has put them in order. Module loading happens
//! only at boot.

use std::{fs, io, path::Path};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

const ORDER: &str = "/modules.order";

/// Loads them all. One that is missing or does not load is logged: whether it was needed shows when the root is mounted.
pub(crate) fn load_all() {
    let order = match fs::read_to_string(ORDER) {
        Ok(order) => order,
        Err(error) => return tracing::warn!("no modules are loaded: {ORDER}: {error}"),
    };
    for path in order.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Err(error) = load(&Path::new("/").join(path)) {
            tracing::warn!("module {path} is not loaded: {error}");
        }
    }
}

fn load(path: &Path) -> io::Result<()> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    match rustix::system::finit_module(&file, c"", 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        // The kernel's word for it is ENOENT, as if the file were missing.
        Err(Errno::NOENT) => Err(io::Error::other("a symbol that it needs is missing (are the modules in order?)")),
        Err(error) => Err(error.into()),
    }
}
