//! Looks at a VMM from outside and names the layer of its jail that does not hold.
//!
//! Nothing that the process says of itself counts, and nothing that was done to it before: only what the kernel shows now.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::cgroup::Cgroups;
use super::spaces::Spaces;
use super::{OOM_SCORE, OPEN_FILES};
use crate::{JailLayer, VmError};

/// What a VMM must look like.
#[derive(Debug)]
pub(crate) struct Expected<'a> {
    pub pid: i32,
    /// User and group.
    pub id: u32,
    pub spaces: &'a Spaces,
    /// Its group, where there are cgroups.
    pub cgroup: Option<(&'a Cgroups, &'a str)>,
    /// Least number of system call filters: ours, and later QEMU's.
    pub filters: u32,
}

/// A file, by device and inode.
pub(crate) type FileId = (u64, u64);

/// Which file a descriptor refers to.
pub(crate) fn file_id(fd: impl std::os::fd::AsFd) -> io::Result<FileId> {
    let stat = rustix::fs::fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn fails<T>(layer: JailLayer, problem: impl Into<String>) -> Result<T, VmError> {
    Err(VmError::Jail { layer, problem: problem.into() })
}

/// Checks all layers but the descriptors.
pub(crate) fn process(expected: &Expected<'_>) -> Result<(), VmError> {
    let status = read(expected.pid, "status", JailLayer::User)?;
    user(&status, expected.id)?;
    let no_new_privs = field(&status, "NoNewPrivs:");
    if no_new_privs != ["1"] {
        return fails(JailLayer::NoNewPrivs, format!("NoNewPrivs is {no_new_privs:?}"));
    }
    let (mode, filters) = (field(&status, "Seccomp:"), field(&status, "Seccomp_filters:"));
    // The count is shown since Linux 5.10.
    let enough = filters.first().is_none_or(|n| n.parse::<u32>().is_ok_and(|n| n >= expected.filters));
    if mode != ["2"] || !enough {
        return fails(JailLayer::Seccomp, format!("its mode is {mode:?} with {filters:?} filters"));
    }
    namespaces(expected)?;
    if let Some((groups, name)) = expected.cgroup {
        let text = read(expected.pid, "cgroup", JailLayer::Cgroup)?;
        groups.holds(&text, name).or_else(|problem| fails(JailLayer::Cgroup, problem))?;
    }
    limits(expected.pid)
}

fn user(status: &str, id: u32) -> Result<(), VmError> {
    let id = id.to_string();
    for name in ["Uid:", "Gid:"] {
        // Real, effective, saved, and of the file system.
        let found = field(status, name);
        if found != [id.as_str(); 4] {
            return fails(JailLayer::User, format!("{name} {found:?}, expected {id}"));
        }
    }
    let groups = field(status, "Groups:");
    if !groups.is_empty() {
        return fails(JailLayer::User, format!("it has the groups {groups:?}"));
    }
    for name in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        let found = field(status, name);
        if found.iter().any(|set| set.chars().any(|digit| digit != '0')) {
            return fails(JailLayer::User, format!("{name} {found:?}"));
        }
    }
    Ok(())
}

fn namespaces(expected: &Expected<'_>) -> Result<(), VmError> {
    let Expected { pid, spaces, .. } = expected;
    for (space, layer) in [
        (&spaces.net, JailLayer::Namespaces),
        (&spaces.ipc, JailLayer::Namespaces),
        (&spaces.uts, JailLayer::Namespaces),
        (&spaces.mnt, JailLayer::Files),
    ] {
        let found = stat(*pid, &format!("ns/{}", space.name), layer)?;
        if found != space.id {
            return fails(layer, format!("its {} namespace is {found:?}, expected {:?}", space.name, space.id));
        }
    }
    let root = stat(*pid, "root", JailLayer::Files)?;
    if root != spaces.root {
        return fails(JailLayer::Files, format!("its root is {root:?}, expected {:?}", spaces.root));
    }
    Ok(())
}

fn limits(pid: i32) -> Result<(), VmError> {
    let text = read(pid, "limits", JailLayer::Limits)?;
    // Soft and hard; `unlimited` is no number.
    let limit = |name: &str| -> Option<u64> {
        let values = text.lines().find_map(|line| line.strip_prefix(name))?;
        let mut values = values.split_ascii_whitespace().map(str::parse::<u64>);
        Some(values.next()?.ok()?.max(values.next()?.ok()?))
    };
    for (name, most) in [("Max core file size", 0), ("Max open files", OPEN_FILES), ("Max file size", u64::MAX)] {
        if limit(name).is_none_or(|found| found > most) {
            return fails(JailLayer::Limits, format!("{name} is {:?}, expected {most} at most", limit(name)));
        }
    }
    let score = read(pid, "oom_score_adj", JailLayer::Limits)?;
    if score.trim() != OOM_SCORE.to_string() {
        return fails(JailLayer::Limits, format!("oom_score_adj is {}", score.trim()));
    }
    Ok(())
}

/// Checks what a started VMM holds: no file or device that was not in its order, and `image`, which other machines share,
/// not for writing.
pub(crate) fn descriptors(pid: i32, allowed: &[FileId], image: FileId) -> Result<(), VmError> {
    const LAYER: JailLayer = JailLayer::Descriptors;
    let unreadable = |error: io::Error| VmError::Jail { layer: LAYER, problem: error.to_string() };
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name();
        // Closed meanwhile is fine.
        let Ok(meta) = std::fs::metadata(entry.path()) else { continue };
        let id = (meta.dev(), meta.ino());
        if id == image && writable(pid, &name.to_string_lossy()) {
            return fails(LAYER, format!("descriptor {} of its memory image is writable", name.display()));
        }
        if !is_harmless(&entry.path(), &meta) && !allowed.contains(&id) {
            let target = std::fs::read_link(entry.path()).unwrap_or_default();
            return fails(LAYER, format!("descriptor {} is {}", name.display(), target.display()));
        }
    }
    Ok(())
}

/// Sockets (it can make none; those of the order and what they accepted), pipes, and what has no file at all.
fn is_harmless(path: &Path, meta: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let kind = meta.file_type();
    if kind.is_socket() || kind.is_fifo() {
        return true;
    }
    // `anon_inode:[eventfd]`, `/memfd:…`: neither can be reached by another process.
    let target = std::fs::read_link(path).unwrap_or_default();
    let target = target.as_os_str().as_encoded_bytes();
    target.starts_with(b"anon_inode:") || target.starts_with(b"/memfd:")
}

/// By the octal flags in `/proc/PID/fdinfo/N`. What can't be read counts as writable.
fn writable(pid: i32, fd: &str) -> bool {
    let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| i32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    flags.is_none_or(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY)
}

fn field<'a>(status: &'a str, name: &str) -> Vec<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().split_ascii_whitespace().collect()
}

fn read(pid: i32, name: &str, layer: JailLayer) -> Result<String, VmError> {
    std::fs::read_to_string(format!("/proc/{pid}/{name}"))
        .or_else(|error| fails(layer, format!("/proc/{pid}/{name} can't be read: {error}")))
}

fn stat(pid: i32, name: &str, layer: JailLayer) -> Result<FileId, VmError> {
    let meta = std::fs::metadata(format!("/proc/{pid}/{name}"));
    meta.map(|meta| (meta.dev(), meta.ino()))
        .or_else(|error| fails(layer, format!("/proc/{pid}/{name} can't be examined: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "Name:\tqemu\nUid:\t7\t7\t7\t7\nGid:\t7\t7\t7\t7\nGroups:\t \nCapInh:\t0000000000000000\n\
        CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\n";

    #[test]
    fn any_other_user_group_or_capability_is_noticed() {
        user(GOOD, 7).unwrap();
        user(GOOD, 8).unwrap_err();
        for (from, to) in [
            ("Uid:\t7\t7\t7\t7", "Uid:\t7\t7\t0\t7"),
            ("Gid:\t7\t7", "Gid:\t0\t7"),
            ("Groups:\t ", "Groups:\t0 27"),
            ("CapEff:\t0000", "CapEff:\t0020"),
            ("Uid:", "Xid:"),
        ] {
            let error = user(&GOOD.replace(from, to), 7).unwrap_err();
            assert!(matches!(error, VmError::Jail { layer: JailLayer::User, .. }), "{error}");
        }
    }

    #[test]
    fn this_process_has_no_jail() {
        let pid = i32::try_from(std::process::id()).unwrap();
        assert!(matches!(limits(pid), Err(VmError::Jail { layer: JailLayer::Limits, .. })));
    }

    #[test]
    fn a_writable_descriptor_of_the_image_and_a_foreign_file_are_noticed() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let mut image = tempfile::NamedTempFile::new().unwrap();
        io::Write::write_all(&mut image, b"x").unwrap();
        let id = file_id(image.as_file()).unwrap();
        let error = descriptors(pid, &[id], id).unwrap_err();
        assert!(error.to_string().contains("closed set of descriptors"), "{error}");
        // The test program's own files are in no order.
        descriptors(pid, &[], (0, 0)).unwrap_err();
    }
}
