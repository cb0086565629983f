//! The superblock, and where inodes are.

use super::{Ext4Image, Ext4ReadError, le16, le32, wide};

/// Where it is in an image.
pub(super) const OFFSET: u64 = 1024;
/// Its bytes.
pub(super) const SIZE: usize = 1024;

const MAGIC: u16 = 0xEF53;
/// The log was not empty when the image was taken.
const RECOVER: u32 = 0x4;
const WIDE: u32 = 0x80;
/// Incompatible features that this reader copes with: entry types, recovery, extents, 64 bit, multiple mount protection,
/// flexible groups, attributes in inodes, checksum seed, large directories, case folding.
const KNOWN: u32 = 0x2 | RECOVER | 0x40 | WIDE | 0x100 | 0x200 | 0x400 | 0x2000 | 0x4000 | 0x2_0000;
/// What every file system that Coppice makes has; without it all files would be of the kind that can't be read here.
const EXTENTS: u32 = 0x40;

#[derive(Debug, Clone)]
pub(super) struct Superblock {
    pub block_size: usize,
    pub needs_recovery: bool,
    pub journal_inode: u32,
    pub inode_size: usize,
    first_data_block: u64,
    inodes: u32,
    inodes_per_group: u32,
    descriptor_size: u64,
}

impl Superblock {
    pub(super) fn parse(raw: &[u8]) -> Result<Self, Ext4ReadError> {
        if le16(raw, 0x38) != MAGIC {
            return Err(Ext4ReadError::Unsupported("it has no ext4 superblock"));
        }
        let incompatible = le32(raw, 0x60);
        if incompatible & !KNOWN != 0 {
            return Err(Ext4ReadError::Unsupported("it uses a feature that is not known here"));
        }
        if incompatible & EXTENTS == 0 {
            return Err(Ext4ReadError::Unsupported("its files have no extents"));
        }
        let block_size = match le32(raw, 0x18) {
            log @ 0..=6 => 1024_usize << log,
            _ => return Err(Ext4ReadError::Corrupt("its block size is out of range")),
        };
        let inode_size = usize::from(le16(raw, 0x58));
        if !inode_size.is_power_of_two() || !(128..=block_size).contains(&inode_size) {
            return Err(Ext4ReadError::Corrupt("its inode size is out of range"));
        }
        let descriptor_size = match le16(raw, 0xFE) {
            _ if incompatible & WIDE == 0 => 32,
            size if size.is_power_of_two() && (64..=1024).contains(&size) => u64::from(size),
            _ => return Err(Ext4ReadError::Corrupt("its group descriptors have a size out of range")),
        };
        let (inodes, inodes_per_group) = (le32(raw, 0x0), le32(raw, 0x28));
        if inodes_per_group == 0 {
            return Err(Ext4ReadError::Corrupt("its groups have no inodes"));
        }
        let needs_recovery = incompatible & RECOVER != 0;
        let journal_inode = le32(raw, 0xE0);
        let has_journal = le32(raw, 0x5C) & 0x4 != 0;
        if needs_recovery && (journal_inode == 0 || !has_journal) {
            return Err(Ext4ReadError::Unsupported("its journal is somewhere else"));
        }
        let first_data_block = u64::from(le32(raw, 0x14));
        Ok(Self {
            block_size,
            needs_recovery,
            journal_inode,
            inode_size,
            first_data_block,
            inodes,
            inodes_per_group,
            descriptor_size,
        })
    }
}

impl Ext4Image {
    /// The bytes of an inode.
    pub(super) fn raw_inode(&self, number: u32) -> Result<Vec<u8>, Ext4ReadError> {
        let sb = &self.superblock;
        let index = number.checked_sub(1).filter(|_| number <= sb.inodes);
        let index = index.ok_or(Ext4ReadError::Corrupt("it refers to an inode that there is not"))?;
        let (group, within) = (index / sb.inodes_per_group, index % sb.inodes_per_group);

        let mut descriptor = [0; 64];
        let wanted = if sb.descriptor_size == 32 { 32 } else { 64 };
        let read = descriptor.get_mut(..wanted).unwrap_or_default();
        self.read(sb.first_data_block + 1, u64::from(group) * sb.descriptor_size, read)?;
        let table = wide(le32(&descriptor, 0x28), le32(&descriptor, 0x8));

        let mut raw = vec![0; sb.inode_size];
        self.read(table, u64::from(within) * sb.inode_size as u64, &mut raw)?;
        Ok(raw)
    }
}
