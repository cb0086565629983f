//! Where the network of an instance is: its router namespace, its pair of links, its table in the root namespace.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive, mount_change, unmount};

use crate::error::NetError;
use crate::inside::{Inside, in_new_namespace};
use crate::nft::Nft;
use crate::rtnl::{self, Rtnl};
use crate::rules;

/// Where `ip netns` keeps names of namespaces.
const NAMES: &str = "/run/netns";

/// Instances choose the addresses of their links one after the other.
const LOCK: &str = "/run/coppice-net.lock";

/// The first of the ranges of four addresses that links use, and how many there are: 169.254.64.0/18, which is far from what
/// clouds answer at (169.254.169.254).
const LINKS: u32 = u32::from_be_bytes([169, 254, 64, 0]);
const LINK_COUNT: u32 = 1 << 12;
const LINK_PREFIX: u8 = 30;

/// What an instance's parts are called.
#[derive(Debug, Clone)]
pub(super) struct Names {
    /// The router namespace's file.
    pub(super) netns: PathBuf,
    /// The root namespace's end of the pair of links.
    pub(super) link: String,
    /// The table in the root namespace.
    pub(super) table: String,
    /// Where the search for a free range begins.
    seed: u32,
}

impl Names {
    /// The names for an id of eight hexadecimal digits.
    pub(super) fn new(id: &str) -> Result<Self, NetError> {
        let digits = id.len() == 8 && id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let seed = u32::from_str_radix(id, 16).ok().filter(|_| digits);
        let seed = seed.ok_or_else(|| NetError::System {
            what: format!("`{id}` is not an instance's id"),
            source: io::ErrorKind::InvalidInput.into(),
        })?;
        Ok(Self {
            netns: Path::new(NAMES).join(format!("coppice-{id}")),
            link: format!("cpc{id}"),
            table: format!("coppice_{id}"),
            seed,
        })
    }
}

/// What works in the root namespace.
pub(super) struct Outside {
    pub(super) nft: Nft,
    pub(super) links: Rtnl,
    /// How many rules the instance's table has when it is as it should be.
    rules: usize,
}

impl Outside {
    /// In the namespace of the calling thread.
    pub(super) fn new() -> Result<Self, NetError> {
        let links = Rtnl::new().map_err(NetError::system("opening a netlink socket"))?;
        Ok(Self { nft: Nft::new()?, links, rules: 0 })
    }

    /// Sets the host's rules, in place of those that are there.
    fn set_rules(&mut self, names: &Names, far: Ipv4Addr) -> Result<(), NetError> {
        self.nft.change("setting the host's rules", &rules::outside(&names.table, &names.link, far))?;
        self.rules = self.count(names)?;
        Ok(())
    }

    fn count(&mut self, names: &Names) -> Result<usize, NetError> {
        let objects = self.nft.list("listing the host's rules", &format!("list table inet {}", names.table))?;
        Ok(objects.iter().filter(|object| object.get("rule").is_some()).count())
    }

    /// Sets the host's rules if they are not as they should be.
    pub(super) fn mend(&mut self, names: &Names, far: Ipv4Addr) -> Result<(), NetError> {
        if self.count(names).is_ok_and(|rules| rules == self.rules) {
            return Ok(());
        }
        tracing::warn!(table = names.table, "somebody removed rules of the network; they are set again");
        self.set_rules(names, far)
    }
}

/// A lock among the instances of this machine; it ends with the descriptor.
fn lock() -> Result<OwnedFd, NetError> {
    let file = open(LOCK, OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::RUSR | Mode::WUSR)
        .map_err(NetError::system(format!("opening {LOCK}")))?;
    flock(&file, FlockOperation::LockExclusive).map_err(NetError::system(format!("locking {LOCK}")))?;
    Ok(file)
}

/// The router namespace: the one that is there, or a new one.
pub(super) fn router_namespace(names: &Names) -> Result<OwnedFd, NetError> {
    let _lock = lock()?;
    if let Some(netns) = open_namespace(&names.netns)? {
        return Ok(netns);
    }
    prepare_names()?;
    let path = names.netns.clone();
    let what = || format!("naming the network namespace {}", path.display());
    fs::write(&path, []).map_err(NetError::system(what()))?;
    in_new_namespace(|own| {
        mount_bind("/proc/thread-self/ns/net", &path).map_err(NetError::system(what()))?;
        own.try_clone().map(OwnedFd::from).map_err(NetError::system(what()))
    })
}

/// A named namespace; `None` if the name isn't there, or is but a file, as after a crash between two steps.
fn open_namespace(path: &Path) -> Result<Option<OwnedFd>, NetError> {
    const NSFS_MAGIC: libc::__fsword_t = 0x6e73_6673;
    let what = || format!("opening the network namespace {}", path.display());
    let file = match open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        other => other.map_err(NetError::system(what()))?,
    };
    let kind = rustix::fs::fstatfs(&file).map_err(NetError::system(what()))?.f_type;
    Ok((kind == NSFS_MAGIC).then_some(file))
}

/// The directory of names as `ip netns` makes it: a mount of its own that is shared, so that a name that is removed here is
/// removed in every other mount namespace.
fn prepare_names() -> Result<(), NetError> {
    let what = || format!("preparing {NAMES}");
    fs::create_dir_all(NAMES).map_err(NetError::system(what()))?;
    let shared = MountPropagationFlags::SHARED | MountPropagationFlags::REC;
    if mount_change(NAMES, shared).is_err() {
        mount_bind_recursive(NAMES, NAMES).map_err(NetError::system(what()))?;
        mount_change(NAMES, shared).map_err(NetError::system(what()))?;
    }
    Ok(())
}

/// Makes the pair of links and the rules of the root namespace, as far as they aren't there. Returns
/// the router's address, by which the host knows all that comes from sandboxes.
pub(super) fn connect(
    names: &Names,
    outside: &Inside<Outside>,
    router: &Inside<Rtnl>,
    netns: BorrowedFd<'_>,
) -> Result<Ipv4Addr, NetError> {
    let _lock = lock()?;
    let there = router.run(|_| Ok(rtnl::index_of(rules::UPLINK).is_ok()))?;
    let netns = netns.try_clone_to_owned().map_err(NetError::system("duplicating a descriptor"))?;
    let own = names.clone();
    let (host, far) = outside.run(move |outside| outside_end(&own, outside, there, netns.as_fd()))?;
    router.run(move |links| router_end(links, host, far))?;
    Ok(far)
}

fn outside_end(
    names: &Names,
    outside: &mut Outside,
    peer_is_there: bool,
    netns: BorrowedFd<'_>,
) -> Result<(Ipv4Addr, Ipv4Addr), NetError> {
    let what = |what: &str| NetError::system::<io::Error>(format!("{what} {}", names.link));
    let used = addresses().map_err(NetError::system("listing the host's addresses"))?;
    let there = rtnl::index_of(&names.link).is_ok();
    let own = used.iter().find(|(name, address)| *name == names.link && link_of(*address).is_some());
    let host = match own {
        Some((_, address)) if there && peer_is_there => *address,
        _ => {
            // One end without the other is left when a start was interrupted, or when somebody removed one.
            if there {
                outside.links.ask(vec![rtnl::delete_link(&names.link)]).map_err(what("removing the link"))?;
            }
            outside.links.ask(vec![rtnl::veth(&names.link, rules::UPLINK, netns)]).map_err(what("making the link"))?;
            let host = free_range(names.seed, &used).ok_or_else(|| NetError::Missing {
                what: "a free range of link-local addresses".to_owned(),
                hint: "close other instances on this machine".to_owned(),
            })?;
            let index = rtnl::index_of(&names.link).map_err(what("finding the link"))?;
            outside
                .links
                .ask(vec![rtnl::address(index, host, LINK_PREFIX)])
                .map_err(what("giving an address to the link"))?;
            host
        }
    };
    let far = Ipv4Addr::from_bits(host.to_bits() + 1);
    // Before the link is up, so that nothing comes over it that isn't filtered.
    outside.set_rules(names, far)?;
    outside.links.ask(vec![rtnl::link_up(&names.link, None)]).map_err(what("bringing up the link"))?;
    forwarding()?;
    Ok((host, far))
}

/// Lets the host forward packets, and says so if it did not.
fn forwarding() -> Result<(), NetError> {
    const SWITCH: &str = "/proc/sys/net/ipv4/ip_forward";
    let now = fs::read_to_string(SWITCH).map_err(NetError::system(format!("reading {SWITCH}")))?;
    if now.trim() == "0" {
        fs::write(SWITCH, "1").map_err(NetError::system(format!("setting {SWITCH}")))?;
        tracing::warn!("net.ipv4.ip_forward was off and is on now: sandboxes reach the outside through this host");
    }
    Ok(())
}

fn router_end(links: &mut Rtnl, host: Ipv4Addr, far: Ipv4Addr) -> Result<(), NetError> {
    settings()?;
    let what = |what: &str| NetError::system::<io::Error>(format!("{what} in the router namespace"));
    let index = |name: &str| rtnl::index_of(name).map_err(what("finding a link"));
    let (lo, up) = (index("lo")?, index(rules::UPLINK)?);
    links
        .ask(vec![
            rtnl::link_up("lo", None),
            rtnl::address(lo, crate::slots::GATEWAY, 32),
            rtnl::address(up, far, LINK_PREFIX),
            rtnl::link_up(rules::UPLINK, None),
            rtnl::default_route(host),
        ])
        .map_err(what("setting links, addresses and routes"))
}

/// The settings of the router namespace, from inside it.
fn settings() -> Result<(), NetError> {
    let set = |path: &str, value: &str| fs::write(Path::new("/proc/sys/net").join(path), value);
    for (path, value) in [
        ("ipv4/conf/all/send_redirects", "0"),
        ("ipv4/conf/default/send_redirects", "0"),
        ("ipv4/conf/all/accept_redirects", "0"),
        ("ipv4/conf/default/accept_redirects", "0"),
        ("ipv4/ip_forward", "1"),
    ] {
        set(path, value).map_err(NetError::system(format!("setting {path} in the router namespace")))?;
    }
    // IPv6 isn't switched off, so that what guests send of it meets the rules, which drop and count it; but the router takes no part
    // in it. A kernel without IPv6 has none of these.
    for (path, value) in [
        ("ipv6/conf/all/forwarding", "0"),
        ("ipv6/conf/default/accept_ra", "0"),
        ("ipv6/conf/default/dad_transmits", "0"),
        ("ipv6/conf/default/addr_gen_mode", "1"),
    ] {
        if let Err(error) = set(path, value) {
            tracing::debug!(path, %error, "not set in the router namespace");
        }
    }
    Ok(())
}

/// The range that an address of a link's end belongs to.
fn link_of(address: Ipv4Addr) -> Option<u32> {
    address.to_bits().checked_sub(LINKS).map(|offset| offset / 4).filter(|link| *link < LINK_COUNT)
}

/// The first address of a range that no interface of the host uses, looking from `seed` on.
fn free_range(seed: u32, used: &[(String, Ipv4Addr)]) -> Option<Ipv4Addr> {
    let taken: HashSet<u32> = used.iter().filter_map(|(_, address)| link_of(*address)).collect();
    (0..LINK_COUNT)
        .map(|step| seed.wrapping_add(step) % LINK_COUNT)
        .find(|link| !taken.contains(link))
        .map(|link| Ipv4Addr::from_bits(LINKS + link * 4 + 1))
}

/// The IPv4 addresses of the calling thread's namespace, with the links that have them.
fn addresses() -> io::Result<Vec<(String, Ipv4Addr)>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the call sets the pointer to a list that it allocates, which is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: each entry is valid until the list is freed; a name is a terminated string, and an address whose family is AF_INET
    // is a `sockaddr_in`.
    unsafe {
        while let Some(entry) = next.as_ref() {
            next = entry.ifa_next;
            let family = entry.ifa_addr.as_ref().map(|address| i32::from(address.sa_family));
            if family == Some(libc::AF_INET) {
                let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                let name = std::ffi::CStr::from_ptr(entry.ifa_name).to_string_lossy().into_owned();
                found.push((name, Ipv4Addr::from_bits(u32::from_be(address.sin_addr.s_addr))));
            }
        }
        libc::freeifaddrs(list);
    }
    Ok(found)
}

/// Removes what is in the root namespace, then the router namespace's name. What is gone already is no error.
pub(super) fn remove(names: &Names, outside: &Inside<Outside>) -> Result<(), NetError> {
    let _lock = lock()?;
    let own = names.clone();
    outside.run(move |outside| {
        let table = &own.table;
        outside
            .nft
            .change("removing the host's rules", &format!("add table inet {table}\ndelete table inet {table}"))?;
        match outside.links.ask(vec![rtnl::delete_link(&own.link)]) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            other => other.map_err(NetError::system(format!("removing the link {}", own.link))),
        }
    })?;
    let what = || format!("removing the network namespace {}", names.netns.display());
    if open_namespace(&names.netns)?.is_some() {
        unmount(&names.netns, UnmountFlags::DETACH).map_err(NetError::system(what()))?;
    }
    match fs::remove_file(&names.netns) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(NetError::system(what())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_eight_digits() {
        assert_eq!(Names::new("0123abcd").unwrap().link, "cpc0123abcd");
        for bad in ["", "0123abc", "0123ABCD", "+123abcd", "0123abcde", "../../ab"] {
            assert!(Names::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn links_get_free_ranges() {
        let at = |link: u32| (String::new(), Ipv4Addr::from_bits(LINKS + link * 4 + 2));
        // All but a few are in use; the search begins near the end and goes on at the beginning.
        let mut used: Vec<_> = (0..LINK_COUNT).filter(|link| ![7, 4090].contains(link)).map(at).collect();
        used.push((String::new(), Ipv4Addr::new(169, 254, 200, 1)));
        for expected in [4090, 7] {
            let found = free_range(u32::MAX - 9, &used).unwrap();
            assert_eq!(found, Ipv4Addr::from_bits(LINKS + expected * 4 + 1));
            used.push((String::new(), found));
        }
        assert_eq!(free_range(0, &used), None);
        assert_eq!(free_range(0, &[]), Some(Ipv4Addr::new(169, 254, 64, 1)));
    }
}
