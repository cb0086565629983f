//! What a request must be before anything is done for it.
//!
//! Descriptors are judged by what they are, not by where they came from: the other half could only open them with rights
//! of its own. What must not get through is one that says less than it seems, since root may open a file again by its
//! descriptor: a path descriptor needs no right to read, and one for reading is none for writing.

use std::os::fd::{AsFd, OwnedFd};

use coppice_engine::{ProcessId, SpawnFds, SpawnOrder, StartFds};
use rustix::fs::{FileType, OFlags, SealFlags, fcntl_get_seals, fcntl_getfl, fstat, major, minor};
use rustix::net::SocketType;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};

use crate::failure::Failure;

/// Most records of slots: there are no more slots.
pub(crate) const MAX_RECORDS: usize = coppice_net::MAX_SLOTS as usize;
/// Most memory of a guest, and of an arena for its pages, bytes.
const MAX_MEMORY: u64 = 64 << 30;
/// The kernel's limit of a command line on x86.
const MAX_CMDLINE: usize = 2048;
/// Character device 10:200: `/dev/net/tun`.
const TUN: (u32, u32) = (10, 200);

pub(crate) fn refused(why: impl Into<String>) -> Failure {
    Failure::Refused(why.into())
}

/// Just so many descriptors.
pub(crate) fn exactly<const N: usize>(fds: Vec<OwnedFd>) -> Result<[OwnedFd; N], Failure> {
    let count = fds.len();
    fds.try_into().map_err(|_fds| refused(format!("{N} descriptors belong to this request, not {count}")))
}

pub(crate) fn at_most(what: &str, count: usize, limit: usize) -> Result<(), Failure> {
    if count <= limit { Ok(()) } else { Err(refused(format!("{count} {what} are too many, at most {limit}"))) }
}

/// A process id is one of a single process: 0 and negative ones mean others to some system calls, and 1 is never a VMM.
pub(crate) fn pid(id: ProcessId) -> Result<(), Failure> {
    if id.pid > 1 { Ok(()) } else { Err(refused("that is no process id of a VMM")) }
}

pub(crate) fn memory_len(len: u64) -> Result<(), Failure> {
    let fits = (1..=MAX_MEMORY).contains(&len) && len.is_multiple_of(4096);
    if fits { Ok(()) } else { Err(refused("no guest has memory of that size")) }
}

/// An order within the limits of machines, for a slot of the network.
pub(crate) fn order(order: &SpawnOrder) -> Result<(), Failure> {
    let machine = &order.machine;
    let fits = (1..=64).contains(&machine.cpus) && (128..=65_536).contains(&machine.memory_mib);
    if !fits {
        return Err(refused("no machine has that shape"));
    }
    if machine.cmdline.len() > MAX_CMDLINE || machine.cmdline.contains(|c: char| c.is_control()) {
        return Err(refused("that is no kernel command line"));
    }
    for name in [&machine.kernel, &machine.initramfs] {
        coppice_disk::check_name(name).map_err(|error| refused(error.to_string()))?;
    }
    // Locally administered, of one device.
    if order.mac[0] & 3 != 2 {
        return Err(refused("that is no hardware address of a guest"));
    }
    if order.jail.place().is_none_or(|(index, _)| index >= coppice_net::MAX_SLOTS) {
        return Err(refused("there is no such slot"));
    }
    Ok(())
}

/// What a VMM is given, each of the kind that it must be.
pub(crate) fn spawn_fds(fds: &SpawnFds<'_>) -> Result<(), Failure> {
    for socket in [fds.monitor, fds.console, fds.ports[0], fds.ports[1]] {
        stream_socket(socket)?;
        if socket_acceptconn(socket) != Ok(true) {
            return Err(refused("a socket of a VMM does not listen"));
        }
    }
    file(fds.log, Access::Write)?;
    file(fds.memory, Access::Read)?;
    file(fds.disk, Access::Both)?;
    match fds.start {
        StartFds::Boot { vmlinuz, initramfs } => {
            file(vmlinuz, Access::Read)?;
            file(initramfs, Access::Read)?;
        }
        StartFds::Restore { devices } => file(devices, Access::Read)?,
    }
    tap(fds.tap)
}

/// A unix stream socket.
pub(crate) fn stream_socket(fd: impl AsFd) -> Result<(), Failure> {
    let kind = (socket_domain(&fd), socket_type(&fd));
    if kind == (Ok(rustix::net::AddressFamily::UNIX), Ok(SocketType::STREAM)) {
        return Ok(());
    }
    Err(refused("a descriptor is no unix stream socket"))
}

/// A memfd whose length stays, so that copying into it can't fault.
pub(crate) fn arena(fd: impl AsFd, len: u64) -> Result<(), Failure> {
    memory_len(len)?;
    file(&fd, Access::Both)?;
    let sealed = fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    let long = fstat(&fd).is_ok_and(|stat| u64::try_from(stat.st_size).is_ok_and(|size| size >= len));
    if sealed && long { Ok(()) } else { Err(refused("that is no arena: a memfd, as long as it says, sealed")) }
}

/// What a file must have been opened for, at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    Both,
}

/// A regular file that was opened for this.
pub(crate) fn file(fd: impl AsFd, access: Access) -> Result<(), Failure> {
    match fstat(&fd) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {}
        _ => return Err(refused("a descriptor is no regular file")),
    }
    let flags = fcntl_getfl(&fd).map_err(|errno| refused(errno.to_string()))?;
    let mode = flags & OFlags::RWMODE;
    let fits = match access {
        Access::Read => mode == OFlags::RDONLY || mode == OFlags::RDWR,
        Access::Write => mode == OFlags::WRONLY || mode == OFlags::RDWR,
        Access::Both => mode == OFlags::RDWR,
    };
    // The mode of a path descriptor is 0, which is also that of reading.
    if fits && !flags.contains(OFlags::PATH) { Ok(()) } else { Err(refused("a file is not open for what it is for")) }
}

/// A network device of the kernel's tun driver.
fn tap(fd: impl AsFd) -> Result<(), Failure> {
    match fstat(&fd) {
        Ok(stat)
            if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
                && (major(stat.st_rdev), minor(stat.st_rdev)) == TUN
                && fcntl_getfl(&fd).is_ok_and(|flags| !flags.contains(OFlags::PATH)) =>
        {
            Ok(())
        }
        _ => Err(refused("a descriptor is no TAP device")),
    }
}
