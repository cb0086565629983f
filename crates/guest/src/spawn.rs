//! How a child process is set up between fork and exec: its own session and process group, default signals, the out-of-memory
//! score, priority, user and groups, working directory.
//!
//! It does not wait (see [`crate::reaper`]) and does not look at output (see [`crate::exec`]).

use std::{
    ffi::CString,
    io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    path::Path,
    process::{Command, Stdio},
};

use rustix::{
    fs::{Gid, Mode, OFlags, Uid},
    io::Errno,
};

use crate::users::User;

/// Commands are killed before the agent (which is at -1000) when memory runs out.
const OOM_SCORE_ADJ: &[u8] = b"500";
/// Added to the errno of a step between fork and exec, so that it isn't taken for that of exec. `std` hands the number through.
const SETUP_ERROR: i32 = 0x10000;
/// Highest signal number (`_NSIG`, include/uapi/asm-generic/signal.h).
const SIGNALS: i32 = 64;

/// Why a child did not come to run its program.
#[derive(Debug)]
pub(crate) enum SpawnError {
    /// The program can't be executed: the errno of execve.
    Exec(io::Error),
    /// Something before that failed: fork, pipes, user, working directory.
    Setup(io::Error),
}

impl From<io::Error> for SpawnError {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(code) if code >= SETUP_ERROR => Self::Setup(io::Error::from_raw_os_error(code - SETUP_ERROR)),
            Some(libc::EAGAIN | libc::ENOMEM | libc::EMFILE | libc::ENFILE) | None => Self::Setup(error),
            Some(_) => Self::Exec(error),
        }
    }
}

/// A command in `dir` as `user` (`None`: as the agent) with exactly the environment `env`, that joins the group behind `door`.
pub(crate) fn command<'a>(
    argv: impl IntoIterator<Item = &'a str>,
    env: impl IntoIterator<Item = (String, String)>,
    dir: &Path,
    user: Option<&User>,
    door: Option<OwnedFd>,
) -> io::Result<Command> {
    let mut argv = argv.into_iter();
    let mut command = Command::new(argv.next().ok_or(io::ErrorKind::InvalidInput)?);
    command.args(argv).env_clear().envs(env).stdin(Stdio::null());
    let dir = CString::new(dir.as_os_str().as_encoded_bytes())?;
    let ids = match user {
        Some(user) if rustix::process::geteuid().is_root() => Some((user.uid, user.gid, user.groups.clone())),
        _ => None,
    };
    // SAFETY: the closure runs in the forked child. It makes system calls only, through wrappers that neither allocate
    // nor take locks; everything it needs was allocated before the fork.
    unsafe {
        command.pre_exec(move || {
            let ids = ids.as_ref().map(|(uid, gid, groups)| (*uid, *gid, groups.as_slice()));
            set_up(&dir, ids, door.as_ref()).map_err(|e| io::Error::from_raw_os_error(SETUP_ERROR + e.raw_os_error()))
        });
    }
    Ok(command)
}

/// The child's side. Async-signal-safe.
fn set_up(dir: &CString, ids: Option<(Uid, Gid, &[Gid])>, door: Option<&OwnedFd>) -> Result<(), Errno> {
    if let Some(door) = door {
        // Itself. What it starts later is born in the same group.
        rustix::io::write(door, b"0")?;
    }
    rustix::process::setsid()?;
    reset_signals();
    set_oom_score();
    // Not the agent's priority. Lowering it is always allowed, and where it is lower already this may fail.
    rustix::process::setpriority_process(None, 0).ok();
    if let Some((uid, gid, groups)) = ids {
        // The thread-level calls are process-wide here: a forked child has one thread.
        rustix::thread::set_thread_groups(groups)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    }
    rustix::process::chdir(dir.as_c_str())
}

fn reset_signals() {
    for signal in 1..=SIGNALS {
        // SAFETY: signal(2) is async-signal-safe; numbers that can't be changed (KILL, STOP, libc's own) answer EINVAL.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: `set` is initialized by sigemptyset before it is read.
    unsafe {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut());
    }
}

/// Best effort: without /proc there is no score to set.
fn set_oom_score() {
    let file = rustix::fs::open(c"/proc/self/oom_score_adj", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
    if let Ok(file) = file {
        rustix::io::write(file, OOM_SCORE_ADJ).ok();
    }
}
