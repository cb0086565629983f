//! The life of slots: many, in any order, with crashes in between, several instances at once, and nothing left over.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use common::{Instance, root};
use coppice_net::{Egress, NetConfig, NetError, Network, Opening, Seat, Slot, SlotRecord, Slots, check, isolated_tap};

const PATIENCE: Duration = Duration::from_secs(60);

/// Numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % below
    }
}

fn policy(kind: usize) -> Egress {
    match kind {
        0 => Egress::None,
        1 => Egress::allow(&["192.0.2.0/24", "192.0.2.7:80", "198.51.100.0/24:443", "*.example.org"]).unwrap(),
        _ => Egress::Open,
    }
}

/// What the router has is what these slots have, and nothing more.
fn assert_exactly(instance: &Instance, slots: usize) {
    assert_eq!(instance.links().len(), slots, "links");
    for set in ["set inet coppice slots", "set arp coppice slots", "map inet coppice epoch", "set inet coppice epochs"]
    {
        assert_eq!(instance.elements(set), slots, "{set}");
    }
    assert_eq!(instance.elements("map inet coppice limits_in"), slots);
    assert_eq!(instance.inside("nft list limits table inet coppice").matches("limit ").count(), 2 * slots);
    let routes = instance.inside("ip route");
    assert_eq!(routes.lines().filter(|line| line.contains("dev t")).count(), slots, "routes");
    assert_eq!(instance.inside("ip neigh").lines().filter(|line| line.contains("dev t")).count(), slots, "neighbours");
}

#[test]
fn five_hundred_in_random_order_with_crashes_leave_nothing() {
    if !root() {
        return;
    }
    let (limit, ready) = (500, 16);
    let mut instance = Instance::open(None, limit, ready, Some(1 << 20));
    let mut dice = Dice(3);
    let mut taken: HashMap<u32, (Slot, Egress)> = HashMap::new();
    let (mut takes, mut puts) = (0, 0);
    for round in 0..4 {
        while takes < 125 * (round + 1) {
            if taken.is_empty() || dice.roll(5) < 3 {
                let egress = policy(dice.roll(8));
                let slot = instance.network().take(&egress).unwrap();
                takes += 1;
                if matches!(egress, Egress::Allow(_)) {
                    let opening = Opening { address: "192.0.2.9".parse().unwrap(), port: Some(80), ttl: PATIENCE };
                    instance.network().open_names(slot.index, &[opening]).unwrap();
                }
                assert!(taken.insert(slot.index, (slot, egress)).is_none(), "taken twice");
            } else {
                let index = *taken.keys().nth(dice.roll(taken.len())).unwrap();
                let (slot, _) = taken.remove(&index).unwrap();
                puts += 1;
                if dice.roll(2) == 0 {
                    instance.network().set_egress(index, &policy(1)).unwrap();
                }
                // Whether the VMM is gone before its slot is put, or a moment later, makes no difference.
                let early = dice.roll(2) == 0;
                let held = (!early).then_some(slot);
                instance.network().put(index).unwrap();
                drop(held);
            }
        }
        // A crash: some machines outlive it, and the others are gone before the next start, or are not wanted any more.
        let mut keep = Vec::new();
        let mut unwanted = Vec::new();
        for (index, (slot, egress)) in std::mem::take(&mut taken) {
            match dice.roll(3) {
                0 => drop(slot),
                1 => unwanted.push(slot),
                _ => {
                    let record = SlotRecord {
                        index,
                        mac: slot.mac,
                        address: slot.address,
                        egress: egress.clone(),
                        seat: slot.seat,
                    };
                    keep.push(record);
                    taken.insert(index, (slot, egress));
                }
            }
        }
        instance.crash();
        instance.restart(&keep);
        assert!(instance.network().settle(PATIENCE));
        assert_eq!(instance.network().capacity().0, u32::try_from(keep.len()).unwrap());
        assert_exactly(&instance, keep.len() + usize::try_from(ready).unwrap());
        assert!(matches!(instance.network().close(), Err(NetError::InUse { .. })) || keep.is_empty());
    }
    assert!(takes >= 500 && puts > 100, "{takes} {puts}");
    for index in taken.keys() {
        instance.network().put(*index).unwrap();
    }
    assert!(instance.network().settle(PATIENCE));
    assert_exactly(&instance, usize::try_from(ready).unwrap());
    for set in ["nets_any", "nets_port", "names_any", "names_port"] {
        assert_eq!(instance.elements(&format!("set inet coppice {set}")), 0, "{set}");
    }
    instance.network().close().unwrap();
    assert_eq!(instance.traces(), Vec::<String>::new());
}

#[test]
fn a_thousand_slots_are_there_at_once_and_no_more() {
    if !root() {
        return;
    }
    let instance = Instance::open(None, 1000, 1000, Some(1 << 20));
    assert!(instance.network().settle(PATIENCE));
    let slots: Vec<Slot> = (0..1000).map(|_| instance.network().take(&Egress::Open).unwrap()).collect();
    let addresses: HashSet<_> = slots.iter().map(|slot| slot.address).collect();
    let macs: HashSet<_> = slots.iter().map(|slot| slot.mac).collect();
    assert_eq!((addresses.len(), macs.len()), (1000, 1000));
    assert!(matches!(instance.network().take(&Egress::Open), Err(NetError::Exhausted { limit: 1000 })));
    assert_eq!(instance.network().capacity(), (1000, 1000));
    assert_exactly(&instance, 1000);
    // The last is as reachable as the first.
    let guest = common::guest::Guest::new(slots.last().unwrap());
    guest.send(5000, "192.0.2.254:9".parse().unwrap(), "");
    for slot in &slots {
        instance.network().put(slot.index).unwrap();
    }
}

#[test]
fn many_callers_at_once_get_in_nobodys_way() {
    if !root() {
        return;
    }
    let instance = Instance::open(None, 24, 4, Some(1 << 20));
    let network = instance.network();
    std::thread::scope(|scope| {
        for caller in 0..4 {
            scope.spawn(move || {
                let mut dice = Dice(caller);
                let mut own = Vec::new();
                for _ in 0..150 {
                    match dice.roll(4) {
                        0 if own.len() < 6 => own.push(network.take(&policy(dice.roll(3))).unwrap().index),
                        1 if !own.is_empty() => network.put(own.swap_remove(dice.roll(own.len()))).unwrap(),
                        2 => {
                            // Of any slot, also somebody else's, or one that is being taken apart.
                            let index = u32::try_from(dice.roll(24)).unwrap();
                            let told = network.set_egress(index, &policy(dice.roll(3)));
                            assert!(matches!(told, Ok(()) | Err(NetError::UnknownSlot { .. })), "{told:?}");
                        }
                        _ => {
                            let index = u32::try_from(dice.roll(24)).unwrap();
                            let opening = Opening { address: "192.0.2.9".parse().unwrap(), port: None, ttl: PATIENCE };
                            let told = network.open_names(index, &[opening]);
                            assert!(matches!(told, Ok(()) | Err(NetError::UnknownSlot { .. })), "{told:?}");
                        }
                    }
                }
                own.into_iter().for_each(|index| network.put(index).unwrap());
            });
        }
    });
    assert!(network.settle(PATIENCE));
    assert_eq!(network.capacity(), (0, 24));
    assert_exactly(&instance, 4);
    assert_eq!(instance.elements("set inet coppice names_any") + instance.elements("set inet coppice nets_any"), 0);
}

#[test]
fn instances_are_side_by_side() {
    if !root() {
        return;
    }
    let links: HashSet<String> = std::thread::scope(|scope| {
        let run = || {
            let instance = Instance::open(None, 20, 4, None);
            let slots: Vec<Slot> = (0..20).map(|_| instance.network().take(&policy(1)).unwrap()).collect();
            assert_exactly_links(&instance, &slots);
            let address = instance.inside("ip -o -4 address show dev up");
            slots.iter().for_each(|slot| instance.network().put(slot.index).unwrap());
            assert!(instance.network().settle(PATIENCE));
            (instance, address)
        };
        let running: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
        // All of them are there until the last has its address.
        let instances: Vec<_> = running.into_iter().map(|thread| thread.join().unwrap()).collect();
        instances.into_iter().map(|(_, address)| address).collect()
    });
    assert_eq!(links.len(), 4, "{links:?}");
}

fn assert_exactly_links(instance: &Instance, slots: &[Slot]) {
    let names: HashSet<String> = slots.iter().map(|slot| format!("t{}", slot.index)).collect();
    assert_eq!(instance.links(), names);
}

#[test]
fn mistakes_are_told_and_change_nothing() {
    if !root() {
        return;
    }
    let config = NetConfig { id: "BAD".to_owned(), limit: 1, ready: 0, bandwidth: None };
    assert!(Network::open(config.clone()).is_err());
    assert!(Network::open(NetConfig { id: common::fresh_id(), limit: u32::MAX, ..config }).is_err());

    let mut instance = Instance::open(None, 1, 0, None);
    let network = instance.network();
    assert!(matches!(network.reclaim(&[]), Err(NetError::Settled)));
    assert!(matches!(network.set_egress(0, &Egress::None), Err(NetError::UnknownSlot { index: 0 })));
    assert!(matches!(network.open_names(7, &[]), Err(NetError::UnknownSlot { index: 7 })));
    let many = Egress::Allow(vec!["192.0.2.1".parse().unwrap(); 65]);
    assert!(matches!(network.take(&many), Err(NetError::Policy(_))));
    let slot = network.take(&Egress::Open).unwrap();
    assert!(matches!(network.take(&Egress::Open), Err(NetError::Exhausted { limit: 1 })));
    assert!(matches!(network.close(), Err(NetError::InUse { taken: 1 })));
    network.put(slot.index).unwrap();
    network.put(77).unwrap();
    assert_eq!(network.take(&Egress::Open).unwrap().index, slot.index, "waits for the one that is being taken apart");

    let address = "10.203.1.1".parse().unwrap();
    let wrong = SlotRecord { index: 0, mac: [2; 6], address, egress: Egress::Open, seat: Seat::First };
    instance.crash();
    let network = Network::open(instance.config.clone()).unwrap();
    assert!(matches!(network.take(&Egress::Open), Err(NetError::NotReady)));
    assert!(matches!(network.reclaim(&[wrong]), Err(NetError::BadRecord { index: 0, .. })));
    network.reclaim(&[]).unwrap();
    network.close().unwrap();
    assert!(matches!(network.take(&Egress::Open), Err(NetError::Closed)));
    assert!(network.guest_socket().is_err());
    drop(network);
    // What was closed can be opened again.
    instance.restart(&[]);
    instance.network().take(&Egress::Open).unwrap();
}

#[test]
fn rules_that_somebody_broke_are_set_anew() {
    if !root() {
        return;
    }
    let instance = Instance::open(None, 8, 2, Some(1 << 20));
    let slots: Vec<Slot> = (0..4).map(|_| instance.network().take(&policy(1)).unwrap()).collect();
    instance.inside("nft flush set inet coppice slots");
    instance.network().put(slots[0].index).unwrap();
    assert!(instance.network().settle(PATIENCE));
    assert_exactly(&instance, 5);
    slots.iter().for_each(|slot| instance.network().put(slot.index).unwrap());
}

#[test]
fn this_host_has_what_it_takes() {
    if !root() {
        assert_eq!(check().len(), 1, "it says what is missing without root");
        return;
    }
    assert_eq!(check(), []);
    let (one, two) = (isolated_tap().unwrap(), isolated_tap().unwrap());
    for tap in [&one, &two] {
        rustix::io::write(tap, &[0; 64]).unwrap();
    }
}
