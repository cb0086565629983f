//! What differs between two ext4 images by their files: added, modified, deleted.
//!
//! Both trees are walked side by side, name by name; only inodes that differ are looked at more closely, and only files of
//! one size whose inodes differ are compared by content. So it costs as much as there are names, not as there are bytes.
//! What differs may still be older than the instant that is asked about: what a guest had not written to its disk when that
//! was cloned gets there later, without having changed since. The times of change of inodes and directories tell, by the guest's
//! own clock; what they call older is counted and not listed.
//!
//! A file that was renamed is one deleted and one added. Times are no change by themselves: a file that was written anew with
//! what it had before is as it was.
//!
//! Both images are read by [`crate::ext4_read`], and may be hostile; everything is bounded, and what is left out because of a bound is
//! said in the answer. It does not know which images belong together.

use std::collections::HashSet;

use crate::ext4_read::{Ext4Image, Ext4ReadError, Extent, Inode, Kind, Name, ROOT};

/// Longest path that is followed, bytes. Longer ones can only be made piece by piece.
const MAX_PATH: usize = 4096;
/// Bytes that are compared at a time.
const PIECE: usize = 1 << 20;

/// Bounds of a comparison.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Only what was changed then or later, by the guest's clock: nanoseconds since 1970.
    pub since: Option<i128>,
    /// Most entries in each list.
    pub listed: usize,
    /// Most names that are looked at, in both images together.
    pub names: usize,
    /// Most bytes of content that are read, of each image.
    pub content: u64,
}

/// What of a thing is not as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Aspect {
    /// A file's bytes.
    Content,
    /// It is another kind of thing.
    Kind,
    /// Permissions.
    Mode,
    /// User or group.
    Owner,
    /// Where a symbolic link leads.
    Target,
    /// A device's numbers.
    Device,
    /// Extended attributes.
    Attributes,
}

/// One path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    /// From the root; not always UTF-8.
    pub path: Vec<u8>,
    /// What it is; of something deleted, what it was.
    pub kind: Kind,
    /// Permissions, with the set-id and sticky bits.
    pub mode: u16,
    /// Bytes of a file's or link's content, as it is; of something deleted, as it was. 0 for everything else.
    pub size: u64,
    /// The size that a modified one had.
    pub size_before: u64,
    /// What of a modified one is not as it was.
    pub aspects: Vec<Aspect>,
}

/// Entries of one kind: so many, and the first of them by path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct List {
    /// At most [`Bounds::listed`].
    pub entries: Vec<Changed>,
    /// All of them.
    pub count: u64,
    /// Sum of their sizes.
    pub bytes: u64,
}

/// Why an answer does not have everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// There are more names than [`Bounds::names`].
    TooManyNames,
    /// It took too long.
    TooSlow,
}

/// What differs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// In the new image only.
    pub added: List,
    /// In both, and not the same.
    pub modified: List,
    /// In the old image only.
    pub deleted: List,
    /// What differs and was changed before [`Bounds::since`].
    pub earlier: u64,
    /// Files that are among the modified ones although their content may be the same: comparing it would have taken more
    /// than [`Bounds::content`], or it can't be read.
    pub not_compared: u64,
    /// Names whose inode, or directories whose names, can't be read.
    pub unreadable: u64,
    /// Why the walk ended early: what came after is not in here.
    pub missing: Option<Missing>,
}

/// Compares two images, all of them or what is at `below` (names from the root) and in it.
///
/// # Errors
/// A root directory can't be read.
pub fn compare(old: &Ext4Image, new: &Ext4Image, below: &[Vec<u8>], bounds: Bounds) -> Result<Changes, Ext4ReadError> {
    let roots = (old.inode(ROOT)?, new.inode(ROOT)?);
    let seen = (HashSet::from([ROOT]), HashSet::from([ROOT]));
    let mut walk = Walk {
        old,
        new,
        below,
        bounds,
        names_left: bounds.names,
        content_left: bounds.content,
        seen,
        path: Vec::new(),
        stack: Vec::new(),
        changes: Changes::default(),
    };
    let top = Within { changed: walk.is_late(&roots.1), verdict: None };
    let walked = walk.enter(Some(&roots.0), Some(&roots.1), top).and_then(|()| walk.run());
    walk.changes.missing = match walked {
        Ok(()) => None,
        Err(Stop::Names) => Some(Missing::TooManyNames),
        Err(Stop::Time) => Some(Missing::TooSlow),
    };
    Ok(walk.changes)
}

/// Why a walk ends early.
enum Stop {
    Names,
    Time,
}

/// A name in one or both directories.
struct Pair {
    name: Vec<u8>,
    old: Option<u32>,
    new: Option<u32>,
}

/// What is known of everything in a directory.
#[derive(Clone, Copy)]
struct Within {
    /// Names may have come to it or gone from it since the instant that is asked about.
    changed: bool,
    /// Whether all in it is of after that instant: the whole tree went, or came from somewhere else.
    verdict: Option<bool>,
}

/// A directory whose names are being looked at.
struct Frame {
    pairs: std::vec::IntoIter<Pair>,
    within: Within,
    /// Length of its path.
    path: usize,
}

struct Walk<'a> {
    old: &'a Ext4Image,
    new: &'a Ext4Image,
    below: &'a [Vec<u8>],
    bounds: Bounds,
    names_left: usize,
    content_left: u64,
    /// Directories that were entered. A tree that was made to contain itself has an end here.
    seen: (HashSet<u32>, HashSet<u32>),
    path: Vec<u8>,
    stack: Vec<Frame>,
    changes: Changes,
}

impl Walk<'_> {
    fn run(&mut self) -> Result<(), Stop> {
        while let Some(frame) = self.stack.last_mut() {
            self.path.truncate(frame.path);
            let within = frame.within;
            let Some(pair) = frame.pairs.next() else {
                self.stack.pop();
                continue;
            };
            // Above what was asked for there is one name to follow, and nothing to say.
            let depth = self.stack.len();
            if self.below.get(depth - 1).is_some_and(|wanted| *wanted != pair.name) {
                continue;
            }
            self.path.push(b'/');
            self.path.extend_from_slice(&pair.name);
            self.look_at(&pair, within, depth >= self.below.len())?;
        }
        Ok(())
    }

    /// Whether an inode was changed since the instant that is asked about.
    fn is_late(&self, inode: &Inode) -> bool {
        self.bounds.since.is_none_or(|since| inode.changed_at() >= since)
    }

    fn look_at(&mut self, pair: &Pair, within: Within, report: bool) -> Result<(), Stop> {
        let old = self.inode(self.old, pair.old)?;
        let new = self.inode(self.new, pair.new)?;
        // What can't be read on one side is neither added nor deleted.
        let known = old.is_some() == pair.old.is_some() && new.is_some() == pair.new.is_some();
        let late = within.verdict.unwrap_or_else(|| new.as_ref().map_or(within.changed, |new| self.is_late(new)));
        if report && known {
            self.report(old.as_ref(), new.as_ref(), late)?;
        }
        let mut enter = |inode: Option<Inode>, number: Option<u32>, new: bool| {
            let seen = if new { &mut self.seen.1 } else { &mut self.seen.0 };
            inode.filter(|inode| inode.kind == Kind::Directory && number.is_some_and(|number| seen.insert(number)))
        };
        let (old, new) = (enter(old, pair.old, false), enter(new, pair.new, true));
        if !known || (old.is_none() && new.is_none()) {
            return Ok(());
        }
        let below = Within {
            changed: late,
            verdict: match (&old, &new) {
                (Some(_), Some(_)) => None,
                // A directory that was moved takes along what is in it, as old as it is.
                (None, _) => late.then_some(true),
                (Some(_), None) => Some(late),
            },
        };
        self.enter(old.as_ref(), new.as_ref(), below)
    }

    /// Goes into a directory that is in one or both.
    fn enter(&mut self, old: Option<&Inode>, new: Option<&Inode>, within: Within) -> Result<(), Stop> {
        if self.path.len() > MAX_PATH {
            self.changes.unreadable += 1;
            return Ok(());
        }
        let (old, new) = (self.names(self.old, old)?, self.names(self.new, new)?);
        let (Some(old), Some(new)) = (old, new) else { return Ok(()) };
        self.stack.push(Frame { pairs: merge(old, new).into_iter(), within, path: self.path.len() });
        Ok(())
    }

    /// `None` when they can't be read: then nothing can be said of what is in the directory.
    fn names(&mut self, image: &Ext4Image, directory: Option<&Inode>) -> Result<Option<Vec<Name>>, Stop> {
        let Some(directory) = directory else { return Ok(Some(Vec::new())) };
        let names = image.names(directory, self.names_left);
        let names = self.readable(names)?;
        self.names_left = self.names_left.checked_sub(names.as_ref().map_or(0, Vec::len)).ok_or(Stop::Names)?;
        Ok(names)
    }

    fn inode(&mut self, image: &Ext4Image, number: Option<u32>) -> Result<Option<Inode>, Stop> {
        number.map_or(Ok(None), |number| self.readable(image.inode(number)))
    }

    fn readable<T>(&mut self, read: Result<T, Ext4ReadError>) -> Result<Option<T>, Stop> {
        match read {
            Ok(found) => Ok(Some(found)),
            Err(Ext4ReadError::Stopped) => Err(Stop::Time),
            Err(Ext4ReadError::TooMany) => Err(Stop::Names),
            Err(_) => {
                self.changes.unreadable += 1;
                Ok(None)
            }
        }
    }

    fn report(&mut self, old: Option<&Inode>, new: Option<&Inode>, late: bool) -> Result<(), Stop> {
        if !late {
            let differs = match (old, new) {
                // Directories change with every name that comes and goes, which is told of the name.
                (Some(old), Some(new)) => new.kind != Kind::Directory && !old.is_same(new),
                _ => true,
            };
            self.changes.earlier += u64::from(differs);
            return Ok(());
        }
        let (path, listed) = (self.path.clone(), self.bounds.listed);
        match (old, new) {
            (None, None) => {}
            (None, Some(new)) => self.changes.added.push(changed(path, new, 0, Vec::new()), listed),
            (Some(old), None) => self.changes.deleted.push(changed(path, old, 0, Vec::new()), listed),
            (Some(old), Some(new)) => {
                let aspects = self.aspects(old, new)?;
                if !aspects.is_empty() {
                    self.changes.modified.push(changed(path, new, size(old), aspects), listed);
                }
            }
        }
        Ok(())
    }

    fn aspects(&mut self, old: &Inode, new: &Inode) -> Result<Vec<Aspect>, Stop> {
        if old.is_same(new) {
            return Ok(Vec::new());
        }
        if old.kind != new.kind {
            return Ok(vec![Aspect::Kind]);
        }
        let mut aspects = Vec::new();
        let own = match new.kind {
            Kind::File => Some((Aspect::Content, self.content_differs(old, new)?)),
            Kind::Symlink => {
                let targets = (self.old.target(old), self.new.target(new));
                let targets = (self.readable(targets.0)?, self.readable(targets.1)?);
                Some((Aspect::Target, targets.0 != targets.1))
            }
            Kind::CharDevice | Kind::BlockDevice => Some((Aspect::Device, old.device() != new.device())),
            Kind::Directory | Kind::Fifo | Kind::Socket => None,
        };
        aspects.extend(own.and_then(|(aspect, differs)| differs.then_some(aspect)));
        if old.mode != new.mode {
            aspects.push(Aspect::Mode);
        }
        if (old.uid, old.gid) != (new.uid, new.gid) {
            aspects.push(Aspect::Owner);
        }
        let attributes = (self.old.attributes(old), self.new.attributes(new));
        let attributes = (self.readable(attributes.0)?, self.readable(attributes.1)?);
        if attributes.0 != attributes.1 {
            aspects.push(Aspect::Attributes);
        }
        Ok(aspects)
    }

    fn content_differs(&mut self, old: &Inode, new: &Inode) -> Result<bool, Stop> {
        if old.size != new.size {
            return Ok(true);
        }
        match self.compare_content(old, new) {
            Ok(Some(differs)) => Ok(differs),
            Err(Ext4ReadError::Stopped) => Err(Stop::Time),
            // Better said of one file too many than of one too few.
            Ok(None) | Err(_) => {
                self.changes.not_compared += 1;
                Ok(true)
            }
        }
    }

    /// `None` when it would be too much.
    fn compare_content(&mut self, old: &Inode, new: &Inode) -> Result<Option<bool>, Ext4ReadError> {
        let (of_old, of_new) = (self.old.extents(old)?, self.new.extents(new)?);
        let mut buffers = (vec![0; PIECE], vec![0; PIECE]);
        for (from, until) in covered(&of_old, &of_new, self.new.block_size() as u64, new.size) {
            self.content_left = match self.content_left.checked_sub(until - from) {
                Some(left) => left,
                None => return Ok(None),
            };
            let mut at = from;
            while at < until {
                let length = usize::try_from(until - at).unwrap_or(PIECE).min(PIECE);
                let (a, b) = (buffers.0.get_mut(..length), buffers.1.get_mut(..length));
                let (a, b) = (a.unwrap_or_default(), b.unwrap_or_default());
                self.old.read_content(&of_old, at, a)?;
                self.new.read_content(&of_new, at, b)?;
                if a != b {
                    return Ok(Some(true));
                }
                at += length as u64;
            }
        }
        Ok(Some(false))
    }
}

impl List {
    fn push(&mut self, changed: Changed, listed: usize) {
        self.count += 1;
        self.bytes = self.bytes.saturating_add(changed.size);
        if self.entries.len() < listed {
            self.entries.push(changed);
        }
    }
}

fn changed(path: Vec<u8>, inode: &Inode, size_before: u64, aspects: Vec<Aspect>) -> Changed {
    Changed { path, kind: inode.kind, mode: inode.mode, size: size(inode), size_before, aspects }
}

/// Directories have sizes that say nothing to anybody.
fn size(inode: &Inode) -> u64 {
    match inode.kind {
        Kind::File | Kind::Symlink => inode.size,
        _ => 0,
    }
}

/// Two sorted lists of names as one.
fn merge(old: Vec<Name>, new: Vec<Name>) -> Vec<Pair> {
    let mut pairs = Vec::with_capacity(old.len().max(new.len()));
    let (mut old, mut new) = (old.into_iter().peekable(), new.into_iter().peekable());
    loop {
        let order = match (old.peek(), new.peek()) {
            (None, None) => return pairs,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some(a), Some(b)) => a.name.cmp(&b.name),
        };
        let a = if order.is_le() { old.next() } else { None };
        let b = if order.is_ge() { new.next() } else { None };
        let (of_old, of_new) = (a.as_ref().map(|name| name.inode), b.as_ref().map(|name| name.inode));
        if let Some(name) = a.or(b) {
            pairs.push(Pair { name: name.name, old: of_old, new: of_new });
        }
    }
}

/// The ranges of bytes, in order, in which one of two files has data; everything else is zeros in both.
fn covered(a: &[Extent], b: &[Extent], block: u64, size: u64) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = a.iter().chain(b).map(|extent| (extent.logical, extent.end())).collect();
    ranges.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
    for (from, until) in ranges {
        match merged.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(until),
            _ => merged.push((from, until)),
        }
    }
    let bytes = merged.into_iter().map(|(from, until)| (from * block, (until * block).min(size)));
    bytes.filter(|(from, until)| from < until).collect()
}

#[cfg(test)]
mod tests;
