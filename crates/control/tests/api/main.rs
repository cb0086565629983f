//! The API over a scriptable host, driven over TCP.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may panic, in its helpers too")]

#[path = "../common/mod.rs"]
mod common;

mod files;
mod http;
mod links;
mod ports;
mod previews;
mod proxy;
mod quotas;
mod server;
mod streams;
mod tenants;
mod tunnel;
