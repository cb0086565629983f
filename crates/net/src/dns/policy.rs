//! Whose question it is: policies by slot, what each sandbox may ask of the proxy, and the addresses that are open for it.

use std::collections::HashMap;
use std::fmt::Debug;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::egress::Egress;
use crate::error::NetError;
use crate::slots::Opening;

/// Questions per second that a sandbox may ask in the long run, and at once.
const RATE: f64 = 100.0;
const BURST: f64 = 200.0;
/// Questions of one sandbox that are being answered.
const IN_FLIGHT: usize = 32;
/// Connections of one sandbox.
const CONNECTIONS: usize = 8;
/// Most addresses (with their ports) that are open for one sandbox at a time.
pub const MAX_OPEN: usize = 1024;
/// How much longer an address is open than the guest was told: a connection that it begins at the last moment works.
const GRACE: Duration = Duration::from_secs(10);

/// Why the addresses of a name were not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The sandbox has another policy by now, or the slot another sandbox.
    #[error("the policy that the name was allowed by is no longer in force")]
    Stale,
    /// It has too many open already.
    #[error("{MAX_OPEN} addresses are open for this sandbox already")]
    TooMany,
    /// The network did not do it.
    #[error("the addresses can't be opened")]
    Net(#[from] NetError),
    /// A bug: the task that opened them panicked.
    #[error("opening the addresses was interrupted")]
    Interrupted,
}

/// What the proxy needs to know, and to have done.
pub trait Directory: Send + Sync + Debug {
    /// The policy of the sandbox that has this address. The same one as long as it is in force.
    fn policy(&self, guest: Ipv4Addr) -> Option<Arc<Policy>>;

    /// Opens addresses under a policy. Blocks; they are open when it returns.
    ///
    /// # Errors
    /// [`OpenError::Stale`] if that policy is not in force any more: nothing was opened then.
    fn open_names(&self, policy: &Arc<Policy>, openings: &[Opening]) -> Result<(), OpenError>;
}

/// A policy in force, with what is counted while it is.
#[derive(Debug)]
pub struct Policy {
    slot: u32,
    egress: Egress,
    rate: Mutex<Bucket>,
    in_flight: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    opened: tokio::sync::Mutex<HashMap<(Ipv4Addr, Option<u16>), Instant>>,
}

impl Policy {
    /// A policy that comes into force.
    #[must_use]
    pub fn new(slot: u32, egress: Egress) -> Arc<Self> {
        Arc::new(Self {
            slot,
            egress,
            rate: Mutex::new(Bucket { left: BURST, at: Instant::now() }),
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT)),
            connections: Arc::new(Semaphore::new(CONNECTIONS)),
            opened: tokio::sync::Mutex::default(),
        })
    }

    /// The slot that it is for.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// What the sandbox may reach.
    #[must_use]
    pub fn egress(&self) -> &Egress {
        &self.egress
    }

    /// Whether the sandbox may ask one more question now.
    pub(super) fn may_ask(&self) -> bool {
        self.rate.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now())
    }

    /// Room for one more question that is being answered.
    pub(super) fn enter(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.in_flight).try_acquire_owned().ok()
    }

    /// Room for one more connection.
    pub(super) fn connect(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.connections).try_acquire_owned().ok()
    }

    /// Opens addresses for as long as the guest is told. They are open when this answers.
    ///
    /// What is open for long enough already is not opened again. One call at a time and sandbox: a sandbox never holds more
    /// than one thread.
    pub(super) async fn open(
        self: &Arc<Self>,
        directory: &Arc<dyn Directory>,
        addresses: &[Ipv4Addr],
        ports: &[Option<u16>],
        ttl: Duration,
    ) -> Result<(), OpenError> {
        let mut opened = self.opened.lock().await;
        let now = Instant::now();
        opened.retain(|_, until| *until > now);
        let wanted = addresses.iter().flat_map(|address| ports.iter().map(|port| (*address, *port)));
        let missing: Vec<_> = wanted.filter(|key| opened.get(key).is_none_or(|until| *until < now + ttl)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        if opened.len() + missing.iter().filter(|key| !opened.contains_key(key)).count() > MAX_OPEN {
            return Err(OpenError::TooMany);
        }
        let lasting = ttl + GRACE;
        let openings: Vec<Opening> =
            missing.iter().map(|(address, port)| Opening { address: *address, port: *port, ttl: lasting }).collect();
        let (directory, policy) = (Arc::clone(directory), Arc::clone(self));
        let done = tokio::task::spawn_blocking(move || directory.open_names(&policy, &openings)).await;
        done.map_err(|_| OpenError::Interrupted)??;
        // From before the call: never later than the rules have it.
        opened.extend(missing.into_iter().map(|key| (key, now + lasting)));
        Ok(())
    }
}

/// A token bucket.
#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Bucket {
    fn take(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.left = (self.left + passed * RATE).min(BURST);
        self.at = now;
        let any = self.left >= 1.0;
        if any {
            self.left -= 1.0;
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let start = Instant::now();
        let mut bucket = Bucket { left: BURST, at: start };
        assert_eq!((0..1000).filter(|_| bucket.take(start)).count(), 200);
        assert_eq!((0..1000).filter(|_| bucket.take(start + Duration::from_secs(1))).count(), 100);
        assert_eq!((0..1000).filter(|_| bucket.take(start + Duration::from_secs(1000))).count(), 200);
    }
}
