//! The identity of a VMM process: a pid that can't be mistaken for another process, by pidfd and start time.
//!
//! It works the same for our own children and for processes of an earlier daemon. It does not start processes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A process that is held by a pidfd.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Pid,
    start: u64,
    pidfd: AsyncFd<OwnedFd>,
}

impl Process {
    /// Takes hold of a process. The caller knows that `pid` is the one that it means: it just started it, or it checks
    /// [`Self::start_time`] afterwards (once held, the pid can't be given away unnoticed).
    pub fn hold(pid: i32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
        let start = start_time(pid)?;
        // SAFETY: an OwnedFd answers with the same open descriptor for as long as it lives, and it lives in the AsyncFd.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE)? };
        Ok(Self { pid, start, pidfd })
    }

    /// The pid.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Start time in clock ticks since boot.
    pub fn start_time(&self) -> u64 {
        self.start
    }

    /// Whether it has ended already (and waits to be reaped).
    pub fn is_zombie(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
    }

    /// Waits until the process has ended, reaps it when it is our child, and says how it ended when that can be known.
    pub async fn ended(&self) -> String {
        match self.pidfd.readable().await {
            Ok(_guard) => {}
            Err(error) => return format!("it can't be watched any more: {error}"),
        }
        match waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(0), _) => "it exited".to_owned(),
                (Some(code), _) => format!("exit status {code}"),
                (_, Some(signal)) => format!("killed by signal {signal}"),
                _ => "it ended".to_owned(),
            },
            // Not our child: it was started by an earlier daemon.
            _ => "it ended".to_owned(),
        }
    }

    /// Sends SIGKILL. Succeeds when it is already gone.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Field 22 of /proc/PID/stat. The command name (field 2) may hold spaces and parentheses: fields count from its last `)`.
fn start_time(pid: Pid) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))?;
    parse_start_time(&stat).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

fn parse_start_time(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// CPU time (user and system) that a process has used, from fields 14 and 15 of /proc/PID/stat.
pub(crate) fn cpu_time(pid: i32) -> io::Result<std::time::Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace().skip(11);
    let mut field = || fields.next().and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    let ticks = field().saturating_add(field());
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(std::time::Duration::from_millis(ticks.saturating_mul(1000) / per_second))
}

/// Id of this boot of the host.
pub(crate) fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_time_is_found_behind_any_command_name() {
        let fields: Vec<String> = (3..=52).map(|n| n.to_string()).collect();
        let stat = format!("77 (a) b (c)) {}", fields.join(" "));
        assert_eq!(parse_start_time(&stat), Some(22));
        assert_eq!(parse_start_time("77 (x) S 1"), None);
        assert_eq!(parse_start_time(""), None);
    }

    #[tokio::test]
    async fn the_end_of_a_child_is_noticed_and_named() {
        #[expect(clippy::zombie_processes, reason = "`Process` reaps it")]
        let child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::hold(i32::try_from(child.id()).unwrap()).unwrap();
        process.kill().unwrap();
        assert_eq!(process.ended().await, "killed by signal 9");
        process.kill().unwrap();
    }
}
