//! The two halves of `coppice up`: one that may do everything and does little, one that does the rest and may do nothing.
//!
//! The privileged half ([`Server`]) is root. It owns the network and starts VMMs, for anybody at the other end of one
//! socket. The unprivileged half (everything else: HTTP, tokens, databases, guests' bytes, QEMU's monitors) is a process of
//! a user of its own without capabilities ([`half`]), and sees the same two traits that it would have in one process:
//! [`RemotePrivileged`] and [`RemoteSlots`].
//!
//! | module | what it is for |
//! |---|---|
//! | `frame` | messages with descriptors on a stream socket, bounded |
//! | `message`, `failure` | requests, answers and errors as plain data |
//! | `client`, `remote` | the unprivileged end |
//! | `server`, `check` | the privileged end: what a request must be before anything is done |
//! | [`half`] | starting the unprivileged half, and its proof that it is one |
//!
//! # What somebody could do who has taken over the unprivileged half
//!
//! All that the product does to sandboxes: read and change every guest's memory, disk and traffic, start machines up to the
//! limits, end them, change their egress policies, read tokens and templates. It owns the data directory. Root makes and
//! checks templates there by path, at the start of a server and by commands, and so could be led to other files by links
//! that are planted meanwhile; what it reads it never executes, and owners it changes only by descriptor.
//!
//! What it could not do, because no request says it: name a path, a program or an argument; act on a process that is not
//! a VMM of this server; give a VMM more than the jail allows, another place on the network than its slot's, or a descriptor
//! that is of another kind than it must be or was opened for less than it says (root may open it again); make rules, links or addresses other than those of
//! slots; reach a private range from a guest. Frames, lists and numbers are bounded, and what is not understood ends its
//! connection. It can keep the privileged half busy, up to its own number of connections.
//!
//! If one half ends, so does the other: the socket is the lifeline. VMs live on, and the next `coppice up` takes over.

mod check;
mod client;
mod failure;
mod frame;
pub mod half;
mod message;
mod remote;
mod server;

#[cfg(test)]
mod tests;

pub use client::{Broker, Inherited};
pub use remote::{RemotePrivileged, RemoteSlots};
pub use server::Server;
