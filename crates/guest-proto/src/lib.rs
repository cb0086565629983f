//! The host-guest protocol: generated messages and service ([`v1`]), the preamble that starts a session ([`session`]),
//! and the limits both sides enforce ([`limits`]).
//!
//! This crate does no I/O: the guest serves the protocol in `coppice-guest`, the host calls it through
//! `coppice_engine::GuestSession`.
#![forbid(unsafe_code)]

pub mod limits;
pub mod session;

/// Generated from `proto/guest.proto`.
#[expect(missing_docs, clippy::allow_attributes, reason = "generated code; the .proto file is the documentation")]
pub mod v1 {
    tonic::include_proto!("coppice.guest.v1");
}
