//! The one owner of `wait`: children are started through [`Reaper::spawn`] and their ends are told by pid.
//!
//! PID 1 has to reap every orphan, and a `waitpid(-1)` anywhere would steal the status that someone else waits for. So
//! nothing else in this crate waits for a child, and the standard library's `Child` is taken apart at once. A lock is
//! held from fork to registration and while reaping, so that no status can be lost between the two, and so that a
//! process group can be killed without hitting a recycled pid.
//!
//! It knows nothing of timeouts or output.

use std::{
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitOptions, WaitStatus},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

/// Whose children are reaped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReapMode {
    /// All of the process's: the agent is PID 1.
    All,
    /// Only those that the agent started: it shares the process with others (tests, fakes).
    Own,
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exit {
    /// The exit code, or 128 + signal.
    pub code: i32,
    /// The signal that killed it; 0 when it exited by itself.
    pub signal: i32,
}

impl From<WaitStatus> for Exit {
    fn from(status: WaitStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (_, Some(signal)) => Self { code: 128 + signal, signal },
            (Some(code), None) => Self { code, signal: 0 },
            (None, None) => Self { code: 0, signal: 0 },
        }
    }
}

/// A child that was started, without its `Child`.
#[derive(Debug)]
pub(crate) struct Spawned {
    pub pid: Pid,
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    /// Resolves once the child has been reaped.
    pub exit: oneshot::Receiver<Exit>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Reaper {
    mode: ReapMode,
    waiting: Mutex<HashMap<Pid, oneshot::Sender<Exit>>>,
}

impl Reaper {
    /// Starts reaping in the background, until the reaper is dropped. Must be called in a tokio runtime.
    pub(crate) fn start(mode: ReapMode) -> io::Result<Arc<Self>> {
        let reaper = Arc::new(Self { mode, waiting: Mutex::default() });
        let mut sigchld = signal(SignalKind::child())?;
        let weak = Arc::downgrade(&reaper);
        tokio::spawn(async move {
            while sigchld.recv().await.is_some() {
                let Some(reaper) = weak.upgrade() else { break };
                reaper.reap();
            }
        });
        // Orphans that ended before the handler was there.
        reaper.reap();
        Ok(reaper)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Pid, oneshot::Sender<Exit>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a child. Blocks for the time of fork and exec.
    pub(crate) fn spawn(&self, command: &mut Command) -> io::Result<Spawned> {
        let mut waiting = self.lock();
        let mut child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
        let (tx, exit) = oneshot::channel();
        waiting.insert(pid, tx);
        Ok(Spawned {
            pid,
            stdin: child.stdin.take().map(OwnedFd::from),
            stdout: child.stdout.take().map(OwnedFd::from),
            stderr: child.stderr.take().map(OwnedFd::from),
            exit,
        })
    }

    /// Kills the process group of a child that was started as its leader, unless that child has been reaped already.
    pub(crate) fn kill_group(&self, leader: Pid) {
        let waiting = self.lock();
        if !waiting.contains_key(&leader) {
            return;
        }
        match rustix::process::kill_process_group(leader, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => tracing::warn!("can't kill process group {leader}: {error}"),
        }
    }

    /// Collects every child that has ended.
    fn reap(&self) {
        let mut waiting = self.lock();
        match self.mode {
            ReapMode::All => loop {
                match rustix::process::wait(WaitOptions::NOHANG) {
                    Ok(Some((pid, status))) => tell(waiting.remove(&pid), status),
                    Ok(None) | Err(Errno::CHILD) => break,
                    Err(Errno::INTR) => {}
                    Err(error) => {
                        tracing::error!("wait: {error}");
                        break;
                    }
                }
            },
            ReapMode::Own => {
                let ended: Vec<_> = waiting
                    .keys()
                    .filter_map(|&pid| rustix::process::waitpid(Some(pid), WaitOptions::NOHANG).ok().flatten())
                    .collect();
                for (pid, status) in ended {
                    tell(waiting.remove(&pid), status);
                }
            }
        }
    }
}

fn tell(waiter: Option<oneshot::Sender<Exit>>, status: WaitStatus) {
    if let Some(waiter) = waiter {
        // Nobody listens any more: the agent lost interest, the zombie is gone all the same.
        waiter.send(status.into()).ok();
    }
}
