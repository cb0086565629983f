//! Names in directories.

use super::{Ext4Image, Ext4ReadError, Inode, Kind, le16, le32};

/// Largest directory that is read, bytes of content: some millions of names.
const MAX_SIZE: u64 = 128 << 20;
/// Smallest record: its fields without a name.
const HEADER: usize = 8;

/// A name, and the number of the inode that it stands for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// Neither empty nor with a slash or NUL in it; not always UTF-8.
    pub name: Vec<u8>,
    /// Where it leads.
    pub inode: u32,
}

impl Ext4Image {
    /// The names in a directory, sorted, each once, without `.` and `..`; at most `limit`. Directories with an index are
    /// read as those without: the index is made to look like empty blocks.
    ///
    /// # Errors
    /// The directory is damaged or has more names.
    pub fn names(&self, directory: &Inode, limit: usize) -> Result<Vec<Name>, Ext4ReadError> {
        if directory.kind != Kind::Directory || directory.size > MAX_SIZE {
            return Err(Ext4ReadError::Corrupt("a directory is none, or too large"));
        }
        let mut names = Vec::new();
        let end = directory.size.div_ceil(self.block_size() as u64);
        for extent in self.extents(directory)? {
            for logical in extent.logical..extent.end().min(end) {
                let mut block = vec![0; self.block_size()];
                self.read_content(&[extent], logical * self.block_size() as u64, &mut block)?;
                names_of_block(&block, &mut names)?;
                if names.len() > limit {
                    return Err(Ext4ReadError::TooMany);
                }
            }
        }
        names.sort();
        names.dedup_by(|a, b| a.name == b.name);
        Ok(names)
    }
}

fn names_of_block(block: &[u8], names: &mut Vec<Name>) -> Result<(), Ext4ReadError> {
    const DAMAGED: Ext4ReadError = Ext4ReadError::Corrupt("a directory's records don't fit its blocks");
    let mut rest = block;
    while !rest.is_empty() {
        let (inode, name_length) = (le32(rest, 0), rest.get(6).copied().map_or(0, usize::from));
        let length = match le16(rest, 4) {
            // Of blocks of 64 KiB, whose length does not fit.
            0 | u16::MAX if block.len() == 1 << 16 => 1 << 16,
            length => usize::from(length),
        };
        if length < HEADER || length % 4 != 0 || length > rest.len() {
            return Err(DAMAGED);
        }
        let (record, next) = rest.split_at_checked(length).ok_or(DAMAGED)?;
        rest = next;
        if inode == 0 {
            continue;
        }
        let name = record.get(HEADER..HEADER + name_length).ok_or(DAMAGED)?;
        match name {
            b"." | b".." => {}
            b"" => return Err(DAMAGED),
            name if name.iter().any(|byte| matches!(byte, 0 | b'/')) => return Err(DAMAGED),
            name => names.push(Name { name: name.to_owned(), inode }),
        }
    }
    Ok(())
}
