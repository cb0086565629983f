//! The processes of a sandbox as one group, which the kernel's freezer (cgroup v2) holds and releases.
//!
//! Every command joins [`COMMANDS`] before it runs its program, and what it starts is born there: background children,
//! new sessions, daemons. Resume hooks run in [`HOOKS`], which is never held: they are part of the handshake. What they
//! leave behind is moved to the commands.
//!
//! Only root in the guest can move a process out of its group; it then runs early in a copy, which is its own affair.
//! Not in here: when processes are held (see [`crate::hold`]).

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, Signal, kill_process},
};

const COMMANDS: &str = "commands";
const HOOKS: &str = "hooks";
/// Rounds of moving what hooks left: a process may fork while others are moved.
const SWEEPS: usize = 8;
/// Longest list of pids that is read.
const MAX_PIDS: u64 = 1 << 20;

/// A group that processes join before they run their program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// What the host asked to run.
    Commands,
    /// Resume hooks.
    Hooks,
}

/// The two groups, with their files open: what a handshake needs is then part of what machines are restored from.
#[derive(Debug)]
pub(crate) struct Processes {
    freeze: File,
    events: File,
    commands: File,
    hooks: File,
}

impl Processes {
    /// Makes the groups below `root`, a cgroup v2 mount.
    pub(crate) fn make(root: &Path) -> io::Result<Self> {
        let (commands, hooks) = (root.join(COMMANDS), root.join(HOOKS));
        for dir in [&commands, &hooks] {
            match fs::create_dir(dir) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        let open = |path: &Path| fs::OpenOptions::new().read(true).write(true).open(path);
        Ok(Self {
            freeze: open(&commands.join("cgroup.freeze"))?,
            events: File::open(commands.join("cgroup.events"))?,
            commands: open(&commands.join("cgroup.procs"))?,
            hooks: open(&hooks.join("cgroup.procs"))?,
        })
    }

    /// Where a process writes `0` to join a group.
    pub(crate) fn door(&self, group: Group) -> BorrowedFd<'_> {
        match group {
            Group::Commands => self.commands.as_fd(),
            Group::Hooks => self.hooks.as_fd(),
        }
    }

    /// Holds the commands, within `limit`; releases them again when that is not enough.
    pub(crate) fn hold(&self, limit: Duration) -> io::Result<()> {
        let end = Instant::now() + limit;
        self.adopt_hooks()?;
        let held = self.set(b"1").and_then(|()| self.wait_held(end));
        if held.is_err() {
            self.set(b"0")?;
        }
        held
    }

    pub(crate) fn release(&self) -> io::Result<()> {
        self.set(b"0")
    }

    /// Moves what hooks left behind to the commands.
    pub(crate) fn adopt_hooks(&self) -> io::Result<()> {
        for _ in 0..SWEEPS {
            let pids = read_from_start(&self.hooks)?;
            if pids.is_empty() {
                return Ok(());
            }
            for pid in pids.lines() {
                match (&self.commands).write(pid.as_bytes()) {
                    // It has ended meanwhile.
                    Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
                    other => drop(other?),
                }
            }
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "processes of resume hooks multiply"))
    }

    /// Signals every command that has a handler for `signal`. While all are held, that is the first thing that they run
    /// when they go on. Which ones have a handler can't change meanwhile, and no pid is reused.
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        for pid in read_from_start(&self.commands)?.lines() {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            if !catches(&status, signal.as_raw()) {
                continue;
            }
            let Some(pid) = pid.parse().ok().and_then(Pid::from_raw) else { continue };
            // Gone meanwhile: nothing to tell.
            kill_process(pid, signal).ok();
        }
        Ok(())
    }

    fn set(&self, value: &[u8]) -> io::Result<()> {
        (&self.freeze).write_all(value)
    }

    fn wait_held(&self, end: Instant) -> io::Result<()> {
        loop {
            if read_from_start(&self.events)?.lines().any(|line| line == "frozen 1") {
                return Ok(());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // A change since the file was last read shows as PRI.
            let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
            match poll(&mut [PollFd::new(&self.events, PollFlags::PRI)], Some(&left)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether a `/proc/PID/status` says that there is a handler (`SigCgt`, proc(5)).
fn catches(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    u32::try_from(signal - 1).ok().and_then(|bit| mask.checked_shr(bit)).is_some_and(|mask| mask & 1 == 1)
}

fn read_from_start(mut file: &File) -> io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    let mut text = String::new();
    file.take(MAX_PIDS).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_handler_counts() {
        let status = "Name:\tx\nSigBlk:\tffffffffffffffff\nSigIgn:\tffffffffffffffff\nSigCgt:\t0800000000000002\n";
        assert!(catches(status, 60) && catches(status, 2));
        assert!(!catches(status, 59) && !catches(status, 61) && !catches(status, 1) && !catches(status, 64));
        for none in ["", "SigCgt:\n", "SigCgt:\tzz\n"] {
            assert!(!catches(none, 60));
        }
    }
}
