//! What the rest of the product needs of the network, and the arithmetic of addresses.

use std::fmt::Debug;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::egress::Egress;
use crate::error::NetError;

/// The gateway and the DNS server of every sandbox: a fork changes a guest's address, never its route or its resolver.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 203, 0, 1);

/// The gateway's MAC address: the same on every TAP, so that what a parent knows of its neighbour is true in its children.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x63, 0, 0, 0, 1];

/// The length of the prefix of a guest's address: nothing is on its link but the gateway.
pub const PREFIX: u8 = 32;

/// The first address of the pool; it is never seen outside the router namespace.
const BASE: u32 = u32::from_be_bytes([10, 203, 0, 0]);

/// The addresses below this offset are the router's own.
const RESERVED: u32 = 256;

/// How many slots the pool's /16 has room for; the last address would be its broadcast address.
pub const MAX_SLOTS: u32 = 65_536 - RESERVED - 1;

/// The address of a slot, which is `None` for an index past [`MAX_SLOTS`].
#[must_use]
pub fn address_of(index: u32) -> Option<Ipv4Addr> {
    (index < MAX_SLOTS).then(|| Ipv4Addr::from_bits(BASE + RESERVED + index))
}

/// The slot that an address belongs to: the inverse of [`address_of`].
#[must_use]
pub fn slot_of(address: Ipv4Addr) -> Option<u32> {
    address.to_bits().checked_sub(BASE + RESERVED).filter(|index| *index < MAX_SLOTS)
}

/// Where a machine sits at its slot. There are two seats so that a machine can take the place of another one: address, MAC,
/// policy and connections are the slot's, and go to whoever it leads to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seat {
    /// Where everybody begins.
    #[default]
    First,
    /// For the successor of who is in the first one.
    Second,
}

impl Seat {
    /// Both.
    pub const ALL: [Self; 2] = [Self::First, Self::Second];

    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }
}

/// A place on the network, taken for one sandbox.
#[derive(Debug, Clone)]
pub struct Slot {
    /// Which slot it is: also what the VMM's user id is derived from.
    pub index: u32,
    /// Where at it.
    pub seat: Seat,
    /// The MAC address of the guest's interface, fresh for each use of the slot.
    pub mac: [u8; 6],
    /// The guest's address.
    pub address: Ipv4Addr,
    /// The TAP that the VMM gets. The device lives for as long as someone holds the descriptor.
    pub tap: Arc<OwnedFd>,
}

/// What to remember of a slot so that its network can be taken over after a restart.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SlotRecord {
    /// Which slot it is.
    pub index: u32,
    /// The MAC address of the guest's interface.
    pub mac: [u8; 6],
    /// The guest's address.
    pub address: Ipv4Addr,
    /// What the guest may reach.
    pub egress: Egress,
    /// Where its machine sits; records of before there were two say nothing.
    #[serde(default)]
    pub seat: Seat,
}

/// An address that a name of a slot's policy resolved to: it may be reached for as long as the answer is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// The address that the name resolved to.
    pub address: Ipv4Addr,
    /// The only port that may be reached there; `None` for any.
    pub port: Option<u16>,
    /// For how long.
    pub ttl: Duration,
}

/// How many packets of guests were dropped since the network was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Not from the slot's own address and MAC, or IPv6.
    pub spoofed: u64,
    /// Not allowed by the slot's policy, or to a private range.
    pub refused: u64,
    /// To the host itself.
    pub host_refused: u64,
}

/// What the rest of the product needs of the network. The calls block.
pub trait Slots: Send + Sync + Debug {
    /// Says after a start which slots are in use by machines that outlived the last run; everything else that an
    /// earlier run left is removed. Until then nothing can be taken.
    ///
    /// # Errors
    /// If a record contradicts the arithmetic of addresses, or the rules or links can't be set.
    fn reclaim(&self, keep: &[SlotRecord]) -> Result<(), NetError>;

    /// Takes a slot with a policy that is in force when this returns.
    ///
    /// # Errors
    /// [`NetError::Exhausted`] if all are taken, [`NetError::NotReady`] before [`Slots::reclaim`]; others if no slot could be
    /// made or the policy can't be applied.
    fn take(&self, egress: &Egress) -> Result<Slot, NetError>;

    /// Gives a slot back. It is made new in the background: nothing of its former owner is left on it. Giving back
    /// what isn't taken is no error.
    ///
    /// # Errors
    /// If the network is closed.
    fn put(&self, index: u32) -> Result<(), NetError>;

    /// Makes the other seat of a taken slot. Both may send; what comes for the slot goes to the one that there was before until
    /// [`Slots::unseat`] takes that away, so that nothing is lost to it if its successor fails. The caller sees to it that no
    /// more than one of the two machines runs.
    ///
    /// # Errors
    /// If the slot isn't taken, both of its seats are made already, or the seat can't be made; all is as before then.
    fn reseat(&self, index: u32) -> Result<Slot, NetError>;

    /// Takes one of two seats away, with its TAP; what comes for the slot goes to the other one. Where there are not two there
    /// is nothing to do.
    ///
    /// # Errors
    /// If the links or the rules can't be set.
    fn unseat(&self, index: u32, seat: Seat) -> Result<(), NetError>;

    /// Changes what a taken slot may reach. Connections that the new policy doesn't allow are cut.
    ///
    /// # Errors
    /// If the slot isn't taken or the rules can't be set; the old policy is then still in force.
    fn set_egress(&self, index: u32, egress: &Egress) -> Result<(), NetError>;

    /// Opens addresses that allowed names resolved to. Private addresses are never reachable, even if opened.
    ///
    /// # Errors
    /// If the slot isn't taken or the rules can't be set.
    fn open_names(&self, index: u32, openings: &[Opening]) -> Result<(), NetError>;

    /// An unconnected non-blocking TCP socket inside the router namespace: what connects to guests.
    ///
    /// # Errors
    /// If no socket can be made.
    fn guest_socket(&self) -> Result<OwnedFd, NetError>;

    /// A bound UDP socket and a listening TCP socket at [`GATEWAY`]:53, both non-blocking.
    ///
    /// # Errors
    /// If they can't be made, as when they are in use.
    fn dns_sockets(&self) -> Result<(OwnedFd, OwnedFd), NetError>;

    /// What was dropped so far.
    ///
    /// # Errors
    /// If the counters can't be read.
    fn counters(&self) -> Result<Counters, NetError>;

    /// The slot that an address belongs to.
    fn slot_of(&self, address: Ipv4Addr) -> Option<u32> {
        slot_of(address)
    }

    /// How many slots are taken, and how many can be.
    fn capacity(&self) -> (u32, u32);

    /// Removes the network: namespace, links, rules. No slot may be in use.
    ///
    /// # Errors
    /// [`NetError::InUse`] if a slot is taken; others if something can't be removed.
    fn close(&self) -> Result<(), NetError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_slots_are_each_others_inverse() {
        for index in 0..MAX_SLOTS {
            let address = address_of(index).unwrap();
            assert_eq!(slot_of(address), Some(index));
            assert_eq!(&address.octets()[..2], &[10, 203]);
        }
        assert_eq!(address_of(0), Some(Ipv4Addr::new(10, 203, 1, 0)));
        assert_eq!(address_of(MAX_SLOTS - 1), Some(Ipv4Addr::new(10, 203, 255, 254)));
        assert_eq!(address_of(MAX_SLOTS), None);
        for outside in [GATEWAY, Ipv4Addr::new(10, 203, 0, 255), Ipv4Addr::new(10, 203, 255, 255), Ipv4Addr::BROADCAST]
        {
            assert_eq!(slot_of(outside), None, "{outside}");
        }
    }
}
