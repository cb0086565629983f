//! Ends the connections that a copy of a machine has from its original's address: they go on there, and hang here.
//!
//! By the kernel's `sock_diag`: a list of the sockets, then `SOCK_DESTROY` for each that is bound to the old address, after
//! which reads and writes fail with ECONNABORTED. The old address is gone by then, so that no reset for the original's
//! connection leaves the machine. Listening TCP sockets and UDP sockets without a peer are left alone: those on all addresses
//! serve the new one. So are sockets on loopback.

use std::{io, net::Ipv4Addr, path::Path};

use rustix::io::Errno;

use crate::{netlink::Socket, ports};

// include/uapi/linux/sock_diag.h, inet_diag.h
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// TCP states (include/net/tcp_states.h) with a peer that still matters: all but TIME_WAIT, CLOSE and LISTEN.
const TCP_STATES: u32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;
/// Connected.
const UDP_STATES: u32 = 1 << 1;
/// Bytes of `struct inet_diag_sockid`: ports, addresses, interface, cookie.
const SOCKET_ID: usize = 48;
/// Where it is in `struct inet_diag_req_v2` and in `struct inet_diag_msg`.
const ID_IN_REQUEST: usize = 8;
const ID_IN_ANSWER: usize = 4;
/// Where the local address is in it.
const LOCAL: usize = 4;
/// Where state and inode are in `struct inet_diag_msg`.
const STATE: usize = 1;
const INODE: usize = 68;
/// Each refusal is an answer that waits in the socket's buffer.
const BATCH: usize = 64;
/// Lists that are made until one has nothing to end.
const PASSES: usize = 4;

type Request = [u8; ID_IN_REQUEST + SOCKET_ID];

const _: () = assert!(size_of::<Request>() == 56);

/// Ends every connection from `address`.
pub(crate) fn end(diag: &mut Option<Socket>, address: Ipv4Addr) -> io::Result<()> {
    for _ in 0..PASSES {
        let found = match list(diag, address) {
            // No sock_diag, or none for one of the protocols: the kernel has no such modules loaded.
            Err(error) if is_missing(&error) => return none_are_open(address),
            found => found?,
        };
        if found.is_empty() {
            return Ok(());
        }
        let Some(socket) = diag.as_mut() else { return none_are_open(address) };
        destroy(socket, &found)?;
    }
    none_are_open(address)
}

fn is_missing(error: &io::Error) -> bool {
    let missing = [Errno::NOENT, Errno::PROTONOSUPPORT, Errno::OPNOTSUPP];
    missing.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// The requests that end them, without a lookup between: the kernel knows each by its cookie.
fn list(diag: &mut Option<Socket>, address: Ipv4Addr) -> io::Result<Vec<Request>> {
    let socket = match diag {
        Some(socket) => socket,
        None => diag.insert(Socket::sock_diag()?),
    };
    let (v4, v6) = (address.octets(), address.to_ipv6_mapped().octets());
    let mut found = Vec::new();
    // A server on `::` has its IPv4 connections in the family of IPv6.
    let all = [
        (AF_INET, TCP, TCP_STATES),
        (AF_INET6, TCP, TCP_STATES),
        (AF_INET, UDP, UDP_STATES),
        (AF_INET6, UDP, UDP_STATES),
    ];
    for (family, protocol, states) in all {
        let local: &[u8] = if family == AF_INET { &v4 } else { &v6 };
        let mut request = [0; size_of::<Request>()];
        request[..2].copy_from_slice(&[family, protocol]);
        request[4..ID_IN_REQUEST].copy_from_slice(&states.to_ne_bytes());
        socket.dump(SOCK_DIAG_BY_FAMILY, &request, |answer| {
            let Some(id) = answer.get(ID_IN_ANSWER..ID_IN_ANSWER + SOCKET_ID) else { return };
            if id.get(LOCAL..).is_some_and(|id| id.starts_with(local)) && !is_over(answer) {
                let mut end = request;
                end[ID_IN_REQUEST..].copy_from_slice(id);
                found.push(end);
            }
        })?;
    }
    Ok(found)
}

/// Whether a connection was closed here and only waits for its peer, as one in TIME_WAIT does: nobody can notice its end, the
/// kernel forgets it by itself, and before Linux 6.4 it refuses to do so when it is told to.
fn is_over(answer: &[u8]) -> bool {
    let inode = answer.get(INODE..).and_then(|inode| inode.first_chunk());
    answer.get(STATE) == Some(&ports::FIN_WAIT2) && inode == Some(&[0; 4])
}

/// What is refused is looked at again.
fn destroy(socket: &mut Socket, found: &[Request]) -> io::Result<()> {
    for some in found.chunks(BATCH) {
        let mut batch = socket.batch();
        for request in some {
            batch.push(SOCK_DESTROY, 0, request, &[]);
        }
        for refused in socket.run(batch)? {
            match refused.errno {
                // It has ended by itself, or was closed just now, or the kernel can't do it at all.
                Errno::NOENT | Errno::OPNOTSUPP => {}
                errno => return Err(io::Error::from(errno)),
            }
        }
    }
    Ok(())
}

/// Without a way to end connections there must be none.
fn none_are_open(address: Ipv4Addr) -> io::Result<()> {
    let open = ports::connections_from(Path::new("/proc/thread-self/net"), address)?;
    if open == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "the kernel can't end the {open} connections from {address} (sock_diag, SOCK_DESTROY)"
    )))
}
