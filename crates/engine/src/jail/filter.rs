//! The filter of system calls that a VMM has from before its first instruction, and who answers what it may not open itself.
//!
//! Its user may open none of the files that it works on, and a QEMU before 8.2 wants its memory file writable though it only
//! maps it privately. So opens for writing, and some for reading ([`Reads`]), ask the [`Supervisor`]: for the names of the order it
//! puts a read-only descriptor into the VMM, whatever was asked for; other opens for reading go on, others for writing are
//! refused. When the VMM has started the supervisor ends, and from then on the kernel refuses all of these.
//!
//! QEMU's own sandbox, which it puts on top, refuses much more; this one holds also before that.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO,
    SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_USER_NOTIF, sock_filter,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// System calls that a kernel without them has no answer for: programs then use the older ones, whose arguments a filter
/// can see. io_uring opens files past any filter.
const UNKNOWN: [libc::c_long; 5] = [
    libc::SYS_clone3,
    libc::SYS_openat2,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
];

/// What no VMM needs and what attackers of kernels like.
const FORBIDDEN: [libc::c_long; 41] = [
    libc::SYS_creat,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kcmp,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_shmget,
    libc::SYS_semget,
    libc::SYS_msgget,
    libc::SYS_mq_open,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
];

/// Flags of an open that change something.
const CHANGING: i32 = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC;
/// Flags of `clone` that make namespaces.
const NEW_SPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// `AUDIT_ARCH_X86_64`.
const ARCH: u32 = 0xc000_003e;
/// Bit of the numbers of the x32 system calls.
const X32: u32 = 0x4000_0000;
/// Offsets in `struct seccomp_data`: number, architecture, first argument (its low half; arguments have eight bytes).
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// Which opens for reading ask the supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reads {
    /// Those without `O_CLOEXEC`. A restore opens only its memory file, as every QEMU does it: like this.
    Plain,
    /// All. A boot opens kernel and initramfs by a library whose newer versions set the flag; and the hundred libraries that
    /// ask in vain cost it nothing that counts.
    All,
}

/// The program.
pub(crate) fn program(reads: Reads) -> Vec<sock_filter> {
    let errno = |errno: i32| ret(SECCOMP_RET_ERRNO | errno.cast_unsigned());
    let mut all = vec![
        load(ARCHITECTURE),
        jump(BPF_JEQ, ARCH, 1, 0),
        ret(SECCOMP_RET_KILL_PROCESS),
        load(NUMBER),
        jump(BPF_JSET, X32, 0, 1),
        errno(libc::ENOSYS),
    ];
    for (calls, answer) in [(&UNKNOWN[..], libc::ENOSYS), (&FORBIDDEN[..], libc::EPERM)] {
        for call in calls {
            all.extend([jump(BPF_JEQ, number(*call), 0, 1), errno(answer)]);
        }
    }
    for (call, argument) in [(libc::SYS_openat, 2), (libc::SYS_open, 1)] {
        all.extend([
            jump(BPF_JEQ, number(call), 0, 5),
            load(ARGUMENTS + 8 * argument),
            jump(BPF_JSET, CHANGING.cast_unsigned(), 2, 0),
            // Libraries are opened like this, by the hundred.
            jump(BPF_JSET, libc::O_CLOEXEC.cast_unsigned(), if reads == Reads::All { 1 } else { 0 }, 1),
            ret(SECCOMP_RET_ALLOW),
            ret(SECCOMP_RET_USER_NOTIF),
        ]);
    }
    all.extend([
        jump(BPF_JEQ, number(libc::SYS_clone), 0, 3),
        load(ARGUMENTS),
        jump(BPF_JSET, NEW_SPACES.cast_unsigned(), 0, 1),
        errno(libc::EPERM),
        ret(SECCOMP_RET_ALLOW),
    ]);
    all
}

fn number(call: libc::c_long) -> u32 {
    u32::try_from(call).unwrap_or(u32::MAX)
}

fn load(offset: u32) -> sock_filter {
    statement(BPF_LD | BPF_W | BPF_ABS, offset, 0, 0)
}

fn jump(test: u32, value: u32, yes: u8, no: u8) -> sock_filter {
    statement(BPF_JMP | test | BPF_K, value, yes, no)
}

fn ret(answer: u32) -> sock_filter {
    statement(BPF_RET | BPF_K, answer, 0, 0)
}

fn statement(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: u16::try_from(code).unwrap_or(0), jt, jf, k }
}

/// A file that a VMM gets when it opens a name.
#[derive(Debug)]
pub(crate) struct Offer {
    name: Vec<u8>,
    file: File,
    writable: bool,
}

impl Offer {
    /// `source` under `name`: read-only, whatever `source` was opened for.
    pub fn read_only(name: String, source: impl AsFd) -> io::Result<Self> {
        Ok(Self { name: name.into_bytes(), file: File::open(own_path(source))?, writable: false })
    }

    /// As [`Self::read_only`], but writable: for the test that the verification notices, and for devices.
    pub fn writable(name: String, path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Self { name: name.into_bytes(), file, writable: true })
    }

    /// With a position of its own each time, as opening a file does.
    fn open(&self) -> io::Result<File> {
        OpenOptions::new().read(true).write(self.writable).open(own_path(&self.file))
    }
}

fn own_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Answers a VMM's opens until it has started.
#[derive(Debug)]
pub(crate) struct Supervisor {
    stop: OwnedFd,
}

/// Longest time that a VMM may take to start; then it is refused everything.
const PATIENCE: Duration = Duration::from_secs(120);
/// Names are shorter.
const MAX_NAME: usize = 64;

impl Supervisor {
    /// Starts it.
    pub fn start(listener: OwnedFd, offers: Vec<Offer>) -> io::Result<Self> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let theirs = stop.try_clone()?;
        let serve = move || {
            if let Err(error) = serve(&listener, &theirs, &offers) {
                tracing::warn!(%error, "a starting VMM's opens are not answered any more");
            }
        };
        std::thread::Builder::new().name("vmm-opens".to_owned()).spawn(serve)?;
        Ok(Self { stop })
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // It also ends when the VMM does, or in time.
        if let Err(error) = rustix::io::write(&self.stop, &1u64.to_ne_bytes()) {
            tracing::debug!(%error, "a supervisor was not told to end");
        }
    }
}

fn serve(listener: &OwnedFd, stop: &OwnedFd, offers: &[Offer]) -> io::Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(1), tv_nsec: left.subsec_nanos().into() };
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        match poll(&mut fds, Some(&left)) {
            // In time, too: closing the listener refuses everything from then on.
            Ok(0) => return Ok(()),
            Err(rustix::io::Errno::INTR) => continue,
            result => result.map(drop)?,
        }
        let [asked, stopped] = fds.map(|fd| fd.revents());
        if !stopped.is_empty() {
            return Ok(());
        }
        if asked.contains(PollFlags::IN) {
            answer(listener, offers)?;
        } else if !asked.is_empty() {
            // Nobody has the filter any more.
            return Ok(());
        }
    }
}

/// Answers one system call. That its caller is gone meanwhile is fine.
fn answer(listener: &OwnedFd, offers: &[Offer]) -> io::Result<()> {
    // SAFETY: all-zero is what the kernel wants, and valid for these plain numbers.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `seccomp_notif`, whose size is part of the number.
    if unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) } != 0 {
        return gone(io::Error::last_os_error());
    }
    let (argument, flags) = match i64::from(call.data.nr) {
        libc::SYS_openat => (call.data.args[1], call.data.args[2]),
        _ => (call.data.args[0], call.data.args[1]),
    };
    let name = read_name(i32::try_from(call.pid).unwrap_or(-1), argument);
    // What was read may be another process's memory, if the caller is gone.
    // SAFETY: reads one u64.
    if unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &raw const call.id) } != 0 {
        return gone(io::Error::last_os_error());
    }
    let mut response = libc::seccomp_notif_resp { id: call.id, val: 0, error: 0, flags: 0 };
    match offers.iter().find(|offer| offer.name == name) {
        Some(offer) => match offer.open().and_then(|file| add_fd(listener, call.id, &file)) {
            Ok(fd) => response.val = fd,
            Err(error) => response.error = -error.raw_os_error().unwrap_or(libc::EACCES),
        },
        // Only for reading: whether it may is decided by the kernel, as if there were no filter.
        None if flags & u64::from(CHANGING.cast_unsigned()) == 0 => {
            response.flags = u32::try_from(libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE).unwrap_or(0);
        }
        None => {
            let name = String::from_utf8_lossy(&name);
            tracing::debug!(%name, flags, "a starting VMM was refused a file");
            response.error = -libc::EACCES;
        }
    }
    // SAFETY: the kernel reads one `seccomp_notif_resp`.
    match unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut response) } {
        0 => Ok(()),
        _ => gone(io::Error::last_os_error()),
    }
}

fn gone(error: io::Error) -> io::Result<()> {
    if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) { Ok(()) } else { Err(error) }
}

fn add_fd(listener: &OwnedFd, id: u64, file: &File) -> io::Result<i64> {
    let request = libc::seccomp_notif_addfd {
        id,
        flags: 0,
        srcfd: u32::try_from(file.as_raw_fd()).unwrap_or(u32::MAX),
        newfd: 0,
        newfd_flags: libc::O_CLOEXEC.cast_unsigned(),
    };
    // SAFETY: the kernel reads one `seccomp_notif_addfd`.
    let fd = unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ADDFD, &raw const request) };
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(fd.into()) }
}

/// The string at an address of another process, without its end; empty when it is too long or can't be read.
fn read_name(pid: i32, address: u64) -> Vec<u8> {
    let mut name = [0u8; MAX_NAME];
    let Ok(address) = usize::try_from(address) else { return Vec::new() };
    // The string may end right before a page that is not there, so never read over the end of its page at once.
    let first = (4096 - address % 4096).min(MAX_NAME);
    let local = libc::iovec { iov_base: name.as_mut_ptr().cast(), iov_len: MAX_NAME };
    let part = |at: usize, len| libc::iovec { iov_base: std::ptr::without_provenance_mut(at), iov_len: len };
    let remote = [part(address, first), part(address.saturating_add(first), MAX_NAME - first)];
    // SAFETY: `local` is exactly `name`; the other process's addresses are checked by the kernel, which reads as far as it can.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, remote.as_ptr(), 2, 0) };
    let read = usize::try_from(read).unwrap_or(0);
    let read = name.get(..read).unwrap_or_default();
    read.iter().position(|byte| *byte == 0).and_then(|end| read.get(..end)).unwrap_or_default().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the program answers, by an interpreter of the few instructions that it has.
    fn verdict(arch: u32, nr: libc::c_long, args: [i32; 6]) -> u32 {
        verdict_of(&program(Reads::Plain), arch, nr, args)
    }

    fn verdict_of(program: &[sock_filter], arch: u32, nr: libc::c_long, args: [i32; 6]) -> u32 {
        let (mut at, mut accumulator) = (0usize, 0u32);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            match u32::from(code) {
                c if c == BPF_RET | BPF_K => return k,
                c if c == BPF_LD | BPF_W | BPF_ABS => {
                    accumulator = match k {
                        NUMBER => number(nr),
                        ARCHITECTURE => arch,
                        offset => args[usize::try_from((offset - ARGUMENTS) / 8).unwrap()].cast_unsigned(),
                    };
                }
                c if c == BPF_JMP | BPF_JEQ | BPF_K => at += usize::from(if accumulator == k { jt } else { jf }),
                c if c == BPF_JMP | BPF_JSET | BPF_K => at += usize::from(if accumulator & k != 0 { jt } else { jf }),
                other => panic!("instruction {other}"),
            }
        }
    }

    #[test]
    fn the_program_answers_every_kind_of_call_as_it_should() {
        let open = |flags| verdict(ARCH, libc::SYS_openat, [0, 0, flags, 0, 0, 0]);
        assert_eq!(open(libc::O_RDONLY | libc::O_CLOEXEC), SECCOMP_RET_ALLOW);
        let library = [0, 0, libc::O_CLOEXEC, 0, 0, 0];
        assert_eq!(verdict_of(&program(Reads::All), ARCH, libc::SYS_openat, library), SECCOMP_RET_USER_NOTIF);
        for flags in [0, libc::O_RDWR, libc::O_WRONLY | libc::O_CLOEXEC, libc::O_CREAT | libc::O_CLOEXEC, libc::O_TRUNC]
        {
            assert_eq!(open(flags), SECCOMP_RET_USER_NOTIF, "{flags:x}");
            assert_eq!(verdict(ARCH, libc::SYS_open, [0, flags, 0, 0, 0, 0]), SECCOMP_RET_USER_NOTIF);
        }
        let error = |errno: i32| SECCOMP_RET_ERRNO | errno.cast_unsigned();
        assert_eq!(verdict(ARCH, libc::SYS_creat, [0; 6]), error(libc::EPERM));
        assert_eq!(verdict(ARCH, libc::SYS_clone3, [0; 6]), error(libc::ENOSYS));
        assert_eq!(verdict(ARCH, libc::SYS_clone, [libc::CLONE_NEWUSER, 0, 0, 0, 0, 0]), error(libc::EPERM));
        let thread = libc::CLONE_VM | libc::CLONE_THREAD;
        for (call, first) in [(libc::SYS_clone, thread), (libc::SYS_read, 0), (libc::SYS_execve, 0)] {
            assert_eq!(verdict(ARCH, call, [first, 0, 0, 0, 0, 0]), SECCOMP_RET_ALLOW);
        }
        assert_eq!(verdict(0x4000_0003, libc::SYS_read, [0; 6]), SECCOMP_RET_KILL_PROCESS);
        assert_eq!(verdict(ARCH, libc::SYS_read | libc::c_long::from(X32), [0; 6]), error(libc::ENOSYS));
    }

    #[test]
    fn names_are_read_from_memory_and_long_ones_are_none() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let read = |text: &std::ffi::CStr| read_name(pid, text.as_ptr().expose_provenance() as u64);
        assert_eq!(read(c"/proc/self/fd/7"), b"/proc/self/fd/7");
        let long = std::ffi::CString::new(vec![b'x'; 100]).unwrap();
        assert_eq!((read(&long), read_name(pid, 8)), (vec![], vec![]));
    }

    const SCRIPT: &str = "read a < /proc/self/fd/77 && echo \"offered $a\"
        read a < /proc/self/fd/77 && echo \"again $a\"
        (echo x > /proc/self/fd/77) 2>&- && echo wrote it || echo not writable
        (: > $0) 2>&- && echo made it || echo refused
        (: < /etc/passwd) 2>&- && echo read
        read go <&3
        (: > $0) 2>&- || echo refused afterwards
        (: < /proc/self/fd/77) 2>&- || echo nothing offered afterwards
        exec 4<&0 && echo works on";

    #[test]
    fn a_process_gets_what_is_offered_read_only_and_nothing_when_the_supervisor_has_ended() {
        use crate::privileged::child::{Confinement, Plan, reap, start};
        let dir = tempfile::tempdir().unwrap();
        let (offered, log) = (dir.path().join("offered"), dir.path().join("log"));
        std::fs::write(&offered, "this\n").unwrap();
        let log_file = File::create(&log).unwrap();
        let source = OpenOptions::new().read(true).write(true).open(&offered).unwrap();
        let (gate, go) = std::io::pipe().unwrap();
        let c = |text: &str| std::ffi::CString::new(text).unwrap();
        let program = program(Reads::Plain);
        let plan = Plan {
            program: Path::new("/bin/sh"),
            arguments: vec![c("-c"), c(SCRIPT), c(dir.path().join("made").to_str().unwrap())],
            fds: vec![gate.as_fd()],
            log: log_file.as_fd(),
            confinement: Confinement { no_new_privs: true, filter: Some(&program), ..Confinement::default() },
        };
        let started = start(&plan).unwrap();
        let offers = vec![Offer::read_only("/proc/self/fd/77".to_owned(), &source).unwrap()];
        let supervisor = Supervisor::start(started.listener.unwrap(), offers).unwrap();
        let said = |lines: usize| {
            let end = Instant::now() + Duration::from_secs(20);
            loop {
                let text = std::fs::read_to_string(&log).unwrap();
                if text.lines().count() >= lines || Instant::now() > end {
                    return text;
                }
                std::thread::yield_now();
            }
        };
        let before = "offered this\nagain this\nnot writable\nrefused\nread\n";
        assert_eq!(said(5), before);
        drop(supervisor);
        drop(go);
        reap(started.pid);
        let after = "refused afterwards\nnothing offered afterwards\nworks on\n";
        assert_eq!(said(8), format!("{before}{after}"));
        assert_eq!(std::fs::read_to_string(&offered).unwrap(), "this\n");
    }
}
