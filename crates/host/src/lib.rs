//! Sandboxes on one host: lifecycle, fork, capture, TTL, admission, recovery.
//!
//! | module | does |
//! |---|---|
//! | `api` | the one interface through which control reaches a host |
//! | `host` | what operations share; start and stop |
//! | `entry`, `actor` | one sandbox: its record and session; the one who changes its machine |
//! | `launch` | from an image or a disk to a sandbox whose guest has acknowledged |
//! | `create`, `fork_tree`, `fork_disk`, `promote`, `snapshots`, `lifecycle` | one operation each |
//! | `exec`, `files`, `logs` | what goes past the actor, any number at once |
//! | `admission`, `reaper`, `recovery`, `undo` | refuse in time, end in time, nothing half-made |
//! | `record`, `store` | what is written down |
//!
//! It does not parse HTTP, know tokens or place sandboxes on other hosts (control), run VMs (engine) or make templates
//! (image).
#![forbid(unsafe_code)]

mod actor;
mod admission;
mod api;
mod create;
mod dead_vm;
mod entry;
mod error;
mod exec;
mod files;
mod fork;
mod fork_disk;
mod fork_tree;
mod guest_error;
mod handshake;
mod host;
mod launch;
mod lifecycle;
mod logs;
mod promote;
mod reaper;
mod record;
mod recovery;
mod snapshots;
mod store;
mod templates;
mod undo;

pub use api::{ByteStream, ExecEvent, ExecExit, ExecSpec, ExecStream, FileRead, ForkSpec, HostApi, HostInfo};
pub use error::{Coded, HostError};
pub use host::{Host, HostConfig, StartError};
pub use store::StoreError;
pub use templates::delete_template;
