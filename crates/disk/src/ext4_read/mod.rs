//! Reads an ext4 file system out of an image, without mounting it: what is in it was written by a guest, and is hostile.
//!
//! Everything that the image says is checked before it is used: offsets against the image's length, records against their
//! block, trees against their depth and order. What doesn't fit is an [`Ext4ReadError`], never a panic, and how much is
//! read is for the caller to bound, by [`Patience`]. A file system that was not unmounted, e.g. the clone of a running guest's disk, is read
//! as its journal says, which is replayed in memory.
//!
//! Written by ourselves because of that journal: the readers that there are (`ext4-view` 1.0) stop where the log wraps
//! around, apply revocations to one transaction only, and don't tell when an inode was changed, without which every file
//! would have to be compared byte by byte.
//!
//! What it does not do: verify checksums (the image is of one instant, and a guest that lies about its own files can
//! make checksums too), follow symbolic links, or read files without extents, inline data and encrypted names.

mod dir;
mod extents;
mod inode;
mod journal;
mod superblock;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub use dir::Name;
pub use extents::Extent;
pub use inode::{Inode, Kind};

use journal::Replacement;
use superblock::Superblock;

/// The number of the root directory's inode.
pub const ROOT: u32 = 2;

/// An image can't be read, or a part of it.
#[derive(Debug, thiserror::Error)]
pub enum Ext4ReadError {
    /// The image's file.
    #[error("the image can't be read")]
    Io(#[from] io::Error),
    /// There is none in it, or one that uses what this reader doesn't know.
    #[error("not a file system that can be read here: {0}")]
    Unsupported(&'static str),
    /// It contradicts itself.
    #[error("the file system is damaged: {0}")]
    Corrupt(&'static str),
    /// A directory has more names than were asked for.
    #[error("there are more names in it than are looked at")]
    TooMany,
    /// [`Patience`] had an end.
    #[error("reading it took too long, or is no longer wanted")]
    Stopped,
}

/// How long a reader goes on. An image can be made so that reading it takes for ever.
#[derive(Debug, Clone, Default)]
pub struct Patience {
    /// Until then.
    pub deadline: Option<Instant>,
    /// Or until somebody sets this.
    pub stop: Arc<AtomicBool>,
}

impl Patience {
    fn check(&self) -> Result<(), Ext4ReadError> {
        let over =
            self.stop.load(Ordering::Relaxed) || self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if over { Err(Ext4ReadError::Stopped) } else { Ok(()) }
    }
}

/// The file system in an image, as it would be after recovery.
#[derive(Debug)]
pub struct Ext4Image {
    file: File,
    len: u64,
    patience: Patience,
    superblock: Superblock,
    /// Blocks whose contents are in the journal.
    replaced: BTreeMap<u64, Replacement>,
}

impl Ext4Image {
    /// Reads the superblock, and the journal where it is needed. Blocking, as everything here.
    ///
    /// # Errors
    /// [`Ext4ReadError`].
    pub fn open(file: File, patience: Patience) -> Result<Self, Ext4ReadError> {
        let len = file.metadata()?.len();
        let mut raw = [0; superblock::SIZE];
        file.read_exact_at(&mut raw, superblock::OFFSET)?;
        let superblock = Superblock::parse(&raw)?;
        let mut image = Self { file, len, patience, superblock, replaced: BTreeMap::new() };
        if image.superblock.needs_recovery {
            image.replaced = journal::load(&image)?;
        }
        Ok(image)
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.superblock.block_size
    }

    /// Whether its journal had something that was not in its place yet.
    #[must_use]
    pub fn was_replayed(&self) -> bool {
        !self.replaced.is_empty()
    }

    /// Reads from consecutive blocks of the file system, beginning `skip` bytes after the start of `block`.
    fn read(&self, block: u64, skip: u64, to: &mut [u8]) -> Result<(), Ext4ReadError> {
        const OUTSIDE: Ext4ReadError = Ext4ReadError::Corrupt("it refers to blocks outside of the disk");
        self.patience.check()?;
        let size = self.superblock.block_size as u64;
        let start = block.checked_mul(size).and_then(|at| at.checked_add(skip)).ok_or(OUTSIDE)?;
        let end = start.checked_add(to.len() as u64).ok_or(OUTSIDE)?;
        if end > self.len {
            return Err(OUTSIDE);
        }
        self.file.read_exact_at(to, start)?;
        if self.replaced.is_empty() || to.is_empty() {
            return Ok(());
        }
        for (&block, replacement) in self.replaced.range(start / size..=(end - 1) / size) {
            let content = self.replacement(*replacement)?;
            let (block_start, block_end) = (block * size, block * size + size);
            let (from, until) = (block_start.max(start), block_end.min(end));
            let target = slice_mut(to, from - start, until - from)?;
            target.copy_from_slice(slice(&content, from - block_start, until - from)?);
        }
        Ok(())
    }

    /// A block as the journal has it.
    fn replacement(&self, replacement: Replacement) -> Result<Vec<u8>, Ext4ReadError> {
        let size = self.superblock.block_size;
        let mut content = vec![0; size];
        let at = replacement.at.checked_mul(size as u64).filter(|at| at.saturating_add(size as u64) <= self.len);
        self.file
            .read_exact_at(&mut content, at.ok_or(Ext4ReadError::Corrupt("its journal is outside of the disk"))?)?;
        if replacement.escaped
            && let Some(start) = content.first_chunk_mut()
        {
            *start = journal::MAGIC.to_be_bytes();
        }
        Ok(content)
    }

    /// Reads one of the blocks.
    fn block(&self, block: u64) -> Result<Vec<u8>, Ext4ReadError> {
        let mut content = vec![0; self.superblock.block_size];
        self.read(block, 0, &mut content)?;
        Ok(content)
    }
}

fn slice(bytes: &[u8], at: u64, len: u64) -> Result<&[u8], Ext4ReadError> {
    let range = usize::try_from(at).ok().zip(usize::try_from(len).ok());
    let found = range.and_then(|(at, len)| bytes.get(at..at.checked_add(len)?));
    found.ok_or(Ext4ReadError::Corrupt("a record reaches beyond its block"))
}

fn slice_mut(bytes: &mut [u8], at: u64, len: u64) -> Result<&mut [u8], Ext4ReadError> {
    let range = usize::try_from(at).ok().zip(usize::try_from(len).ok());
    let found = range.and_then(|(at, len)| bytes.get_mut(at..at.checked_add(len)?));
    found.ok_or(Ext4ReadError::Corrupt("a record reaches beyond its block"))
}

/// `N` bytes at an offset; zeros beyond the end, which no caller asks for: they read records whose length was checked.
fn bytes<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    from.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N])
}

fn le16(from: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes(from, at))
}

fn le32(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes(from, at))
}

fn be16(from: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes(from, at))
}

fn be32(from: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes(from, at))
}

/// Of two halves.
fn wide(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
