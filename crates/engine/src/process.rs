//! A VMM process seen from the engine: a pid that can't be mistaken for another process, watched by a pidfd.
//!
//! What is done to it goes through the privileged side. It works the same for processes of an earlier daemon.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::privileged::{Privileged, ProcessId, ProcessStats, Spawned};

/// A process that is held by a pidfd.
#[derive(Debug)]
pub(crate) struct Process {
    id: ProcessId,
    pidfd: AsyncFd<OwnedFd>,
    privileged: Arc<dyn Privileged>,
}

/// How long between looks at a process whose pidfd is readable and that is not to be reaped yet.
const ALMOST: Duration = Duration::from_millis(5);

impl Process {
    /// Watches a process that the privileged side spawned or adopted. Needs a runtime.
    pub fn watch(privileged: Arc<dyn Privileged>, spawned: Spawned) -> io::Result<Self> {
        let Spawned { id, pidfd } = spawned;
        // SAFETY: an OwnedFd answers with the same open descriptor for as long as it lives, and it lives in the AsyncFd.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE)? };
        Ok(Self { id, pidfd, privileged })
    }

    /// Who it is.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Waits until the process has ended, has it reaped, and says how it ended when that can be known.
    pub async fn ended(&self) -> String {
        match self.pidfd.readable().await {
            Ok(_guard) => {}
            Err(error) => return format!("it can't be watched any more: {error}"),
        }
        loop {
            let (privileged, id) = (Arc::clone(&self.privileged), self.id);
            let asked = tokio::task::spawn_blocking(move || privileged.ended(id)).await;
            match asked.unwrap_or_else(|interrupted| Err(io::Error::other(interrupted))) {
                Ok(Some(how)) => return how,
                Ok(None) => tokio::time::sleep(ALMOST).await,
                Err(error) => return format!("it ended; how is not known: {error}"),
            }
        }
    }

    /// Sends SIGKILL. Succeeds when it is already gone. Blocking, but not for long.
    pub fn kill(&self) -> io::Result<()> {
        self.privileged.kill(self.id)
    }
}

/// Field 22 of /proc/PID/stat. The command name (field 2) may hold spaces and parentheses: fields count from its last `)`.
pub(crate) fn start_time(pid: i32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start_time(&stat).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

fn parse_start_time(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Effective user id of a process.
pub(crate) fn uid(pid: i32) -> io::Result<u32> {
    use std::os::unix::fs::MetadataExt;
    // The directory's owner is root for a process that changed its user; the line of its status is not.
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let uid = status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_ascii_whitespace().nth(1)?.parse().ok());
    uid.map_or_else(|| Ok(std::fs::metadata(format!("/proc/{pid}"))?.uid()), Ok)
}

/// What a process uses, from its smaps_rollup and stat.
pub(crate) fn stats(pid: i32) -> io::Result<ProcessStats> {
    let (pss_bytes, private_bytes) = parse_rollup(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?);
    Ok(ProcessStats { pss_bytes, private_bytes, cpu_time: cpu_time(pid)? })
}

/// CPU time (user and system) that a process has used, from fields 14 and 15 of /proc/PID/stat.
fn cpu_time(pid: i32) -> io::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace().skip(11);
    let mut field = || fields.next().and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    let ticks = field().saturating_add(field());
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_millis(ticks.saturating_mul(1000) / per_second))
}

/// `Pss` and `Private_Dirty` of /proc/PID/smaps_rollup, bytes.
fn parse_rollup(text: &str) -> (u64, u64) {
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.split_ascii_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or(0)
            .saturating_mul(1024)
    };
    (field("Pss:"), field("Private_Dirty:"))
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

    #[test]
    fn the_rollup_is_parsed() {
        let text = "55-7f ---p 00000000 00:00 0 [rollup]\nRss:  900 kB\nPss:   100 kB\nPss_Dirty:  7 kB\nPrivate_Dirty:  40 kB\n";
        assert_eq!(parse_rollup(text), (100 << 10, 40 << 10));
        assert_eq!(parse_rollup(""), (0, 0));
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_noticed() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let local: Arc<dyn Privileged> = Arc::new(crate::privileged::Local::unjailed().unwrap());
        let id = ProcessId { pid, start_time: start_time(pid).unwrap() };
        local.kill(id).unwrap_err();
        let pidfd = local.adopt(id).unwrap().unwrap();
        let process = Process::watch(Arc::clone(&local), Spawned { id, pidfd }).unwrap();
        process.kill().unwrap();
        assert_eq!(process.ended().await, "it ended");
        child.wait().unwrap();
        process.kill().unwrap();
        assert!(local.adopt(id).unwrap().is_none());
    }
}
