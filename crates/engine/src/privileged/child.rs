//! Fork and exec of a VMM: descriptors at fixed numbers, and the layers of the jail that a process puts on by itself.
//!
//! Everything is prepared before the fork; between fork and exec only system calls are made, since other threads of the
//! parent may have held any lock. The child reports the step that failed, and hands over the listener of its system call
//! filter, on a socket that closes with the exec.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};
use rustix::process::{Gid, Resource, Rlimit, Uid};
use rustix::thread::{LinkNameSpaceType, set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::JailLayer;

/// The number of the first descriptor that is handed over; the others follow.
pub(crate) const FIRST_FD: RawFd = 3;

/// What to start.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub program: &'a Path,
    pub arguments: Vec<CString>,
    /// Get the numbers from [`FIRST_FD`] on.
    pub fds: Vec<BorrowedFd<'a>>,
    /// Standard output and error.
    pub log: BorrowedFd<'a>,
    pub confinement: Confinement<'a>,
}

/// The layers that a process puts on by itself. Absent ones are left out, which only development without root does.
#[derive(Debug, Default)]
pub(crate) struct Confinement<'a> {
    /// User and group id.
    pub id: Option<u32>,
    /// `cgroup.procs` of its groups.
    pub groups: Vec<BorrowedFd<'a>>,
    /// Resources and their limits.
    pub limits: Vec<(Resource, u64)>,
    /// Network, IPC, host name.
    pub namespaces: Vec<(BorrowedFd<'a>, LinkNameSpaceType)>,
    /// The mount namespace, whose root becomes the root.
    pub files: Option<BorrowedFd<'a>>,
    pub no_new_privs: bool,
    /// A program for seccomp with user notification.
    pub filter: Option<&'a [libc::sock_filter]>,
}

/// A child that executes its program.
#[derive(Debug)]
pub(crate) struct Started {
    pub pid: i32,
    /// Of its filter.
    pub listener: Option<OwnedFd>,
}

/// Why there is none.
#[derive(Debug)]
pub(crate) enum StartError {
    /// A layer could not be put on.
    Layer(JailLayer, io::Error),
    /// The program could not be executed.
    Exec(io::Error),
    /// Anything else, with what was tried.
    Other(&'static str, io::Error),
}

/// The step that a child was at when it failed; the discriminants go through the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Step {
    Session,
    Cgroup,
    Limits,
    Namespaces,
    Files,
    User,
    Descriptors,
    NoNewPrivs,
    Filter,
    Exec,
}

const STEPS: [Step; 10] = [
    Step::Session,
    Step::Cgroup,
    Step::Limits,
    Step::Namespaces,
    Step::Files,
    Step::User,
    Step::Descriptors,
    Step::NoNewPrivs,
    Step::Filter,
    Step::Exec,
];

impl Step {
    fn error(self, errno: i32) -> StartError {
        let error = io::Error::from_raw_os_error(errno);
        match self {
            Self::Session => StartError::Other("making a session for QEMU", error),
            Self::Descriptors => StartError::Other("handing descriptors to QEMU", error),
            Self::Exec => StartError::Exec(error),
            Self::Cgroup => StartError::Layer(JailLayer::Cgroup, error),
            Self::Limits => StartError::Layer(JailLayer::Limits, error),
            Self::Namespaces => StartError::Layer(JailLayer::Namespaces, error),
            Self::Files => StartError::Layer(JailLayer::Files, error),
            Self::User => StartError::Layer(JailLayer::User, error),
            Self::NoNewPrivs => StartError::Layer(JailLayer::NoNewPrivs, error),
            // What a process without no-new-privs gets.
            Self::Filter if errno == libc::EACCES => StartError::Layer(JailLayer::NoNewPrivs, error),
            Self::Filter => StartError::Layer(JailLayer::Seccomp, error),
        }
    }
}

/// What the child works from: nothing in here is allocated or freed after the fork.
struct Prepared<'a> {
    plan: &'a Plan<'a>,
    program: CString,
    argv: Vec<*const libc::c_char>,
    null: OwnedFd,
    report: OwnedFd,
}

/// Starts it. The child is not reaped here, except when this fails.
pub(crate) fn start(plan: &Plan<'_>) -> Result<Started, StartError> {
    let other = |what| move |error: io::Error| StartError::Other(what, error);
    let program = CString::new(plan.program.as_os_str().as_encoded_bytes())
        .map_err(|error| StartError::Other("naming QEMU's program", error.into()))?;
    let mut argv: Vec<*const libc::c_char> = vec![program.as_ptr()];
    argv.extend(plan.arguments.iter().map(|argument| argument.as_ptr()));
    argv.push(std::ptr::null());
    let null = std::fs::File::open("/dev/null").map_err(other("opening /dev/null"))?;
    if plan.fds.len() > MOST {
        return Err(StartError::Other("handing descriptors to QEMU", io::ErrorKind::InvalidInput.into()));
    }
    let (ours, report) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|error| StartError::Other("making a socket pair", error.into()))?;
    let prepared = Prepared { plan, program, argv, null: null.into(), report };
    // SAFETY: the child runs `run`, which only makes system calls and never returns; see the module's doc.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let (report, (step, errno)) = run(&prepared);
        let number = errno.raw_os_error().to_ne_bytes();
        let message = [step as u8, number[0], number[1], number[2], number[3]];
        // Nobody can be told that this fails, too: the parent then sees a child that is gone.
        rustix::net::send(report, &message, SendFlags::NOSIGNAL).ok();
        // SAFETY: ends this process at once, without handlers of the parent's.
        unsafe { libc::_exit(127) }
    }
    if pid < 0 {
        return Err(StartError::Other("forking", io::Error::last_os_error()));
    }
    drop(prepared);
    let told = listen(&ours);
    match told {
        Ok((None, listener)) => Ok(Started { pid, listener }),
        Ok((Some(error), _)) => {
            reap(pid);
            Err(error)
        }
        Err(error) => {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
            }
            reap(pid);
            Err(StartError::Other("listening to a starting VMM", error))
        }
    }
}

/// Waits for the end of a child.
pub(crate) fn reap(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid);
    while rustix::process::waitpid(pid, rustix::process::WaitOptions::empty())
        .is_err_and(|errno| errno == rustix::io::Errno::INTR)
    {}
}

/// What the child says until its exec closes the socket.
fn listen(socket: &OwnedFd) -> io::Result<(Option<StartError>, Option<OwnedFd>)> {
    let (mut failed, mut listener) = (None, None);
    loop {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut data = [0u8; 8];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(socket, &mut [io::IoSliceMut::new(&mut data)], &mut control, flags)
        })?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                listener = fds.last();
            }
        }
        match (received.bytes, data) {
            (0, _) => return Ok((failed, listener)),
            (5, [step, a, b, c, d, ..]) => {
                let step = STEPS.into_iter().find(|known| *known as u8 == step).unwrap_or(Step::Exec);
                failed = Some(step.error(i32::from_ne_bytes([a, b, c, d])));
            }
            _ => {}
        }
    }
}

type Failed = (Step, rustix::io::Errno);

/// In the child. Returns only when something failed, with the socket to report it on.
fn run<'a>(prepared: &'a Prepared<'_>) -> (BorrowedFd<'a>, Failed) {
    // Gets another number on the way.
    let mut report = prepared.report.as_fd();
    let failed = match confine(prepared, &mut report) {
        Err(failed) => failed,
        Ok(()) => {
            let environment: [*const libc::c_char; 1] = [std::ptr::null()];
            // SAFETY: a NUL-terminated path, and two NULL-terminated arrays of NUL-terminated strings that live on.
            unsafe { libc::execve(prepared.program.as_ptr(), prepared.argv.as_ptr(), environment.as_ptr()) };
            (Step::Exec, last_errno())
        }
    };
    (report, failed)
}

fn last_errno() -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(rustix::io::Errno::IO)
}

/// The order matters: groups and namespaces need root; limits come when descriptors have low numbers (the parent may have
/// more of them open than a VMM may); the filter needs no-new-privs, and is last since it refuses some of this.
fn confine(prepared: &Prepared<'_>, report: &mut BorrowedFd<'_>) -> Result<(), Failed> {
    let Confinement { id, groups, limits, namespaces, files, no_new_privs, filter } = &prepared.plan.confinement;
    let at = |step: Step| move |errno: rustix::io::Errno| (step, errno);
    rustix::process::setsid().map_err(at(Step::Session))?;
    // SAFETY: an all-zero set is valid, and is emptied; no handler of the parent's runs in between.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
    for procs in groups {
        rustix::io::write(procs, b"0").map_err(at(Step::Cgroup))?;
    }
    for (namespace, kind) in namespaces {
        rustix::thread::move_into_link_name_space(*namespace, Some(*kind)).map_err(at(Step::Namespaces))?;
    }
    match files {
        // Also makes its root the root and the working directory.
        Some(files) => rustix::thread::move_into_link_name_space(*files, Some(LinkNameSpaceType::Mount)),
        None => rustix::process::chdir(c"/"),
    }
    .map_err(at(Step::Files))?;
    if let Some(id) = id {
        drop_privileges(*id).map_err(at(Step::User))?;
    }
    *report = place_descriptors(prepared).map_err(at(Step::Descriptors))?;
    for (resource, most) in limits {
        let limit = Rlimit { current: Some(*most), maximum: Some(*most) };
        rustix::process::setrlimit(*resource, limit).map_err(at(Step::Limits))?;
    }
    if *no_new_privs {
        // SAFETY: plain numbers.
        if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
            return Err((Step::NoNewPrivs, last_errno()));
        }
    }
    if let Some(filter) = filter {
        install_filter(filter, *report).map_err(at(Step::Filter))?;
    }
    Ok(())
}

/// Groups first, user last: each needs the privilege that the next one gives up. The child has one thread.
fn drop_privileges(id: u32) -> rustix::io::Result<()> {
    for capability in 0..64 {
        // SAFETY: plain numbers. The first one that does not exist ends it.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            break;
        }
    }
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}

/// Most descriptors that a plan may have.
const MOST: usize = 16;

/// Gives every descriptor its number and closes all others but the socket for reports, which gets the number after them
/// and is the answer.
fn place_descriptors<'a>(prepared: &Prepared<'_>) -> rustix::io::Result<BorrowedFd<'a>> {
    let fds = &prepared.plan.fds;
    let last = FIRST_FD + RawFd::try_from(fds.len()).unwrap_or(RawFd::MAX);
    // All are put aside first: a source may have the number of another one's target.
    let aside = |fd: BorrowedFd<'_>| -> rustix::io::Result<RawFd> {
        // SAFETY: plain numbers; the new descriptor is used by number only.
        let new = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, last + 1) };
        if new < 0 { Err(last_errno()) } else { Ok(new) }
    };
    let place = |from: RawFd, to: RawFd, flags: i32| -> rustix::io::Result<()> {
        // SAFETY: plain numbers. What had the number `to` is closed: whatever is still needed is put aside.
        if unsafe { libc::dup3(from, to, flags) } < 0 { Err(last_errno()) } else { Ok(()) }
    };
    let (report, null, log) =
        (aside(prepared.report.as_fd())?, aside(prepared.null.as_fd())?, aside(prepared.plan.log)?);
    let mut numbers = [-1; MOST];
    for (number, fd) in numbers.iter_mut().zip(fds) {
        *number = aside(*fd)?;
    }
    place(null, 0, 0)?;
    place(log, 1, 0)?;
    place(log, 2, 0)?;
    for (number, target) in numbers.iter().zip(FIRST_FD..last) {
        place(*number, target, 0)?;
    }
    place(report, last, libc::O_CLOEXEC)?;
    let rest = libc::c_uint::try_from(last + 1).unwrap_or(libc::c_uint::MAX);
    // SAFETY: plain numbers. Nothing from here on uses any of these descriptors.
    if unsafe { libc::syscall(libc::SYS_close_range, rest, libc::c_uint::MAX, 0) } != 0 {
        return Err(last_errno());
    }
    // SAFETY: just placed, and open until the exec.
    Ok(unsafe { BorrowedFd::borrow_raw(last) })
}

/// Installs the filter for this process and sends its listener to the parent.
fn install_filter(filter: &[libc::sock_filter], report: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let len = u16::try_from(filter.len()).map_err(|_long| rustix::io::Errno::INVAL)?;
    let program = libc::sock_fprog { len, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the program is valid for the call, which only reads it.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    let number = RawFd::try_from(listener).ok().filter(|fd| *fd >= 0).ok_or_else(last_errno)?;
    // SAFETY: the kernel just made it for us.
    let listener = unsafe { OwnedFd::from_raw_fd(number) };
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [listener.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(report, &[io::IoSlice::new(b"L")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_missing_and_a_filter_that_is_refused_are_reported() {
        let log = tempfile::tempfile().unwrap();
        let plan =
            |program, confinement| Plan { program, arguments: vec![], fds: vec![], log: log.as_fd(), confinement };
        let missing = start(&plan(Path::new("/no/such/program"), Confinement::default())).unwrap_err();
        assert!(matches!(missing, StartError::Exec(error) if error.kind() == io::ErrorKind::NotFound));
        let confinement = Confinement { no_new_privs: true, filter: Some(&[]), ..Confinement::default() };
        let refused = start(&plan(Path::new("/bin/true"), confinement)).unwrap_err();
        assert!(matches!(refused, StartError::Layer(JailLayer::Seccomp, _)), "{refused:?}");
    }

    #[test]
    fn a_child_has_its_descriptors_under_their_numbers_and_no_others() {
        let log = tempfile::tempfile().unwrap();
        let (first, second) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        // Not closed by an exec, so only the start may do it.
        rustix::io::fcntl_setfd(&second, rustix::io::FdFlags::empty()).unwrap();
        let c = |text: &str| CString::new(text).unwrap();
        let plan = Plan {
            program: Path::new("/bin/sh"),
            arguments: vec![c("-c"), c("echo /proc/self/fd/*; echo a >&3; echo b >&4")],
            fds: vec![second.as_fd(), first.as_fd()],
            log: log.as_fd(),
            confinement: Confinement::default(),
        };
        let started = start(&plan).unwrap();
        assert!(started.listener.is_none());
        reap(started.pid);
        let read = |file: &std::fs::File| {
            use std::os::unix::fs::FileExt;
            let mut text = [0; 200];
            let read = file.read_at(&mut text, 0).unwrap();
            String::from_utf8_lossy(&text[..read]).into_owned()
        };
        let numbers: Vec<String> =
            read(&log).split_whitespace().map(|path| path.replace("/proc/self/fd/", "")).collect();
        // One more: of the directory that the shell lists.
        assert_eq!(numbers, ["0", "1", "2", "3", "4", "5"]);
        assert_eq!((read(&second), read(&first)), ("a\n".to_owned(), "b\n".to_owned()));
    }
}
