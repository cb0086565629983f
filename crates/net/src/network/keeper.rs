//! Making slots and taking them apart: the keeper does both in the background, a `take` that finds none ready makes its own.
//!
//! A slot is never cleaned for its next owner: its link is removed, with whatever frames are in it and whoever still holds it,
//! its rules go, and it is made new with another MAC and another epoch.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use rustix::rand::{GetRandomFlags, getrandom};

use super::Shared;
use super::pool::{Made, Phase, Work};
use crate::egress::Egress;
use crate::error::NetError;
use crate::rtnl;
use crate::rules::{Batch, Identity, is_tap_name, tap_name};
use crate::slots::{GATEWAY_MAC, Seat, address_of};
use crate::tap;

/// How many slots the keeper works on at once: a caller that changes a policy waits for no more than that.
const BATCH: usize = 16;

/// How long the keeper waits after a failure.
const PAUSE: Duration = Duration::from_secs(1);

/// Links that are to be removed are in this group for a moment.
const DOOMED: u32 = 0x636f_7070;

fn random<const N: usize>() -> Result<[u8; N], NetError> {
    let mut bytes = [0; N];
    let got = getrandom(&mut bytes, GetRandomFlags::empty()).map_err(NetError::system("asking for randomness"))?;
    if got == N {
        Ok(bytes)
    } else {
        Err(NetError::system("asking for randomness")(io::Error::from(io::ErrorKind::UnexpectedEof)))
    }
}

/// A mark for connections; 0 is that of connections without one.
pub(super) fn random_epoch() -> Result<u32, NetError> {
    Ok(u32::from_ne_bytes(random()?).max(1))
}

/// A locally administered address of ours.
fn random_mac() -> Result<[u8; 6], NetError> {
    loop {
        let [a, b, c, d] = random()?;
        let mac = [0x02, 0x63, a, b, c, d];
        if mac != GATEWAY_MAC {
            return Ok(mac);
        }
    }
}

impl Shared {
    /// What the keeper's thread does until the network is closed.
    pub(super) fn keep(&self) {
        loop {
            let mut pool = self.pool();
            let work = loop {
                if pool.phase == Phase::Closed {
                    return;
                }
                match pool.work(BATCH) {
                    Some(work) => break work,
                    None => pool = self.change.wait(pool).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(pool);
            let failure = match work {
                Work::Retire(indexes) => self.retire(&indexes),
                Work::Make(indexes) => self.prepare(&indexes),
            };
            let mut pool = self.pool();
            pool.failure = failure.as_ref().err().map(ToString::to_string);
            self.change.notify_all();
            if let Err(error) = failure {
                tracing::error!(error = &error as &dyn std::error::Error, "network slots");
                // Not a sleep: closing must not wait for it.
                let closed = |pool: &mut super::Pool| pool.phase != Phase::Closed;
                drop(self.change.wait_timeout_while(pool, PAUSE, closed));
            }
        }
    }

    fn prepare(&self, indexes: &[u32]) -> Result<(), NetError> {
        let _turn = self.turn();
        let made = self.make(indexes);
        let (made, failed, result) = match made {
            Ok(made) => (made, &[][..], Ok(())),
            Err(error) => (Vec::new(), indexes, Err(error)),
        };
        self.pool().prepared(made, failed);
        result
    }

    /// Makes slots: links, then rules. Either all of them are made, or nothing is left of any. The caller has the turn until they
    /// are in the pool: nobody sets all rules anew without them.
    pub(super) fn make(&self, indexes: &[u32]) -> Result<Vec<Made>, NetError> {
        let mut identities = Vec::with_capacity(indexes.len());
        for index in indexes {
            let address = address_of(*index).ok_or(NetError::UnknownSlot { index: *index })?;
            let (mac, epoch) = (random_mac()?, random_epoch()?);
            identities.push(Identity { index: *index, seat: Seat::First, mac, address, epoch });
        }
        let wanted = identities.clone();
        // If one fails, the descriptors of the others are closed, and with them their links go.
        let taps = self.links.run(move |links| {
            wanted
                .iter()
                .map(|identity| {
                    let tap = make_tap(links, identity)?;
                    connect(links, identity)?;
                    Ok(tap)
                })
                .collect::<Result<Vec<_>, NetError>>()
        })?;
        let mut batch = Batch::default();
        identities.iter().for_each(|identity| batch.add_slot(identity, &Egress::Open, self.bandwidth));
        self.apply("adding slots", batch)?;
        let made = identities.into_iter().zip(taps).map(|(identity, tap)| Made {
            identity,
            tap: Some(Arc::new(tap)),
            beside: None,
            egress: Egress::Open,
            opened: HashMap::new(),
        });
        Ok(made.collect())
    }

    /// Takes slots apart: links, then rules, so that what was on its way finds the old rules until it finds no link.
    fn retire(&self, indexes: &[u32]) -> Result<(), NetError> {
        let names = both_names(indexes.iter().copied());
        if let Err(error) = self.links.run(move |links| remove_links(links, names)) {
            self.pool().not_retired();
            return Err(error);
        }
        let _turn = self.turn();
        let mut batch = Batch::default();
        for made in self.pool().dismantling() {
            batch.remove_slot(&made.identity, &made.egress, self.bandwidth.is_some());
            made.identities().skip(1).for_each(|beside| batch.identity("delete", &beside));
            made.opened.keys().for_each(|(to, port)| batch.close(made.identity.address, *to, *port));
        }
        let removed = self.apply("removing slots", batch).or_else(|error| {
            // Somebody else changed the rules. They are set anew for the slots that remain.
            tracing::warn!(error = &error as &dyn std::error::Error, "the router's rules are set anew");
            self.set_all_rules(self.pool().all())
        });
        let mut pool = self.pool();
        match removed {
            Ok(()) => pool.retired(),
            Err(_) => pool.not_retired(),
        }
        removed
    }

    /// Removes the links of slots that nobody uses.
    pub(super) fn remove_spare_links(&self) -> Result<(), NetError> {
        let names: Vec<String> = both_names(self.pool().spare().into_iter());
        if names.is_empty() {
            return Ok(());
        }
        match self.links.run(move |links| remove_links(links, names)) {
            // It was closed before.
            Err(NetError::Closed) => Ok(()),
            other => other,
        }
    }

    /// Removes the links of slots that aren't kept, and makes sure of the routes and neighbours of those that are.
    pub(super) fn keep_links(&self, kept: &[Made]) -> Result<(), NetError> {
        let kept: HashMap<String, Identity> =
            kept.iter().map(|made| (made.identity.tap_name(), made.identity)).collect();
        self.links.run(move |links| {
            let (mut there, mut doomed) = (0_usize, Vec::new());
            for name in tap_links()? {
                match kept.get(&name) {
                    Some(identity) => {
                        there += 1;
                        connect(links, identity)?;
                    }
                    None => doomed.push(name),
                }
            }
            if there < kept.len() {
                tracing::warn!(missing = kept.len() - there, "TAPs of machines that should have survived are gone");
            }
            if !doomed.is_empty() {
                tracing::info!(count = doomed.len(), "removing TAPs that an earlier run left");
            }
            remove_links(links, doomed)
        })
    }
}

/// A seat's TAP, up. Nothing leads to it yet.
pub(super) fn make_tap(links: &mut rtnl::Rtnl, identity: &Identity) -> Result<OwnedFd, NetError> {
    let name = identity.tap_name();
    let what = |what: &str| NetError::system::<io::Error>(format!("{what} {name}"));
    let tap = tap::create(&name).map_err(what("making the TAP"))?;
    links.ask(vec![rtnl::link_up(&name, Some(GATEWAY_MAC))]).map_err(what("bringing up the TAP"))?;
    Ok(tap)
}

/// The route to a slot's seat, in place of the one to its other seat, and who is there.
pub(super) fn connect(links: &mut rtnl::Rtnl, identity: &Identity) -> Result<(), NetError> {
    let name = identity.tap_name();
    let connected = rtnl::index_of(&name).and_then(|link| {
        links.ask(vec![rtnl::neighbour(identity.address, link, identity.mac), rtnl::host_route(identity.address, link)])
    });
    connected.map_err(NetError::system(format!("setting route and neighbour of {name}")))
}

/// The names of all seats that slots may have.
fn both_names(indexes: impl Iterator<Item = u32>) -> Vec<String> {
    indexes.flat_map(|index| Seat::ALL.map(|seat| tap_name(index, seat))).collect()
}

/// Removes links, all in one step: each step waits until no CPU uses what it removes. Links that are gone are no error.
pub(super) fn remove_links(links: &mut rtnl::Rtnl, names: Vec<String>) -> Result<(), NetError> {
    let gone = |result: io::Result<()>| match result {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        other => other.map_err(NetError::system("removing TAPs")),
    };
    if names.is_empty() {
        return Ok(());
    }
    let requests = names.iter().map(|name| rtnl::link_group(name, DOOMED)).collect();
    links.ask_each(requests).into_iter().try_for_each(gone)?;
    gone(links.ask(vec![rtnl::delete_group(DOOMED)]))
}

/// The TAPs in the calling thread's namespace.
fn tap_links() -> Result<Vec<String>, NetError> {
    const LIST: &str = "/proc/thread-self/net/dev";
    let text = fs::read_to_string(LIST).map_err(NetError::system(format!("reading {LIST}")))?;
    let names = text.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim());
    Ok(names.filter(|name| is_tap_name(name)).map(str::to_owned).collect())
}
