//! A sealed file: a small JSON document that says what it is before it is decoded.
//!
//! ```json
//! {"format":"coppice-machine-image","version":1,"checksum":"<BLAKE3 of the body's text>","body":{…}}
//! ```
//!
//! What is on disk is untrusted. [`open`] checks the format's name, then its version, then the checksum, and only then
//! decodes the body, so that a file of another build says which version it has instead of "decode error". It does not
//! check what the fields mean: that is the type's own.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::verify::Digest;

/// Why a file is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// Not JSON, or not the outer shape of a sealed file.
    #[error("is not a sealed file")]
    Syntax(#[source] serde_json::Error),
    /// Another format.
    #[error("is not {expected} but {found:?}")]
    Format {
        /// What was asked for.
        expected: &'static str,
        /// What it says it is.
        found: String,
    },
    /// Written by another build.
    #[error("has format version {found}; this build reads version {expected}")]
    Version {
        /// What this build reads.
        expected: u32,
        /// What the file has.
        found: u32,
    },
    /// The body was changed after it was written.
    #[error("is damaged: wrong checksum")]
    Checksum,
    /// The body does not decode.
    #[error("does not decode")]
    Body(#[source] serde_json::Error),
}

#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    format: String,
    version: u32,
    checksum: Digest,
    #[serde(borrow)]
    body: &'a RawValue,
}

/// The part of the envelope that every version has.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
}

/// The contents of a sealed file.
///
/// # Errors
/// [`SealError::Body`] for a body that JSON can't express.
pub fn seal<T: Serialize>(format: &str, version: u32, body: &T) -> Result<Vec<u8>, SealError> {
    let body = serde_json::value::to_raw_value(body).map_err(SealError::Body)?;
    let checksum = Digest::of(body.get().as_bytes());
    let envelope = Envelope { format: format.to_owned(), version, checksum, body: &body };
    serde_json::to_vec(&envelope).map_err(SealError::Body)
}

/// Parses the contents of a sealed file.
///
/// # Errors
/// Says which of syntax, format, version, checksum and body is wrong.
pub fn open<T: DeserializeOwned>(format: &'static str, version: u32, bytes: &[u8]) -> Result<T, SealError> {
    let head: Head = serde_json::from_slice(bytes).map_err(SealError::Syntax)?;
    if head.format != format {
        return Err(SealError::Format { expected: format, found: head.format });
    }
    if head.version != version {
        return Err(SealError::Version { expected: version, found: head.version });
    }
    let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(SealError::Syntax)?;
    if Digest::of(envelope.body.get().as_bytes()) != envelope.checksum {
        return Err(SealError::Checksum);
    }
    serde_json::from_str(envelope.body.get()).map_err(SealError::Body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_format_and_another_version_are_named_even_when_the_body_is_unknown() {
        let text = br#"{"format":"b","version":9,"sections":[]}"#;
        assert!(matches!(open::<u8>("a", 1, text), Err(SealError::Format { expected: "a", found }) if found == "b"));
        assert!(matches!(open::<u8>("b", 1, text), Err(SealError::Version { expected: 1, found: 9 })));
        assert!(matches!(open::<u8>("b", 9, text), Err(SealError::Syntax(_))));
    }

    #[test]
    fn a_changed_body_is_noticed() {
        let text = String::from_utf8(seal("f", 1, &7).unwrap()).unwrap();
        assert_eq!(open::<u8>("f", 1, text.as_bytes()).unwrap(), 7);
        let changed = text.replace("\"body\":7", "\"body\":8");
        assert!(matches!(open::<u8>("f", 1, changed.as_bytes()), Err(SealError::Checksum)));
        assert!(matches!(open::<String>("f", 1, text.as_bytes()), Err(SealError::Body(_))));
    }
}
