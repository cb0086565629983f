//! How many sandboxes a workspace may ask for in a moment: a token bucket per workspace, for create and fork only. Other
//! calls are not limited: no published client asks again after a 429 of theirs.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Buckets that are kept before the full ones among them are forgotten: a full bucket is as good as none.
const KEPT: usize = 1024;
/// Seconds of the rate that may come at once.
const BURST_SECONDS: f64 = 2.0;

/// The buckets.
#[derive(Debug)]
pub(crate) struct CreateRate {
    per_second: f64,
    buckets: Mutex<HashMap<String, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl CreateRate {
    /// So many calls a second, and two seconds' worth at once; 0: any number.
    pub(crate) fn new(per_second: u32) -> Self {
        Self { per_second: f64::from(per_second), buckets: Mutex::default() }
    }

    /// Whether one more call may be made now.
    pub(crate) fn admit(&self, workspace: &str) -> bool {
        self.per_second == 0.0 || self.admit_at(workspace, Instant::now())
    }

    fn admit_at(&self, workspace: &str, now: Instant) -> bool {
        let most = (self.per_second * BURST_SECONDS).max(1.0);
        let level = |bucket: &Bucket| {
            let since = now.saturating_duration_since(bucket.at).as_secs_f64();
            (bucket.left + since * self.per_second).min(most)
        };
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= KEPT && !buckets.contains_key(workspace) {
            buckets.retain(|_, bucket| level(bucket) < most);
        }
        let left = buckets.get(workspace).map_or(most, level);
        let admitted = left >= 1.0;
        let left = if admitted { left - 1.0 } else { left };
        buckets.insert(workspace.to_owned(), Bucket { left, at: now });
        admitted
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_burst_then_the_rate_and_each_workspace_for_itself() {
        let rate = CreateRate::new(10);
        let start = Instant::now();
        let admitted = |at, times: usize| (0..times).filter(|_| rate.admit_at("a", at)).count();
        assert_eq!(admitted(start, 50), 20);
        assert_eq!(admitted(start + Duration::from_millis(500), 50), 5);
        assert_eq!(admitted(start + Duration::from_secs(1000), 50), 20);
        assert!(rate.admit_at("b", start));
    }

    #[test]
    fn no_rate_is_no_limit_and_full_buckets_are_forgotten() {
        let rate = CreateRate::new(0);
        assert!((0..10_000).all(|_| rate.admit("a")));
        let rate = CreateRate::new(1);
        let start = Instant::now();
        for number in 0..2 * KEPT {
            assert!(rate.admit_at(&number.to_string(), start + Duration::from_secs(number as u64)));
        }
        assert!(rate.buckets.lock().unwrap().len() <= KEPT + 1);
    }
}
