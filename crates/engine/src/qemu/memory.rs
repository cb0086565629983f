//! Guest memory seen from outside: where QEMU maps it, which pages the machine wrote, copying them.
//!
//! A machine's memory is a private mapping of a file, so what it wrote are the *anonymous* pages of that mapping; every
//! other page is as in the file. [`GuestMemory`] finds and copies them with the process stopped; [`crate::qemu::arena`]
//! owns the buffer and [`crate::qemu::memory_file`] writes it out. Nothing here stops or resumes a machine.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Bytes of a page (x86-64).
pub(crate) const PAGE: u64 = 4096;

/// The mapping of a VM's memory in its VMM process.
#[derive(Debug)]
pub(crate) struct GuestMemory {
    pid: i32,
    start: u64,
    len: u64,
    pagemap: File,
    /// `/proc/PID/map_files` entry of the first part: the mapped file itself, even when its name is gone.
    link: PathBuf,
}

/// Pages that lie together, as offset into guest memory and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub start: u64,
    pub len: u64,
}

/// Bytes in a list of ranges.
pub(crate) fn total(ranges: &[Range]) -> u64 {
    ranges.iter().map(|r| r.len).sum()
}

/// One line of /proc/PID/maps.
#[derive(Debug, PartialEq, Eq)]
struct Mapping<'a> {
    start: u64,
    end: u64,
    private_writable: bool,
    offset: u64,
    file: (&'a str, u64),
}

fn parse_mapping(line: &str) -> Option<Mapping<'_>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let flags = fields.next()?;
    let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let device = fields.next()?;
    let inode = fields.next()?.parse().ok()?;
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        private_writable: flags.starts_with("rw") && flags.ends_with('p'),
        offset,
        file: (device, inode),
    })
}

/// Finds the private writable mapping of one file from its beginning that is exactly `len` bytes long. The kernel may show
/// it in several adjoining parts. Its path is not looked at: the file may have been renamed or removed.
fn find(maps: impl Iterator<Item = io::Result<String>>, len: u64) -> io::Result<Option<(u64, (u64, u64))>> {
    struct Candidate {
        start: u64,
        end: u64,
        file: (String, u64),
        first: (u64, u64),
    }
    let mut candidate: Option<Candidate> = None;
    for line in maps {
        let line = line?;
        let Some(map) = parse_mapping(&line) else { continue };
        candidate = match candidate {
            Some(c)
                if c.end == map.start && (c.file.0.as_str(), c.file.1) == map.file && map.offset == c.end - c.start =>
            {
                Some(Candidate { end: map.end, ..c })
            }
            _ if map.private_writable && map.file.1 != 0 && map.offset == 0 => Some(Candidate {
                start: map.start,
                end: map.end,
                file: (map.file.0.to_owned(), map.file.1),
                first: (map.start, map.end),
            }),
            _ => None,
        };
        if let Some(c) = &candidate
            && c.end - c.start == len
        {
            return Ok(Some((c.start, c.first)));
        }
    }
    Ok(None)
}

impl GuestMemory {
    /// Finds the memory of `len` bytes in a process.
    pub fn find(pid: i32, len: u64) -> io::Result<Self> {
        let maps = BufReader::new(File::open(format!("/proc/{pid}/maps"))?);
        let (start, first) = find(maps.lines(), len)?
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the VMM has no mapping of guest memory"))?;
        let link = PathBuf::from(format!("/proc/{pid}/map_files/{:x}-{:x}", first.0, first.1));
        Ok(Self { pid, start, len, pagemap: File::open(format!("/proc/{pid}/pagemap"))?, link })
    }

    /// Size, bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Opens the mapped file for reading, whatever became of its name.
    pub fn open_base(&self) -> io::Result<File> {
        File::open(&self.link)
    }

    /// Which pages the machine has written since it started. Only exact while it is stopped.
    pub fn written(&self) -> io::Result<Vec<Range>> {
        match self.scan() {
            // ENOTTY, EINVAL: a kernel before 6.7.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => self.read_pagemap(),
            result => result,
        }
    }

    /// By `PAGEMAP_SCAN`: the kernel walks its page tables and answers with ranges.
    fn scan(&self) -> io::Result<Vec<Range>> {
        let mut found = vec![PageRegion::default(); SCAN_BATCH];
        let mut ranges: Vec<Range> = Vec::new();
        let end = self.start + self.len;
        let mut at = self.start;
        while at < end {
            let mut arg = PmScanArg {
                size: size_of::<PmScanArg>() as u64,
                start: at,
                end,
                vec: found.as_mut_ptr().expose_provenance() as u64,
                vec_len: SCAN_BATCH as u64,
                // Anonymous: not of the file, and there.
                category_inverted: PAGE_IS_FILE,
                category_mask: PAGE_IS_FILE,
                category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                ..PmScanArg::default()
            };
            // SAFETY: `arg` is a valid pm_scan_arg of the size it says, and `vec` points to `vec_len` page_regions that
            // live until after the call; the kernel writes only these.
            let count = unsafe { libc::ioctl(self.pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
            let count = usize::try_from(count).map_err(|_negative| io::Error::last_os_error())?;
            for region in found.iter().take(count) {
                push(&mut ranges, region.start - self.start, region.end - region.start);
            }
            // The walk ends early when the vector is full.
            if arg.walk_end <= at {
                return Err(io::Error::other("PAGEMAP_SCAN makes no progress"));
            }
            at = arg.walk_end;
        }
        Ok(ranges)
    }

    /// By reading eight bytes for each page.
    fn read_pagemap(&self) -> io::Result<Vec<Range>> {
        let mut ranges = Vec::new();
        let mut entries = vec![0u8; 128 << 10];
        let pages = self.len / PAGE;
        let mut page = 0;
        while page < pages {
            let want = usize::try_from((pages - page) * 8).unwrap_or(usize::MAX).min(entries.len());
            let Some(buffer) = entries.get_mut(..want) else { break };
            self.pagemap.read_exact_at(buffer, (self.start / PAGE + page) * 8)?;
            for entry in buffer.as_chunks::<8>().0 {
                let entry = u64::from_ne_bytes(*entry);
                if entry & (PM_PRESENT | PM_SWAP) != 0 && entry & PM_FILE == 0 {
                    push(&mut ranges, page * PAGE, PAGE);
                }
                page += 1;
            }
        }
        Ok(ranges)
    }

    /// Copies ranges, one after the other, into `buffer`, which must be as long as they are together. Two threads share
    /// the work where there are two processors: one alone is bound by the latency of pinning pages.
    pub fn copy(&self, ranges: &[Range], buffer: &mut [u8]) -> io::Result<()> {
        let half = ranges_until(ranges, total(ranges) / 2);
        let (first, second) = ranges.split_at(half);
        let middle = usize::try_from(total(first)).unwrap_or(usize::MAX);
        let (front, back) = buffer
            .split_at_mut_checked(middle)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the buffer is too small"))?;
        if back.len() < PARALLEL {
            self.copy_serial(first, front)?;
            return self.copy_serial(second, back);
        }
        std::thread::scope(|scope| {
            let other = scope.spawn(|| self.copy_serial(first, front));
            let mine = self.copy_serial(second, back);
            let other = other.join().unwrap_or_else(|_panic| Err(io::Error::other("a copying thread panicked")));
            mine.and(other)
        })
    }

    fn copy_serial(&self, ranges: &[Range], mut buffer: &mut [u8]) -> io::Result<()> {
        let mut remote = Vec::with_capacity(IOV_BATCH);
        for batch in ranges.chunks(IOV_BATCH) {
            remote.clear();
            for range in batch {
                let address = usize::try_from(self.start + range.start).map_err(io::Error::other)?;
                let len = usize::try_from(range.len).map_err(io::Error::other)?;
                remote.push(libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: len });
            }
            let want = usize::try_from(total(batch)).map_err(io::Error::other)?;
            let target = buffer
                .split_off_mut(..want)
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the buffer is too small"))?;
            read_process(self.pid, &mut remote, target)?;
        }
        Ok(())
    }
}

/// How many ranges of the list hold at most `bytes`, at least one where there is one.
pub(crate) fn ranges_until(ranges: &[Range], bytes: u64) -> usize {
    let mut sum = 0u64;
    let fit = ranges
        .iter()
        .take_while(|r| {
            sum = sum.saturating_add(r.len);
            sum <= bytes
        })
        .count();
    fit.max(1).min(ranges.len())
}

fn push(ranges: &mut Vec<Range>, start: u64, len: u64) {
    match ranges.last_mut() {
        Some(last) if last.start + last.len == start && last.len + len <= MAX_RANGE => last.len += len,
        _ => {
            let mut at = start;
            while at < start + len {
                let part = (start + len - at).min(MAX_RANGE);
                ranges.push(Range { start: at, len: part });
                at += part;
            }
        }
    }
}

/// Reads all of `remote` into `target`. The kernel may stop early at a boundary; then it goes on there.
fn read_process(pid: i32, remote: &mut [libc::iovec], target: &mut [u8]) -> io::Result<()> {
    let mut done = 0usize;
    let mut first = 0usize;
    while let Some(rest) = target.get_mut(done..)
        && !rest.is_empty()
    {
        let local = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let parts = remote.get(first..).unwrap_or_default();
        let count = parts.len().try_into().unwrap_or(0);
        // SAFETY: `local` is exactly the exclusive slice `rest`; the remote addresses are in another process, where the
        // kernel checks them.
        let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, parts.as_ptr(), count, 0) };
        let mut read = usize::try_from(read).map_err(|_negative| io::Error::last_os_error())?;
        if read == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        done += read;
        while let Some(part) = remote.get_mut(first)
            && read > 0
        {
            let step = read.min(part.iov_len);
            part.iov_len -= step;
            part.iov_base = part.iov_base.wrapping_byte_add(step);
            read -= step;
            if part.iov_len == 0 {
                first += 1;
            }
        }
    }
    Ok(())
}

/// Page regions that one scan call may answer with.
const SCAN_BATCH: usize = 4096;
/// Ranges in one `process_vm_readv` (`UIO_MAXIOV` is 1024).
const IOV_BATCH: usize = 1024;
/// Copies smaller than this for each thread are not worth one, bytes.
const PARALLEL: usize = 2 << 20;
/// Longest single range, so that lists of ranges split evenly and batches stay below `MAX_RW_COUNT`.
const MAX_RANGE: u64 = 1 << 20;

const PM_FILE: u64 = 1 << 61;
const PM_SWAP: u64 = 1 << 62;
const PM_PRESENT: u64 = 1 << 63;

// include/uapi/linux/fs.h, since 6.7.
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

#[repr(C)]
#[derive(Debug, Default)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610;
const _: () = assert!(size_of::<PmScanArg>() == 96 && (PAGEMAP_SCAN >> 16) & 0x3fff == 96);
const _: () = assert!(size_of::<PageRegion>() == 24);

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn find_in(text: &str, len: u64) -> Option<(u64, (u64, u64))> {
        find(text.lines().map(|l| Ok(l.to_owned())), len).unwrap()
    }

    #[test]
    fn the_mapping_is_found_by_kind_and_length_also_in_parts_and_without_a_name() {
        let maps = "1000-3000 r--p 00000000 fe:00 7 /usr/bin/qemu\n\
                    5000-7000 rw-p 00000000 00:00 0 \n\
                    8000-9000 rw-s 00000000 07:00 9 /x/memory\n\
                    a000-c000 rw-p 00000000 07:00 132 /x/a b (deleted)\n\
                    c000-d000 rw-p 00002000 07:00 132 /x/a b (deleted)\n";
        assert_eq!(find_in(maps, 0x3000), Some((0xa000, (0xa000, 0xc000))));
        assert_eq!(find_in(maps, 0x2000), Some((0xa000, (0xa000, 0xc000))));
        assert_eq!(find_in(maps, 0x1000), None);
        assert_eq!(find_in("junk\n1-\n", 0x1000), None);
    }

    /// The process under test is this one: a private file mapping with some pages written.
    fn mapped() -> (File, *mut u8, u64) {
        let len = 64 * PAGE + (3 << 20);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; usize::try_from(len).unwrap()]).unwrap();
        let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let size = usize::try_from(len).unwrap();
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let map =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, prot, rustix::mm::MapFlags::PRIVATE, &file, 0) };
        (file, map.unwrap().cast(), len)
    }

    #[test]
    fn written_pages_are_found_by_both_ways_and_copied() {
        let (_file, map, len) = mapped();
        let written = [0usize, 1, 5, 63, 64 + 700];
        // SAFETY: all inside the mapping, which nobody else uses.
        unsafe {
            assert_eq!(map.add(9 * 4096).read_volatile(), 7, "a page that was read is not a page that was written");
            for page in written {
                map.add(page * 4096).write_volatile(u8::try_from(page % 200).unwrap() + 10);
            }
        }
        let pid = i32::try_from(std::process::id()).unwrap();
        let memory = GuestMemory::find(pid, len).unwrap();
        let page = |n: u64, count: u64| Range { start: n * PAGE, len: count * PAGE };
        let expected = vec![page(0, 2), page(5, 1), page(63, 1), page(764, 1)];
        assert_eq!(memory.read_pagemap().unwrap(), expected);
        assert_eq!(memory.written().unwrap(), expected);
        let mut buffer = vec![0; 5 * 4096];
        memory.copy(&expected, &mut buffer).unwrap();
        let firsts: Vec<u8> = buffer.chunks(4096).map(|p| p[0]).collect();
        assert_eq!(firsts, [10, 11, 15, 73, 174]);
        let all: Vec<Range> = (0..len >> 18).map(|n| Range { start: n << 18, len: 1 << 18 }).collect();
        let mut buffer = vec![0; usize::try_from(total(&all)).unwrap()];
        memory.copy(&all, &mut buffer).unwrap();
        assert_eq!((buffer[0], buffer[4096], buffer[9 * 4096], buffer[764 * 4096]), (10, 11, 7, 174));
        assert_eq!(memory.open_base().unwrap().metadata().unwrap().len(), len);
    }

    #[test]
    fn a_buffer_that_is_too_small_is_an_error() {
        let (_file, _map, len) = mapped();
        let memory = GuestMemory::find(i32::try_from(std::process::id()).unwrap(), len).unwrap();
        memory.copy(&[Range { start: 0, len: 2 * PAGE }], &mut [0; 4096]).unwrap_err();
    }

    #[test]
    fn neighbours_are_joined_and_long_ranges_split() {
        let mut ranges = Vec::new();
        push(&mut ranges, 0, PAGE);
        push(&mut ranges, PAGE, PAGE);
        push(&mut ranges, 8 * PAGE, 2 * MAX_RANGE + PAGE);
        assert_eq!(ranges.len(), 4);
        assert_eq!(total(&ranges), 3 * PAGE + 2 * MAX_RANGE);
        assert_eq!(ranges_until(&ranges, 2 * PAGE), 1);
        assert_eq!(ranges_until(&ranges, 0), 1);
        assert_eq!(ranges_until(&[], 5), 0);
    }
}
