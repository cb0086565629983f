//! What can go wrong.

use std::io;

use crate::egress::EgressError;

/// An error of the network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// Every slot is taken.
    #[error("all {limit} network slots of this host are in use")]
    Exhausted {
        /// How many there are.
        limit: u32,
    },
    /// Nobody said yet what an earlier run's machines still use.
    #[error("the network is not ready: what an earlier run left has not been sorted out")]
    NotReady,
    /// It was said already what an earlier run's machines use.
    #[error("what an earlier run left has been sorted out already")]
    Settled,
    /// The slot isn't taken.
    #[error("network slot {index} is not in use")]
    UnknownSlot {
        /// Which.
        index: u32,
    },
    /// There is no seat left to be made.
    #[error("network slot {index} has two seats already")]
    Seats {
        /// Which.
        index: u32,
    },
    /// A record of a slot to keep makes no sense.
    #[error("the record of network slot {index} can't be right: {why}")]
    BadRecord {
        /// Which.
        index: u32,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The policy is not one that can be applied.
    #[error("the egress policy can't be applied")]
    Policy(#[from] EgressError),
    /// The network can't be removed yet.
    #[error("the network can't be closed: {taken} slots are in use")]
    InUse {
        /// How many slots are taken.
        taken: u32,
    },
    /// The network was closed.
    #[error("the network is closed")]
    Closed,
    /// The kernel refused something.
    #[error("{what}")]
    System {
        /// What was attempted.
        what: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// nftables refused a change or a question.
    #[error("nftables: {what}: {message}")]
    Rules {
        /// What was attempted.
        what: &'static str,
        /// What it said.
        message: String,
    },
    /// The host lacks something.
    #[error("{what} is missing: {hint}")]
    Missing {
        /// What.
        what: String,
        /// What to do about it.
        hint: String,
    },
    /// The process that owns the network did not answer, or not properly.
    #[error("the network's owner: {message}")]
    Remote {
        /// What it said, or what became of it.
        message: String,
    },
}

impl NetError {
    /// Wraps an error of the kernel: `map_err(NetError::system("setting an address"))`.
    pub(crate) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        move |source| Self::System { what: what.into(), source: source.into() }
    }
}
