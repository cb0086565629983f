//! Requests about the network.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use coppice_engine::JailSlot;
use coppice_net::{Egress, MAX_ALLOWED, MAX_SLOTS, NetError, Seat, Slot, SlotRecord, Slots};

use super::Answered;
use crate::check;
use crate::client::lock;
use crate::failure::{Failure, NetFailure};
use crate::message::{Answer, SlotsRequest};

/// The network, and which places on it were taken here: a VMM gets its own and no other.
#[derive(Debug)]
pub(super) struct Places {
    slots: Arc<dyn Slots>,
    taken: Mutex<HashMap<(u32, Seat), Place>>,
}

/// What a seat of a taken slot is on the wire.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub mac: [u8; 6],
    pub tap: Arc<OwnedFd>,
}

impl Places {
    pub fn new(slots: Arc<dyn Slots>) -> Self {
        Self { slots, taken: Mutex::default() }
    }

    /// Of a seat that was made here and not given back.
    pub fn get(&self, jail: JailSlot) -> Option<Place> {
        lock(&self.taken).get(&jail.place()?).cloned()
    }

    fn give(&self, slot: Slot) -> (Answer, Vec<Arc<OwnedFd>>) {
        let Slot { index, seat, mac, address, tap } = slot;
        lock(&self.taken).insert((index, seat), Place { mac, tap: Arc::clone(&tap) });
        (Answer::Slot { index, seat, mac, address }, vec![tap])
    }

    /// Does what was asked for. `kept` is what earlier parts of a list brought on the same connection.
    pub fn answer(&self, request: SlotsRequest, kept: &mut Vec<SlotRecord>) -> Answered {
        let slots = &self.slots;
        let none = |done: Result<(), NetError>| done.map(|()| (Answer::Done, Vec::new()));
        let outcome = match request {
            SlotsRequest::Reclaim { keep, more } => {
                check::at_most("records", kept.len() + keep.len(), check::MAX_RECORDS)?;
                kept.extend(keep);
                if more { none(Ok(())) } else { none(slots.reclaim(&std::mem::take(kept))) }
            }
            SlotsRequest::Take(egress) => slots.take(policy(&egress)?).map(|slot| {
                coppice_fault::point!("slot.taken");
                self.give(slot)
            }),
            SlotsRequest::Put(index) => {
                // Before it can be somebody else's.
                lock(&self.taken).retain(|(taken, _), _| *taken != index);
                let put = slots.put(checked(index)?);
                coppice_fault::point!("slot.given-back");
                none(put)
            }
            SlotsRequest::Reseat(index) => slots.reseat(checked(index)?).map(|slot| self.give(slot)),
            SlotsRequest::Unseat(index, seat) => {
                let done = slots.unseat(checked(index)?, seat);
                if done.is_ok() {
                    lock(&self.taken).remove(&(index, seat));
                }
                none(done)
            }
            SlotsRequest::SetEgress(index, egress) => none(slots.set_egress(checked(index)?, policy(&egress)?)),
            SlotsRequest::OpenNames(index, openings) => none(slots.open_names(checked(index)?, &openings)),
            SlotsRequest::GuestSocket => slots.guest_socket().map(|fd| (Answer::Done, vec![Arc::new(fd)])),
            SlotsRequest::DnsSockets => {
                slots.dns_sockets().map(|(udp, tcp)| (Answer::Done, vec![Arc::new(udp), Arc::new(tcp)]))
            }
            SlotsRequest::Counters => slots.counters().map(|counters| (Answer::Counters(counters), Vec::new())),
            SlotsRequest::Capacity => {
                let (taken, limit) = slots.capacity();
                Ok((Answer::Capacity(taken, limit), Vec::new()))
            }
            SlotsRequest::Close => none(slots.close()),
        };
        outcome.map_err(|error| Failure::Net(NetFailure::from(&error)))
    }
}

fn checked(index: u32) -> Result<u32, Failure> {
    if index < MAX_SLOTS { Ok(index) } else { Err(check::refused("there is no such slot")) }
}

fn policy(egress: &Egress) -> Result<&Egress, Failure> {
    if let Egress::Allow(allowed) = egress {
        check::at_most("entries", allowed.len(), MAX_ALLOWED)?;
    }
    Ok(egress)
}
