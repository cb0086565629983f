//! Inodes: what kind of thing a name stands for, and all that is known of it but its content.

use super::{Ext4Image, Ext4ReadError, le16, le32, slice, wide};

/// Where the extents, a short link's target, or a device's numbers are.
const BLOCKS: std::ops::Range<usize> = 0x28..0x64;
/// Longest target of a symbolic link, bytes.
const MAX_TARGET: u64 = 4096;
/// The content is in extents.
const HAS_EXTENTS: u32 = 0x8_0000;
/// Encrypted, or with its content in the inode: not read here.
const UNREADABLE: u32 = 0x800 | 0x1000_0000;

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket's name.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

/// An inode.
#[derive(Debug, Clone)]
pub struct Inode {
    /// What it is.
    pub kind: Kind,
    /// Permissions, with the set-id and sticky bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes of its content.
    pub size: u64,
    flags: u32,
    raw: Vec<u8>,
}

impl Ext4Image {
    /// Reads an inode.
    ///
    /// # Errors
    /// There is none of this number, or it is not one of a thing that has a name.
    pub fn inode(&self, number: u32) -> Result<Inode, Ext4ReadError> {
        let raw = self.raw_inode(number)?;
        let mode = le16(&raw, 0x0);
        let kind = match mode & 0xF000 {
            0x1000 => Kind::Fifo,
            0x2000 => Kind::CharDevice,
            0x4000 => Kind::Directory,
            0x6000 => Kind::BlockDevice,
            0x8000 => Kind::File,
            0xA000 => Kind::Symlink,
            0xC000 => Kind::Socket,
            _ => return Err(Ext4ReadError::Corrupt("a name leads to an inode that is nothing")),
        };
        if le16(&raw, 0x1A) == 0 {
            return Err(Ext4ReadError::Corrupt("a name leads to an inode that was deleted"));
        }
        Ok(Inode {
            kind,
            mode: mode & 0o7777,
            uid: wide16(le16(&raw, 0x78), le16(&raw, 0x2)),
            gid: wide16(le16(&raw, 0x7A), le16(&raw, 0x18)),
            size: wide(le32(&raw, 0x6C), le32(&raw, 0x4)),
            flags: le32(&raw, 0x20),
            raw,
        })
    }

    /// Where a symbolic link leads.
    ///
    /// # Errors
    /// It is damaged, or no link.
    pub fn target(&self, link: &Inode) -> Result<Vec<u8>, Ext4ReadError> {
        if link.kind != Kind::Symlink || link.size > MAX_TARGET {
            return Err(Ext4ReadError::Corrupt("a symbolic link has no target"));
        }
        let inside = link.raw.get(BLOCKS).unwrap_or_default();
        if link.size < inside.len() as u64 {
            return Ok(slice(inside, 0, link.size)?.to_owned());
        }
        let mut target = vec![0; usize::try_from(link.size).unwrap_or_default()];
        self.read_content(&self.extents(link)?, 0, &mut target)?;
        Ok(target)
    }

    /// The extended attributes, as they are stored: to be compared, not to be understood. Those of SELinux and ACLs are
    /// among them.
    ///
    /// # Errors
    /// Their block can't be read.
    pub fn attributes(&self, inode: &Inode) -> Result<Vec<u8>, Ext4ReadError> {
        // In the inode they come after the fields, of which there are as many as the inode says.
        let fields = if inode.raw.len() > 128 { 128 + usize::from(le16(&inode.raw, 0x80)) } else { inode.raw.len() };
        let mut attributes = inode.raw.get(fields..).unwrap_or_default().to_owned();
        let block = wide(u32::from(le16(&inode.raw, 0x76)), le32(&inode.raw, 0x68));
        if block != 0 {
            // Behind a header that counts the inodes that share it.
            attributes.extend_from_slice(self.block(block)?.get(32..).unwrap_or_default());
        }
        Ok(attributes)
    }
}

impl Inode {
    /// Whether two inodes are the same in all but when they were last read. Whatever a kernel does to a file changes the
    /// time of change in its inode: those that are the same have the same content.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        /// Time of access, its fraction, and the checksum over all of it.
        const PASSING: [std::ops::Range<usize>; 4] = [0x8..0xC, 0x8C..0x90, 0x7C..0x7E, 0x82..0x84];
        let settled = |raw: &[u8]| {
            let mut raw = raw.to_owned();
            for range in PASSING {
                raw.get_mut(range).unwrap_or_default().fill(0);
            }
            raw
        };
        self.raw == other.raw || settled(&self.raw) == settled(&other.raw)
    }

    /// When anything of it but its time of access was changed, by the guest's clock: nanoseconds since 1970.
    #[must_use]
    pub fn changed_at(&self) -> i128 {
        let has_more = self.raw.len() > 128 && le16(&self.raw, 0x80) >= 8;
        let more = if has_more { le32(&self.raw, 0x84) } else { 0 };
        // Two more bits of the seconds, which are signed, and the nanoseconds.
        let seconds = i64::from(le32(&self.raw, 0xC).cast_signed()) + (i64::from(more & 3) << 32);
        i128::from(seconds) * 1_000_000_000 + i128::from(more >> 2)
    }

    /// The numbers of a device.
    #[must_use]
    pub fn device(&self) -> &[u8] {
        self.blocks().get(..8).unwrap_or_default()
    }

    pub(super) fn blocks(&self) -> &[u8] {
        self.raw.get(BLOCKS).unwrap_or_default()
    }

    /// Whether its content is where [`Ext4Image::extents`] finds it.
    pub(super) fn check_extents(&self) -> Result<(), Ext4ReadError> {
        if self.flags & UNREADABLE != 0 {
            return Err(Ext4ReadError::Unsupported("a file is encrypted, or has its content in its inode"));
        }
        if self.flags & HAS_EXTENTS == 0 {
            return Err(Ext4ReadError::Unsupported("a file has no extents"));
        }
        Ok(())
    }
}

fn wide16(high: u16, low: u16) -> u32 {
    u32::from(high) << 16 | u32::from(low)
}
