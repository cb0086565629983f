//! A virtio-serial port as a byte stream.
//!
//! What the kernel does (drivers/char/virtio_console.c): while no host is connected, `read` gives 0, `write` gives
//! EAGAIN and `poll` gives HUP; connecting, disconnecting and data wake the waiters. A HUP is not final, but tokio
//! remembers it for ever, and would spin. So the port is registered, edge-triggered, with an epoll instance of its own, and
//! tokio watches that: an epoll instance is readable while it holds events and never hangs up. With no host the agent
//! sleeps; the next connection's first bytes wake it.
//!
//! The port stays open for the life of the agent: closing it would throw away bytes that are waiting in it.
//! It knows nothing of sessions.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll, Waker, ready},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, epoll},
    fs::{Mode, OFlags},
    io::Errno,
};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd};

const CLASS: &str = "/sys/class/virtio-ports";

/// Finds the device node of a named port: `/dev/vportNpM` of the one whose name is `name`. No udev makes links here.
pub fn find(name: &str) -> io::Result<PathBuf> {
    for entry in fs::read_dir(CLASS)? {
        let entry = entry?;
        if fs::read_to_string(entry.path().join("name")).is_ok_and(|found| found.trim_end() == name) {
            return Ok(Path::new("/dev").join(entry.file_name()));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("no virtio-serial port is named {name}")))
}

/// An open port. Read and written by one task.
#[derive(Debug)]
pub struct PortStream {
    port: OwnedFd,
    /// Watches `port`; see the module.
    events: AsyncFd<OwnedFd>,
    /// Who waits to read, and to write. An event that one of them takes may be the other's.
    reader: Option<Waker>,
    writer: Option<Waker>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Reader,
    Writer,
}

impl PortStream {
    /// Opens a port. Must be called in a tokio runtime.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        Self::from_fd(rustix::fs::open(path, flags, Mode::empty())?)
    }

    /// Takes an open descriptor, which must be non-blocking.
    pub fn from_fd(port: OwnedFd) -> io::Result<Self> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&events, &port, epoll::EventData::new_u64(0), flags)?;
        // SAFETY: an OwnedFd always gives the same descriptor, and keeps it open until it is dropped.
        let events = unsafe { AsyncFd::register_with_interest(events, Interest::READABLE) }.map_err(io::Error::from)?;
        Ok(Self { port, events, reader: None, writer: None })
    }

    /// Waits until there are bytes to read: a host is connected and has begun.
    pub async fn has_data(&mut self) -> io::Result<()> {
        std::future::poll_fn(|cx| {
            self.poll_io(cx, Side::Reader, |port| {
                let events = poll_now(port, PollFlags::IN)?;
                // While no host is connected the port counts as readable, for its end of file.
                if events.contains(PollFlags::IN) && !events.contains(PollFlags::HUP) {
                    Ok(())
                } else {
                    Err(Errno::AGAIN)
                }
            })
        })
        .await
    }

    /// Tries `attempt` until it does not answer EAGAIN, waiting for an event of the port between two attempts.
    fn poll_io<T>(
        &mut self,
        cx: &mut Context<'_>,
        side: Side,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> Poll<io::Result<T>> {
        loop {
            match attempt(self.port.as_fd()) {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {}
                result => return Poll::Ready(Ok(result?)),
            }
            let waiting = match side {
                Side::Reader => &mut self.reader,
                Side::Writer => &mut self.writer,
            };
            *waiting = Some(cx.waker().clone());
            let mut guard = ready!(self.events.poll_read_ready(cx))?;
            // In this order: an event that comes after the wait makes a new readiness, which clearing leaves alone.
            take_events(self.events.get_ref())?;
            guard.clear_ready();
            let other = match side {
                Side::Reader => &mut self.writer,
                Side::Writer => &mut self.reader,
            };
            if let Some(other) = other.take() {
                other.wake();
            }
        }
    }
}

/// Empties the epoll instance.
fn take_events(events: &OwnedFd) -> io::Result<()> {
    let mut buffer: [std::mem::MaybeUninit<epoll::Event>; 4] = [std::mem::MaybeUninit::uninit(); 4];
    match epoll::wait(events, &mut buffer[..], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn poll_now(port: BorrowedFd<'_>, flags: PollFlags) -> rustix::io::Result<PollFlags> {
    let mut fds = [PollFd::from_borrowed_fd(port, flags)];
    rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(fds[0].revents())
}

impl AsyncRead for PortStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let spare = buf.initialize_unfilled();
        let n = ready!(self.poll_io(cx, Side::Reader, |port| rustix::io::read(port, &mut *spare)))?;
        buf.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_io(cx, Side::Writer, |port| match rustix::io::write(port, buf) {
            // The kernel says EAGAIN for a full queue and for no host alike; the second one is the end of the session.
            Err(Errno::AGAIN) if poll_now(port, PollFlags::OUT)?.contains(PollFlags::HUP) => Err(Errno::PIPE),
            result => result,
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write, os::unix::net::UnixStream, time::Duration};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn pair() -> (PortStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (PortStream::from_fd(ours.into()).unwrap(), theirs)
    }

    #[tokio::test]
    async fn data_wakes_a_waiting_reader_every_time() {
        let (mut port, mut peer) = pair();
        let writer = std::thread::spawn(move || {
            for i in 0..200u8 {
                peer.write_all(&[i; 3]).unwrap();
                if i % 8 == 0 {
                    #[expect(clippy::disallowed_methods, reason = "a thread of the test's own")]
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            peer
        });
        let mut got = vec![0; 600];
        port.has_data().await.unwrap();
        tokio::time::timeout(Duration::from_secs(5), port.read_exact(&mut got)).await.unwrap().unwrap();
        assert!(got.chunks(3).enumerate().all(|(i, chunk)| chunk.iter().all(|&b| usize::from(b) == i)));
        drop(writer.join().unwrap());
        assert_eq!(port.read(&mut got).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_reader_and_a_writer_that_wait_both_go_on() {
        let (port, peer) = pair();
        peer.set_nonblocking(true).unwrap();
        let peer = tokio::net::UnixStream::from_std(peer).unwrap();
        let (mut peer_read, mut peer_write) = peer.into_split();
        const SIZE: usize = 4 << 20;
        let echo = async move {
            let mut port = port;
            tokio::io::copy(&mut { Duplex(&mut port) }, &mut tokio::io::sink()).await.unwrap();
        };
        let send = async move {
            let mut sent = 0;
            while sent < SIZE {
                peer_write.write_all(&[7; 4096]).await.unwrap();
                sent += 4096;
            }
            peer_write.shutdown().await.unwrap();
        };
        let receive = async move {
            let mut all = Vec::new();
            peer_read.read_to_end(&mut all).await.unwrap();
            assert_eq!(all.len(), SIZE);
            assert!(all.iter().all(|&b| b == 7));
        };
        tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(echo, send, receive) }).await.unwrap();
    }

    /// Reads from the port and writes what it read back, before it reads more.
    struct Duplex<'a>(&'a mut PortStream);

    impl AsyncRead for Duplex<'_> {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            ready!(Pin::new(&mut *self.0).poll_read(cx, buf))?;
            let mut back = buf.filled().to_vec();
            while !back.is_empty() {
                match Pin::new(&mut *self.0).poll_write(cx, &back) {
                    Poll::Ready(n) => drop(back.drain(..n?)),
                    Poll::Pending => std::thread::yield_now(),
                }
            }
            Poll::Ready(Ok(()))
        }
    }
}
