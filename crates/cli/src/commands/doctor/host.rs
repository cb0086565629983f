//! The operating system: privileges, kernel, memory, programs.

use std::path::Path;

use super::Check;
use crate::words;

/// Below this a host can run a sandbox or two, no more.
const LITTLE_MEMORY: u64 = 2 << 30;
/// Below this not even one.
const NO_MEMORY: u64 = 700 << 20;
/// The first kernel with the `PAGEMAP_SCAN` ioctl.
const PAGEMAP_SCAN: (u32, u32) = (6, 7);

/// Programs, what they are for, and the Debian package that has them.
const TOOLS: [(&str, &str, &str); 9] = [
    ("mmdebstrap", "building templates", "mmdebstrap"),
    ("mke2fs", "building templates", "e2fsprogs"),
    ("e2fsck", "building templates", "e2fsprogs"),
    ("debugfs", "building templates", "e2fsprogs"),
    ("apt-get", "building templates", "apt"),
    ("dpkg-deb", "unpacking the guest kernel", "dpkg"),
    ("depmod", "unpacking the guest kernel", "kmod"),
    ("mkfs.xfs", "making the data directory's volume", "xfsprogs"),
    ("losetup", "mounting the data directory's volume", "util-linux"),
];

pub(super) fn root() -> Check {
    if rustix::process::geteuid().is_root() {
        return Check::ok("root", "yes");
    }
    Check::fail("root", "this user can't start VMs or mount volumes", "run the server, and this, with sudo")
}

pub(super) fn system() -> Check {
    let uname = rustix::system::uname();
    let (machine, release) = (uname.machine().to_string_lossy(), uname.release().to_string_lossy());
    let finding = format!("Linux {release} on {machine}");
    if machine == "x86_64" {
        return Check::ok("system", finding);
    }
    Check::fail("system", finding, "Coppice runs on x86_64 so far")
}

pub(super) fn memory() -> Check {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let Some(available) = meminfo(&text, "MemAvailable") else {
        return Check::warn("memory", "can't be told", "is /proc mounted?");
    };
    let total = meminfo(&text, "MemTotal").unwrap_or(available);
    let finding = format!("{} of {} available", words::size(available), words::size(total));
    match available {
        _ if available < NO_MEMORY => Check::fail("memory", finding, "a sandbox needs some 600 MiB at its start"),
        _ if available < LITTLE_MEMORY => Check::warn("memory", finding, "enough for a sandbox or two"),
        _ => Check::ok("memory", finding),
    }
}

/// A field of /proc/meminfo, bytes.
fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

pub(super) fn tools() -> Vec<Check> {
    let missing: Vec<_> = TOOLS.iter().filter(|(program, ..)| !on_path(program)).collect();
    if missing.is_empty() {
        return vec![Check::ok("programs", format!("all {} that set-up uses", TOOLS.len()))];
    }
    let check = |(program, purpose, package): &(&'static str, &str, &str)| {
        Check::warn("programs", format!("{program} is missing: no {purpose}"), format!("apt-get install {package}"))
    };
    missing.into_iter().map(check).collect()
}

fn on_path(program: &str) -> bool {
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        .iter()
        .any(|dir| Path::new(dir).join(program).is_file())
}

pub(super) fn pagemap() -> Check {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let newer = version(&release).is_some_and(|version| version >= PAGEMAP_SCAN);
    if newer {
        return Check::ok("dirty pages", "by the PAGEMAP_SCAN ioctl");
    }
    Check::ok("dirty pages", "by reading /proc/PID/pagemap (PAGEMAP_SCAN, of Linux 6.7, would be faster)")
}

/// Major and minor of a kernel release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

pub(super) fn userfaultfd() -> Check {
    if Path::new("/dev/userfaultfd").exists() || Path::new("/proc/sys/vm/unprivileged_userfaultfd").exists() {
        return Check::ok("userfaultfd", "there");
    }
    Check::warn("userfaultfd", "this kernel has none", "only streaming restores will need it")
}

/// Links, rules and namespaces, tried out. What is missing keeps `coppice up` from starting.
pub(super) async fn network() -> Vec<Check> {
    let missing = tokio::task::spawn_blocking(coppice_net::check).await.unwrap_or_default();
    if missing.is_empty() {
        return vec![Check::ok("network", "namespaces, TAPs and nftables rules can be made")];
    }
    missing.into_iter().map(|missing| Check::fail("network", missing.what, missing.hint)).collect()
}

pub(super) fn dns() -> Check {
    let resolvers = coppice_net::dns::system_upstreams();
    if resolvers.is_empty() {
        return Check::warn(
            "DNS",
            "this host names no resolver: sandboxes can't resolve names",
            "add a nameserver line to /etc/resolv.conf, or give one with `coppice up --dns`",
        );
    }
    let names: Vec<String> = resolvers.iter().map(|server| server.ip().to_string()).collect();
    Check::ok("DNS", format!("names are asked of {}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_read() {
        assert_eq!(version("6.1.0-57-cloud-amd64"), Some((6, 1)));
        assert_eq!(version("6.7"), Some((6, 7)));
        assert_eq!(version("x"), None);
        let text = "MemTotal:       24 kB\nMemFree: 1 kB\nMemAvailable:    2 kB\n";
        assert_eq!((meminfo(text, "MemAvailable"), meminfo(text, "MemTotal")), (Some(2048), Some(24 << 10)));
        assert_eq!(meminfo(text, "Mem"), None);
    }
}
