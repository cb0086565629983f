//! The two traits of what needs rights, for the half that has none.

mod machines;
mod slots;

pub use machines::RemotePrivileged;
pub use slots::RemoteSlots;
