//! The policies in force, kept in step with the slots.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::policy::{Directory, OpenError, Policy};
use crate::egress::Egress;
use crate::error::NetError;
use crate::slots::{Counters, Opening, Seat, Slot, SlotRecord, Slots};

/// [`Slots`] that remembers which policy each slot has, so that it can tell the DNS proxy.
///
/// Everything that changes a slot goes through it. A name that was allowed by a policy opens nothing once that policy was
/// replaced or the slot given back: per slot, opening and changing exclude each other.
#[derive(Debug)]
pub struct TrackedSlots {
    slots: Arc<dyn Slots>,
    cells: RwLock<HashMap<u32, Arc<Cell>>>,
}

/// One slot. Lock order: `gate`, then `policy`.
#[derive(Debug, Default)]
struct Cell {
    /// Held for as long as something is done to the slot.
    gate: Mutex<()>,
    /// Held for a moment only, because the proxy reads it for every packet.
    policy: Mutex<Option<Arc<Policy>>>,
}

impl Cell {
    fn get(&self) -> Option<Arc<Policy>> {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, policy: Option<Arc<Policy>>) {
        *self.policy.lock().unwrap_or_else(PoisonError::into_inner) = policy;
    }
}

impl TrackedSlots {
    /// Slots, none of which is taken or reclaimed yet.
    #[must_use]
    pub fn new(slots: Arc<dyn Slots>) -> Arc<Self> {
        Arc::new(Self { slots, cells: RwLock::default() })
    }

    fn known(&self, index: u32) -> Option<Arc<Cell>> {
        self.cells.read().unwrap_or_else(PoisonError::into_inner).get(&index).cloned()
    }

    fn cell(&self, index: u32) -> Arc<Cell> {
        if let Some(cell) = self.known(index) {
            return cell;
        }
        // Cells stay: there are no more of them than slots.
        Arc::clone(self.cells.write().unwrap_or_else(PoisonError::into_inner).entry(index).or_default())
    }
}

impl Directory for TrackedSlots {
    fn policy(&self, guest: Ipv4Addr) -> Option<Arc<Policy>> {
        self.known(self.slots.slot_of(guest)?)?.get()
    }

    fn open_names(&self, policy: &Arc<Policy>, openings: &[Opening]) -> Result<(), OpenError> {
        let cell = self.known(policy.slot()).ok_or(OpenError::Stale)?;
        let _gate = cell.gate.lock().unwrap_or_else(PoisonError::into_inner);
        if !cell.get().is_some_and(|current| Arc::ptr_eq(&current, policy)) {
            return Err(OpenError::Stale);
        }
        Ok(self.slots.open_names(policy.slot(), openings)?)
    }
}

impl Slots for TrackedSlots {
    fn reclaim(&self, keep: &[SlotRecord]) -> Result<(), NetError> {
        self.slots.reclaim(keep)?;
        for record in keep {
            self.cell(record.index).set(Some(Policy::new(record.index, record.egress.clone())));
        }
        Ok(())
    }

    fn take(&self, egress: &Egress) -> Result<Slot, NetError> {
        let slot = self.slots.take(egress)?;
        self.cell(slot.index).set(Some(Policy::new(slot.index, egress.clone())));
        Ok(slot)
    }

    fn put(&self, index: u32) -> Result<(), NetError> {
        let cell = self.cell(index);
        let _gate = cell.gate.lock().unwrap_or_else(PoisonError::into_inner);
        // First: a slot that is free may have a new owner at once.
        cell.set(None);
        self.slots.put(index)
    }

    fn set_egress(&self, index: u32, egress: &Egress) -> Result<(), NetError> {
        let cell = self.cell(index);
        let _gate = cell.gate.lock().unwrap_or_else(PoisonError::into_inner);
        self.slots.set_egress(index, egress)?;
        cell.set(Some(Policy::new(index, egress.clone())));
        Ok(())
    }

    // The policy is the slot's, whoever sits there.
    fn reseat(&self, index: u32) -> Result<Slot, NetError> {
        self.slots.reseat(index)
    }

    fn unseat(&self, index: u32, seat: Seat) -> Result<(), NetError> {
        self.slots.unseat(index, seat)
    }

    fn open_names(&self, index: u32, openings: &[Opening]) -> Result<(), NetError> {
        self.slots.open_names(index, openings)
    }

    fn guest_socket(&self) -> Result<OwnedFd, NetError> {
        self.slots.guest_socket()
    }

    fn dns_sockets(&self) -> Result<(OwnedFd, OwnedFd), NetError> {
        self.slots.dns_sockets()
    }

    fn counters(&self) -> Result<Counters, NetError> {
        self.slots.counters()
    }

    fn slot_of(&self, address: Ipv4Addr) -> Option<u32> {
        self.slots.slot_of(address)
    }

    fn capacity(&self) -> (u32, u32) {
        self.slots.capacity()
    }

    fn close(&self) -> Result<(), NetError> {
        self.slots.close()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::slots::address_of;

    /// Slots that only count.
    #[derive(Debug, Default)]
    struct Plain {
        log: Mutex<Vec<String>>,
        refuse: Mutex<bool>,
    }

    impl Plain {
        fn note(&self, what: String) -> Result<(), NetError> {
            if *self.refuse.lock().unwrap() {
                return Err(NetError::Closed);
            }
            self.log.lock().unwrap().push(what);
            Ok(())
        }

        fn slot(index: u32, seat: Seat) -> Slot {
            let tap = Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
            Slot { index, seat, mac: [0; 6], address: address_of(index).unwrap(), tap }
        }
    }

    impl Slots for Plain {
        fn reclaim(&self, keep: &[SlotRecord]) -> Result<(), NetError> {
            self.note(format!("reclaim {}", keep.len()))
        }
        fn take(&self, _: &Egress) -> Result<Slot, NetError> {
            self.note("take".into())?;
            Ok(Self::slot(1, Seat::First))
        }
        fn put(&self, index: u32) -> Result<(), NetError> {
            self.note(format!("put {index}"))
        }
        fn reseat(&self, index: u32) -> Result<Slot, NetError> {
            self.note(format!("reseat {index}"))?;
            Ok(Self::slot(index, Seat::Second))
        }
        fn unseat(&self, index: u32, seat: Seat) -> Result<(), NetError> {
            self.note(format!("unseat {index} {seat:?}"))
        }
        fn set_egress(&self, index: u32, egress: &Egress) -> Result<(), NetError> {
            self.note(format!("set {index} {egress:?}"))
        }
        fn open_names(&self, index: u32, openings: &[Opening]) -> Result<(), NetError> {
            self.note(format!("open {index} {}", openings.len()))
        }
        fn guest_socket(&self) -> Result<OwnedFd, NetError> {
            Err(NetError::Closed)
        }
        fn dns_sockets(&self) -> Result<(OwnedFd, OwnedFd), NetError> {
            Err(NetError::Closed)
        }
        fn counters(&self) -> Result<Counters, NetError> {
            Ok(Counters::default())
        }
        fn capacity(&self) -> (u32, u32) {
            (0, 1)
        }
        fn close(&self) -> Result<(), NetError> {
            Ok(())
        }
    }

    #[test]
    fn the_proxy_knows_the_policy_that_is_in_force_and_no_other() {
        let plain = Arc::new(Plain::default());
        let slots = TrackedSlots::new(Arc::clone(&plain) as Arc<dyn Slots>);
        let allow = |name: &str| Egress::allow(&[name]).unwrap();
        let (address, egress) = (address_of(7).unwrap(), allow("old.org"));
        let record = SlotRecord { index: 7, mac: [0; 6], address, egress, seat: Seat::First };
        slots.reclaim(&[record]).unwrap();
        assert_eq!(slots.policy(address_of(7).unwrap()).unwrap().egress(), &allow("old.org"));

        let address = slots.take(&allow("a.org")).unwrap().address;
        let first = slots.policy(address).unwrap();
        assert!(Arc::ptr_eq(&first, &slots.policy(address).unwrap()));
        let opening = [Opening { address: [203, 0, 113, 1].into(), port: None, ttl: Duration::from_secs(5) }];
        let open = |policy| Directory::open_names(slots.as_ref(), policy, &opening);
        open(&first).unwrap();

        *plain.refuse.lock().unwrap() = true;
        assert!(slots.set_egress(1, &Egress::Open).is_err());
        assert!(Arc::ptr_eq(&first, &slots.policy(address).unwrap()), "a change that failed changes nothing");
        *plain.refuse.lock().unwrap() = false;
        slots.set_egress(1, &allow("a.org")).unwrap();
        assert!(matches!(open(&first), Err(OpenError::Stale)), "an equal policy is not the same");
        let second = slots.policy(address).unwrap();
        open(&second).unwrap();
        // Who takes the place of another has its policy, too.
        slots.reseat(1).unwrap();
        slots.unseat(1, Seat::First).unwrap();
        open(&second).unwrap();

        slots.put(1).unwrap();
        assert!(slots.policy(address).is_none());
        assert!(matches!(open(&second), Err(OpenError::Stale)));
        slots.take(&allow("a.org")).unwrap();
        assert!(matches!(open(&second), Err(OpenError::Stale)), "the slot has another owner");
        for unknown in [crate::GATEWAY, address_of(9).unwrap(), [203, 0, 113, 1].into()] {
            assert!(slots.policy(unknown).is_none());
        }
        let opened = plain.log.lock().unwrap().iter().filter(|line| line.starts_with("open")).count();
        assert_eq!(opened, 3);
    }
}
