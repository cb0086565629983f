//! The DNS proxy on loopback sockets, between guests and a real resolver that does what a test says.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod guests;
mod resolvers;
mod upstream;
mod world;
