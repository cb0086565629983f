//! What a guest's refusal means for the caller: from gRPC statuses to typed errors.

use coppice_api::ErrorClass;
use tonic::Code;

use crate::Coded;
use crate::entry::AccessError;

/// Why a call into a guest failed.
#[derive(Debug, thiserror::Error)]
pub enum GuestCallError {
    /// The sandbox can't be used.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// There is no such file.
    #[error("{0}")]
    NoSuchFile(String),
    /// The request makes no sense to the guest, e.g. a path that is not absolute.
    #[error("{0}")]
    Invalid(String),
    /// The file is of another kind, e.g. a directory.
    #[error("{0}")]
    WrongKind(String),
    /// Not allowed in the guest.
    #[error("{0}")]
    Denied(String),
    /// Something in the guest is used up: its disk, or the number of its commands.
    #[error("{0}")]
    Exhausted(String),
    /// It did not answer in time, although the host gave it more than it was asked to take.
    #[error("the guest did not answer within {0:?}: timeout")]
    Timeout(std::time::Duration),
    /// The guest or the way to it broke.
    #[error("the guest could not do it")]
    Broken(#[source] Box<tonic::Status>),
    /// The guest answered something else than was asked.
    #[error("the guest broke the protocol: {0}")]
    Protocol(&'static str),
}

impl From<tonic::Status> for GuestCallError {
    fn from(status: tonic::Status) -> Self {
        let message = || bounded(status.message());
        match status.code() {
            Code::NotFound => Self::NoSuchFile(message()),
            Code::InvalidArgument => Self::Invalid(message()),
            Code::FailedPrecondition => Self::WrongKind(message()),
            Code::PermissionDenied => Self::Denied(message()),
            Code::ResourceExhausted => Self::Exhausted(message()),
            _ => Self::Broken(Box::new(status)),
        }
    }
}

impl Coded for GuestCallError {
    fn code(&self) -> &'static str {
        match self {
            Self::Access(e) => e.code(),
            Self::NoSuchFile(_) => "file_not_found",
            Self::Invalid(_) => "bad_request",
            Self::WrongKind(_) => "wrong_file_kind",
            Self::Denied(_) => "guest_denied",
            Self::Exhausted(_) => "guest_exhausted",
            Self::Timeout(_) => "guest_timeout",
            Self::Broken(_) => "guest_unavailable",
            Self::Protocol(_) => "guest_protocol",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Access(e) => e.class(),
            Self::NoSuchFile(_) => ErrorClass::NotFound,
            Self::Invalid(_) | Self::WrongKind(_) | Self::Denied(_) => ErrorClass::Caller,
            Self::Exhausted(_) => ErrorClass::Quota,
            Self::Timeout(_) => ErrorClass::Timeout,
            Self::Broken(_) | Self::Protocol(_) => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Access(e) => e.hint(),
            _ => None,
        }
    }
}

/// A guest's sentence is a stranger's: bounded, one line, printable.
fn bounded(message: &str) -> String {
    let text: String = message.chars().filter(|c| !c.is_control()).take(500).collect();
    if text.is_empty() { "the guest refused".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_sentence_is_bounded_and_printable() {
        let status = tonic::Status::not_found(format!("a\r\n\x1b[31m{}", "x".repeat(10_000)));
        let GuestCallError::NoSuchFile(text) = GuestCallError::from(status) else { panic!("another variant") };
        assert_eq!(text.chars().count(), 500);
        assert!(text.chars().all(|c| !c.is_control()));
        assert_eq!(GuestCallError::from(tonic::Status::not_found("")).to_string(), "the guest refused");
    }
}
