//! Which slots there are and what each is for at the moment. Nothing here touches the kernel.

use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use crate::egress::Egress;
use crate::error::NetError;
use crate::rules::{Identity, Openings};
use crate::slots::Seat;

/// Where the network is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Open, but nobody said yet which slots an earlier run's machines use.
    Unsorted,
    /// At work.
    Running,
    /// Closed.
    Closed,
}

/// A slot with its TAP and its rules.
#[derive(Debug)]
pub(super) struct Made {
    /// With the seat that the slot's address leads to.
    pub(super) identity: Identity,
    /// `None` for a slot that was kept from an earlier run: its VMM has the TAP.
    pub(super) tap: Option<Arc<OwnedFd>>,
    /// The seat of who may take its place, while there are two.
    pub(super) beside: Option<Beside>,
    /// The policy that is in force.
    pub(super) egress: Egress,
    /// What was opened for names, and until when.
    pub(super) opened: HashMap<(Ipv4Addr, Option<u16>), Instant>,
}

/// A seat that the slot's address does not lead to.
#[derive(Debug)]
pub(super) struct Beside {
    pub(super) seat: Seat,
    pub(super) tap: Arc<OwnedFd>,
}

impl Made {
    /// One in each seat that there is, the one that the address leads to first.
    pub(super) fn identities(&self) -> impl Iterator<Item = Identity> {
        let beside = self.beside.as_ref().map(|beside| Identity { seat: beside.seat, ..self.identity });
        std::iter::once(self.identity).chain(beside)
    }

    /// Has one seat again: not this one.
    pub(super) fn unseat(&mut self, seat: Seat) {
        if let Some(beside) = self.beside.take()
            && beside.seat != seat
        {
            (self.identity.seat, self.tap) = (beside.seat, Some(beside.tap));
        }
    }

    /// What is open for longer than now.
    pub(super) fn openings(&self) -> Openings {
        let now = Instant::now();
        self.opened
            .iter()
            .filter_map(|((address, port), until)| Some((*address, *port, until.checked_duration_since(now)?)))
            .collect()
    }
}

/// What the keeper does next.
#[derive(Debug)]
pub(super) enum Work {
    /// Take these apart; their indexes are free then.
    Retire(Vec<u32>),
    /// Make these ahead.
    Make(Vec<u32>),
}

/// What a `take` finds.
#[derive(Debug)]
pub(super) enum Found {
    /// One that was made ahead; it is in the table of taken ones already.
    Ready(u32),
    /// None was: this one is to be made.
    Unmade(u32),
    /// Every other one is being worked on.
    Wait,
}

/// Every slot below the limit is in exactly one of these places, or in the hands of who counts as `busy`.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) phase: Phase,
    limit: u32,
    /// How many should be ready.
    target: usize,
    /// Neither TAP nor rules; the one that was given back first comes first.
    unmade: VecDeque<u32>,
    ready: VecDeque<Made>,
    taken: HashMap<u32, Made>,
    /// Given back, not yet taken apart.
    retiring: VecDeque<Made>,
    /// Given back, and being taken apart.
    dismantling: Vec<Made>,
    /// Indexes that somebody makes or takes apart at the moment.
    busy: usize,
    /// Why the keeper's last attempt failed.
    pub(super) failure: Option<String>,
}

impl Pool {
    pub(super) fn new(limit: u32, ready: u32) -> Self {
        let target = usize::try_from(ready.min(limit)).unwrap_or(usize::MAX);
        Self {
            phase: Phase::Unsorted,
            limit,
            target,
            unmade: (0..limit).collect(),
            ready: VecDeque::new(),
            taken: HashMap::new(),
            retiring: VecDeque::new(),
            dismantling: Vec::new(),
            busy: 0,
            failure: None,
        }
    }

    /// Begins with the slots that an earlier run's machines use.
    pub(super) fn keep(&mut self, kept: Vec<Made>) {
        self.taken = kept.into_iter().map(|made| (made.identity.index, made)).collect();
        self.unmade.retain(|index| !self.taken.contains_key(index));
        self.phase = Phase::Running;
    }

    pub(super) fn counts(&self) -> (u32, u32) {
        (u32::try_from(self.taken.len()).unwrap_or(u32::MAX), self.limit)
    }

    pub(super) fn ready_count(&self) -> usize {
        self.ready.len()
    }

    /// Whether the keeper has nothing left to do.
    pub(super) fn settled(&self) -> bool {
        self.busy == 0 && self.retiring.is_empty() && (self.ready.len() >= self.target || self.unmade.is_empty())
    }

    /// Whether slots may be taken.
    pub(super) fn running(&self) -> Result<(), NetError> {
        match self.phase {
            Phase::Running => Ok(()),
            Phase::Unsorted => Err(NetError::NotReady),
            Phase::Closed => Err(NetError::Closed),
        }
    }

    pub(super) fn find(&mut self) -> Result<Found, NetError> {
        self.running()?;
        if let Some(made) = self.ready.pop_front() {
            let index = made.identity.index;
            self.taken.insert(index, made);
            return Ok(Found::Ready(index));
        }
        if let Some(index) = self.unmade.pop_front() {
            self.busy += 1;
            return Ok(Found::Unmade(index));
        }
        if self.busy > 0 || !self.retiring.is_empty() {
            Ok(Found::Wait)
        } else {
            Err(NetError::Exhausted { limit: self.limit })
        }
    }

    /// What was found unmade is made now, and taken; or it couldn't be.
    pub(super) fn made(&mut self, index: u32, made: Option<Made>) {
        self.busy -= 1;
        match made {
            Some(made) => drop(self.taken.insert(index, made)),
            None => self.free(index),
        }
    }

    pub(super) fn taken(&self, index: u32) -> Option<&Made> {
        self.taken.get(&index)
    }

    /// A slot whose rules were changed: it may have been given back meanwhile.
    pub(super) fn changed(&mut self, index: u32) -> Option<&mut Made> {
        match self.taken.get_mut(&index) {
            Some(made) => Some(made),
            None => self.retiring.iter_mut().chain(&mut self.dismantling).find(|made| made.identity.index == index),
        }
    }

    /// Every slot that has rules and is to have them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Made> {
        self.ready.iter().chain(self.taken.values()).chain(&self.retiring)
    }

    pub(super) fn put(&mut self, index: u32) {
        if let Some(made) = self.taken.remove(&index) {
            self.retiring.push_back(made);
        }
    }

    /// The next work, of at most so many slots.
    pub(super) fn work(&mut self, most: usize) -> Option<Work> {
        if self.phase != Phase::Running {
            return None;
        }
        let count = self.retiring.len().min(most);
        if count > 0 {
            self.busy += count;
            let first = self.dismantling.len();
            self.dismantling.extend(self.retiring.drain(..count));
            let indexes = self.dismantling.iter().skip(first).map(|made| made.identity.index);
            return Some(Work::Retire(indexes.collect()));
        }
        let count = self.target.saturating_sub(self.ready.len()).min(self.unmade.len()).min(most);
        if count > 0 {
            self.busy += count;
            return Some(Work::Make(self.unmade.drain(..count).collect()));
        }
        None
    }

    /// What is being taken apart.
    pub(super) fn dismantling(&self) -> &[Made] {
        &self.dismantling
    }

    /// What was being taken apart is.
    pub(super) fn retired(&mut self) {
        for made in std::mem::take(&mut self.dismantling) {
            self.busy -= 1;
            self.free(made.identity.index);
        }
    }

    /// What was being taken apart can't be yet.
    pub(super) fn not_retired(&mut self) {
        self.busy -= self.dismantling.len();
        self.retiring.extend(self.dismantling.drain(..));
    }

    /// Slots were made ahead, and others couldn't be.
    pub(super) fn prepared(&mut self, made: Vec<Made>, failed: &[u32]) {
        self.busy -= made.len() + failed.len();
        self.ready.extend(made);
        failed.iter().for_each(|index| self.free(*index));
    }

    /// An index may be used again. One past the limit, kept from a run with a higher one, is not.
    fn free(&mut self, index: u32) {
        if index < self.limit {
            self.unmade.push_back(index);
        }
    }

    /// Ends it, if nothing is taken.
    pub(super) fn close(&mut self) -> Result<(), NetError> {
        match self.counts() {
            (0, _) => {
                self.phase = Phase::Closed;
                Ok(())
            }
            (taken, _) => Err(NetError::InUse { taken }),
        }
    }

    /// The slots that nobody uses, and whose links are there or may be.
    pub(super) fn spare(&self) -> Vec<u32> {
        self.ready.iter().chain(&self.retiring).map(|made| made.identity.index).collect()
    }

    /// Lets go of every TAP.
    pub(super) fn clear(&mut self) {
        self.ready.clear();
        self.retiring.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::address_of;

    fn made(index: u32) -> Made {
        let address = address_of(index).unwrap();
        let identity = Identity { index, seat: Seat::First, mac: [2; 6], address, epoch: 1 };
        Made { identity, tap: None, beside: None, egress: Egress::Open, opened: HashMap::new() }
    }

    /// Takes as the network would, with everything succeeding.
    fn take(pool: &mut Pool) -> Result<u32, NetError> {
        match pool.find()? {
            Found::Ready(index) => Ok(index),
            Found::Unmade(index) => {
                pool.made(index, Some(made(index)));
                Ok(index)
            }
            Found::Wait => {
                work(pool);
                take(pool)
            }
        }
    }

    fn work(pool: &mut Pool) {
        while let Some(work) = pool.work(3) {
            match work {
                Work::Retire(_) => pool.retired(),
                Work::Make(indexes) => pool.prepared(indexes.into_iter().map(made).collect(), &[]),
            }
        }
    }

    #[test]
    fn nothing_is_taken_before_the_past_is_sorted_out() {
        let mut pool = Pool::new(2, 1);
        assert!(matches!(pool.find(), Err(NetError::NotReady)));
        assert!(pool.work(8).is_none());
        pool.keep(vec![made(1)]);
        assert_eq!(take(&mut pool).unwrap(), 0);
        assert!(matches!(pool.find(), Err(NetError::Exhausted { limit: 2 })));
        assert!(matches!(pool.close(), Err(NetError::InUse { taken: 2 })));
    }

    #[test]
    fn the_oldest_free_slot_comes_first_and_none_is_lost() {
        let mut pool = Pool::new(5, 2);
        pool.keep(Vec::new());
        work(&mut pool);
        assert_eq!((0..5).map(|_| take(&mut pool).unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        for index in [3, 1, 1, 4, 9] {
            pool.put(index);
        }
        assert_eq!((0..3).map(|_| take(&mut pool).unwrap()).collect::<Vec<_>>(), [3, 1, 4]);
        assert!(matches!(pool.find(), Err(NetError::Exhausted { .. })));
    }

    #[test]
    fn a_slot_that_cannot_be_made_is_tried_last() {
        let mut pool = Pool::new(2, 0);
        pool.keep(vec![made(7)]);
        let Ok(Found::Unmade(0)) = pool.find() else { panic!() };
        pool.made(0, None);
        assert_eq!(take(&mut pool).unwrap(), 1);
        pool.put(7);
        work(&mut pool);
        assert_eq!(take(&mut pool).unwrap(), 0);
        assert!(matches!(pool.find(), Err(NetError::Exhausted { .. })), "a slot past the limit does not come back");
    }
}
