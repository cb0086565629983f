//! Requests about VMM processes.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex};

use coppice_engine::{Privileged, ProcessId, Range, SpawnFds, SpawnOrder};

use super::Answered;
use super::slots::Places;
use crate::check;
use crate::client::lock;
use crate::failure::{Failure, io_failure};
use crate::message::{Answer, MachineRequest};

/// Most ranges of one copy: what 4 GiB of pages are in the worst case. More are copied in several rounds.
const MAX_RANGES: usize = 1 << 20;

/// The VMM processes that may be named, and who acts on them.
#[derive(Debug)]
pub(super) struct Machines {
    privileged: Arc<dyn Privileged>,
    /// Spawned or adopted here, and not seen to end.
    known: Mutex<HashSet<ProcessId>>,
}

impl Machines {
    pub fn new(privileged: Arc<dyn Privileged>) -> Self {
        Self { privileged, known: Mutex::default() }
    }

    /// Does what was asked for. `parts` is what earlier parts of a list brought on the same connection.
    pub fn answer(
        &self,
        request: MachineRequest,
        fds: Vec<OwnedFd>,
        parts: &mut Vec<Range>,
        places: &Places,
    ) -> Answered {
        match request {
            MachineRequest::Spawn(order) => return self.spawn(&order, &fds, places),
            MachineRequest::RegisterArena(len) => {
                let [memory] = check::exactly(fds)?;
                check::arena(&memory, len)?;
                return plain(self.privileged.register_arena(memory.as_fd(), len).map(Answer::Arena));
            }
            _ => check::exactly::<0>(fds)?,
        };
        let privileged = &self.privileged;
        match request {
            MachineRequest::Spawn(_) | MachineRequest::RegisterArena(_) => Err(check::refused("it was answered")),
            MachineRequest::Facts => plain(privileged.facts().map(Answer::Facts)),
            MachineRequest::Confirm(id) => {
                privileged.confirm(self.known(id)?).map_err(Failure::Vm)?;
                Ok((Answer::Done, Vec::new()))
            }
            MachineRequest::Adopt(id) => self.adopt(id),
            MachineRequest::EndStrays(keep) => {
                check::at_most("VMMs", keep.len(), check::MAX_RECORDS)?;
                let ended = privileged.end_strays(&keep).map_err(|error| io_failure(&error))?;
                lock(&self.known).retain(|id| !ended.contains(id));
                Ok((Answer::Strays(ended), Vec::new()))
            }
            MachineRequest::Kill(id) => self.kill(id),
            MachineRequest::Ended(id) => self.ended(id),
            MachineRequest::OpenMemory(id, len) => {
                check::memory_len(len)?;
                let memory = privileged.open_memory(self.known(id)?, len).map_err(|error| io_failure(&error))?;
                let fds = [memory.pagemap, memory.base].map(|file| Arc::new(OwnedFd::from(file)));
                Ok((Answer::Memory { start: memory.start }, fds.into()))
            }
            MachineRequest::ReadMemory { id, ranges, arena, more } => {
                check::at_most("ranges", parts.len() + ranges.len(), MAX_RANGES)?;
                parts.extend(ranges);
                if more {
                    return Ok((Answer::Done, Vec::new()));
                }
                let ranges = std::mem::take(parts);
                plain(privileged.read_memory(self.known(id)?, &ranges, arena).map(|()| Answer::Done))
            }
            MachineRequest::DropArena(arena) => plain(privileged.drop_arena(arena).map(|()| Answer::Done)),
            MachineRequest::Stats(id) => plain(privileged.stats(self.known(id)?).map(Answer::Stats)),
        }
    }

    fn spawn(&self, order: &SpawnOrder, fds: &[OwnedFd], places: &Places) -> Answered {
        check::order(order)?;
        let list: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        let fds = SpawnFds::from_list(order.start, &list)
            .ok_or_else(|| check::refused("other descriptors belong to this start"))?;
        check::spawn_fds(&fds)?;
        let place = places.get(order.jail).filter(|place| place.mac == order.mac);
        let place = place.ok_or_else(|| check::refused("that slot of the network was not taken for it"))?;
        // Ours, which is the slot's for certain.
        let fds = SpawnFds { tap: place.tap.as_fd(), ..fds };
        let spawned = self.privileged.spawn(order, fds).map_err(Failure::Vm)?;
        coppice_fault::point!("vmm.spawned");
        lock(&self.known).insert(spawned.id);
        Ok((Answer::Spawned(spawned.id), vec![Arc::new(spawned.pidfd)]))
    }

    fn adopt(&self, id: ProcessId) -> Answered {
        check::pid(id)?;
        let pidfd = self.privileged.adopt(id).map_err(Failure::Vm)?;
        if pidfd.is_some() {
            lock(&self.known).insert(id);
        }
        Ok((Answer::Adopted, pidfd.into_iter().map(Arc::new).collect()))
    }

    /// One that has ended by itself meanwhile is what was asked for.
    fn kill(&self, id: ProcessId) -> Answered {
        match self.known(id) {
            Ok(id) => {
                let killed = self.privileged.kill(id);
                coppice_fault::point!("vmm.killed");
                plain(killed.map(|()| Answer::Done))
            }
            Err(_) if id.is_gone() => Ok((Answer::Done, Vec::new())),
            Err(refused) => Err(refused),
        }
    }

    fn ended(&self, id: ProcessId) -> Answered {
        if id.is_gone() && self.known(id).is_err() {
            return Ok((Answer::Ended(Some("it ended".to_owned())), Vec::new()));
        }
        let how = self.privileged.ended(self.known(id)?).map_err(|error| io_failure(&error))?;
        if how.is_some() {
            lock(&self.known).remove(&id);
        }
        Ok((Answer::Ended(how), Vec::new()))
    }

    /// Only what was spawned or adopted can be named.
    fn known(&self, id: ProcessId) -> Result<ProcessId, Failure> {
        if lock(&self.known).contains(&id) {
            return Ok(id);
        }
        Err(check::refused(format!("process {} is no VMM of this server", id.pid)))
    }
}

fn plain(outcome: io::Result<Answer>) -> Answered {
    outcome.map(|answer| (answer, Vec::new())).map_err(|error| io_failure(&error))
}
