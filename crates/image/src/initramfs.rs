//! The initramfs: the agent as `/init`, the modules of the guest kernel in load order, and nothing else.
//!
//! A cpio archive (newc), named by the hash of its contents and stored next to its kernel as `initramfs-ID`. Uncompressed:
//! measured under TCG, zstd makes no difference to the boot (1.6-1.9 s either way). It does not choose modules ([`crate::modules`]).

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use coppice_disk::{DataDir, Event, NameError, Progress, check_name};
use coppice_engine::GuestKernel;
use cpio::NewcBuilder;
use cpio::newc::ModeFileType;

use crate::kernel::{Kernel, KernelError};

/// Directory of the modules in the archive. `/modules.order` has their paths, one a line, in load order.
pub const MODULES_DIR: &str = "modules";
/// Largest agent that is taken, bytes: larger is a mistake, e.g. one with debug information.
const MAX_AGENT: u64 = 64 << 20;

/// There is no initramfs.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// The agent's binary is missing.
    #[error("there is no guest agent at {path}: `make build` builds it", path = path.display())]
    AgentMissing {
        /// Where it was looked for.
        path: PathBuf,
        /// Why it cannot be read.
        #[source]
        source: io::Error,
    },
    /// The agent's binary cannot be PID 1 of an empty initramfs.
    #[error("{path} cannot be the guest agent: {reason}; `make build` builds the right one", path = path.display())]
    AgentUnusable {
        /// The binary.
        path: PathBuf,
        /// Why.
        reason: &'static str,
    },
    /// The kernel's modules cannot be read.
    #[error("cannot read the guest kernel")]
    Kernel(#[from] KernelError),
    /// The archive or a module cannot be read or written.
    #[error("cannot use {path}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A bad id.
    #[error("cannot name the initramfs")]
    Name(#[from] NameError),
}

/// An initramfs in the data directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Initramfs {
    /// Hash of its contents.
    pub id: String,
    /// The file.
    pub path: PathBuf,
}

/// Makes sure that the data directory has the initramfs of this kernel and this agent. Blocking.
///
/// # Errors
/// [`InitramfsError`]; nothing is left behind.
pub fn prepare_initramfs(kernel: &Kernel, agent: &Path, progress: &dyn Progress) -> Result<Initramfs, InitramfsError> {
    let agent = read_agent(agent)?;
    let order = kernel.module_order()?;
    let mut modules = Vec::new();
    for name in order {
        let path = kernel.dir.join("modules").join(&name);
        let contents = fs::read(&path).map_err(|source| InitramfsError::Io { path, source })?;
        modules.push((name, contents));
    }
    let at_kernel = |source| InitramfsError::Io { path: kernel.dir.clone(), source };
    let archive = archive(&agent, &modules).map_err(at_kernel)?;
    let id: String = blake3::hash(&archive).to_hex().chars().take(16).collect();
    let path = kernel.dir.join(file_name(&id));
    if fs::metadata(&path).is_ok_and(|meta| usize::try_from(meta.len()) == Ok(archive.len())) {
        progress.report(Event::Kept { what: &format!("initramfs {id}") });
        return Ok(Initramfs { id, path });
    }
    progress.report(Event::Step { what: "initramfs" });
    coppice_disk::fsync::replace_file(&path, &archive, 0o644)
        .map_err(|source| InitramfsError::Io { path: path.clone(), source })?;
    progress.report(Event::Done { what: &format!("initramfs {id} ({} KiB)", archive.len() >> 10) });
    Ok(Initramfs { id, path })
}

fn file_name(id: &str) -> String {
    format!("initramfs-{id}")
}

/// The files of a kernel and an initramfs by their ids, as a manifest of a machine image names them.
///
/// # Errors
/// [`InitramfsError::Io`] naming the file that is missing.
pub fn guest_kernel(data: &DataDir, kernel_id: &str, initramfs_id: &str) -> Result<GuestKernel, InitramfsError> {
    let dir = data.kernel_dir(kernel_id)?;
    let files = GuestKernel { vmlinuz: dir.join("vmlinuz"), initramfs: dir.join(file_name(check_name(initramfs_id)?)) };
    for path in [&files.vmlinuz, &files.initramfs] {
        fs::metadata(path).map_err(|source| InitramfsError::Io { path: path.clone(), source })?;
    }
    Ok(files)
}

fn read_agent(path: &Path) -> Result<Vec<u8>, InitramfsError> {
    let missing = |source| InitramfsError::AgentMissing { path: path.into(), source };
    let unusable = |reason| InitramfsError::AgentUnusable { path: path.into(), reason };
    if fs::metadata(path).map_err(missing)?.len() > MAX_AGENT {
        return Err(unusable("it is larger than 64 MiB"));
    }
    let bytes = fs::read(path).map_err(missing)?;
    if !bytes.starts_with(b"\x7fELF") {
        return Err(unusable("it is not an ELF program"));
    }
    // PT_INTERP's string sits right behind the program headers. A kernel would only say "No working init found".
    let head = bytes.get(..4096).unwrap_or(&bytes);
    if head.windows(8).any(|window| window == b"ld-linux") {
        return Err(unusable("it is not static"));
    }
    Ok(bytes)
}

/// The archive; the same bytes for the same contents.
fn archive(agent: &[u8], modules: &[(String, Vec<u8>)]) -> io::Result<Vec<u8>> {
    let mut archive = Archive { bytes: Vec::new(), inode: 0 };
    for dir in ["dev", "proc", "sys", "newroot", MODULES_DIR] {
        archive.add(NewcBuilder::new(dir).mode(0o755).nlink(2).set_mode_file_type(ModeFileType::Directory), &[])?;
    }
    // The kernel opens it for PID 1 before anything can mount devtmpfs.
    let console = NewcBuilder::new("dev/console").mode(0o600).rdev_major(5).rdev_minor(1);
    archive.add(console.set_mode_file_type(ModeFileType::Char), &[])?;
    archive.file("init", 0o755, agent)?;
    let mut order = String::new();
    for (name, contents) in modules {
        let path = format!("{MODULES_DIR}/{name}");
        archive.file(&path, 0o644, contents)?;
        order.push('/');
        order.push_str(&path);
        order.push('\n');
    }
    archive.file("modules.order", 0o644, order.as_bytes())?;
    cpio::newc::trailer(archive.bytes)
}

struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    fn file(&mut self, name: &str, mode: u32, contents: &[u8]) -> io::Result<()> {
        self.add(NewcBuilder::new(name).mode(mode).set_mode_file_type(ModeFileType::Regular), contents)
    }

    fn add(&mut self, entry: NewcBuilder, contents: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let size = u32::try_from(contents.len()).map_err(io::Error::other)?;
        let mut writer = entry.ino(self.inode).write(std::mem::take(&mut self.bytes), size);
        writer.write_all(contents)?;
        self.bytes = writer.finish()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    #[test]
    fn the_archive_holds_init_console_and_modules_in_order() {
        let modules = [("b.ko".to_owned(), b"BB".to_vec()), ("a.ko".to_owned(), b"A".to_vec())];
        let bytes = archive(b"\x7fELF agent", &modules).unwrap();
        assert_eq!(bytes, archive(b"\x7fELF agent", &modules).unwrap(), "reproducible");
        let mut rest = Cursor::new(bytes);
        let mut names = Vec::new();
        loop {
            let mut reader = cpio::NewcReader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
            if name == "modules.order" {
                let mut text = String::new();
                io::Read::read_to_string(&mut reader, &mut text).unwrap();
                assert_eq!(text, "/modules/b.ko\n/modules/a.ko\n");
            }
            names.push((name, mode));
            rest = reader.finish().unwrap();
        }
        assert!(names.contains(&("init".into(), 0o100_755)));
        assert!(names.contains(&("dev/console".into(), 0o020_600)));
        assert!(names.contains(&("modules/a.ko".into(), 0o100_644)));
        assert!(names.contains(&("proc".into(), 0o040_755)));
    }

    #[test]
    fn what_cannot_be_the_agent_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        assert!(matches!(read_agent(&path), Err(InitramfsError::AgentMissing { .. })));
        for bytes in [&b"#!/bin/sh\n"[..], b"\x7fELF....../lib64/ld-linux-x86-64.so.2"] {
            fs::write(&path, bytes).unwrap();
            assert!(matches!(read_agent(&path), Err(InitramfsError::AgentUnusable { .. })));
        }
        fs::write(&path, b"\x7fELF static").unwrap();
        read_agent(&path).unwrap();
    }
}
