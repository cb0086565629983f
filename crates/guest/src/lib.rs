//! The agent in a sandbox: PID 1, a static binary that serves the guest protocol of `coppice-guest-proto`.
//!
//! As PID 1 ([`boot`]) it loads modules, mounts the root disk, switches root and stays: it reaps, runs commands, serves
//! files, performs the resume handshake and freezes the root file system. Everything that it does to the machine as a
//! whole (clock, CRNG, host name, network, freeze) goes through [`System`], so that the same service runs in an ordinary process:
//! tests and `coppice-testkit`'s fake engine embed it with a [`RecordingSystem`] and [`serve`] it on any byte stream.
//!
//! It does not decide anything about sandboxes: the host does.

pub mod agent;
pub mod boot;
mod connections;
pub mod console;
mod exec;
mod files;
mod hold;
mod modules;
mod mounts;
mod netlink;
mod network;
pub mod port;
mod ports;
mod processes;
mod quiesce;
mod reaper;
mod remove;
mod resume;
mod service;
mod session;
mod spawn;
mod status;
mod system;
mod users;
mod write_file;

pub use network::NetworkConfig;
pub use processes::Group;
pub use reaper::ReapMode;
pub use service::{GuestService, ServiceConfig};
pub use session::{ServeError, serve};
pub use system::{Effect, LinuxSystem, RecordingSystem, System};
