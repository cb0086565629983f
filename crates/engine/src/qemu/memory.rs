//! Guest memory seen from outside: which pages the machine wrote, and copying them.
//!
//! A machine's memory is a private mapping of a file, so what it wrote are the *anonymous* pages of that mapping; every
//! other page is as in the file. [`GuestMemory`] finds them with the process stopped, by a descriptor of its page map, and
//! has them copied by the side that may; [`crate::qemu::arena`] owns the buffer and [`crate::qemu::memory_file`] writes it
//! out. Nothing here stops or resumes a machine.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::arena::Arena;
use crate::privileged::{MemoryHandle, Privileged, ProcessId, Range};

/// Bytes of a page (x86-64).
pub(crate) const PAGE: u64 = 4096;

/// The mapping of a VM's memory in its VMM process.
#[derive(Debug)]
pub(crate) struct GuestMemory {
    privileged: Arc<dyn Privileged>,
    id: ProcessId,
    start: u64,
    len: u64,
    pagemap: File,
    base: File,
}

impl GuestMemory {
    /// Finds the memory of `len` bytes in a process.
    pub fn find(privileged: Arc<dyn Privileged>, id: ProcessId, len: u64) -> io::Result<Self> {
        let MemoryHandle { start, pagemap, base } = privileged.open_memory(id, len)?;
        Ok(Self { privileged, id, start, len, pagemap, base })
    }

    /// Size, bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The mapped file, whatever became of its name.
    pub fn base(&self) -> &File {
        &self.base
    }

    /// Copies ranges, one after the other, to the beginning of an arena.
    pub fn copy(&self, ranges: &[Range], arena: &Arena) -> io::Result<()> {
        self.privileged.read_memory(self.id, ranges, arena.id())
    }

    /// Which pages the machine has written since it started. Only exact while it is stopped.
    pub fn written(&self) -> io::Result<Vec<Range>> {
        self.pages(Kind::Written)
    }

    /// Which pages of the file are mapped as they are: what the machine has lately read, and not written.
    pub fn read(&self) -> io::Result<Vec<Range>> {
        self.pages(Kind::Read)
    }

    fn pages(&self, kind: Kind) -> io::Result<Vec<Range>> {
        match self.scan(kind) {
            // ENOTTY, EINVAL: a kernel before 6.7.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => self.read_pagemap(kind),
            result => result,
        }
    }

    /// By `PAGEMAP_SCAN`: the kernel walks its page tables and answers with ranges.
    fn scan(&self, kind: Kind) -> io::Result<Vec<Range>> {
        let mut found = vec![PageRegion::default(); SCAN_BATCH];
        let mut ranges: Vec<Range> = Vec::new();
        let end = self.start + self.len;
        let mut at = self.start;
        let (inverted, mask) = kind.categories();
        while at < end {
            let mut arg = PmScanArg {
                size: size_of::<PmScanArg>() as u64,
                start: at,
                end,
                vec: found.as_mut_ptr().expose_provenance() as u64,
                vec_len: SCAN_BATCH as u64,
                category_inverted: inverted,
                category_mask: mask,
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
    fn read_pagemap(&self, kind: Kind) -> io::Result<Vec<Range>> {
        let mut ranges = Vec::new();
        let mut entries = vec![0u8; 128 << 10];
        let pages = self.len / PAGE;
        let mut page = 0;
        while page < pages {
            let want = usize::try_from((pages - page) * 8).unwrap_or(usize::MAX).min(entries.len());
            let Some(buffer) = entries.get_mut(..want) else { break };
            self.pagemap.read_exact_at(buffer, (self.start / PAGE + page) * 8)?;
            for entry in buffer.as_chunks::<8>().0 {
                if kind.is(u64::from_ne_bytes(*entry)) {
                    push(&mut ranges, page * PAGE, PAGE);
                }
                page += 1;
            }
        }
        Ok(ranges)
    }
}

/// What became of a page of the file in a machine that maps it privately.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Anonymous: not of the file any more, and there.
    Written,
    /// Of the file, and there.
    Read,
}

impl Kind {
    /// For `PAGEMAP_SCAN`: categories that must not hold, and that are looked at beside those of a page that is there.
    fn categories(self) -> (u64, u64) {
        match self {
            Self::Written => (PAGE_IS_FILE, PAGE_IS_FILE),
            Self::Read => (0, PAGE_IS_FILE),
        }
    }

    /// Whether an entry of a page map says so.
    fn is(self, entry: u64) -> bool {
        let of_file = entry & PM_FILE != 0;
        entry & (PM_PRESENT | PM_SWAP) != 0 && of_file == matches!(self, Self::Read)
    }
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

/// Page regions that one scan call may answer with.
const SCAN_BATCH: usize = 4096;
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
    use crate::privileged::{Local, ranges_until, total};
    use crate::process::start_time;
    use crate::qemu::arena::ArenaPool;
    use crate::qemu::memory_file::MemoryFile;
    use std::io::Write;

    /// The process under test is this one: a private file mapping with some pages written.
    fn mapped() -> (File, usize, u64) {
        let len = 64 * PAGE + (3 << 20);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; usize::try_from(len).unwrap()]).unwrap();
        let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let size = usize::try_from(len).unwrap();
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let map =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, prot, rustix::mm::MapFlags::PRIVATE, &file, 0) };
        (file, map.unwrap().expose_provenance(), len)
    }

    fn privileged() -> (Arc<dyn Privileged>, ProcessId) {
        let pid = i32::try_from(std::process::id()).unwrap();
        let id = ProcessId { pid, start_time: start_time(pid).unwrap() };
        let local = Local::unjailed().unwrap();
        local.adopt(id).unwrap().unwrap();
        (Arc::new(local), id)
    }

    #[tokio::test]
    async fn written_pages_are_found_by_both_ways_and_copied() {
        let (_file, map, len) = mapped();
        let map: *mut u8 = std::ptr::with_exposed_provenance_mut(map);
        let written = [0usize, 1, 5, 63, 64 + 700];
        // SAFETY: all inside the mapping, which nobody else uses.
        unsafe {
            assert_eq!(map.add(9 * 4096).read_volatile(), 7, "a page that was read is not a page that was written");
            for page in written {
                map.add(page * 4096).write_volatile(u8::try_from(page % 200).unwrap() + 10);
            }
        }
        let (privileged, id) = privileged();
        let pool = ArenaPool::new(Arc::clone(&privileged), 16 << 20);
        let memory = GuestMemory::find(privileged, id, len).unwrap();
        let page = |n: u64, count: u64| Range { start: n * PAGE, len: count * PAGE };
        let expected = vec![page(0, 2), page(5, 1), page(63, 1), page(764, 1)];
        assert_eq!(memory.read_pagemap(Kind::Written).unwrap(), expected);
        assert_eq!(memory.written().unwrap(), expected);
        // Again: a write to a huge page takes what was only read of it out of the page table.
        // SAFETY: as above.
        assert_eq!(unsafe { map.add(9 * 4096).read_volatile() }, 7);
        let read = memory.read().unwrap();
        assert_eq!(memory.read_pagemap(Kind::Read).unwrap(), read);
        let is_in = |page: &usize| read.iter().any(|r| (r.start..r.start + r.len).contains(&(*page as u64 * PAGE)));
        assert!(is_in(&9) && !written.iter().any(is_in), "{read:?}");
        let mut arena = pool.take(8 << 20).await.unwrap();
        memory.copy(&expected, &arena).unwrap();
        let firsts: Vec<u8> = arena.bytes().chunks(4096).take(5).map(|p| p[0]).collect();
        assert_eq!(firsts, [10, 11, 15, 73, 174]);
        let all: Vec<Range> = (0..len >> 18).map(|n| Range { start: n << 18, len: 1 << 18 }).collect();
        memory.copy(&all, &arena).unwrap();
        let bytes = arena.bytes();
        assert_eq!((bytes[0], bytes[4096], bytes[9 * 4096], bytes[764 * 4096]), (10, 11, 7, 174));
        assert_eq!(memory.base().metadata().unwrap().len(), len);
        let too_much: Vec<Range> = all.iter().chain(&all).chain(&all).copied().collect();
        memory.copy(&too_much, &arena).unwrap_err();
    }

    /// The memory of a machine beyond what 32 bits can address is found, copied and written where it is; again after a page
    /// was set to zero, one was given back, and one is new.
    #[tokio::test]
    async fn memory_above_four_gib_is_captured_where_it_is() {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
        let len = 5u64 << 30;
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        let base = [3u8; 4096];
        let places = [0u64, (1 << 30) + PAGE, (3 << 30) - PAGE, 3 << 30, (4 << 30) + 7 * PAGE, len - PAGE];
        places.iter().for_each(|at| file.write_all_at(&base, *at).unwrap());
        let size = usize::try_from(len).unwrap();
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let map: *mut u8 = unsafe { mmap(std::ptr::null_mut(), size, prot, flags, &file, 0).unwrap() }.cast();
        let page = |at: u64| map.wrapping_add(usize::try_from(at).unwrap());
        // SAFETY: inside of the mapping, which nobody else uses.
        let put = |at: u64, value: u8| unsafe { page(at).write_bytes(value, 4096) };
        places.iter().zip(10u8..).for_each(|(at, value)| put(*at, value));
        let (privileged, id) = privileged();
        let memory = GuestMemory::find(Arc::clone(&privileged), id, len).unwrap();
        let mut arena = ArenaPool::new(privileged, 16 << 20).take(1 << 20).await.unwrap();
        let mut capture = || {
            let image = tempfile::tempfile().unwrap();
            let (file, _) = MemoryFile::new(image.try_clone().unwrap(), Some(memory.base()), len).unwrap();
            let written = memory.written().unwrap();
            memory.copy(&written, &arena).unwrap();
            file.write(&written, &arena.bytes()[..usize::try_from(total(&written)).unwrap()]).unwrap();
            (image, total(&written))
        };
        let value = |file: &File, at: u64| {
            let mut found = [0u8; 4096];
            file.read_exact_at(&mut found, at).unwrap();
            assert!(found.iter().all(|byte| *byte == found[0]), "a torn page at {at}");
            found[0]
        };
        let (image, bytes) = capture();
        assert_eq!(bytes, 6 * PAGE);
        assert_eq!(places.map(|at| value(&image, at)), [10, 11, 12, 13, 14, 15]);
        put(places[3], 0);
        put(places[5] - PAGE, 99);
        // SAFETY: inside of the mapping, and no reference into it is alive.
        unsafe { madvise(page(places[4]).cast(), 4096, Advice::LinuxDontNeed).unwrap() };
        let (image, bytes) = capture();
        assert_eq!(places.map(|at| value(&image, at)), [10, 11, 12, 0, 3, 15]);
        assert_eq!((value(&image, places[5] - PAGE), bytes), (99, 6 * PAGE));
        // SAFETY: exactly the mapping from above.
        unsafe { rustix::mm::munmap(map.cast(), size).unwrap() };
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
