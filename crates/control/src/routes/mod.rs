//! The handlers, one file per resource. Each parses, calls one function of the host, and maps its error; each carries
//! its own OpenAPI description.

pub(crate) mod audit;
pub(crate) mod changes;
pub(crate) mod exec;
pub(crate) mod fork;
pub(crate) mod fs;
pub(crate) mod host;
pub(crate) mod logs;
pub(crate) mod meta;
pub(crate) mod network;
pub(crate) mod ports;
pub(crate) mod previews;
pub(crate) mod proxy;
pub(crate) mod sandboxes;
pub(crate) mod snapshots;
pub(crate) mod templates;
pub(crate) mod tokens;
pub(crate) mod tunnel;
pub(crate) mod workspaces;

/// What a handler answers.
pub(crate) type Answer<T> = Result<T, crate::error::ApiError>;
