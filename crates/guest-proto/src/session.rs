//! The preamble that starts a session on the byte stream, before HTTP/2.
//!
//! A stream may still hold bytes of an earlier peer: a guest is captured in the middle of a session, a daemon is killed
//! and its successor connects to the same port. So the host opens with a [`Hello`] that holds a fresh session id and the
//! guest answers with a [`Welcome`] that repeats it. Whatever else arrives in its place ends the session; the host then
//! disconnects and tries again until its deadline.
//!
//! The guest has two ports, [`PORTS`]. Each session uses the other port than the session before it ([`other_port`]), so
//! that a restored guest can't take its new host for the peer it was captured with. A welcome on one port ends the
//! session on the other.

use uuid::Uuid;

/// Names of the two virtio-serial ports (`/dev/virtio-ports/NAME` in the guest).
pub const PORTS: [&str; 2] = ["coppice.agent.0", "coppice.agent.1"];

/// Version of the protocol. A guest of another version refuses the session by closing it.
pub const VERSION: u32 = 1;

/// Bytes of a hello and of a welcome on the wire.
pub const PREAMBLE_LEN: usize = 32;

const HELLO_MAGIC: [u8; 8] = *b"COPPICE>";
const WELCOME_MAGIC: [u8; 8] = *b"COPPICE<";

/// The port that the next session uses after one on `port`.
#[must_use]
pub fn other_port(port: usize) -> usize {
    1 - (port & 1)
}

/// Host to guest, the first [`PREAMBLE_LEN`] bytes of a session: magic, version (little-endian), session id, four zero bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// New for every session.
    pub session: Uuid,
}

/// Guest to host, the answer to a [`Hello`], in the same layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Welcome {
    /// The session id of the hello.
    pub session: Uuid,
}

/// Why bytes are not a preamble.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PreambleError {
    /// Not the start of a session: left-over bytes of another one.
    #[error("not a session preamble")]
    Magic,
    /// The peer speaks another version.
    #[error("the peer speaks protocol version {0}, this build {VERSION}")]
    Version(u32),
    /// Reserved bytes are set.
    #[error("reserved bytes of the session preamble are set")]
    Reserved,
}

fn encode(magic: [u8; 8], session: Uuid) -> [u8; PREAMBLE_LEN] {
    let mut out = [0; PREAMBLE_LEN];
    out[..8].copy_from_slice(&magic);
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out[12..28].copy_from_slice(session.as_bytes());
    out
}

fn decode(magic: [u8; 8], bytes: &[u8; PREAMBLE_LEN]) -> Result<Uuid, PreambleError> {
    if bytes[..8] != magic {
        return Err(PreambleError::Magic);
    }
    let mut version = [0; 4];
    version.copy_from_slice(&bytes[8..12]);
    let version = u32::from_le_bytes(version);
    if version != VERSION {
        return Err(PreambleError::Version(version));
    }
    if bytes[28..] != [0; 4] {
        return Err(PreambleError::Reserved);
    }
    let mut id = [0; 16];
    id.copy_from_slice(&bytes[12..28]);
    Ok(Uuid::from_bytes(id))
}

impl Hello {
    /// The wire form.
    #[must_use]
    pub fn encode(&self) -> [u8; PREAMBLE_LEN] {
        encode(HELLO_MAGIC, self.session)
    }

    /// Parses the wire form.
    pub fn decode(bytes: &[u8; PREAMBLE_LEN]) -> Result<Self, PreambleError> {
        Ok(Self { session: decode(HELLO_MAGIC, bytes)? })
    }
}

impl Welcome {
    /// The wire form.
    #[must_use]
    pub fn encode(&self) -> [u8; PREAMBLE_LEN] {
        encode(WELCOME_MAGIC, self.session)
    }

    /// Parses the wire form.
    pub fn decode(bytes: &[u8; PREAMBLE_LEN]) -> Result<Self, PreambleError> {
        Ok(Self { session: decode(WELCOME_MAGIC, bytes)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hello_and_welcome_are_told_apart() {
        let session = Uuid::new_v4();
        assert_eq!(Hello::decode(&Hello { session }.encode()), Ok(Hello { session }));
        assert_eq!(Hello::decode(&Welcome { session }.encode()), Err(PreambleError::Magic));
        assert_eq!(Welcome::decode(&Hello { session }.encode()), Err(PreambleError::Magic));
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = Hello { session: Uuid::nil() }.encode();
        bytes[8] = 9;
        assert_eq!(Hello::decode(&bytes), Err(PreambleError::Version(9)));
    }

    proptest! {
        #[test]
        fn only_an_encoding_decodes(bytes in any::<[u8; PREAMBLE_LEN]>(), id in any::<[u8; 16]>(), at in 0..PREAMBLE_LEN, bit in 0..8u8) {
            prop_assert!(Hello::decode(&bytes).is_err());
            let good = Hello { session: Uuid::from_bytes(id) }.encode();
            let mut bad = good;
            bad[at] ^= 1 << bit;
            // A flipped bit is either noticed or changes the id, so that the peer's echo doesn't match.
            prop_assert_ne!(Hello::decode(&bad), Hello::decode(&good));
        }
    }
}
