//! The mounts of a sandbox: the kernel's file systems, the root disk, and the move from the initramfs to it.
//!
//! It mounts nothing that the host or the user asks for later.

use std::{fs, io, path::Path};

use rustix::{
    fs::{CWD, Mode},
    io::Errno,
    mount::{MountFlags, mount, mount_bind, mount_move},
};

/// Where the root disk is mounted before it becomes `/`.
const NEW_ROOT: &str = "/newroot";

/// Where the groups that processes are held in are.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";

/// What is mounted over the kernel's boot id.
pub(crate) const BOOT_ID: &str = "run/coppice/boot_id";
const KERNELS_BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// One file system without a disk.
struct Virtual {
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
    data: Option<&'static std::ffi::CStr>,
    /// Whether the sandbox is of no use without it.
    needed: bool,
}

const fn virtual_fs(kind: &'static str, target: &'static str, data: Option<&'static std::ffi::CStr>) -> Virtual {
    Virtual { kind, target, flags: MountFlags::NOSUID.union(MountFlags::NODEV), data, needed: true }
}

/// Mounts /proc, /sys and /dev in the initramfs. They are moved along to the root disk.
pub(crate) fn mount_kernel() -> io::Result<()> {
    let mounts = [
        Virtual { flags: MountFlags::NOSUID, ..virtual_fs("devtmpfs", "/dev", Some(c"mode=755")) },
        virtual_fs("proc", "/proc", None),
        virtual_fs("sysfs", "/sys", None),
    ];
    mounts.iter().try_for_each(mount_virtual)
}

/// Mounts the rest, after the switch to the root disk.
pub(crate) fn mount_rest() -> io::Result<()> {
    let mounts = [
        Virtual {
            flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
            ..virtual_fs("devpts", "/dev/pts", Some(c"gid=5,mode=620,ptmxmode=666"))
        },
        virtual_fs("tmpfs", "/dev/shm", Some(c"mode=1777")),
        virtual_fs("tmpfs", "/run", Some(c"mode=755")),
        // Every command is moved into its group, and without this the kernel waits for a grace period of RCU each time.
        Virtual { needed: false, ..virtual_fs("cgroup2", CGROUPS, Some(c"favordynmods")) },
    ];
    mounts.iter().try_for_each(mount_virtual)?;
    // What udev would make.
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        match std::os::unix::fs::symlink(target, link) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => tracing::warn!("{link}: {error}"),
            _ => {}
        }
    }
    for dir in ["/run/coppice", "/run/lock"] {
        fs::create_dir_all(dir)?;
    }
    ["hostname", "machine-id", "resolv.conf"].into_iter().try_for_each(mount_name)?;
    mount_boot_id()
}

/// The kernel's id of this boot is in its memory, and so in every copy; what asks for it is shown one that a resume can write.
fn mount_boot_id() -> io::Result<()> {
    let file = format!("/{BOOT_ID}");
    fs::write(&file, fs::read(KERNELS_BOOT_ID)?)?;
    mount_bind(file.as_str(), KERNELS_BOOT_ID)
        .map_err(|error| io::Error::other(format!("mounting {file} over {KERNELS_BOOT_ID}: {error}")))
}

/// Files that resumes write are in memory and only mounted over the disk: a write to ext4 runs much more kernel code
/// (which costs in a machine that was just restored), and makes its disk differ from that of its siblings for nothing.
fn mount_name(name: &str) -> io::Result<()> {
    let (file, over) = (format!("/run/coppice/{name}"), format!("/etc/{name}"));
    fs::write(&file, "")?;
    // A link, as of resolv.conf with systemd-resolved, may lead nowhere, or into a /run that is no more.
    if fs::symlink_metadata(&over).is_ok_and(|meta| meta.is_symlink()) {
        fs::remove_file(&over)?;
    }
    if !fs::exists(&over)? {
        fs::write(&over, "")?;
    }
    mount_bind(file.as_str(), over.as_str())
        .map_err(|error| io::Error::other(format!("mounting {file} over {over}: {error}")))
}

fn mount_virtual(what: &Virtual) -> io::Result<()> {
    let result =
        make_dir(what.target).and_then(|()| Ok(mount(what.kind, what.target, what.kind, what.flags, what.data)?));
    match result {
        // The kernel mounts devtmpfs by itself if it is told to.
        Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => Ok(()),
        Err(error) if !what.needed => {
            tracing::warn!("{} is not mounted: {error}", what.target);
            Ok(())
        }
        Err(error) => Err(io::Error::new(error.kind(), format!("mounting {}: {error}", what.target))),
        Ok(()) => Ok(()),
    }
}

fn make_dir(path: &str) -> io::Result<()> {
    match rustix::fs::mkdirat(CWD, path, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Mounts the root disk beside the initramfs.
pub(crate) fn mount_root(device: &str) -> io::Result<()> {
    make_dir(NEW_ROOT)?;
    Ok(mount(device, NEW_ROOT, "ext4", MountFlags::NOATIME, None)?)
}

/// Makes the root disk `/`, and frees what the initramfs holds. The agent goes on running from its deleted file.
pub(crate) fn switch_root() -> io::Result<()> {
    let initramfs = rustix::fs::stat("/")?.st_dev;
    for from in ["/dev", "/proc", "/sys"] {
        let to = format!("{NEW_ROOT}{from}");
        make_dir(&to)?;
        mount_move(from, to.as_str())?;
    }
    rustix::process::chdir(NEW_ROOT)?;
    free(Path::new("/"), initramfs);
    mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    Ok(rustix::process::chdir("/")?)
}

/// Deletes everything on the initramfs, and nothing on what is mounted in it. What stays only costs memory.
fn free(dir: &Path, device: u64) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.filter_map(Result::ok) {
        let path = entry.path();
        let Ok(stat) = rustix::fs::lstat(&path) else { continue };
        if stat.st_dev != device {
            continue;
        }
        let removed = if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
            free(&path, device);
            fs::remove_dir(&path)
        } else {
            fs::remove_file(&path)
        };
        match removed {
            // The mount point of the root disk.
            Err(error) if error.kind() != io::ErrorKind::ResourceBusy => tracing::debug!("{path:?}: {error}"),
            _ => {}
        }
    }
}
