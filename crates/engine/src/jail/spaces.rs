//! Namespaces that all VMMs share: nothing of the host's is in them.
//!
//! They are made once, on a thread that enters them and ends; descriptors keep them. VMMs need not be kept apart by them
//! from each other: a view without writable files, a network without interfaces and an IPC namespace that no other user
//! can reach into hold nothing to share. The mounts vanish with the last VMM and the last descriptor.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// The namespaces, with what identifies them from outside.
#[derive(Debug)]
pub(crate) struct Spaces {
    pub net: Space,
    pub ipc: Space,
    pub uts: Space,
    pub mnt: Space,
    /// Device and inode of the root directory.
    pub root: (u64, u64),
}

/// One namespace.
#[derive(Debug)]
pub(crate) struct Space {
    fd: OwnedFd,
    /// Device and inode.
    pub id: (u64, u64),
    pub kind: LinkNameSpaceType,
    /// Its name in `/proc/PID/ns`.
    pub name: &'static str,
}

impl Space {
    fn new(fd: OwnedFd, kind: LinkNameSpaceType, name: &'static str) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&fd)?;
        Ok(Self { fd, id: (stat.st_dev, stat.st_ino), kind, name })
    }

    fn current(kind: LinkNameSpaceType, name: &'static str) -> io::Result<Self> {
        Self::new(File::open(format!("/proc/thread-self/ns/{name}"))?.into(), kind, name)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Spaces {
    /// Makes them for a program. `void` is the network namespace, where somebody else made one. Needs root.
    pub fn make(program: &Path, void: Option<&OwnedFd>) -> io::Result<Self> {
        let void = void.map(OwnedFd::try_clone).transpose()?;
        let program = program.to_owned();
        let made = std::thread::Builder::new().name("jail".to_owned()).spawn(move || enter(&program, void))?;
        made.join().unwrap_or_else(|_panic| Err(io::Error::other("the thread that makes the jail panicked")))
    }
}

fn enter(program: &Path, void: Option<OwnedFd>) -> io::Result<Spaces> {
    let mut new = UnshareFlags::FS | UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    if void.is_none() {
        new |= UnshareFlags::NEWNET;
    }
    // SAFETY: only this thread's namespaces and working directory change, and it ends with this function's caller. It shares
    // its descriptors with the process as before (no CLONE_FILES).
    unsafe { rustix::thread::unshare_unsafe(new)? };
    let net = match void {
        Some(void) => Space::new(void, LinkNameSpaceType::Network, "net")?,
        None => Space::current(LinkNameSpaceType::Network, "net")?,
    };
    let ipc = Space::current(LinkNameSpaceType::InterProcessCommunication, "ipc")?;
    let uts = Space::current(LinkNameSpaceType::HostNameAndNISDomainName, "uts")?;
    let mnt = Space::current(LinkNameSpaceType::Mount, "mnt")?;
    rustix::system::sethostname(b"vmm")?;
    build_view(program)?;
    let root = rustix::fs::stat("/")?;
    Ok(Spaces { net, ipc, uts, mnt, root: (root.st_dev, root.st_ino) })
}

/// Where the view is put together, in a mount namespace that nobody else sees. Every system has it.
const STAGE: &str = "/tmp";

/// Replaces the root of this mount namespace by a small read-only one.
fn build_view(program: &Path) -> io::Result<()> {
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    // Opened before anything is mounted over: the sources may lie below the stage.
    let program = program.canonicalize()?;
    let sources: Vec<(PathBuf, OwnedFd, bool)> = parts(&program).into_iter().filter_map(open_source).collect();
    let links: Vec<(PathBuf, PathBuf)> = ["/lib", "/lib64", "/lib32"]
        .into_iter()
        .filter_map(|link| Some((PathBuf::from(link), std::fs::read_link(link).ok()?)))
        .collect();
    let (quiet, size) = (MountFlags::NOSUID | MountFlags::NODEV, c"size=1m,nr_inodes=4k,mode=0755");
    rustix::mount::mount("coppice-vmm", STAGE, "tmpfs", quiet, size)?;
    for (path, source, is_dir) in &sources {
        let target = inside(path);
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent)?;
        }
        if *is_dir {
            std::fs::create_dir_all(&target)?
        } else {
            drop(File::create(&target)?)
        }
        bind(source, &target, path.starts_with("/dev"))?;
    }
    for (link, to) in links {
        std::os::unix::fs::symlink(to, inside(&link))?;
    }
    // The old root is stacked on the new one and taken away.
    rustix::process::chdir(STAGE)?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    rustix::mount::mount_remount("/", MountFlags::BIND | MountFlags::RDONLY | quiet | MountFlags::NOEXEC, c"")?;
    Ok(())
}

/// What QEMU reads after its start: its program, libraries, firmware. Nothing else of the host's, and no `/proc`.
fn parts(program: &Path) -> Vec<PathBuf> {
    let fixed = ["/dev/null", "/etc/ld.so.cache", "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64"];
    let mut all: Vec<PathBuf> = fixed.into_iter().map(PathBuf::from).collect();
    all.push(program.to_owned());
    // `PREFIX/bin/qemu-system-x86_64`
    if let Some(prefix) = program.parent().and_then(Path::parent) {
        all.extend(["lib", "lib64"].map(|dir| prefix.join(dir)));
        all.extend(["qemu", "seabios", "ipxe", "qemu-firmware"].map(|dir| prefix.join("share").join(dir)));
    }
    all.sort();
    all.dedup();
    // What lies in another one comes with it.
    let nested: Vec<PathBuf> = all.clone();
    all.retain(|path| !nested.iter().any(|other| other != path && path.starts_with(other)));
    all
}

/// Opens a part without following a link: `/lib` of a merged system is a link, which is made again.
fn open_source(path: PathBuf) -> Option<(PathBuf, OwnedFd, bool)> {
    let meta = path.symlink_metadata().ok().filter(|meta| !meta.is_symlink())?;
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC;
    let source = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).ok()?;
    let opened = rustix::fs::fstat(&source).ok()?;
    (opened.st_ino == meta.ino()).then_some((path, source, meta.is_dir()))
}

fn bind(source: &OwnedFd, target: &Path, is_device: bool) -> io::Result<()> {
    let from = format!("/proc/thread-self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(source));
    rustix::mount::mount_bind(from, target)?;
    let mut flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID;
    flags |= if is_device { MountFlags::NOEXEC } else { MountFlags::NODEV };
    rustix::mount::mount_remount(target, flags, c"")?;
    Ok(())
}

fn inside(path: &Path) -> PathBuf {
    Path::new(STAGE).join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_view_has_the_program_its_libraries_and_firmware_and_nothing_twice() {
        let all = parts(Path::new("/usr/bin/qemu-system-x86_64"));
        let has = |path: &str| all.iter().filter(|p| *p == Path::new(path)).count();
        assert_eq!([has("/usr/bin/qemu-system-x86_64"), has("/usr/lib"), has("/usr/share/qemu")], [1, 1, 1]);
        assert!(all.iter().all(|path| !path.starts_with("/proc") && !path.starts_with("/var")));
        let own = parts(Path::new("/opt/qemu/bin/qemu"));
        assert!(own.contains(&PathBuf::from("/opt/qemu/lib")) && own.contains(&PathBuf::from("/usr/lib")));
    }
}
