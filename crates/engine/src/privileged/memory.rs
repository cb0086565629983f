//! A VMM's memory, by rights over its process: where it maps guest memory, and copying from it.
//!
//! Which pages are worth copying is found out on the other side (`qemu::memory`), which also owns the arenas.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::BorrowedFd;
use std::sync::Mutex;

use rustix::fs::SealFlags;

use super::{MemoryHandle, Range, total};
use crate::shared_memory::SharedMemory;

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

/// Finds the memory of `len` bytes in a process.
pub(crate) fn open(pid: i32, len: u64) -> io::Result<MemoryHandle> {
    let maps = BufReader::new(File::open(format!("/proc/{pid}/maps"))?);
    let (start, first) = find(maps.lines(), len)?
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the VMM has no mapping of guest memory"))?;
    // The mapped file itself, even when its name is gone.
    let base = File::open(format!("/proc/{pid}/map_files/{:x}-{:x}", first.0, first.1))?;
    Ok(MemoryHandle { start, pagemap: File::open(format!("/proc/{pid}/pagemap"))?, base })
}

/// Memory that another process shares with us, as target of copies.
#[derive(Debug)]
pub(crate) struct Target(Mutex<SharedMemory>);

impl Target {
    /// Maps it. It must not be able to shrink, or copies would fail in the middle.
    pub fn new(memory: BorrowedFd<'_>, len: u64) -> io::Result<Self> {
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        if !rustix::fs::fcntl_get_seals(memory)?.contains(SealFlags::SHRINK) {
            return Err(invalid("the arena is not sealed against shrinking"));
        }
        if u64::try_from(rustix::fs::fstat(memory)?.st_size).unwrap_or(0) < len {
            return Err(invalid("the arena is shorter than it should be"));
        }
        Ok(Self(Mutex::new(SharedMemory::map(memory, usize::try_from(len).map_err(io::Error::other)?, true)?)))
    }

    /// Copies ranges of the memory of `len` bytes that is mapped at `start` in a process, one after the other.
    pub fn fill(&self, pid: i32, (start, len): (u64, u64), ranges: &[Range]) -> io::Result<()> {
        let inside = |range: &Range| range.start.checked_add(range.len).is_some_and(|end| end <= len);
        if !ranges.iter().all(inside) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a range is outside of guest memory"));
        }
        let mut target = self.0.lock().map_err(|_poisoned| io::Error::other("an earlier copy panicked"))?;
        let bytes = usize::try_from(total(ranges)).map_err(io::Error::other)?;
        let buffer = target.bytes().get_mut(..bytes).ok_or_else(too_small)?;
        copy(pid, start, ranges, buffer, threads())
    }
}

fn too_small() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the buffer is too small")
}

/// Copies ranges, one after the other, into `buffer`, which must be as long as they are together. `threads` share the work:
/// one alone is bound by the latency of pinning pages.
fn copy(pid: i32, base: u64, mut ranges: &[Range], mut buffer: &mut [u8], threads: usize) -> io::Result<()> {
    let share = (buffer.len() / threads.max(1)).max(PARALLEL);
    let share = u64::try_from(share).map_err(io::Error::other)?;
    std::thread::scope(|scope| {
        let mut others = Vec::new();
        while total(ranges) >= share.saturating_add(PARALLEL as u64) {
            let (part, rest) = ranges.split_at(ranges_until(ranges, share));
            let len = usize::try_from(total(part)).map_err(io::Error::other)?;
            let target = buffer.split_off_mut(..len).ok_or_else(too_small)?;
            ranges = rest;
            others.push(scope.spawn(move || copy_serial(pid, base, part, target)));
        }
        let mine = copy_serial(pid, base, ranges, buffer);
        others.into_iter().fold(mine, |sofar, other| {
            let other = other.join().unwrap_or_else(|_panic| Err(io::Error::other("a copying thread panicked")));
            sofar.and(other)
        })
    })
}

/// As many threads as there are processors, up to where more of them wait for the memory rather than for the kernel.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MAX_THREADS)
}

fn copy_serial(pid: i32, base: u64, ranges: &[Range], mut buffer: &mut [u8]) -> io::Result<()> {
    let mut remote = Vec::with_capacity(IOV_BATCH);
    for batch in ranges.chunks(IOV_BATCH) {
        remote.clear();
        for range in batch {
            let address = usize::try_from(base.saturating_add(range.start)).map_err(io::Error::other)?;
            let len = usize::try_from(range.len).map_err(io::Error::other)?;
            remote.push(libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: len });
        }
        let want = usize::try_from(total(batch)).map_err(io::Error::other)?;
        let target = buffer.split_off_mut(..want).ok_or_else(too_small)?;
        read_process(pid, &mut remote, target)?;
    }
    Ok(())
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

/// Ranges in one `process_vm_readv` (`UIO_MAXIOV` is 1024).
const IOV_BATCH: usize = 1024;
/// Copies smaller than this for each thread are not worth one, bytes.
const PARALLEL: usize = 2 << 20;
/// Most threads of one copy.
const MAX_THREADS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn every_number_of_threads_copies_the_same() {
        let source: Vec<u8> = (0..24u32 << 20).map(|n| u8::try_from((n >> 12) % 251).unwrap()).collect();
        let pid = i32::try_from(std::process::id()).unwrap();
        let base = source.as_ptr().expose_provenance() as u64;
        // Every second half MiB but one, of which there are fewer than a thread gets.
        let ranges: Vec<Range> = (0..23u64).map(|n| Range { start: n << 20, len: 1 << 19 }).collect();
        let expected: Vec<u8> = source.chunks(1 << 20).take(23).flat_map(|mib| &mib[..1 << 19]).copied().collect();
        for threads in 0..6 {
            let mut buffer = vec![0; expected.len()];
            copy(pid, base, &ranges, &mut buffer, threads).unwrap();
            assert!(buffer == expected, "{threads} threads");
            copy(pid, base, &ranges, &mut buffer[1..], threads).unwrap_err();
        }
    }

    #[test]
    fn ranges_outside_of_memory_or_too_long_for_the_arena_are_refused() {
        let memory = SharedMemory::memfd(4096).unwrap();
        let target = Target::new(std::os::fd::AsFd::as_fd(&memory), 4096).unwrap();
        let source = vec![7u8; 8192];
        let pid = i32::try_from(std::process::id()).unwrap();
        let at = (source.as_ptr().expose_provenance() as u64, 8192);
        target.fill(pid, at, &[Range { start: 4096, len: 100 }]).unwrap();
        assert_eq!(target.0.lock().unwrap().bytes()[..101], [&[7u8; 100][..], &[0]].concat());
        target.fill(pid, at, &[Range { start: 8000, len: 200 }]).unwrap_err();
        target.fill(pid, at, &[Range { start: u64::MAX, len: 2 }]).unwrap_err();
        target.fill(pid, at, &[Range { start: 0, len: 4097 }]).unwrap_err();
        let open_ended = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        Target::new(std::os::fd::AsFd::as_fd(&open_ended), 0).unwrap_err();
    }
}
