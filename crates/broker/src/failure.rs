//! Errors on the wire: kind and texts, so that both sides of the socket see the same typed error.

use std::error::Error;
use std::io;

use coppice_engine::VmError;
use coppice_net::NetError;
use serde::{Deserialize, Serialize};

/// Longest text of an error, bytes: what a kernel, QEMU or nftables says may be long.
const MAX_TEXT: usize = 4096;

/// Why a request has no answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Failure {
    /// Refused by the broker itself: what was asked for is nothing that the other half may have.
    Refused(String),
    Net(NetFailure),
    Vm(VmError),
    Io(IoFailure),
}

/// An [`io::Error`]: by its number, which says all, or by kind and text.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct IoFailure {
    errno: Option<i32>,
    kind: IoKind,
    text: String,
}

/// The kinds that code of ours tells apart.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum IoKind {
    NotFound,
    PermissionDenied,
    InvalidInput,
    InvalidData,
    TimedOut,
    UnexpectedEof,
    StorageFull,
    Unsupported,
    Other,
}

impl From<&io::Error> for IoFailure {
    fn from(error: &io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => IoKind::NotFound,
            io::ErrorKind::PermissionDenied => IoKind::PermissionDenied,
            io::ErrorKind::InvalidInput => IoKind::InvalidInput,
            io::ErrorKind::InvalidData => IoKind::InvalidData,
            io::ErrorKind::TimedOut => IoKind::TimedOut,
            io::ErrorKind::UnexpectedEof => IoKind::UnexpectedEof,
            io::ErrorKind::StorageFull => IoKind::StorageFull,
            io::ErrorKind::Unsupported => IoKind::Unsupported,
            _ => IoKind::Other,
        };
        Self { errno: error.raw_os_error(), kind, text: chain(error) }
    }
}

impl From<IoFailure> for io::Error {
    fn from(failure: IoFailure) -> Self {
        if let Some(errno) = failure.errno {
            return Self::from_raw_os_error(errno);
        }
        let kind = match failure.kind {
            IoKind::NotFound => io::ErrorKind::NotFound,
            IoKind::PermissionDenied => io::ErrorKind::PermissionDenied,
            IoKind::InvalidInput => io::ErrorKind::InvalidInput,
            IoKind::InvalidData => io::ErrorKind::InvalidData,
            IoKind::TimedOut => io::ErrorKind::TimedOut,
            IoKind::UnexpectedEof => io::ErrorKind::UnexpectedEof,
            IoKind::StorageFull => io::ErrorKind::StorageFull,
            IoKind::Unsupported => io::ErrorKind::Unsupported,
            IoKind::Other => io::ErrorKind::Other,
        };
        Self::new(kind, failure.text)
    }
}

/// A [`NetError`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum NetFailure {
    Exhausted {
        limit: u32,
    },
    NotReady,
    UnknownSlot {
        index: u32,
    },
    InUse {
        taken: u32,
    },
    Closed,
    System {
        what: String,
        source: IoFailure,
    },
    Missing {
        what: String,
        hint: String,
    },
    /// One whose kind nobody tells apart: all that it says.
    Other(String),
}

impl From<&NetError> for NetFailure {
    fn from(error: &NetError) -> Self {
        match error {
            NetError::Exhausted { limit } => Self::Exhausted { limit: *limit },
            NetError::NotReady => Self::NotReady,
            NetError::UnknownSlot { index } => Self::UnknownSlot { index: *index },
            NetError::InUse { taken } => Self::InUse { taken: *taken },
            NetError::Closed => Self::Closed,
            NetError::System { what, source } => Self::System { what: cut(what), source: source.into() },
            NetError::Missing { what, hint } => Self::Missing { what: cut(what), hint: cut(hint) },
            NetError::Remote { message } => Self::Other(cut(message)),
            other => Self::Other(chain(other)),
        }
    }
}

impl From<NetFailure> for NetError {
    fn from(failure: NetFailure) -> Self {
        match failure {
            NetFailure::Exhausted { limit } => Self::Exhausted { limit },
            NetFailure::NotReady => Self::NotReady,
            NetFailure::UnknownSlot { index } => Self::UnknownSlot { index },
            NetFailure::InUse { taken } => Self::InUse { taken },
            NetFailure::Closed => Self::Closed,
            NetFailure::System { what, source } => Self::System { what, source: source.into() },
            NetFailure::Missing { what, hint } => Self::Missing { what, hint },
            NetFailure::Other(message) => Self::Remote { message },
        }
    }
}

impl From<Failure> for NetError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Net(failure) => failure.into(),
            Failure::Refused(message) => Self::Remote { message },
            Failure::Io(source) => Self::System { what: "the network's owner".into(), source: source.into() },
            Failure::Vm(error) => Self::Remote { message: chain(&error) },
        }
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Io(failure) => failure.into(),
            Failure::Refused(message) => Self::new(io::ErrorKind::PermissionDenied, message),
            Failure::Vm(error) => Self::other(error),
            Failure::Net(failure) => Self::other(NetError::from(failure)),
        }
    }
}

/// An answer with an error of the system.
pub(crate) fn io_failure(error: &io::Error) -> Failure {
    Failure::Io(error.into())
}

/// The message of an error and of its causes, in one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    cut(&text)
}

fn cut(text: &str) -> String {
    let end = text.floor_char_boundary(MAX_TEXT.min(text.len()));
    text.get(..end).unwrap_or_default().to_owned()
}
