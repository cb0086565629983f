//! Which user a VMM is: one of its own, also among the VMMs of other instances on this host.
//!
//! Offsets from [`UID_BASE`]: the lower half of the range is cut into shares of 2^16 for the slots of an instance, the upper
//! half belongs to machines without a slot, of any instance, whose index is random. Two instances may have the same share,
//! with a likelihood of one in 2,048: then VMMs of the same index have the same user, and what keeps them apart is
//! everything else of the jail.

use crate::privileged::{JailSlot, UID_BASE};

/// The share of one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Uids {
    share: u32,
}

/// Slots of an instance.
const SLOTS: u32 = 1 << 16;
/// Shares of the lower half.
const SHARES: u32 = JailSlot::UNSLOTTED / SLOTS;

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
        match slot.index {
            index if index < SLOTS => Some(UID_BASE + self.share * SLOTS + index),
            JailSlot::UNSLOTTED..JailSlot::LIMIT => Some(UID_BASE + slot.index),
            _ => None,
        }
    }

    /// The slot of a user; `None` when it is no VMM's of this instance.
    pub fn slot(self, uid: u32) -> Option<JailSlot> {
        let offset = uid.checked_sub(UID_BASE)?;
        let index = if offset < JailSlot::UNSLOTTED { offset.checked_sub(self.share * SLOTS)? } else { offset };
        let slot = JailSlot { index };
        (self.of(slot) == Some(uid)).then_some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_told_apart_by_instance_and_lead_back_to_their_slot() {
        let (one, other) = (Uids::new("1f921eca"), Uids::new("2b7f96a6"));
        assert_ne!(one, other);
        for index in [0, 1, SLOTS - 1, JailSlot::UNSLOTTED, JailSlot::LIMIT - 1] {
            let slot = JailSlot { index };
            let uid = one.of(slot).unwrap();
            assert!((UID_BASE..=0x7fff_ffff).contains(&uid));
            assert_eq!(one.slot(uid), Some(slot));
            assert_eq!(other.slot(uid).is_some(), index >= JailSlot::UNSLOTTED);
        }
        for index in [SLOTS, JailSlot::UNSLOTTED - 1, JailSlot::LIMIT, u32::MAX] {
            assert_eq!(one.of(JailSlot { index }), None);
        }
        assert!([0, 1000, 65_534, UID_BASE - 1, u32::MAX].into_iter().all(|uid| one.slot(uid).is_none()));
        assert_eq!(one.of(JailSlot { index: 7 }), Uids::new("1f921eca").of(JailSlot { index: 7 }));
    }
}
