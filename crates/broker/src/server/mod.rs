//! The privileged half's end: a thread for each connection, no runtime, every request checked before it is done.

mod machines;
mod slots;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use coppice_engine::{Privileged, Range};
use coppice_net::{SlotRecord, Slots};

use crate::check;
use crate::client::MAX_CONNECTIONS;
use crate::failure::{Failure, io_failure};
use crate::frame::{self, Frame, FrameError};
use crate::message::{Answer, Reply, Request, VERSION, decode, encode};

/// The privileged half: what it does for the other one.
#[derive(Debug)]
pub struct Server {
    slots: slots::Places,
    machines: machines::Machines,
    connections: AtomicUsize,
}

/// An answer with its descriptors.
type Answered = Result<(Answer, Vec<Arc<OwnedFd>>), Failure>;

/// What one connection remembers between two requests.
#[derive(Debug, Default)]
struct Memory {
    /// Parts of a list that is longer than one message.
    keep: Vec<SlotRecord>,
    ranges: Vec<Range>,
}

impl Server {
    /// Serves these.
    #[must_use]
    pub fn new(privileged: Arc<dyn Privileged>, slots: Arc<dyn Slots>) -> Arc<Self> {
        let slots = slots::Places::new(slots);
        Arc::new(Self { slots, machines: machines::Machines::new(privileged), connections: AtomicUsize::new(0) })
    }

    /// Serves the other half on `first` and on the connections that it makes, until it is gone. `gifts` are descriptors
    /// that it gets with its first answer.
    ///
    /// # Errors
    /// When what came on the first connection is nothing that the other half says.
    pub fn serve(self: &Arc<Self>, first: &UnixStream, gifts: Vec<OwnedFd>) -> io::Result<()> {
        let mut gifts = Some(gifts.into_iter().map(Arc::new).collect());
        let end = loop {
            let frame = match frame::receive(first) {
                Ok(frame) => frame,
                Err(error) => break error,
            };
            let answered = match decode(&frame.message) {
                Ok(Request::Hello { version: VERSION }) => match gifts.take() {
                    Some(gifts) => Ok((Answer::Done, gifts)),
                    None => Err(check::refused("it was greeted already")),
                },
                Ok(Request::Hello { .. }) => Err(check::refused("the program was replaced while it started")),
                Ok(Request::Connect) if gifts.is_none() => self.connect(frame.fds),
                Ok(_) => Err(check::refused("not on this connection")),
                Err(error) => break error,
            };
            if let Err(error) = answer(first, answered) {
                break error;
            }
        };
        match end {
            FrameError::Closed | FrameError::Io(_) => Ok(()),
            error @ FrameError::Malformed(_) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        }
    }

    fn connect(self: &Arc<Self>, fds: Vec<OwnedFd>) -> Answered {
        let [fd] = check::exactly(fds)?;
        check::stream_socket(&fd)?;
        let stream = UnixStream::from(fd);
        stream.set_nonblocking(false).map_err(|error| io_failure(&error))?;
        let place = Place::take(self).ok_or_else(|| check::refused("there are too many connections"))?;
        let server = Arc::clone(self);
        let serving = std::thread::Builder::new().name("broker".into()).spawn(move || {
            let _place = place;
            server.converse(&stream);
        });
        match serving {
            Ok(_detached) => Ok((Answer::Done, Vec::new())),
            Err(error) => Err(io_failure(&error)),
        }
    }

    /// One connection to its end.
    fn converse(&self, stream: &UnixStream) {
        let mut memory = Memory::default();
        let end = loop {
            let outcome = frame::receive(stream)
                .and_then(|frame| self.answer_to(frame, &mut memory))
                .and_then(|answered| answer(stream, answered));
            if let Err(error) = outcome {
                break error;
            }
        };
        if let FrameError::Malformed(_) = end {
            tracing::warn!(error = %end, "the unprivileged half said something that is not understood");
        }
    }

    fn answer_to(&self, frame: Frame, memory: &mut Memory) -> Result<Answered, FrameError> {
        Ok(match decode(&frame.message)? {
            Request::Slots(request) => match check::exactly(frame.fds) {
                Ok([]) => self.slots.answer(request, &mut memory.keep),
                Err(refused) => Err(refused),
            },
            Request::Machine(request) => self.machines.answer(request, frame.fds, &mut memory.ranges, &self.slots),
            Request::Hello { .. } | Request::Connect => Err(check::refused("not on this connection")),
        })
    }
}

fn answer(stream: &UnixStream, answered: Answered) -> Result<(), FrameError> {
    let (reply, fds): (Reply, Vec<Arc<OwnedFd>>) = match answered {
        Ok((answer, fds)) => (Ok(answer), fds),
        Err(failure) => (Err(failure), Vec::new()),
    };
    let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    frame::send(stream, &encode(&reply)?, &borrowed)
}

/// Counts a connection while it lives.
struct Place(Arc<Server>);

impl Place {
    fn take(server: &Arc<Server>) -> Option<Self> {
        let before = server.connections.fetch_add(1, Ordering::Relaxed);
        let place = Self(Arc::clone(server));
        (before < MAX_CONNECTIONS).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}
