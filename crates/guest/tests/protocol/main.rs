//! The service as a host sees it: through the protocol, in one process, with real commands and files.

mod common;
mod exec;
mod files;
mod resume;
mod session;
