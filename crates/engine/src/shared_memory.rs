//! Memory that two processes share: a memfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// One mapping.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    address: *mut u8,
    len: usize,
}

// SAFETY: the mapping is owned by this value alone and not tied to a thread.
unsafe impl Send for SharedMemory {}
// SAFETY: a shared reference gives no access to the memory.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// A new memfd of `len` bytes that can't change its size any more.
    pub fn memfd(len: u64) -> io::Result<OwnedFd> {
        let fd = rustix::fs::memfd_create("coppice-arena", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, len)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(fd)
    }

    /// Maps the first `len` bytes of a memfd that is at least as long and can't shrink. With all of its pages made, for who
    /// writes in a hurry; who only reads later maps what is there as it comes.
    pub fn map(memory: BorrowedFd<'_>, len: usize, populate: bool) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let address = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, memory.as_fd(), 0)? };
        let this = Self { address: address.cast(), len };
        // SAFETY: the range is exactly the new mapping; none of these calls changes what is in it. A child between fork and
        // exec needs no page tables for it; huge pages make populating and copying cheaper where the system gives them.
        unsafe {
            for advice in [Advice::LinuxHugepage, Advice::LinuxDontFork, Advice::LinuxDontDump] {
                if let Err(error) = madvise(address, len, advice) {
                    tracing::debug!(%error, ?advice, "advice for staging memory was not taken");
                }
            }
            if populate
                && let Err(errno) = madvise(address, len, Advice::LinuxPopulateWrite)
                && errno != rustix::io::Errno::INVAL
            {
                return Err(errno.into());
            }
        }
        Ok(this)
    }

    /// Its length, bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The memory. What it holds is whatever was put there, also by the other process: bytes without any meaning of their
    /// own, which the other side leaves alone while this one reads them.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length, is initialized (the kernel zeroes it), and is borrowed exclusively through
        // `self`. The other process writes only on this side's request, which is never made while the borrow lives.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping and nobody else refers to it.
        if let Err(error) = unsafe { munmap(self.address.cast(), self.len) } {
            tracing::warn!(%error, "staging memory was not unmapped");
        }
    }
}
