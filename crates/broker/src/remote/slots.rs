//! The network of the privileged half.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use coppice_net::{Counters, Egress, NetError, Opening, Seat, Slot, SlotRecord, Slots};

use crate::client::{Broker, CallError};
use crate::failure::chain;
use crate::message::{Answer, Request, SlotsRequest, encode};

/// Parts of long lists are about this long, bytes; far below the longest message.
const PART: usize = 256 << 10;
/// Openings in one message.
const OPENINGS: usize = 1024;

/// [`Slots`] of the other half of this program.
#[derive(Debug, Clone)]
pub struct RemoteSlots {
    broker: Broker,
}

impl RemoteSlots {
    /// Those of a broker.
    #[must_use]
    pub fn new(broker: Broker) -> Self {
        Self { broker }
    }

    fn call(&self, request: SlotsRequest) -> Result<(Answer, Vec<OwnedFd>), NetError> {
        Ok(self.broker.call(&Request::Slots(request), &[])?)
    }

    fn slot(&self, request: SlotsRequest) -> Result<Slot, NetError> {
        let (answer, fds) = self.call(request)?;
        match (answer, <[OwnedFd; 1]>::try_from(fds)) {
            (Answer::Slot { index, seat, mac, address }, Ok([tap])) => {
                Ok(Slot { index, seat, mac, address, tap: Arc::new(tap) })
            }
            _ => Err(mixed()),
        }
    }

    fn done(&self, request: SlotsRequest) -> Result<(), NetError> {
        Ok(self.broker.done(&Request::Slots(request), &[])?)
    }
}

impl From<CallError> for NetError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Failed(failure) => failure.into(),
            error => Self::Remote { message: chain(&error) },
        }
    }
}

fn mixed() -> NetError {
    CallError::Mixed.into()
}

impl Slots for RemoteSlots {
    fn reclaim(&self, keep: &[SlotRecord]) -> Result<(), NetError> {
        let mut parts: Vec<Vec<SlotRecord>> = vec![Vec::new()];
        let mut room = PART;
        for record in keep {
            let size = encode(record).map_err(CallError::from)?.len();
            if size > room {
                parts.push(Vec::new());
                room = PART;
            }
            room = room.saturating_sub(size);
            if let Some(part) = parts.last_mut() {
                part.push(record.clone());
            }
        }
        let last = parts.len() - 1;
        let requests = parts
            .into_iter()
            .enumerate()
            .map(|(number, keep)| Request::Slots(SlotsRequest::Reclaim { keep, more: number < last }));
        Ok(self.broker.sequence(requests)?)
    }

    fn take(&self, egress: &Egress) -> Result<Slot, NetError> {
        self.slot(SlotsRequest::Take(egress.clone()))
    }

    fn reseat(&self, index: u32) -> Result<Slot, NetError> {
        self.slot(SlotsRequest::Reseat(index))
    }

    fn unseat(&self, index: u32, seat: Seat) -> Result<(), NetError> {
        self.done(SlotsRequest::Unseat(index, seat))
    }

    fn put(&self, index: u32) -> Result<(), NetError> {
        self.done(SlotsRequest::Put(index))
    }

    fn set_egress(&self, index: u32, egress: &Egress) -> Result<(), NetError> {
        self.done(SlotsRequest::SetEgress(index, egress.clone()))
    }

    fn open_names(&self, index: u32, openings: &[Opening]) -> Result<(), NetError> {
        openings.chunks(OPENINGS).try_for_each(|part| self.done(SlotsRequest::OpenNames(index, part.to_vec())))
    }

    fn guest_socket(&self) -> Result<OwnedFd, NetError> {
        let (answer, fds) = self.call(SlotsRequest::GuestSocket)?;
        match (answer, <[OwnedFd; 1]>::try_from(fds)) {
            (Answer::Done, Ok([socket])) => Ok(socket),
            _ => Err(mixed()),
        }
    }

    fn dns_sockets(&self) -> Result<(OwnedFd, OwnedFd), NetError> {
        let (answer, fds) = self.call(SlotsRequest::DnsSockets)?;
        match (answer, <[OwnedFd; 2]>::try_from(fds)) {
            (Answer::Done, Ok([udp, tcp])) => Ok((udp, tcp)),
            _ => Err(mixed()),
        }
    }

    fn counters(&self) -> Result<Counters, NetError> {
        match self.call(SlotsRequest::Counters)? {
            (Answer::Counters(counters), _) => Ok(counters),
            _ => Err(mixed()),
        }
    }

    /// Nothing taken of nothing when the other half is gone: this one ends then, too.
    fn capacity(&self) -> (u32, u32) {
        match self.call(SlotsRequest::Capacity) {
            Ok((Answer::Capacity(taken, limit), _)) => (taken, limit),
            Ok(_) => (0, 0),
            Err(error) => {
                tracing::warn!(%error, "the number of network slots is not known");
                (0, 0)
            }
        }
    }

    fn close(&self) -> Result<(), NetError> {
        self.done(SlotsRequest::Close)
    }
}
