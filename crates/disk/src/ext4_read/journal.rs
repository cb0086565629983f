//! The journal (jbd2), replayed in memory: which blocks have their last contents in the log.
//!
//! As the kernel does it: transactions from the start of the log as long as they are complete and follow each other, in a
//! log that wraps around; a revocation holds for what was logged of its block up to its own transaction, also in earlier
//! ones. Nothing is written.

use std::collections::{BTreeMap, HashMap};

use super::{Ext4Image, Ext4ReadError, be16, be32, wide};

/// Every block of the log that is not a logged block begins with it.
pub(super) const MAGIC: u32 = 0xC03B_3998;
const DESCRIPTOR: u32 = 1;
const COMMIT: u32 = 2;
const SUPERBLOCK_V2: u32 = 4;
const REVOCATION: u32 = 5;
/// Bytes of the header of each block: magic, type, sequence number.
const HEADER: usize = 12;

const WIDE: u32 = 0x2;
const CHECKSUM_V2: u32 = 0x8;
const CHECKSUM_V3: u32 = 0x10;
/// Revocations, 64 bit, asynchronous commits, checksums.
const KNOWN: u32 = 0x1 | WIDE | 0x4 | CHECKSUM_V2 | CHECKSUM_V3;

/// The block began with [`MAGIC`] and was logged without.
const ESCAPED: u32 = 0x1;
/// No UUID follows.
const SAME_UUID: u32 = 0x2;
const LAST: u32 = 0x8;

/// Where a block's last contents are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Replacement {
    /// On the disk.
    pub at: u64,
    /// Its first bytes are to be [`MAGIC`].
    pub escaped: bool,
}

struct Log {
    /// Its blocks on the disk, in order.
    blocks: Vec<u64>,
    features: u32,
    first: usize,
    sequence: u32,
    start: usize,
}

/// One transaction, until its end is seen.
#[derive(Default)]
struct Transaction {
    logged: Vec<(u64, Replacement)>,
    revoked: Vec<u64>,
}

pub(super) fn load(image: &Ext4Image) -> Result<BTreeMap<u64, Replacement>, Ext4ReadError> {
    let Some(log) = Log::open(image)? else { return Ok(BTreeMap::new()) };
    let mut logged: BTreeMap<u64, (u32, Replacement)> = BTreeMap::new();
    let mut revoked: HashMap<u64, u32> = HashMap::new();
    let mut transaction = Transaction::default();
    let (mut sequence, mut at) = (log.sequence, log.start);
    // Once around is all that there can be.
    let mut left = log.blocks.len();
    while left > 0 {
        let block = image.block(log.physical(at)?)?;
        if be32(&block, 0) != MAGIC || be32(&block, 8) != sequence {
            break;
        }
        let mut used = 1;
        match be32(&block, 4) {
            DESCRIPTOR => {
                let Some(tags) = log.tags(&block) else { break };
                for (offset, (target, escaped)) in (1..).zip(&tags) {
                    let physical = log.physical(log.after(at, offset))?;
                    transaction.logged.push((*target, Replacement { at: physical, escaped: *escaped }));
                }
                used += tags.len();
            }
            REVOCATION => transaction.revoked.extend(log.revocations(&block)),
            COMMIT => {
                let done = std::mem::take(&mut transaction);
                logged.extend(done.logged.into_iter().map(|(target, to)| (target, (sequence, to))));
                revoked.extend(done.revoked.into_iter().map(|target| (target, sequence)));
                sequence = sequence.wrapping_add(1);
            }
            _ => break,
        }
        at = log.after(at, used);
        left = left.saturating_sub(used);
    }
    // Sequence numbers are compared as the kernel does, around their end.
    let holds = |block: &u64, sequence: u32| {
        revoked.get(block).is_none_or(|revoked| {
            let ahead = sequence.wrapping_sub(*revoked);
            ahead != 0 && ahead < 1 << 31
        })
    };
    let kept = logged.into_iter().filter(|(block, (sequence, _))| holds(block, *sequence));
    Ok(kept.map(|(block, (_, replacement))| (block, replacement)).collect())
}

impl Log {
    /// `None` when there is nothing to replay.
    fn open(image: &Ext4Image) -> Result<Option<Self>, Ext4ReadError> {
        const DAMAGED: Ext4ReadError = Ext4ReadError::Corrupt("its journal contradicts itself");
        let inode = image.inode(image.superblock.journal_inode)?;
        let mut blocks = Vec::new();
        let most = image.len / image.block_size() as u64;
        for extent in image.extents(&inode)? {
            if extent.logical != blocks.len() as u64 || extent.end() > most {
                return Err(DAMAGED);
            }
            blocks.extend(extent.physical()..extent.physical() + extent.blocks);
        }
        let head = image.block(*blocks.first().ok_or(DAMAGED)?)?;
        if be32(&head, 0) != MAGIC || be32(&head, 4) != SUPERBLOCK_V2 {
            return Err(DAMAGED);
        }
        let features = be32(&head, 40);
        if features & !KNOWN != 0 {
            return Err(Ext4ReadError::Unsupported("its journal uses a feature that is not known here"));
        }
        let number = |at| usize::try_from(be32(&head, at)).map_err(|_| DAMAGED);
        let (length, first, start) = (number(16)?, number(20)?, number(28)?);
        if start == 0 {
            return Ok(None);
        }
        if be32(&head, 12) as usize != image.block_size() || length > blocks.len() {
            return Err(DAMAGED);
        }
        blocks.truncate(length);
        if first == 0 || !(first..length).contains(&start) {
            return Err(DAMAGED);
        }
        Ok(Some(Self { blocks, features, first, sequence: be32(&head, 24), start }))
    }

    fn has(&self, feature: u32) -> bool {
        self.features & feature != 0
    }

    fn physical(&self, at: usize) -> Result<u64, Ext4ReadError> {
        self.blocks.get(at).copied().ok_or(Ext4ReadError::Corrupt("its journal contradicts itself"))
    }

    /// The block that comes so many after another, around the end.
    fn after(&self, at: usize, steps: usize) -> usize {
        let around = self.blocks.len() - self.first;
        self.first + (at - self.first + steps) % around
    }

    /// The blocks that follow a descriptor, by where they belong; `None` when there are more than there can be.
    fn tags(&self, block: &[u8]) -> Option<Vec<(u64, bool)>> {
        let size = match (self.has(CHECKSUM_V3), self.has(CHECKSUM_V2), self.has(WIDE)) {
            (true, _, _) => 16,
            (false, checksum, wide) => 8 + if wide { 4 } else { 0 } + if checksum { 2 } else { 0 },
        };
        let tail = if self.has(CHECKSUM_V2 | CHECKSUM_V3) { 4 } else { 0 };
        let mut rest = block.get(HEADER..block.len() - tail)?;
        let mut tags = Vec::new();
        while rest.len() >= size {
            let flags = if self.has(CHECKSUM_V3) { be32(rest, 4) } else { u32::from(be16(rest, 6)) };
            let high = if self.has(WIDE) { be32(rest, 8) } else { 0 };
            tags.push((wide(high, be32(rest, 0)), flags & ESCAPED != 0));
            let used = size + if flags & SAME_UUID == 0 { 16 } else { 0 };
            rest = rest.get(used..).unwrap_or_default();
            if flags & LAST != 0 {
                break;
            }
        }
        (tags.len() < self.blocks.len() - self.first).then_some(tags)
    }

    fn revocations(&self, block: &[u8]) -> Vec<u64> {
        let size = if self.has(WIDE) { 8 } else { 4 };
        let used = usize::try_from(be32(block, HEADER)).unwrap_or(0).min(block.len());
        let records = block.get(HEADER + 4..used).unwrap_or_default();
        let number = |record: &[u8]| match size {
            8 => wide(be32(record, 0), be32(record, 4)),
            _ => u64::from(be32(record, 0)),
        };
        records.chunks_exact(size).map(number).collect()
    }
}
