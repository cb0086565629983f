//! Network slots without a network: the arithmetic and the bookkeeping are real, packets are not.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use coppice_net::{Counters, Egress, GATEWAY, NetError, Opening, Seat, Slot, SlotRecord, Slots, address_of, slot_of};

/// See the module.
#[derive(Debug)]
pub struct FakeSlots {
    limit: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    ready: bool,
    taken: BTreeMap<u32, Taken>,
    opened: Vec<(u32, Opening)>,
    /// Uses so far: MAC addresses are fresh for each.
    uses: u32,
    fail_policies: bool,
    fail_seats: u32,
    dns: Option<SocketAddr>,
}

/// A slot in use.
#[derive(Debug)]
struct Taken {
    egress: Egress,
    mac: [u8; 6],
    /// The seat that the slot's address leads to, and whether there is another one.
    seat: Seat,
    beside: bool,
}

/// The network of loopback addresses that stands for the guests': `127.203.x.y` is the slot of `10.203.x.y`, so that a
/// test can send from a guest's address.
const LOOPBACK: u8 = 127;

impl FakeSlots {
    /// Of at most `limit` slots.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self { limit, state: Mutex::default() }
    }

    /// The slots in use and what each may reach.
    #[must_use]
    pub fn taken(&self) -> BTreeMap<u32, Egress> {
        self.state().taken.iter().map(|(index, taken)| (*index, taken.egress.clone())).collect()
    }

    /// The slots in use: who gets what comes for each, and whether another seat is there, too.
    #[must_use]
    pub fn seats(&self) -> BTreeMap<u32, (Seat, bool)> {
        self.state().taken.iter().map(|(index, taken)| (*index, (taken.seat, taken.beside))).collect()
    }

    /// So many of the next second seats can't be made.
    pub fn fail_seats(&self, count: u32) {
        self.state().fail_seats = count;
    }

    /// What was opened for names, in order.
    #[must_use]
    pub fn opened(&self) -> Vec<(u32, Opening)> {
        self.state().opened.clone()
    }

    /// From now on no policy but the default one can be applied.
    pub fn fail_policies(&self, fail: bool) {
        self.state().fail_policies = fail;
    }

    /// Where the guests' DNS questions are listened for, once they are.
    #[must_use]
    pub fn dns_address(&self) -> Option<SocketAddr> {
        self.state().dns
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn null() -> Result<OwnedFd, NetError> {
    let file = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null");
    file.map(OwnedFd::from).map_err(|source| NetError::System { what: "opening /dev/null".into(), source })
}

fn refused(state: &State, egress: &Egress) -> Result<(), NetError> {
    if state.fail_policies && *egress != Egress::Open {
        return Err(NetError::Rules { what: "a policy", message: "refused on request".into() });
    }
    Ok(())
}

impl Slots for FakeSlots {
    fn reclaim(&self, keep: &[SlotRecord]) -> Result<(), NetError> {
        let mut state = self.state();
        let taken = |record: &SlotRecord| {
            let SlotRecord { egress, mac, seat, .. } = record.clone();
            (record.index, Taken { egress, mac, seat, beside: false })
        };
        state.taken = keep.iter().map(taken).collect();
        state.ready = true;
        Ok(())
    }

    fn take(&self, egress: &Egress) -> Result<Slot, NetError> {
        let mut state = self.state();
        if !state.ready {
            return Err(NetError::NotReady);
        }
        refused(&state, egress)?;
        let free = (0..self.limit).find(|index| !state.taken.contains_key(index));
        let index = free.ok_or(NetError::Exhausted { limit: self.limit })?;
        let address = address_of(index).ok_or(NetError::UnknownSlot { index })?;
        let tap = Arc::new(null()?);
        state.uses += 1;
        let [a, b, c, d] = state.uses.to_be_bytes();
        let (mac, seat) = ([0x02, 0x63, a, b, c, d], Seat::First);
        state.taken.insert(index, Taken { egress: egress.clone(), mac, seat, beside: false });
        Ok(Slot { index, seat, mac, address, tap })
    }

    fn reseat(&self, index: u32) -> Result<Slot, NetError> {
        let mut state = self.state();
        if state.fail_seats > 0 {
            state.fail_seats -= 1;
            return Err(NetError::Rules { what: "a seat", message: "refused on request".into() });
        }
        let taken = state.taken.get_mut(&index).ok_or(NetError::UnknownSlot { index })?;
        if std::mem::replace(&mut taken.beside, true) {
            return Err(NetError::Seats { index });
        }
        let address = address_of(index).ok_or(NetError::UnknownSlot { index })?;
        Ok(Slot { index, seat: taken.seat.other(), mac: taken.mac, address, tap: Arc::new(null()?) })
    }

    fn unseat(&self, index: u32, seat: Seat) -> Result<(), NetError> {
        if let Some(taken) = self.state().taken.get_mut(&index)
            && std::mem::take(&mut taken.beside)
        {
            // Where there are two, who stays gets what comes.
            taken.seat = seat.other();
        }
        Ok(())
    }

    fn put(&self, index: u32) -> Result<(), NetError> {
        self.state().taken.remove(&index);
        Ok(())
    }

    fn set_egress(&self, index: u32, egress: &Egress) -> Result<(), NetError> {
        let mut state = self.state();
        refused(&state, egress)?;
        let slot = state.taken.get_mut(&index).ok_or(NetError::UnknownSlot { index })?;
        slot.egress = egress.clone();
        Ok(())
    }

    fn open_names(&self, index: u32, openings: &[Opening]) -> Result<(), NetError> {
        let mut state = self.state();
        if !state.taken.contains_key(&index) {
            return Err(NetError::UnknownSlot { index });
        }
        state.opened.extend(openings.iter().map(|opening| (index, opening.clone())));
        Ok(())
    }

    fn guest_socket(&self) -> Result<OwnedFd, NetError> {
        let unsupported = io::Error::from(io::ErrorKind::Unsupported);
        Err(NetError::System { what: "connecting to a fake guest".into(), source: unsupported })
    }

    fn dns_sockets(&self) -> Result<(OwnedFd, OwnedFd), NetError> {
        let failed = |source| NetError::System { what: "listening for fake guests".into(), source };
        // UDP and TCP on one port, as guests expect it; the first choice of the kernel may be taken for the other.
        for _ in 0..16 {
            let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
            let address = udp.local_addr().map_err(failed)?;
            if let Ok(tcp) = TcpListener::bind(address) {
                self.state().dns = Some(address);
                return Ok((udp.into(), tcp.into()));
            }
        }
        Err(failed(io::ErrorKind::AddrInUse.into()))
    }

    fn slot_of(&self, address: Ipv4Addr) -> Option<u32> {
        let [first, rest @ ..] = address.octets();
        let pool = GATEWAY.octets()[0];
        let first = if first == LOOPBACK { pool } else { first };
        slot_of(Ipv4Addr::from([first, rest[0], rest[1], rest[2]]))
    }

    fn counters(&self) -> Result<Counters, NetError> {
        Ok(Counters::default())
    }

    fn capacity(&self) -> (u32, u32) {
        (u32::try_from(self.state().taken.len()).unwrap_or(u32::MAX), self.limit)
    }

    fn close(&self) -> Result<(), NetError> {
        let taken = u32::try_from(self.state().taken.len()).unwrap_or(u32::MAX);
        if taken > 0 { Err(NetError::InUse { taken }) } else { Ok(()) }
    }
}
