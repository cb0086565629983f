//! Checksums of image files.
//!
//! A sparse file is hashed by what it holds, not by its holes: the digest covers its length and, for every range of data,
//! the non-zero 64 KiB blocks with their offsets. Two files with equal contents have equal digests, whatever their holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use serde::{Deserialize, Serialize};

/// A BLAKE3 digest, as 64 lowercase hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Of a byte string.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let hash = blake3::Hash::from_hex(text.as_bytes()).map_err(serde::de::Error::custom)?;
        Ok(Self(*hash.as_bytes()))
    }
}

/// Why a file of an image is not what its manifest says.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// It can't be read.
    #[error("{file} of the machine image can't be read")]
    Read {
        /// Name of the file in the image directory.
        file: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It has another length.
    #[error("{file} of the machine image has {found} bytes, its manifest says {expected}")]
    Length {
        /// Name of the file in the image directory.
        file: &'static str,
        /// From the manifest.
        expected: u64,
        /// On disk.
        found: u64,
    },
    /// It has other contents.
    #[error("{file} of the machine image has a wrong checksum: {found}, its manifest says {expected}")]
    Checksum {
        /// Name of the file in the image directory.
        file: &'static str,
        /// From the manifest.
        expected: Digest,
        /// Of what is on disk.
        found: Digest,
    },
}

const BLOCK: usize = 64 << 10;

/// Digest of a sparse file; reads only its data ranges.
///
/// # Errors
/// What reading or seeking said.
pub fn digest_sparse_file(file: &File) -> io::Result<Digest> {
    let len = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&len.to_le_bytes());
    let mut block = vec![0u8; BLOCK];
    let mut at = 0u64;
    while at < len {
        match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => at = data - data % BLOCK as u64,
            // ENXIO: no data after this offset.
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        }
        let hole = rustix::fs::seek(file, SeekFrom::Hole(at.max(1)))?.min(len);
        let hole = if hole <= at { (at + BLOCK as u64).min(len) } else { hole };
        while at < hole {
            let want = usize::try_from((len - at).min(BLOCK as u64)).unwrap_or(BLOCK);
            let Some(buf) = block.get_mut(..want) else { break };
            file.read_exact_at(buf, at)?;
            if buf.iter().any(|b| *b != 0) {
                hasher.update(&at.to_le_bytes());
                hasher.update(buf);
            }
            at += want as u64;
        }
    }
    Ok(Digest(*hasher.finalize().as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file_with(len: u64, data: &[(u64, &[u8])]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        for (at, bytes) in data {
            file.write_all_at(bytes, *at).unwrap();
        }
        file
    }

    #[test]
    fn holes_and_written_zeros_are_the_same() {
        let sparse = file_with(10 << 20, &[(5 << 20, b"x"), ((9 << 20) + 7, b"yz")]);
        let mut full = tempfile::tempfile().unwrap();
        let mut bytes = vec![0u8; 10 << 20];
        bytes[5 << 20] = b'x';
        bytes[(9 << 20) + 7..(9 << 20) + 9].copy_from_slice(b"yz");
        full.write_all(&bytes).unwrap();
        assert_eq!(digest_sparse_file(&sparse).unwrap(), digest_sparse_file(&full).unwrap());
    }

    #[test]
    fn a_moved_byte_a_changed_byte_and_another_length_are_noticed() {
        let base = digest_sparse_file(&file_with(1 << 20, &[(70_000, b"x")])).unwrap();
        assert_ne!(base, digest_sparse_file(&file_with(1 << 20, &[(70_001, b"x")])).unwrap());
        assert_ne!(base, digest_sparse_file(&file_with(1 << 20, &[(70_000, b"y")])).unwrap());
        assert_ne!(base, digest_sparse_file(&file_with((1 << 20) + 1, &[(70_000, b"x")])).unwrap());
        assert_ne!(base, digest_sparse_file(&file_with(1 << 20, &[(70_000 + (128 << 10), b"x")])).unwrap());
    }

    #[test]
    fn an_empty_file_has_a_digest() {
        assert_eq!(digest_sparse_file(&file_with(0, &[])).unwrap(), digest_sparse_file(&file_with(0, &[])).unwrap());
    }
}
