//! Memory that captured pages are staged in: made before the pause, recycled between captures, bounded.
//!
//! It is shared with the privileged side, which copies into it. Making a fresh page costs ten times as much as copying into one that is there, so buffers are populated before a machine
//! is stopped and kept for a while afterwards. What does not fit the bound is staged in several rounds (`capture.rs`).

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::privileged::{ArenaId, Privileged};
use crate::shared_memory::SharedMemory;

/// Unit in which the bound is counted, bytes.
const UNIT: u64 = 1 << 20;
/// How long an unused buffer is kept.
const KEEP: Duration = Duration::from_secs(30);
/// Most bytes of unused buffers that are kept.
const KEEP_BYTES: usize = 512 << 20;

/// One mapping of ours, known to the privileged side, which fills it.
#[derive(Debug)]
struct Buffer {
    memory: SharedMemory,
    id: ArenaId,
    privileged: Arc<dyn Privileged>,
}

impl Buffer {
    fn new(privileged: Arc<dyn Privileged>, len: usize) -> io::Result<Self> {
        let bytes = u64::try_from(len).map_err(io::Error::other)?;
        let fd = SharedMemory::memfd(bytes)?;
        // The privileged side makes the pages.
        let memory = SharedMemory::map(fd.as_fd(), len, false)?;
        let id = privileged.register_arena(fd.as_fd(), bytes)?;
        Ok(Self { memory, id, privileged })
    }

    fn len(&self) -> usize {
        self.memory.len()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Err(error) = self.privileged.drop_arena(self.id) {
            tracing::warn!(%error, "a staging buffer was not unmapped on the privileged side");
        }
    }
}

/// Hands out buffers.
#[derive(Debug, Clone)]
pub(crate) struct ArenaPool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    privileged: Arc<dyn Privileged>,
    idle: Mutex<Vec<(u64, Buffer)>>,
    tickets: std::sync::atomic::AtomicU64,
    units: Arc<Semaphore>,
    limit: u64,
}

/// A buffer in use; goes back when dropped.
#[derive(Debug)]
pub(crate) struct Arena {
    buffer: Option<Buffer>,
    pool: ArenaPool,
    _permit: OwnedSemaphorePermit,
}

impl ArenaPool {
    /// At most `limit` bytes are in use at once.
    pub fn new(privileged: Arc<dyn Privileged>, limit: u64) -> Self {
        let units = u32::try_from(limit.div_ceil(UNIT)).unwrap_or(u32::MAX).max(1);
        Self {
            inner: Arc::new(Inner {
                privileged,
                idle: Mutex::default(),
                tickets: std::sync::atomic::AtomicU64::new(0),
                units: Arc::new(Semaphore::new(usize::try_from(units).unwrap_or(1))),
                limit: u64::from(units) * UNIT,
            }),
        }
    }

    /// Waits for its turn, and answers with a buffer of `want` bytes, or of the limit when that is less.
    pub async fn take(&self, want: u64) -> io::Result<Arena> {
        let units = want.min(self.inner.limit).div_ceil(UNIT).max(1);
        let permits = u32::try_from(units).map_err(io::Error::other)?;
        let permit = Arc::clone(&self.inner.units).acquire_many_owned(permits).await.map_err(io::Error::other)?;
        let len = usize::try_from(units * UNIT).map_err(io::Error::other)?;
        let buffer = match self.recycle(len) {
            Some(buffer) => buffer,
            None => {
                let privileged = Arc::clone(&self.inner.privileged);
                tokio::task::spawn_blocking(move || Buffer::new(privileged, len)).await.map_err(io::Error::other)??
            }
        };
        Ok(Arena { buffer: Some(buffer), pool: self.clone(), _permit: permit })
    }

    /// The smallest unused buffer that is large enough, unless it is far too large.
    fn recycle(&self, len: usize) -> Option<Buffer> {
        let mut idle = self.inner.idle.lock().ok()?;
        let fits = |buffer: &Buffer| buffer.len() >= len && buffer.len() / 4 <= len;
        let (at, _) = idle.iter().enumerate().filter(|(_, (_, b))| fits(b)).min_by_key(|(_, (_, b))| b.len())?;
        Some(idle.swap_remove(at).1)
    }

    fn put_back(&self, buffer: Buffer) {
        let ticket = self.inner.tickets.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // Outside of a runtime nobody would come to remove it.
        let (Ok(mut idle), Ok(runtime)) = (self.inner.idle.lock(), tokio::runtime::Handle::try_current()) else {
            return;
        };
        if idle.iter().map(|(_, b)| b.len()).sum::<usize>().saturating_add(buffer.len()) > KEEP_BYTES {
            return;
        }
        idle.push((ticket, buffer));
        let pool = Arc::downgrade(&self.inner);
        runtime.spawn(async move {
            tokio::time::sleep(KEEP).await;
            if let Some(pool) = pool.upgrade()
                && let Ok(mut idle) = pool.idle.lock()
            {
                idle.retain(|(t, _)| *t != ticket);
            }
        });
    }
}

impl Arena {
    /// Bytes that fit.
    pub fn len(&self) -> usize {
        self.buffer.as_ref().map_or(0, Buffer::len)
    }

    /// Its name on the privileged side.
    pub fn id(&self) -> ArenaId {
        // There is a buffer until this is dropped; no arena has the last number.
        self.buffer.as_ref().map_or(ArenaId(u64::MAX), |buffer| buffer.id)
    }

    /// The memory. What it holds is left over from earlier captures.
    pub fn bytes(&mut self) -> &mut [u8] {
        self.buffer.as_mut().map_or(&mut [], |buffer| buffer.memory.bytes())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.put_back(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::privileged::Local;

    #[tokio::test]
    async fn buffers_are_recycled_bounded_and_not_handed_out_twice() {
        let pool = ArenaPool::new(Arc::new(Local::unjailed().unwrap()), 8 << 20);
        let mut first = pool.take(3 << 20).await.unwrap();
        assert_eq!(first.len(), 3 << 20);
        first.bytes().fill(1);
        let address = first.bytes().as_ptr();
        drop(first);
        let mut second = pool.take(2 << 20).await.unwrap();
        assert_eq!(second.bytes().as_ptr(), address);
        let mut third = pool.take(2 << 20).await.unwrap();
        assert_ne!(third.bytes().as_ptr(), address);
        let waits = tokio::time::timeout(Duration::from_millis(20), pool.take(5 << 20)).await;
        assert!(waits.is_err());
        drop((second, third));
        assert_eq!(pool.take(1 << 40).await.unwrap().len(), 8 << 20);
    }
}
