//! Writes staged pages to the memory file of a new image.
//!
//! The file begins as a reflink of the base image's memory, or as one hole. Pages that hold only zeros become holes. It is
//! never written again once the image is published: children map it.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, SeekFrom};

use super::memory::PAGE;
use crate::privileged::Range;

/// Zero pages between written ones: fewer than this are written, more become a hole, bytes.
const MIN_HOLE: usize = 16 * 4096;

/// The memory file of an image that is being made.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    file: File,
    has_base: bool,
    written: Cell<u64>,
}

impl MemoryFile {
    /// Of a new empty file: takes over the base's contents, or becomes one hole of `len` bytes.
    pub fn new(file: File, base: Option<&File>, len: u64) -> io::Result<(Self, coppice_disk::CloneKind)> {
        let mut kind = coppice_disk::CloneKind::Reflink;
        if let Some(base) = base {
            kind = coppice_disk::clone_fd(base, &file).map_err(|error| match error {
                coppice_disk::CloneError::NoSpace { source } | coppice_disk::CloneError::Io { source } => source,
                other => io::Error::other(other),
            })?;
        }
        // Also gives a base that is shorter than it should be its length; a machine's memory is never shorter.
        file.set_len(len)?;
        Ok((Self { file, has_base: base.is_some(), written: Cell::new(0) }, kind))
    }

    /// Writes staged ranges. `staged` holds them one after the other.
    pub fn write(&self, ranges: &[Range], mut staged: &[u8]) -> io::Result<()> {
        let mut at = 0;
        while let Some(first) = ranges.get(at) {
            // Ranges that adjoin (long ones are split) are one write.
            let mut len = first.len;
            at += 1;
            while let Some(next) = ranges.get(at)
                && next.start == first.start + len
            {
                len += next.len;
                at += 1;
            }
            let size = usize::try_from(len).map_err(io::Error::other)?;
            let data = staged
                .split_off(..size)
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "fewer bytes than ranges"))?;
            self.write_range(first.start, data)?;
        }
        Ok(())
    }

    /// The same file, to read ahead in.
    pub fn reader(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Bytes that were written so far; zeros that became holes are not.
    pub fn written(&self) -> u64 {
        self.written.get()
    }

    fn write_range(&self, start: u64, data: &[u8]) -> io::Result<()> {
        for run in runs(data) {
            let at = start + u64::try_from(run.start).map_err(io::Error::other)?;
            if run.zero {
                self.zero(at, u64::try_from(run.len).map_err(io::Error::other)?)?;
            } else {
                self.file.write_all_at(data.get(run.start..run.start + run.len).unwrap_or_default(), at)?;
                self.written.set(self.written.get() + run.len as u64);
            }
        }
        Ok(())
    }

    /// Makes a range read as zeros. Without a base it does already.
    fn zero(&self, at: u64, len: u64) -> io::Result<()> {
        if !self.has_base {
            return Ok(());
        }
        match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
            Ok(data) if data >= at + len => return Ok(()),
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            _ => {}
        }
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, punch, at, len) {
            Err(rustix::io::Errno::OPNOTSUPP) => {
                let zeros = [0; 4096];
                let mut done = 0;
                while done < len {
                    self.file.write_all_at(&zeros, at + done)?;
                    done += PAGE;
                }
                Ok(())
            }
            result => Ok(result?),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Run {
    start: usize,
    len: usize,
    zero: bool,
}

/// Splits pages into runs of zeros and of data. Short runs of zeros count as data: a hole costs more than they do.
fn runs(data: &[u8]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (index, page) in data.chunks(4096).enumerate() {
        let zero = is_zero(page);
        match runs.last_mut() {
            Some(last) if last.zero == zero => last.len += page.len(),
            _ => runs.push(Run { start: index * 4096, len: page.len(), zero }),
        }
    }
    let mut joined: Vec<Run> = Vec::new();
    for mut run in runs {
        run.zero = run.zero && (run.len >= MIN_HOLE || run.len == data.len());
        match joined.last_mut() {
            Some(last) if !last.zero && !run.zero => last.len += run.len,
            _ => joined.push(run),
        }
    }
    joined
}

fn is_zero(page: &[u8]) -> bool {
    let (words, rest) = page.as_chunks::<64>();
    words.iter().all(|w| w.iter().fold(0, |a, b| a | b) == 0) && rest.iter().all(|b| *b == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn long_runs_of_zeros_become_holes_and_short_ones_do_not() {
        let mut data = vec![0u8; 40 * 4096];
        data[0] = 1;
        data[3 * 4096] = 1;
        data[39 * 4096] = 1;
        let run = |start: usize, len: usize, zero| Run { start: start * 4096, len: len * 4096, zero };
        assert_eq!(runs(&data), [run(0, 4, false), run(4, 35, true), run(39, 1, false)]);
        assert_eq!(runs(&data[4096..2 * 4096]), [run(0, 1, true)]);
        assert_eq!(runs(&[]), []);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Whatever the base held and whatever was dirty: the file is the base with the dirty pages on top.
        #[test]
        fn the_file_is_the_base_under_the_staged_pages(
            with_base in any::<bool>(),
            base_pages in proptest::collection::vec(0u8..3, 64),
            dirty in proptest::collection::vec(proptest::option::of(0u8..3), 64),
        ) {
            let fill = |pages: &[u8]| pages.iter().flat_map(|p| [*p; 4096]).collect::<Vec<u8>>();
            let base_data = if with_base { fill(&base_pages) } else { vec![0; 64 * 4096] };
            let base = tempfile::tempfile().unwrap();
            base.write_all_at(&base_data, 0).unwrap();
            let mut expected = base_data;
            let (mut ranges, mut staged) = (Vec::new(), Vec::new());
            for (page, value) in dirty.iter().enumerate() {
                if let Some(value) = value {
                    let start = page * 4096;
                    expected[start..start + 4096].fill(*value);
                    ranges.push(Range { start: start as u64, len: PAGE });
                    staged.extend_from_slice(&[*value; 4096]);
                }
            }
            let base = with_base.then_some(base);
            let (file, _) = MemoryFile::new(tempfile::tempfile().unwrap(), base.as_ref(), 64 * PAGE).unwrap();
            file.write(&ranges, &staged).unwrap();
            prop_assert!(file.written() <= staged.len() as u64);
            let mut found = vec![0; 64 * 4096];
            file.file.read_exact_at(&mut found, 0).unwrap();
            prop_assert!(found == expected);
        }
    }
}
