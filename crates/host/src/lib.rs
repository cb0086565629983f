//! Sandboxes on one host: lifecycle, fork, capture, TTL, admission, recovery.
//!
//! | module | does |
//! |---|---|
//! | `api` | the one interface through which control reaches a host |
//! | `host` | what operations share; start and stop |
//! | `entry`, `actor` | one sandbox: its record and session; the one who changes its machine |
//! | `launch` | from an image or a disk to a sandbox whose guest has acknowledged |
//! | `create`, `fork_tree`, `fork_disk`, `fork_warm`, `promote`, `snapshots`, `hibernate`, `wake`, `lifecycle`, `network` | one operation each |
//! | `exec`, `files`, `logs`, `ports`, `connect` | what goes past the actor, any number at once |
//! | `admission`, `reaper`, `recovery`, `undo` | refuse in time, end in time, nothing half-made |
//! | `changes`, `fork_point` | what a sandbox has changed on its disk, and the disk that it began with |
//! | `holdings` | what of a workspace counts for its quotas |
//! | `record`, `store` | what is written down |
//!
//! It does not parse HTTP, know tokens or place sandboxes on other hosts (control), run VMs (engine) or make templates
//! (image).
#![forbid(unsafe_code)]

mod actor;
mod admission;
mod api;
mod capacity;
mod changes;
mod connect;
mod create;
mod dead_vm;
mod entry;
mod error;
mod exec;
mod files;
mod fork;
mod fork_disk;
mod fork_point;
mod fork_tree;
mod fork_warm;
mod guest_error;
mod handshake;
mod hibernate;
mod hold;
mod holdings;
mod host;
mod launch;
mod lifecycle;
mod logs;
mod meter;
mod network;
mod ports;
mod promote;
mod reaper;
mod record;
mod recovery;
mod slots;
mod snapshots;
mod store;
mod templates;
mod undo;
mod wake;

pub use admission::{Overcommit, RoomConfig};
pub use api::{
    ByteStream, ChangesSpec, DetectedPort, ExecEvent, ExecExit, ExecSpec, ExecStream, FileRead, ForkSpec, Held,
    Holdings, HostApi, HostInfo,
};
pub use connect::GuestStream;
pub use error::{Coded, HostError};
pub use host::{Host, HostConfig, StartError};
pub use store::StoreError;
pub use templates::delete_template;
