//! What the commands that act on this host share: its data directory, the engine, the templates, one server at a time.

mod dns;
mod engine;
pub(crate) mod lock;
mod log;
mod prepare;
mod room;
pub mod user;

pub use dns::DnsArgs;
pub use engine::{EngineArgs, engine};
pub use lock::{UpLock, holder};
pub use log::LogArgs;
pub use prepare::{PrepareArgs, VolumeArgs, open_data_dir, prepare_templates};
pub use room::RoomArgs;

use crate::error::CliError;

/// Refuses to go on without root.
pub fn need_root(command: &str) -> Result<(), CliError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(CliError::failed("not_root", format!("`coppice {command}` needs root: mounts, and a user of its own for VMs"))
        .hint(format!("sudo coppice {command}")))
}
