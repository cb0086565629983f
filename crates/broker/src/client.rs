//! The unprivileged half's end: calls, each on a connection of its own while it lasts.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};

use crate::failure::Failure;
use crate::frame::{self, FrameError};
use crate::message::{Answer, Reply, Request, VERSION, decode, encode};

/// Most connections, and so most calls at the same time; further ones wait.
pub(crate) const MAX_CONNECTIONS: usize = 32;

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The call did not get through, or no answer came back.
    #[error("the privileged half of coppice can't be reached")]
    Frame(#[from] FrameError),
    /// It was answered with an error.
    #[error("{0:?}")]
    Failed(Failure),
    /// It was answered with something that is no answer to it.
    #[error("the privileged half of coppice gave an answer to another question")]
    Mixed,
}

/// The privileged half of this program, as the other half sees it. Cheap to clone. Calls block.
#[derive(Debug, Clone)]
pub struct Broker {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// The first connection: it makes further ones, and its end is the end of the privileged half.
    first: Mutex<UnixStream>,
    /// The same socket, to wait for its end while it is in use.
    lifeline: UnixStream,
    pool: Mutex<Pool>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Pool {
    idle: Vec<UnixStream>,
    /// Idle and in use.
    open: usize,
}

/// What the privileged half opened before this half began.
#[derive(Debug)]
pub struct Inherited {
    /// The descriptors, in the order in which they were given to [`crate::Server`].
    pub fds: Vec<OwnedFd>,
}

impl Broker {
    /// Introduces itself on the first connection.
    ///
    /// # Errors
    /// When the other side is no privileged half of the same version.
    pub fn connect(first: UnixStream) -> io::Result<(Self, Inherited)> {
        first.set_nonblocking(false)?;
        let (answer, fds) = exchange(&first, &Request::Hello { version: VERSION }, &[]).map_err(io::Error::other)?;
        let Answer::Done = answer else { return Err(io::Error::other(CallError::Mixed)) };
        let lifeline = first.try_clone()?;
        let shared = Shared { first: Mutex::new(first), lifeline, pool: Mutex::default(), returned: Condvar::new() };
        Ok((Self { shared: Arc::new(shared) }, Inherited { fds }))
    }

    /// Waits until the privileged half is gone. For a thread of its own.
    pub fn wait_for_end(&self) {
        loop {
            // A hang-up is always told; nothing else is waited for.
            let mut fds = [PollFd::new(&self.shared.lifeline, PollFlags::RDHUP)];
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => {}
                _ => return,
            }
        }
    }

    /// One call.
    pub(crate) fn call(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(Answer, Vec<OwnedFd>), CallError> {
        let mut lease = self.lease()?;
        let outcome = match &lease.socket {
            Some(socket) => exchange(socket, request, fds),
            None => Err(FrameError::Closed.into()),
        };
        if matches!(outcome, Err(CallError::Frame(_))) {
            // Out of step: not for another call.
            lease.socket = None;
        }
        outcome
    }

    /// One call that is answered with no more than that it was done.
    pub(crate) fn done(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), CallError> {
        match self.call(request, fds)? {
            (Answer::Done, fds) if fds.is_empty() => Ok(()),
            _ => Err(CallError::Mixed),
        }
    }

    /// Several calls, one after the other, which the other side takes as one.
    pub(crate) fn sequence(&self, requests: impl Iterator<Item = Request>) -> Result<(), CallError> {
        let mut lease = self.lease()?;
        for request in requests {
            let outcome = match &lease.socket {
                Some(socket) => exchange(socket, &request, &[]),
                None => Err(FrameError::Closed.into()),
            };
            match outcome {
                Ok((Answer::Done, _)) => {}
                Ok(_) => return Err(CallError::Mixed),
                Err(error) => {
                    // What was said so far must not be the beginning of somebody else's sequence.
                    lease.socket = None;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn lease(&self) -> Result<Lease<'_>, CallError> {
        let mut pool = lock(&self.shared.pool);
        loop {
            if let Some(socket) = pool.idle.pop() {
                return Ok(Lease { shared: &self.shared, socket: Some(socket) });
            }
            if pool.open < MAX_CONNECTIONS {
                pool.open += 1;
                break;
            }
            pool = self.shared.returned.wait(pool).unwrap_or_else(PoisonError::into_inner);
        }
        drop(pool);
        let mut lease = Lease { shared: &self.shared, socket: None };
        lease.socket = Some(self.open()?);
        Ok(lease)
    }

    #[cfg(test)]
    pub(crate) fn first(&self) -> &Mutex<UnixStream> {
        &self.shared.first
    }

    /// Makes a connection.
    pub(crate) fn open(&self) -> Result<UnixStream, CallError> {
        let (ours, theirs) = UnixStream::pair().map_err(FrameError::Io)?;
        match exchange(&lock(&self.shared.first), &Request::Connect, &[theirs.as_fd()])? {
            (Answer::Done, fds) if fds.is_empty() => Ok(ours),
            _ => Err(CallError::Mixed),
        }
    }
}

/// A connection in use; goes back when dropped, if it is still there.
struct Lease<'a> {
    shared: &'a Shared,
    socket: Option<UnixStream>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let mut pool = lock(&self.shared.pool);
        match self.socket.take() {
            Some(socket) => pool.idle.push(socket),
            None => pool.open -= 1,
        }
        drop(pool);
        self.shared.returned.notify_one();
    }
}

fn exchange(
    socket: &UnixStream,
    request: &Request,
    fds: &[BorrowedFd<'_>],
) -> Result<(Answer, Vec<OwnedFd>), CallError> {
    frame::send(socket, &encode(request)?, fds)?;
    let frame = frame::receive(socket)?;
    match decode::<Reply>(&frame.message)? {
        Ok(answer) => Ok((answer, frame.fds)),
        Err(failure) => Err(CallError::Failed(failure)),
    }
}

/// Nothing behind a lock of this crate can be left half-changed by a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
