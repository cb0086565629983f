//! The handlers, one file per resource. Each parses, calls one function of the host, and maps its error; each carries
//! its own OpenAPI description.

pub(crate) mod exec;
pub(crate) mod fork;
pub(crate) mod fs;
pub(crate) mod logs;
pub(crate) mod meta;
pub(crate) mod sandboxes;
pub(crate) mod snapshots;
pub(crate) mod templates;

/// What a handler answers.
pub(crate) type Answer<T> = Result<T, crate::error::ApiError>;
