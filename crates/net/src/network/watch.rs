//! Whoever loads a firewall on the host removes every rule that is there (`nft flush ruleset`), and with them what keeps sandboxes
//! from the host. The kernel tells who listens; the rules are back a moment later.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

use super::place::{Names, Outside};
use crate::error::NetError;
use crate::inside::Inside;

/// `NFNLGRP_NFTABLES` of linux/netfilter/nfnetlink.h, as a bit.
const CHANGES: u32 = 1 << (7 - 1);

/// A thread that keeps the host's rules in force; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Watches the namespace of the calling thread, which must be that of `outside`.
    pub(super) fn start(names: Names, far: Ipv4Addr, outside: Arc<Inside<Outside>>) -> Result<Self, NetError> {
        let make = || -> io::Result<(OwnedFd, OwnedFd, OwnedFd)> {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::NETFILTER))?;
            bind(&socket, &SocketAddrNetlink::new(0, CHANGES))?;
            let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let stopped = stop.try_clone()?;
            Ok((socket, stop, stopped))
        };
        let (socket, stop, stopped) = make().map_err(NetError::system("watching the host's rules"))?;
        let thread = std::thread::Builder::new()
            .name("net-watch".to_owned())
            .spawn(move || {
                while changed(&socket, &stopped) {
                    let names = names.clone();
                    match outside.run(move |outside| outside.mend(&names, far)) {
                        Ok(()) => {}
                        Err(NetError::Closed) => return,
                        Err(error) => tracing::error!(
                            error = &error as &dyn std::error::Error,
                            "the host's rules are not in force"
                        ),
                    }
                }
            })
            .map_err(NetError::system("starting a thread"))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Err(error) = rustix::io::write(&self.stop, &1_u64.to_ne_bytes()) {
            // It goes on until the process ends; waiting for it would never end.
            tracing::error!(%error, "the thread that watches the host's rules can't be told to stop");
            return;
        }
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Waits for the next change of any rule; `false` says that it is time to stop.
fn changed(socket: &OwnedFd, stop: &OwnedFd) -> bool {
    let mut ready = [PollFd::new(socket, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
    loop {
        match poll(&mut ready, None) {
            Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "the host's rules are not watched any more");
                return false;
            }
            Ok(_) if !ready[1].revents().is_empty() => return false,
            Ok(_) => break,
        }
    }
    // What it says doesn't matter, nor that there was more than the socket holds: the rules are looked at in any case.
    let mut buffer = [0_u8; 16384];
    loop {
        match recv(socket, &mut buffer, RecvFlags::empty()) {
            Err(Errno::AGAIN) => return true,
            Ok(_) | Err(Errno::INTR | Errno::NOBUFS) => {}
            Err(error) => {
                tracing::error!(%error, "the host's rules are not watched any more");
                return false;
            }
        }
    }
}
