//! Typed client of the Coppice HTTP API, and [`explore()`](explore::explore).
//!
//! ```no_run
//! # async fn demo() -> Result<(), Box<dyn std::error::Error>> {
//! use coppice_client::{Client, api::CreateSandboxRequest};
//! let client = Client::new("http://127.0.0.1:8080", "pds_…")?;
//! let sandbox = client.create(&CreateSandboxRequest { template: Some("base".into()), ..Default::default() }).await?;
//! let fork = client.fork_tree(&sandbox.id, 4, Default::default()).await?;
//! # let _children = fork.children; Ok(())
//! # }
//! ```
//!
//! It reads neither environment nor files: whoever builds a [`Client`] says where the server is. It speaks plain HTTP
//! only; TLS is a proxy's work. Dropping a call's future hangs up, and the server undoes what it had begun.
#![forbid(unsafe_code)]

mod changes;
mod error;
mod exec;
pub mod explore;
mod fork;
mod fs;
mod host;
mod logs;
mod ports;
mod retry;
mod sandboxes;
mod snapshots;
pub mod sse;
mod templates;
mod tenants;
mod transport;

pub use changes::ChangesQuery;
pub use coppice_api as api;
pub use error::{ApiError, ClientError};
pub use exec::{ExecEvent, ExecStream};
pub use explore::{Branch, Candidate, ExploreError, ExploreOptions, ExploreOutcome, explore, explore_until};
pub use fs::{FileBody, WriteBody};
pub use logs::LogStream;
pub use ports::Tunnel;
pub use retry::{Refusal, RetryPolicy};
pub use tenants::AuditQuery;
pub use transport::Client;

/// Told of something while a call is under way; must not block for long.
pub type Hook<T> = std::sync::Arc<dyn Fn(&T) + Send + Sync>;
