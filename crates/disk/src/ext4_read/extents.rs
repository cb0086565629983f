//! Where the content of a file is.

use super::{Ext4Image, Ext4ReadError, Inode, le16, le32, slice_mut, wide};

const MAGIC: u16 = 0xF30A;
/// Deepest tree.
const MAX_DEPTH: u16 = 5;
/// Most nodes of one tree that are read: as many as a file of 1 TiB in pieces of 16 KiB has.
const MAX_NODES: usize = 200_000;
/// Longer extents are allocated and not written: they read as zeros.
const MAX_WRITTEN: u16 = 0x8000;
/// A header, an index, an extent.
const RECORD: usize = 12;

/// Consecutive blocks of a file that are consecutive on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First block of the file.
    pub logical: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// First block on the disk.
    physical: u64,
}

impl Extent {
    /// The first block of the file after it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.logical + self.blocks
    }

    /// Its first block on the disk.
    pub(super) fn physical(&self) -> u64 {
        self.physical
    }
}

/// A walk through one tree.
struct Walk<'a> {
    image: &'a Ext4Image,
    extents: Vec<Extent>,
    nodes: usize,
    /// Of the file: all before it have been seen. That they come in order also means that no node is visited twice for
    /// anything but an error.
    next: u64,
}

impl Ext4Image {
    /// The extents of a file, directory or long symbolic link that hold data, in order; the rest is holes.
    ///
    /// # Errors
    /// The tree is damaged, or the content is not in extents.
    pub fn extents(&self, inode: &Inode) -> Result<Vec<Extent>, Ext4ReadError> {
        inode.check_extents()?;
        let mut walk = Walk { image: self, extents: Vec::new(), nodes: 0, next: 0 };
        walk.node(inode.blocks(), None)?;
        Ok(walk.extents)
    }

    /// Reads a part of a file's content. What no extent has is zeros.
    ///
    /// # Errors
    /// An extent is outside of the disk.
    pub fn read_content(&self, extents: &[Extent], at: u64, to: &mut [u8]) -> Result<(), Ext4ReadError> {
        to.fill(0);
        let size = self.block_size() as u64;
        let end = at.saturating_add(to.len() as u64);
        let first = extents.partition_point(|extent| extent.end() * size <= at);
        for extent in extents.get(first..).unwrap_or_default() {
            let (from, until) = ((extent.logical * size).max(at), (extent.end() * size).min(end));
            if from >= until {
                break;
            }
            let target = slice_mut(to, from - at, until - from)?;
            self.read(extent.physical, from - extent.logical * size, target)?;
        }
        Ok(())
    }
}

impl Walk<'_> {
    /// `depth` is what its parent says that it must be.
    fn node(&mut self, node: &[u8], depth: Option<u16>) -> Result<(), Ext4ReadError> {
        const DAMAGED: Ext4ReadError = Ext4ReadError::Corrupt("a tree of extents contradicts itself");
        self.nodes += 1;
        let (entries, found) = (usize::from(le16(node, 2)), le16(node, 6));
        let fits = (entries + 1) * RECORD <= node.len();
        if le16(node, 0) != MAGIC || !fits || found > MAX_DEPTH || depth.is_some_and(|depth| depth != found) {
            return Err(DAMAGED);
        }
        if self.nodes > MAX_NODES {
            return Err(Ext4ReadError::Corrupt("a tree of extents has no end"));
        }
        for record in node.chunks_exact(RECORD).skip(1).take(entries) {
            let logical = u64::from(le32(record, 0));
            if logical < self.next {
                return Err(DAMAGED);
            }
            match found.checked_sub(1) {
                None => self.extent(record, logical),
                Some(below) => {
                    self.next = logical;
                    let child = self.image.block(wide(u32::from(le16(record, 8)), le32(record, 4)))?;
                    self.node(&child, Some(below))?;
                    // An empty child would let its siblings begin where it began: as many of them as there is room for.
                    if self.next == logical {
                        return Err(DAMAGED);
                    }
                }
            }
        }
        Ok(())
    }

    fn extent(&mut self, record: &[u8], logical: u64) {
        let length = le16(record, 4);
        let (blocks, written) = if length > MAX_WRITTEN { (length - MAX_WRITTEN, false) } else { (length, true) };
        self.next = logical + u64::from(blocks);
        if written && blocks > 0 {
            let physical = wide(u32::from(le16(record, 6)), le32(record, 8));
            self.extents.push(Extent { logical, blocks: u64::from(blocks), physical });
        }
    }
}
