//! The second seat of a slot: how a machine takes the place of another one without a packet of either's being the other's.
//!
//! Each seat has a TAP of its own, so that nothing a VMM does to its device as it starts touches the other's. The rules let both
//! send in the slot's name; which of the two gets what comes for it is one route, which is changed last: what a successor
//! that fails had received and acknowledged would be lost to the machine that goes on. It does not know of machines: who
//! calls it sees to it that never more than one of them runs.

use std::sync::Arc;

use super::Shared;
use super::keeper::{connect, make_tap, remove_links};
use super::pool::Beside;
use crate::error::NetError;
use crate::rules::{Batch, Identity};
use crate::slots::{Seat, Slot};

impl Shared {
    /// Makes the other seat. Nobody else changes rules or links of slots meanwhile.
    pub(super) fn reseat(&self, index: u32) -> Result<Slot, NetError> {
        let _turn = self.turn();
        let next = {
            let pool = self.pool();
            pool.running()?;
            let made = pool.taken(index).ok_or(NetError::UnknownSlot { index })?;
            if made.beside.is_some() {
                return Err(NetError::Seats { index });
            }
            Identity { seat: made.identity.seat.other(), ..made.identity }
        };
        // On an error the descriptor is closed, and with it its link goes.
        let tap = Arc::new(self.links.run(move |links| make_tap(links, &next))?);
        let mut batch = Batch::default();
        batch.identity("add", &next);
        self.apply("adding a seat", batch)?;
        if let Some(made) = self.pool().changed(index) {
            made.beside = Some(Beside { seat: next.seat, tap: Arc::clone(&tap) });
        }
        Ok(Slot { index, seat: next.seat, mac: next.mac, address: next.address, tap })
    }

    /// Leads to the other seat, if that is not so, and takes this one away: its link first, so that what was on its way finds the old rules until
    /// it finds no link.
    pub(super) fn unseat(&self, index: u32, seat: Seat) -> Result<(), NetError> {
        let _turn = self.turn();
        let (stays, goes, leads) = {
            let pool = self.pool();
            pool.running()?;
            let Some(made) = pool.taken(index).filter(|made| made.beside.is_some()) else { return Ok(()) };
            let at = |seat| Identity { seat, ..made.identity };
            (at(seat.other()), at(seat), made.identity.seat != seat)
        };
        self.links.run(move |links| {
            if !leads {
                connect(links, &stays)?;
            }
            remove_links(links, vec![goes.tap_name()])
        })?;
        let mut batch = Batch::default();
        batch.identity("delete", &goes);
        self.apply("removing a seat", batch)?;
        if let Some(made) = self.pool().changed(index) {
            made.unseat(seat);
        }
        Ok(())
    }
}
