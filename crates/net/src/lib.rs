//! The network of the sandboxes on one host: slots with an address, a MAC and a TAP each, and what may leave them.
//!
//! | module | what it is for |
//! |---|---|
//! | [`dns`] | the resolver of the guests: answers allowed names, and opens what they resolve to |
//! | [`egress`] | what a sandbox may reach: parsing, checking, the list of private ranges |
//! | [`slots`] | the typed interface that the rest of the product uses, and the arithmetic of addresses |
//! | [`Network`] | the slots of one instance, in process |
//! | [`check`] | what a host lacks, found by trying |
//! | [`error`] | what can go wrong |
//!
//! It does not know sandboxes, tenants or the API's wire types, and starts no process.

mod check;
pub mod dns;
pub mod egress;
pub mod error;
mod inside;
mod network;
mod nft;
mod rtnl;
mod rules;
pub mod slots;
mod tap;

pub use check::{Missing, check};
pub use egress::{Allowed, DomainPattern, Egress, EgressError, Ipv4Cidr, MAX_ALLOWED, is_private};
pub use error::NetError;
pub use network::{NetConfig, Network, instance_id};
pub use slots::{
    Counters, GATEWAY, GATEWAY_MAC, MAX_SLOTS, Opening, PREFIX, Seat, Slot, SlotRecord, Slots, address_of, slot_of,
};
pub use tap::isolated_tap;
