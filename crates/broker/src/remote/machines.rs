//! The VMM processes of the privileged half.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use coppice_engine::{
    ArenaId, MemoryHandle, Privileged, ProcessId, ProcessStats, Range, SpawnFds, SpawnOrder, Spawned, VmError, VmmFacts,
};

use crate::client::{Broker, CallError};
use crate::failure::Failure;
use crate::message::{Answer, MachineRequest, Request};

/// Ranges in one message: far below its longest length even with the largest numbers.
const RANGES: usize = 32 << 10;

/// [`Privileged`] of the other half of this program.
#[derive(Debug, Clone)]
pub struct RemotePrivileged {
    broker: Broker,
}

impl RemotePrivileged {
    /// That of a broker.
    #[must_use]
    pub fn new(broker: Broker) -> Self {
        Self { broker }
    }

    fn call(&self, request: MachineRequest, fds: &[BorrowedFd<'_>]) -> Result<(Answer, Vec<OwnedFd>), CallError> {
        self.broker.call(&Request::Machine(request), fds)
    }

    fn done(&self, request: MachineRequest) -> Result<(), CallError> {
        self.broker.done(&Request::Machine(request), &[])
    }
}

impl From<CallError> for io::Error {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Failed(failure) => failure.into(),
            error => Self::new(io::ErrorKind::BrokenPipe, error),
        }
    }
}

impl From<CallError> for VmError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Failed(Failure::Vm(error)) => error,
            error => Self::System { what: "the privileged half of coppice".into(), source: error.into() },
        }
    }
}

impl Privileged for RemotePrivileged {
    fn facts(&self) -> io::Result<VmmFacts> {
        match self.call(MachineRequest::Facts, &[])? {
            (Answer::Facts(facts), _) => Ok(facts),
            _ => Err(CallError::Mixed.into()),
        }
    }

    fn spawn(&self, order: &SpawnOrder, fds: SpawnFds<'_>) -> Result<Spawned, VmError> {
        let (answer, fds) = self.call(MachineRequest::Spawn(order.clone()), &fds.list())?;
        match (answer, <[OwnedFd; 1]>::try_from(fds)) {
            (Answer::Spawned(id), Ok([pidfd])) => Ok(Spawned { id, pidfd }),
            _ => Err(CallError::Mixed.into()),
        }
    }

    fn confirm(&self, id: ProcessId) -> Result<(), VmError> {
        Ok(self.done(MachineRequest::Confirm(id))?)
    }

    fn adopt(&self, id: ProcessId) -> Result<Option<OwnedFd>, VmError> {
        match self.call(MachineRequest::Adopt(id), &[])? {
            (Answer::Adopted, mut fds) if fds.len() <= 1 => Ok(fds.pop()),
            _ => Err(CallError::Mixed.into()),
        }
    }

    fn end_strays(&self, keep: &[ProcessId]) -> io::Result<Vec<ProcessId>> {
        match self.call(MachineRequest::EndStrays(keep.to_vec()), &[])? {
            (Answer::Strays(ended), _) => Ok(ended),
            _ => Err(CallError::Mixed.into()),
        }
    }

    fn kill(&self, id: ProcessId) -> io::Result<()> {
        Ok(self.done(MachineRequest::Kill(id))?)
    }

    fn ended(&self, id: ProcessId) -> io::Result<Option<String>> {
        match self.call(MachineRequest::Ended(id), &[])? {
            (Answer::Ended(how), _) => Ok(how),
            _ => Err(CallError::Mixed.into()),
        }
    }

    fn open_memory(&self, id: ProcessId, len: u64) -> io::Result<MemoryHandle> {
        let (answer, fds) = self.call(MachineRequest::OpenMemory(id, len), &[])?;
        match (answer, <[OwnedFd; 2]>::try_from(fds)) {
            (Answer::Memory { start }, Ok([pagemap, base])) => {
                Ok(MemoryHandle { start, pagemap: File::from(pagemap), base: File::from(base) })
            }
            _ => Err(CallError::Mixed.into()),
        }
    }

    fn read_memory(&self, id: ProcessId, ranges: &[Range], arena: ArenaId) -> io::Result<()> {
        let last = ranges.len().div_ceil(RANGES).saturating_sub(1);
        let parts = ranges.chunks(RANGES).enumerate().map(|(number, part)| {
            let ranges = part.to_vec();
            Request::Machine(MachineRequest::ReadMemory { id, ranges, arena, more: number < last })
        });
        Ok(self.broker.sequence(parts)?)
    }

    fn register_arena(&self, memory: BorrowedFd<'_>, len: u64) -> io::Result<ArenaId> {
        match self.call(MachineRequest::RegisterArena(len), &[memory.as_fd()])? {
            (Answer::Arena(arena), _) => Ok(arena),
            _ => Err(CallError::Mixed.into()),
        }
    }

    fn drop_arena(&self, arena: ArenaId) -> io::Result<()> {
        Ok(self.done(MachineRequest::DropArena(arena))?)
    }

    fn stats(&self, id: ProcessId) -> io::Result<ProcessStats> {
        match self.call(MachineRequest::Stats(id), &[])? {
            (Answer::Stats(stats), _) => Ok(stats),
            _ => Err(CallError::Mixed.into()),
        }
    }
}
