//! Whether there is room for more sandboxes, decided before anything is made.
//!
//! Measured: available memory and free disk of the host, less what was promised to sandboxes that are just being made. A
//! running sandbox's own use is in the measurement. This is not a limit per workspace.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use coppice_api::ErrorClass;

use crate::Coded;

/// Memory that is never given to sandboxes, bytes.
const MEMORY_FLOOR: u64 = 512 << 20;
/// Disk that is never given to sandboxes, bytes.
const DISK_FLOOR: u64 = 1 << 30;
/// What one more sandbox may need at once: a restored machine owns only the pages that it writes.
const MEMORY_PER_SANDBOX: u64 = 96 << 20;
/// What one more sandbox may write to disk at once.
const DISK_PER_SANDBOX: u64 = 64 << 20;

/// There is no room. Nothing was made.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// Not enough memory.
    #[error(
        "insufficient host memory for {count} more sandbox(es): {need_mib} MiB needed, {available_mib} MiB available"
    )]
    Memory {
        /// How many were asked for.
        count: u64,
        /// MiB that they would need.
        need_mib: u64,
        /// MiB that the host can give.
        available_mib: u64,
    },
    /// Not enough disk.
    #[error("insufficient host storage for {count} more sandbox(es): {need_mib} MiB needed, {available_mib} MiB free")]
    Disk {
        /// How many were asked for.
        count: u64,
        /// MiB that they would need.
        need_mib: u64,
        /// MiB that the host can give.
        available_mib: u64,
    },
    /// The operator's limit.
    #[error("this host is configured for at most {limit} sandboxes")]
    Count {
        /// The limit.
        limit: usize,
    },
    /// The host can't be measured.
    #[error("the host's free memory or disk can't be read")]
    Measure(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Coded for AdmissionError {
    fn code(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "no_memory",
            Self::Disk { .. } => "no_storage",
            Self::Count { .. } => "too_many_sandboxes",
            Self::Measure(_) => "measure_failed",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Measure(_) => ErrorClass::Internal,
            _ => ErrorClass::Capacity,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Measure(_) => None,
            _ => Some("delete sandboxes that are no longer needed, or wait until their TTLs end them".into()),
        }
    }
}

/// Keeps the promises.
#[derive(Debug)]
pub(crate) struct Admission {
    data_dir: PathBuf,
    limit: usize,
    promised: Arc<AtomicU64>,
}

/// Room for some sandboxes that are being made; given back when dropped, as then they are measured.
#[derive(Debug)]
pub(crate) struct Reservation {
    promised: Arc<AtomicU64>,
    count: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.promised.fetch_sub(self.count, Ordering::Relaxed);
    }
}

impl Admission {
    pub(crate) fn new(data_dir: PathBuf, limit: usize) -> Self {
        Self { data_dir, limit, promised: Arc::default() }
    }

    /// Room for `count` more sandboxes on top of `existing`.
    pub(crate) fn reserve(&self, count: u64, existing: usize) -> Result<Reservation, AdmissionError> {
        let before = self.promised.fetch_add(count, Ordering::Relaxed);
        let reservation = Reservation { promised: Arc::clone(&self.promised), count };
        let wanted = usize::try_from(before + count).unwrap_or(usize::MAX);
        if existing.saturating_add(wanted) > self.limit {
            return Err(AdmissionError::Count { limit: self.limit });
        }
        let memory = available_memory().map_err(|e| AdmissionError::Measure(Box::new(e)))?;
        let need = (before + count) * MEMORY_PER_SANDBOX;
        if memory < need + MEMORY_FLOOR {
            return Err(AdmissionError::Memory { count, need_mib: need >> 20, available_mib: memory >> 20 });
        }
        let disk =
            coppice_disk::free_space(&self.data_dir).map_err(|e| AdmissionError::Measure(Box::new(e)))?.available;
        let need = (before + count) * DISK_PER_SANDBOX;
        if disk < need + DISK_FLOOR {
            return Err(AdmissionError::Disk { count, need_mib: need >> 20, available_mib: disk >> 20 });
        }
        Ok(reservation)
    }
}

/// `MemAvailable` of /proc/meminfo, bytes.
fn available_memory() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map(|kib| kib << 10)
        .ok_or_else(|| std::io::Error::other("no MemAvailable in /proc/meminfo"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_counts_until_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let admission = Admission::new(dir.path().to_owned(), 4);
        let held = admission.reserve(3, 0).unwrap();
        assert!(matches!(admission.reserve(2, 0), Err(AdmissionError::Count { limit: 4 })));
        let more = admission.reserve(1, 0).unwrap();
        drop(held);
        assert!(matches!(admission.reserve(1, 3), Err(AdmissionError::Count { .. })));
        drop(more);
        admission.reserve(1, 3).unwrap();
    }

    #[test]
    fn what_no_host_has_is_refused_with_the_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let admission = Admission::new(dir.path().to_owned(), usize::MAX);
        let Err(AdmissionError::Memory { count, need_mib, available_mib }) = admission.reserve(1 << 24, 0) else {
            panic!("expected a refusal for memory");
        };
        assert_eq!(count, 1 << 24);
        assert!(need_mib > available_mib);
        // A refusal promises nothing.
        assert_eq!(admission.promised.load(Ordering::Relaxed), 0);
    }
}
