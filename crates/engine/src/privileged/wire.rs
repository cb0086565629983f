//! Errors of the operating system as plain data, so that they keep their number on the way through a socket.

use std::io;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An [`io::Error`] as plain data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireError {
    /// The system's number, where it is one of the system.
    pub errno: Option<i32>,
    /// What it says.
    pub message: String,
}

impl From<&io::Error> for WireError {
    fn from(error: &io::Error) -> Self {
        Self { errno: error.raw_os_error(), message: error.to_string() }
    }
}

impl From<WireError> for io::Error {
    fn from(error: WireError) -> Self {
        error.errno.map_or_else(|| Self::other(error.message), Self::from_raw_os_error)
    }
}

/// For `#[serde(with = …)]` on a field of type [`io::Error`].
pub(crate) mod io_error {
    use super::{Deserialize, Deserializer, Serialize, Serializer, WireError, io};

    pub(crate) fn serialize<S: Serializer>(error: &io::Error, to: S) -> Result<S::Ok, S::Error> {
        WireError::from(error).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<io::Error, D::Error> {
        Ok(WireError::deserialize(from)?.into())
    }
}

#[cfg(test)]
mod tests {
    use crate::VmError;
    use std::io;

    #[test]
    fn errors_keep_their_number() {
        let source = io::Error::from_raw_os_error(libc::ENOSPC);
        let text = serde_json::to_string(&VmError::System { what: "x".into(), source }).unwrap();
        let VmError::System { source, .. } = serde_json::from_str(&text).unwrap() else { panic!("{text}") };
        assert_eq!(source.kind(), io::ErrorKind::StorageFull);
        let own = super::WireError::from(&io::Error::other("own words"));
        assert_eq!(io::Error::from(own).to_string(), "own words");
    }
}
