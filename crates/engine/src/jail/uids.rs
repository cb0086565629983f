//! Which user a VMM is: one of its own, also among the VMMs of other instances on this host.
//!
//! Offsets from [`UID_BASE`]: the lower half of the range is cut into shares of 2^16 for the slots of an instance, the third
//! quarter likewise for their second seats, the last one belongs to machines without a slot, of any instance, whose index is
//! random. Two instances may have the same share, with a likelihood of one in 2,048 (one in 1,024 for second seats): then
//! VMMs of the same index have the same user, and what keeps them apart is everything else of the jail.

use crate::privileged::{JailSlot, UID_BASE};

/// The share of one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Uids {
    share: u32,
}

/// Slots of an instance.
const SLOTS: u32 = JailSlot::SLOTS;
/// Where second seats begin. First ones are where they were before there were two, so that VMMs outlive a newer daemon.
const SECOND: u32 = 1 << 27;
/// Shares of the lower half, and of the third quarter.
const SHARES: u32 = SECOND / SLOTS;
const SECOND_SHARES: u32 = (JailSlot::UNSLOTTED - SECOND) / SLOTS;

impl Uids {
    /// For the instance `id`; the same after every restart.
    pub fn new(id: &str) -> Self {
        // FNV-1a, which is short and stays what it is.
        let hash = id
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        Self { share: u32::try_from((hash >> 20) % u64::from(SHARES)).unwrap_or(0) }
    }

    /// The user and group of a slot; `None` for an index that there is not.
    pub fn of(self, slot: JailSlot) -> Option<u32> {
        let first = |share: u32| UID_BASE + share * SLOTS;
        match slot.index {
            index if index < SLOTS => Some(first(self.share) + index),
            index if index < 2 * SLOTS => Some(first(self.share % SECOND_SHARES) + SECOND + index - SLOTS),
            JailSlot::UNSLOTTED..JailSlot::LIMIT => Some(UID_BASE + slot.index),
            _ => None,
        }
    }

    /// The slot of a user; `None` when it is no VMM's of this instance.
    pub fn slot(self, uid: u32) -> Option<JailSlot> {
        let offset = uid.checked_sub(UID_BASE)?;
        let index = match offset {
            0..SECOND => offset.checked_sub(self.share * SLOTS).filter(|index| *index < SLOTS)?,
            SECOND..JailSlot::UNSLOTTED => {
                let index = (offset - SECOND).checked_sub(self.share % SECOND_SHARES * SLOTS);
                SLOTS + index.filter(|index| *index < SLOTS)?
            }
            _ => offset,
        };
        let slot = JailSlot { index };
        (self.of(slot) == Some(uid)).then_some(slot)
    }
}

#[cfg(test)]
mod tests {
    use coppice_net::Seat;

    use super::*;

    #[test]
    fn users_are_told_apart_by_instance_and_lead_back_to_their_slot() {
        let (one, other) = (Uids::new("1f921eca"), Uids::new("2b7f96a6"));
        assert_ne!(one, other);
        assert_ne!(one.share % SECOND_SHARES, other.share % SECOND_SHARES);
        for index in [0, 1, SLOTS - 1, SLOTS, 2 * SLOTS - 1, JailSlot::UNSLOTTED, JailSlot::LIMIT - 1] {
            let slot = JailSlot { index };
            let uid = one.of(slot).unwrap();
            assert!((UID_BASE..=0x7fff_ffff).contains(&uid));
            assert_eq!(one.slot(uid), Some(slot));
            assert_eq!(other.slot(uid).is_some(), index >= JailSlot::UNSLOTTED);
        }
        for index in [2 * SLOTS, JailSlot::UNSLOTTED - 1, JailSlot::LIMIT, u32::MAX] {
            assert_eq!(one.of(JailSlot { index }), None);
        }
        assert!([0, 1000, 65_534, UID_BASE - 1, u32::MAX].into_iter().all(|uid| one.slot(uid).is_none()));
        assert_eq!(one.of(JailSlot { index: 7 }), Uids::new("1f921eca").of(JailSlot { index: 7 }));
        // Both seats of a slot lead back to it, and nothing else does.
        for seat in Seat::ALL {
            let slot = JailSlot::of(7, seat).unwrap();
            assert_eq!(slot.place(), Some((7, seat)));
            assert!(!slot.is_unslotted() && JailSlot::of(SLOTS, seat).is_none());
        }
        assert_eq!((JailSlot::unslotted().place(), JailSlot { index: 2 * SLOTS }.place()), (None, None));
        assert_ne!(one.of(JailSlot::of(7, Seat::First).unwrap()), one.of(JailSlot::of(7, Seat::Second).unwrap()));
        assert!((0..1000).all(|_| one.of(JailSlot::unslotted()).is_some()));
    }
}
