//! The network of one instance, in process: what implements [`Slots`] with the kernel.
//!
//! Locks are taken in this order: `turn` (who changes the rules of slots that exist), then `pool`. Neither is held by a
//! `take` that finds a slot made ahead for longer than it takes to pop it off a queue.

mod keeper;
mod place;
mod pool;
mod seats;
mod watch;

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrV4, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::egress::{Allowed, Egress};
use crate::error::NetError;
use crate::inside::{Inside, empty_namespace};
use crate::nft::Nft;
use crate::rtnl::Rtnl;
use crate::rules::{self, Batch, Identity};
use crate::slots::{Counters, GATEWAY, MAX_SLOTS, Opening, Seat, Slot, SlotRecord, Slots, address_of};

use self::place::{Names, Outside};
use self::pool::{Found, Made, Phase, Pool};
use self::watch::Watch;

/// How many addresses may be open for the names of one slot at once: a guest chooses the names below an allowed one.
const MAX_OPENINGS: usize = 1024;

/// How many bytes of questions to the resolver may wait to be read.
const DNS_BUFFER: usize = 4 << 20;

/// How long an answer of DNS is believed at most.
const MAX_TTL: Duration = Duration::from_secs(24 * 3600);

/// How long a `take` waits for slots that are being taken apart.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a network is to be.
#[derive(Debug, Clone)]
pub struct NetConfig {
    /// Eight hexadecimal digits that tell this instance from the others of the machine: [`instance_id`].
    pub id: String,
    /// How many slots may be in use at once.
    pub limit: u32,
    /// How many are kept ready.
    pub ready: u32,
    /// How many bytes a second a sandbox may send to the outside, and receive from it. `None` for no limit.
    pub bandwidth: Option<u64>,
}

/// The id of the instance with this data directory, which should be given in its canonical form.
#[must_use]
pub fn instance_id(data_directory: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let hash = blake3::hash(data_directory.as_os_str().as_bytes());
    hash.to_hex().chars().take(8).collect()
}

/// Every slot that is made is an open descriptor: raises how many this process may have, as far as it may itself.
fn allow_descriptors(slots: u64) {
    /// What the rest of a daemon has open.
    const OTHERS: u64 = 1024;
    let now = getrlimit(Resource::Nofile);
    let wanted = slots + OTHERS;
    if now.current.is_none_or(|now| now >= wanted) {
        return;
    }
    let possible = now.maximum.map_or(wanted, |most| most.min(wanted));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(possible), maximum: now.maximum });
    if raised.is_err() || possible < wanted {
        tracing::warn!(wanted, possible, "too few open files for all network slots: raise LimitNOFILE or `ulimit -Hn`");
    }
}

/// The network of one instance. Dropping it without [`Slots::close`] leaves namespace, links and rules, as a crash does.
pub struct Network {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

/// What the callers and the keeper share.
struct Shared {
    names: Names,
    bandwidth: Option<u64>,
    /// In the router namespace, one for each kind of work, so that none waits for another.
    rules: Inside<Nft>,
    links: Inside<Rtnl>,
    door: Inside<()>,
    /// In the namespace that the network was opened from.
    outside: Arc<Inside<Outside>>,
    watch: Mutex<Option<Watch>>,
    void: OwnedFd,
    turn: Mutex<()>,
    pool: Mutex<Pool>,
    /// Something in the pool changed.
    change: Condvar,
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (taken, limit) = self.capacity();
        f.debug_struct("Network")
            .field("netns", &self.shared.names.netns)
            .field("taken", &taken)
            .field("limit", &limit)
            .finish()
    }
}

impl Network {
    /// Opens the network of an instance: makes what isn't there, takes over what is. Nothing can be taken until
    /// [`Slots::reclaim`] was called.
    ///
    /// # Errors
    /// If the host lacks something (see [`crate::check`]), or the caller isn't root.
    pub fn open(config: NetConfig) -> Result<Self, NetError> {
        let names = Names::new(&config.id)?;
        if config.limit > MAX_SLOTS {
            return Err(NetError::Missing {
                what: format!("room for {} slots", config.limit),
                hint: format!("a host has at most {MAX_SLOTS}"),
            });
        }
        allow_descriptors(u64::from(config.limit));
        let outside = Inside::start("net-outside", None, Outside::new)?;
        let netns = place::router_namespace(&names)?;
        let inside = netns.as_fd();
        let links = || Rtnl::new().map_err(NetError::system("opening a netlink socket"));
        let shared = Shared {
            rules: Inside::start("net-rules", Some(inside), Nft::new)?,
            links: Inside::start("net-links", Some(inside), links)?,
            door: Inside::start("net-door", Some(inside), || Ok(()))?,
            outside: Arc::new(outside),
            watch: Mutex::new(None),
            names,
            bandwidth: config.bandwidth,
            void: empty_namespace()?,
            turn: Mutex::new(()),
            pool: Mutex::new(Pool::new(config.limit, config.ready)),
            change: Condvar::new(),
        };
        // Rules come before links: nothing is forwarded that isn't filtered, not even for a moment.
        shared.first_rules()?;
        let far = place::connect(&shared.names, &shared.outside, &shared.links, inside)?;
        let watch = Watch::start(shared.names.clone(), far, Arc::clone(&shared.outside))?;
        *shared.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
        Ok(Self { shared: Arc::new(shared), keeper: Mutex::new(None) })
    }

    /// A network namespace in which no link is up: where processes belong that have no business with any network.
    #[must_use]
    pub fn void_netns(&self) -> BorrowedFd<'_> {
        self.shared.void.as_fd()
    }

    /// How many slots are made ahead at the moment.
    #[must_use]
    pub fn ready(&self) -> usize {
        self.shared.pool().ready_count()
    }

    /// Waits until the background has nothing to do: slots that were given back are taken apart, those to be kept ready
    /// are ready. `false` if that takes longer than the time given.
    #[must_use]
    pub fn settle(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut pool = self.shared.pool();
        while !pool.settled() {
            let Some(left) = until.checked_duration_since(Instant::now()) else { return false };
            pool = self.shared.change.wait_timeout(pool, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.shared.pool().phase = Phase::Closed;
        self.shared.change.notify_all();
        self.join_keeper();
        // What is left behind is found by the next `open`; it is only sooner done here.
        if let Err(error) = self.shared.remove_spare_links() {
            tracing::debug!(error = &error as &dyn std::error::Error, "TAPs that nobody uses remain");
        }
    }
}

impl Network {
    fn join_keeper(&self) {
        if let Some(keeper) = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take()
            && keeper.join().is_err()
        {
            tracing::error!("the thread that makes network slots panicked");
        }
    }
}

impl Shared {
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who holds this changes the rules of slots that exist; nobody else does.
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn apply(&self, what: &'static str, batch: Batch) -> Result<(), NetError> {
        if batch.is_empty() {
            return Ok(());
        }
        let commands = batch.into_commands();
        self.rules.run(move |nft| nft.change(what, &commands))
    }

    /// The router's rules without any slot, unless rules of an earlier run are there: its machines may be running.
    fn first_rules(&self) -> Result<(), NetError> {
        let bandwidth = self.bandwidth.is_some();
        self.rules.run(move |nft| {
            if nft.list("looking for the router's rules", &rules::list_router()).is_ok() {
                return Ok(());
            }
            nft.change("setting the router's rules", &rules::router(bandwidth))
        })
    }

    /// Sets all rules anew, in one step, for exactly these slots: what was there before doesn't matter.
    fn set_all_rules<'a>(&self, slots: impl Iterator<Item = &'a Made>) -> Result<(), NetError> {
        let mut batch = Batch::default();
        batch.raw(&rules::router(self.bandwidth.is_some()));
        for made in slots {
            batch.add_slot(&made.identity, &made.egress, self.bandwidth);
            made.identities().skip(1).for_each(|beside| batch.identity("add", &beside));
            for (to, port, left) in made.openings() {
                batch.open(made.identity.address, to, port, left);
            }
        }
        self.apply("setting the router's rules", batch)
    }

    /// The records of slots to keep, as slots: with the epochs that their connections carry.
    fn recall(&self, keep: &[SlotRecord]) -> Result<Vec<Made>, NetError> {
        let mut found =
            self.rules.run(|nft| Ok(rules::found(&nft.list("listing the router's rules", &rules::list_router())?)))?;
        let now = Instant::now();
        let mut kept: HashMap<u32, Made> = HashMap::new();
        for record in keep {
            let bad = |why| NetError::BadRecord { index: record.index, why };
            if address_of(record.index) != Some(record.address) {
                return Err(bad("it has another slot's address"));
            }
            record.egress.check()?;
            let epoch = match found.epochs.get(&record.address) {
                Some(epoch) => *epoch,
                None => keeper::random_epoch()?,
            };
            let SlotRecord { index, seat, mac, address, .. } = *record;
            let identity = Identity { index, seat, mac, address, epoch };
            let opened = found.openings.remove(&record.address).unwrap_or_default();
            let opened = match record.egress {
                Egress::Allow(_) => opened.into_iter().map(|(to, port, left)| ((to, port), now + left)).collect(),
                Egress::Open | Egress::None => HashMap::new(),
            };
            let made = Made { identity, tap: None, beside: None, egress: record.egress.clone(), opened };
            if kept.insert(record.index, made).is_some() {
                return Err(bad("there are two of it"));
            }
        }
        Ok(kept.into_values().collect())
    }
}

/// Whether every name of the old list is in the new one, so that what they resolved to stays open.
fn names_remain(old: &Egress, new: &Egress) -> bool {
    let (Egress::Allow(old), Egress::Allow(new)) = (old, new) else { return false };
    old.iter().filter(|entry| matches!(entry, Allowed::Name { .. })).all(|entry| new.contains(entry))
}

impl Slots for Network {
    fn reclaim(&self, keep: &[SlotRecord]) -> Result<(), NetError> {
        let shared = &self.shared;
        let _turn = shared.turn();
        match shared.pool().phase {
            Phase::Unsorted => {}
            Phase::Running => return Err(NetError::Settled),
            Phase::Closed => return Err(NetError::Closed),
        }
        let kept = shared.recall(keep)?;
        shared.set_all_rules(kept.iter())?;
        shared.keep_links(&kept)?;
        tracing::info!(kept = kept.len(), netns = %shared.names.netns.display(), "network ready");
        shared.pool().keep(kept);
        let own = Arc::clone(shared);
        let keeper = std::thread::Builder::new()
            .name("net-keeper".to_owned())
            .spawn(move || own.keep())
            .map_err(NetError::system("starting a thread"))?;
        *self.keeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(keeper);
        Ok(())
    }

    fn take(&self, egress: &Egress) -> Result<Slot, NetError> {
        egress.check()?;
        let index = self.shared.obtain()?;
        self.shared.change.notify_all();
        if *egress != Egress::Open
            && let Err(error) = self.set_egress(index, egress)
        {
            self.put(index)?;
            return Err(error);
        }
        let pool = self.shared.pool();
        let made = pool.taken(index).ok_or(NetError::UnknownSlot { index })?;
        let tap = made.tap.clone().ok_or(NetError::UnknownSlot { index })?;
        let Identity { seat, mac, address, .. } = made.identity;
        Ok(Slot { index, seat, mac, address, tap })
    }

    fn reseat(&self, index: u32) -> Result<Slot, NetError> {
        self.shared.reseat(index)
    }

    fn unseat(&self, index: u32, seat: Seat) -> Result<(), NetError> {
        self.shared.unseat(index, seat)
    }

    fn put(&self, index: u32) -> Result<(), NetError> {
        let mut pool = self.shared.pool();
        pool.running()?;
        pool.put(index);
        drop(pool);
        self.shared.change.notify_all();
        Ok(())
    }

    fn set_egress(&self, index: u32, egress: &Egress) -> Result<(), NetError> {
        egress.check()?;
        let _turn = self.shared.turn();
        let mut batch = Batch::default();
        let (next, names_remain) = {
            let pool = self.shared.pool();
            pool.running()?;
            let made = pool.taken(index).ok_or(NetError::UnknownSlot { index })?;
            if made.egress == *egress {
                return Ok(());
            }
            let next = Identity { epoch: keeper::random_epoch()?, ..made.identity };
            let names_remain = names_remain(&made.egress, egress);
            batch.epoch("delete", &made.identity);
            batch.epoch("add", &next);
            batch.egress("delete", next.address, &made.egress);
            batch.egress("add", next.address, egress);
            if !names_remain {
                made.opened.keys().for_each(|(to, port)| batch.close(next.address, *to, *port));
            }
            (next, names_remain)
        };
        self.shared.apply("changing an egress policy", batch)?;
        if let Some(made) = self.shared.pool().changed(index) {
            made.identity = next;
            made.egress = egress.clone();
            if !names_remain {
                made.opened.clear();
            }
        }
        Ok(())
    }

    fn open_names(&self, index: u32, openings: &[Opening]) -> Result<(), NetError> {
        let _turn = self.shared.turn();
        let mut batch = Batch::default();
        let opened = {
            let pool = self.shared.pool();
            pool.running()?;
            let made = pool.taken(index).ok_or(NetError::UnknownSlot { index })?;
            let address = made.identity.address;
            if !matches!(made.egress, Egress::Allow(_)) {
                // An answer that was on its way when the policy changed: nothing of it is needed, or wanted.
                return Ok(());
            }
            let now = Instant::now();
            let mut opened = made.opened.clone();
            opened.retain(|_, until| *until > now);
            for opening in openings {
                let ttl = opening.ttl.clamp(Duration::from_secs(1), MAX_TTL);
                batch.open(address, opening.address, opening.port, ttl);
                opened.insert((opening.address, opening.port), now + ttl);
            }
            while opened.len() > MAX_OPENINGS {
                let Some(first) = opened.iter().min_by_key(|(_, until)| **until).map(|(key, _)| *key) else { break };
                opened.remove(&first);
                batch.close(address, first.0, first.1);
            }
            opened
        };
        self.shared.apply("opening what a name resolved to", batch)?;
        if let Some(made) = self.shared.pool().changed(index) {
            made.opened = opened;
        }
        Ok(())
    }

    fn guest_socket(&self) -> Result<OwnedFd, NetError> {
        self.shared.door.run(|()| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)
                .map_err(NetError::system("making a socket in the router namespace"))
        })
    }

    fn dns_sockets(&self) -> Result<(OwnedFd, OwnedFd), NetError> {
        self.shared.door.run(|()| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let at = SocketAddrV4::new(GATEWAY, 53);
            let make = || -> rustix::io::Result<(OwnedFd, OwnedFd)> {
                let udp = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
                // Room for bursts of many slots at a time, each of which is limited.
                sockopt::set_socket_recv_buffer_size_force(&udp, DNS_BUFFER)?;
                bind(&udp, &at)?;
                let tcp = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
                sockopt::set_socket_reuseaddr(&tcp, true)?;
                bind(&tcp, &at)?;
                listen(&tcp, 128)?;
                Ok((udp, tcp))
            };
            make().map_err(NetError::system(format!("listening at {GATEWAY}:53 in the router namespace")))
        })
    }

    fn counters(&self) -> Result<Counters, NetError> {
        let question = |table: &str| format!("list counters table {table}");
        let (inet, arp) = (question("inet coppice"), question("arp coppice"));
        let router = self.shared.rules.run(move |nft| {
            let mut objects = nft.list("reading counters", &inet)?;
            objects.extend(nft.list("reading counters", &arp)?);
            Ok(rules::packets(&objects, "coppice"))
        })?;
        let table = self.shared.names.table.clone();
        let outside = self.shared.outside.run(move |outside| {
            let objects = outside.nft.list("reading counters", &question(&format!("inet {table}")))?;
            Ok(rules::packets(&objects, &table))
        })?;
        let count = |counters: &HashMap<String, u64>, name: &str| counters.get(name).copied().unwrap_or(0);
        Ok(Counters {
            spoofed: count(&router, "spoofed"),
            refused: count(&router, "refused"),
            host_refused: count(&outside, "host_refused"),
        })
    }

    fn capacity(&self) -> (u32, u32) {
        self.shared.pool().counts()
    }

    fn close(&self) -> Result<(), NetError> {
        let shared = &self.shared;
        shared.pool().close()?;
        shared.change.notify_all();
        self.join_keeper();
        // The threads hold the namespace, and the TAPs their links. All links go in one step: closing them one by one takes long.
        shared.remove_spare_links()?;
        shared.pool().clear();
        for stop in [|s: &Shared| s.rules.stop(), |s: &Shared| s.links.stop(), |s: &Shared| s.door.stop()] {
            stop(shared);
        }
        drop(shared.watch.lock().unwrap_or_else(PoisonError::into_inner).take());
        place::remove(&shared.names, &shared.outside)?;
        shared.outside.stop();
        Ok(())
    }
}

impl Shared {
    /// An index that is taken now, made ahead if there is one.
    fn obtain(&self) -> Result<u32, NetError> {
        let until = Instant::now() + PATIENCE;
        let mut pool = self.pool();
        loop {
            match pool.find()? {
                Found::Ready(index) => return Ok(index),
                Found::Unmade(index) => {
                    drop(pool);
                    let _turn = self.turn();
                    let (made, result) = match self.make(&[index]) {
                        Ok(mut made) => (made.pop(), Ok(index)),
                        Err(error) => (None, Err(error)),
                    };
                    self.pool().made(index, made);
                    self.change.notify_all();
                    return result;
                }
                Found::Wait => {
                    let Some(left) = until.checked_duration_since(Instant::now()) else {
                        let message = pool.failure.clone().unwrap_or_else(|| "slots are being taken apart".to_owned());
                        return Err(NetError::Rules { what: "no slot became free", message });
                    };
                    pool = self.change.wait_timeout(pool, left).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }
}
