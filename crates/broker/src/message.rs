//! What the two halves say to each other: typed requests and answers, encoded with postcard.
//!
//! A request is answered before the next one is sent on the same connection; calls at the same time have a connection
//! each. No request has a path or an argument of a program in it. Descriptors are beside the message, in the order that
//! the comments here give.

use coppice_engine::{ArenaId, ProcessId, ProcessStats, Range, SpawnOrder, VmmFacts};
use coppice_net::{Counters, Egress, Opening, Seat, SlotRecord};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::frame::FrameError;

/// Raised with every change of what is said: both halves are the same binary, unless it was replaced in between.
pub(crate) const VERSION: u32 = 2;

/// What the unprivileged half asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first words on the first connection. Answered with the descriptors that the privileged half has for the other.
    Hello { version: u32 },
    /// One more connection, whose other end is the one descriptor. Only on the first connection.
    Connect,
    /// The network.
    Slots(SlotsRequest),
    /// VMM processes.
    Machine(MachineRequest),
}

/// One for each method of [`coppice_engine::Privileged`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum MachineRequest {
    Facts,
    /// With the descriptors of [`coppice_engine::SpawnFds::list`].
    Spawn(SpawnOrder),
    Confirm(ProcessId),
    Adopt(ProcessId),
    /// All that are to be kept.
    EndStrays(Vec<ProcessId>),
    Kill(ProcessId),
    Ended(ProcessId),
    OpenMemory(ProcessId, u64),
    /// Some of the ranges; the last part has `more: false` and does it.
    ReadMemory {
        id: ProcessId,
        ranges: Vec<Range>,
        arena: ArenaId,
        more: bool,
    },
    /// With the memfd.
    RegisterArena(u64),
    DropArena(ArenaId),
    Stats(ProcessId),
}

/// One for each method of [`coppice_net::Slots`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum SlotsRequest {
    /// Some of the records; the last part has `more: false` and does it.
    Reclaim {
        keep: Vec<SlotRecord>,
        more: bool,
    },
    Take(Egress),
    Put(u32),
    Reseat(u32),
    Unseat(u32, Seat),
    SetEgress(u32, Egress),
    OpenNames(u32, Vec<Opening>),
    GuestSocket,
    DnsSockets,
    Counters,
    Capacity,
    Close,
}

/// What comes back.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// Nothing more to say. With the descriptors that were asked for, if any.
    Done,
    /// With the TAP.
    Slot {
        index: u32,
        seat: Seat,
        mac: [u8; 6],
        address: std::net::Ipv4Addr,
    },
    Counters(Counters),
    Capacity(u32, u32),
    Facts(VmmFacts),
    /// With its pidfd.
    Spawned(ProcessId),
    /// With its pidfd, when it is there.
    Adopted,
    /// Which were ended.
    Strays(Vec<ProcessId>),
    Ended(Option<String>),
    /// With its page map and the file that is mapped.
    Memory {
        start: u64,
    },
    Arena(ArenaId),
    Stats(ProcessStats),
}

/// An answer, or why there is none.
pub(crate) type Reply = Result<Answer, Failure>;

pub(crate) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, FrameError> {
    postcard::to_stdvec(value).map_err(|_error| FrameError::Malformed("it can't be encoded"))
}

/// All of the bytes, as one value.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(FrameError::Malformed("there is something behind the message")),
        Err(_) => Err(FrameError::Malformed("the message is not known")),
    }
}
