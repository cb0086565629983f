//! TAP devices.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::error::NetError;
use crate::inside::in_new_namespace;
use crate::rtnl::{self, Rtnl};

/// Where TAP devices come from.
pub(crate) const TUN: &str = "/dev/net/tun";

/// `IFF_TUN_EXCL` of linux/if_tun.h: refuse a device that exists.
const EXCLUSIVE: i32 = 0x8000;

/// Makes a TAP in the calling thread's namespace. It lives for as long as someone holds the descriptor. Frames have the
/// header by which checksums and segmentation can be left to whoever is at the other end.
pub(crate) fn create(name: &str) -> io::Result<OwnedFd> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(TUN)?;
    // SAFETY: all-zero bytes are a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | EXCLUSIVE;
    // The flags are 16 bits in the structure, of which the highest is a flag like the others.
    request.ifr_ifru.ifru_flags = u16::try_from(flags).map_err(io::Error::other)?.cast_signed();
    // SAFETY: the descriptor is open and the structure is the one that this request reads and writes.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file.into())
}

/// A TAP in a throw-away namespace, where nobody answers: for machines that need a network interface and no network.
///
/// # Errors
/// If the caller may not make namespaces or TAPs.
pub fn isolated_tap() -> io::Result<OwnedFd> {
    let made = in_new_namespace(|_| {
        // Without this the device would send router solicitations into the machine. A kernel without IPv6 sends none.
        drop(std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
        let tap = create("tap0").map_err(NetError::system("making a TAP"))?;
        let mut links = Rtnl::new().map_err(NetError::system("opening a netlink socket"))?;
        links.ask(vec![rtnl::link_up("tap0", None)]).map_err(NetError::system("bringing a TAP up"))?;
        Ok(tap)
    });
    made.map_err(|error| match error {
        NetError::System { source, what } => io::Error::new(source.kind(), format!("{what}: {source}")),
        other => io::Error::other(other),
    })
}
