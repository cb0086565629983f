//! Fakes, builders, and the real-VM harness of the tests.
//!
//! | module | what it is for |
//! |---|---|
//! | [`assets`] | the guest kernel and root file system that `coppice setup` made |
//! | [`engine_conformance`] | what every engine must do, run against each |
//! | [`fake_engine`] | an engine without VMs, with knobs for everything that can go wrong |
//! | [`fake_slots`] | network slots without a network |
//! | [`handshake`] | resume requests as the host makes them |
#![forbid(unsafe_code)]

pub mod assets;
pub mod engine_conformance;
pub mod fake_engine;
pub mod fake_slots;
pub mod handshake;
