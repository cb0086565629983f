//! The boot as PID 1, from the initramfs to the root disk, and the end of the machine when PID 1 can't go on.
//!
//! Runs before there is a runtime, in one thread. It starts no services: what runs in a sandbox is started by the host.

use std::{
    fs, io,
    os::fd::AsRawFd,
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    fs::{Mode, OFlags},
    net::{AddressFamily, SocketFlags, SocketType},
    process::{Resource, Rlimit},
    system::RebootCommand,
};

use crate::{console, modules, mounts};

const DEFAULT_ROOT: &str = "/dev/vda";
/// How long devices may take to appear. Emulated machines on a busy host are slow.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(30);
const DEVICE_RETRY: Duration = Duration::from_millis(5);
/// The agent answers even when commands use all of the CPU. They start with the ordinary priority (`crate::spawn`).
const PRIORITY: i32 = -15;
/// Open files of the agent and of what it starts: 512 commands have three pipes each.
const OPEN_FILES: u64 = 524_288;

/// Whether this process is the machine's first.
#[must_use]
pub fn is_pid_1() -> bool {
    rustix::process::getpid().is_init()
}

/// Brings the machine up to the point where commands can run.
pub fn boot() -> io::Result<()> {
    mounts::mount_kernel()?;
    open_console();
    modules::load_all();
    let device = root_device(&fs::read_to_string("/proc/cmdline").unwrap_or_default());
    wait_for(Path::new(&device))?;
    mounts::mount_root(&device).map_err(|e| io::Error::new(e.kind(), format!("mounting {device}: {e}")))?;
    mounts::switch_root().map_err(|e| io::Error::new(e.kind(), format!("switching to the root disk: {e}")))?;
    mounts::mount_rest()?;
    if let Err(error) = loopback_up() {
        tracing::warn!("the loopback interface is not up: {error}");
    }
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::warn!("the agent is not protected from running out of memory: {error}");
    }
    if let Err(error) = rustix::process::setpriority_process(None, PRIORITY) {
        tracing::warn!("the agent has no priority over commands: {error}");
    }
    let limit = Rlimit { current: Some(OPEN_FILES), maximum: Some(OPEN_FILES) };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, limit) {
        tracing::warn!("the limit of open files is not raised: {error}");
    }
    tracing::info!("root {device} is mounted, agent {}", env!("CARGO_PKG_VERSION"));
    Ok(())
}

/// The kernel opened the console before there was a /dev; a machine without one is served all the same.
fn open_console() {
    match rustix::fs::open("/dev/console", OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(console) => {
            let stdio = [
                rustix::stdio::dup2_stdin(&console),
                rustix::stdio::dup2_stdout(&console),
                rustix::stdio::dup2_stderr(&console),
            ];
            if let Some(error) = stdio.into_iter().find_map(Result::err) {
                tracing::warn!("/dev/console: {error}");
            }
        }
        Err(error) => tracing::warn!("/dev/console: {error}"),
    }
}

/// The value of `coppice.root=` on the kernel command line.
fn root_device(cmdline: &str) -> String {
    let words = cmdline.split_ascii_whitespace();
    words.filter_map(|word| word.strip_prefix("coppice.root=")).next_back().unwrap_or(DEFAULT_ROOT).to_owned()
}

/// Waits for a device node. Only at boot, which is not a hot path: sandboxes are restored.
pub(crate) fn wait_for(path: &Path) -> io::Result<()> {
    retry(|| fs::symlink_metadata(path).map(drop))
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

/// Tries again while there is nothing, for a bounded time.
pub(crate) fn retry<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let end = Instant::now() + DEVICE_TIMEOUT;
    loop {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < end => {
                #[expect(clippy::disallowed_methods, reason = "at boot, before anything else runs")]
                std::thread::sleep(DEVICE_RETRY);
            }
            result => return result,
        }
    }
}

/// Sets IFF_UP on `lo`; the kernel then gives it its addresses.
fn loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: all-zero bytes are a valid ifreq: an empty name and a null union.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::try_from(*from).map_err(|_| io::ErrorKind::InvalidInput)?;
    }
    // SAFETY: SIOCGIFFLAGS reads and writes an ifreq, which `request` is.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: SIOCGIFFLAGS has set this member of the union.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    let up = libc::c_short::try_from(libc::IFF_UP).map_err(|_| io::ErrorKind::InvalidInput)?;
    request.ifr_ifru.ifru_flags = flags | up;
    // SAFETY: SIOCSIFFLAGS reads an ifreq, which `request` is.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Ends the machine: PID 1 can't go on, and the kernel would panic without a word if it just ended.
pub fn power_off(why: &str) -> ! {
    console::line(&format!("fatal: {why}; powering off"));
    rustix::fs::sync();
    for command in [RebootCommand::PowerOff, RebootCommand::Restart] {
        if let Err(error) = rustix::system::reboot(command) {
            console::line(&format!("reboot: {error}"));
        }
    }
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_comes_from_the_command_line() {
        assert_eq!(root_device("console=ttyS0 quiet\n"), "/dev/vda");
        assert_eq!(root_device("coppice.root=/dev/vdb x"), "/dev/vdb");
        assert_eq!(root_device("coppice.root=/dev/vdb coppice.root=/dev/vdc"), "/dev/vdc");
    }
}
