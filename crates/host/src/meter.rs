//! What the host has and what its machines use: measured in the background, so that a decision never waits for it.
//!
//! The host's own numbers (a line of /proc/meminfo, a statfs) cost microseconds and are read when they are needed. A machine's
//! cost a walk over its page tables, and are read every few seconds, one machine after the other; one that was started since
//! counts by its size. What is decided from them is [`crate::admission`]'s.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_api::SandboxStatus;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::admission::VMM_OVERHEAD;
use crate::entry::Entry;
use crate::host::Shared;

/// How often machines are measured.
const PERIOD: Duration = Duration::from_secs(5);
/// The pause after a round is at least so many times as long as the round: measuring takes at most 2 % of a processor.
const REST: u32 = 50;
/// How long one machine may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the host has, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Facts {
    pub memory_total: u64,
    /// What sandboxes can still get: of the kernel, or of the control group that all of this runs in.
    pub memory_available: u64,
    pub disk_total: u64,
    pub disk_free: u64,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Facts {
    pub(crate) fn read(data_dir: &Path) -> Result<Self, BoxError> {
        let text = fs::read_to_string("/proc/meminfo")?;
        let field = |name: &str| meminfo(&text, name).ok_or_else(|| format!("no {name} in /proc/meminfo"));
        let (total, available) = (field("MemTotal")?, field("MemAvailable")?);
        let space = coppice_disk::free_space(data_dir)?;
        Ok(Self {
            memory_total: total,
            memory_available: group_room(total).map_or(available, |room| room.min(available)),
            disk_total: space.total,
            disk_free: space.available,
        })
    }
}

/// A field of /proc/meminfo, bytes.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// What the control group at the root of what this process sees leaves: in a container that is the container's own, and VMMs
/// are in groups below it. None where it has no limit. Page cache that nobody uses is room.
fn group_room(total: u64) -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let idle = |path: &str, name: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        let value = |line: &str| line.strip_prefix(name)?.trim().parse::<u64>().ok();
        text.lines().find_map(value).unwrap_or(0)
    };
    let (limit, used, idle) = match number("/sys/fs/cgroup/memory.max") {
        Some(limit) => {
            (limit, number("/sys/fs/cgroup/memory.current")?, idle("/sys/fs/cgroup/memory.stat", "inactive_file "))
        }
        None => (
            number("/sys/fs/cgroup/memory/memory.limit_in_bytes").filter(|limit| *limit < total)?,
            number("/sys/fs/cgroup/memory/memory.usage_in_bytes")?,
            idle("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file "),
        ),
    };
    Some(limit.saturating_sub(used.saturating_sub(idle)))
}

/// What was measured of one machine, and what is known of its disk; bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Measured {
    /// Pages that it alone has.
    pub private: u64,
    /// Its share of the pages that it has in common with others: images.
    pub shared: u64,
}

/// All machines together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    /// In the list, whatever they do.
    pub sandboxes: u64,
    pub private: u64,
    pub images: u64,
    /// What may still be written, and what of it counts.
    pub memory_promised: u64,
    pub memory_counted: u64,
    pub disk_promised: u64,
    pub disk_counted: u64,
}

/// What all sandboxes use and may come to use, by what is known now.
pub(crate) fn sums(shared: &Shared) -> Sums {
    let mut sums = Sums::default();
    shared.each(|entry| add(&mut sums, shared, entry));
    sums
}

fn add(sums: &mut Sums, shared: &Shared, entry: &Entry) {
    if entry.is_stopped() {
        // It has nothing any more but a record.
        return;
    }
    sums.sandboxes += 1;
    let (measured, disk_len) = entry.measured();
    let has_machine = match entry.status() {
        SandboxStatus::Creating | SandboxStatus::Running | SandboxStatus::Paused => true,
        // Of one that failed the machine may stand still, or be gone.
        SandboxStatus::Failed => measured.is_some(),
        SandboxStatus::Hibernated | SandboxStatus::Stopped | SandboxStatus::Stopping => false,
    };
    if !has_machine {
        return;
    }
    let config = &shared.admission.config;
    let fresh = config.fresh(u64::from(entry.memory_mib), disk_len);
    let memory = (u64::from(entry.memory_mib) << 20).saturating_add(VMM_OVERHEAD);
    let Measured { private, shared: images } = measured.unwrap_or_default();
    let unwritten = memory.saturating_sub(private);
    sums.private = sums.private.saturating_add(private);
    sums.images = sums.images.saturating_add(images);
    sums.memory_promised = sums.memory_promised.saturating_add(unwritten);
    sums.memory_counted = sums.memory_counted.saturating_add(match measured {
        Some(_) => config.memory_overcommit.counted(unwritten),
        None => fresh.memory,
    });
    sums.disk_promised = sums.disk_promised.saturating_add(disk_len);
    sums.disk_counted = sums.disk_counted.saturating_add(fresh.disk);
}

pub(crate) async fn run(shared: Arc<Shared>, stop: CancellationToken) {
    loop {
        let begun = Instant::now();
        measure(&shared).await;
        let pause = PERIOD.max(begun.elapsed() * REST);
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// One round over all machines.
pub(crate) async fn measure(shared: &Shared) {
    for entry in shared.all() {
        let Some(vm) = entry.machine() else { continue };
        let stats = match tokio::time::timeout(PATIENCE, vm.stats()).await {
            Ok(Ok(stats)) => Some(stats),
            Ok(Err(error)) => {
                // It hibernates, has failed, or ends just now.
                debug!(id = %entry.id, %error, "can't be measured");
                None
            }
            // As it was.
            Err(_) => continue,
        };
        let disk = shared.sandbox_dir(entry.id).join(coppice_snapshot::DISK_FILE);
        let disk_len = tokio::fs::metadata(&disk).await.map(|found| found.len()).ok();
        entry.set_measured(&vm, stats, disk_len);
    }
    shared.measured_now();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_kernel_s_own_words() {
        let text = "MemTotal:       24683728 kB\nMemFree:  1 kB\nMemAvailable:   19204416 kB\nMemAvailableX: 7 kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(24_683_728 << 10));
        assert_eq!(meminfo(text, "MemAvailable"), Some(19_204_416 << 10));
        assert_eq!(meminfo("", "MemTotal"), None);
        let facts = Facts::read(Path::new("/")).unwrap();
        assert!(facts.memory_available > 0 && facts.memory_available <= facts.memory_total);
        assert!(facts.disk_free <= facts.disk_total && facts.disk_total > 0);
    }
}
