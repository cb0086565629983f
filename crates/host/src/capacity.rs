//! What the host has, what of it is used and promised, and what still fits: for a person who asks why something was refused.
//!
//! The numbers are those that admission decides by, of one moment. It decides nothing.

use std::collections::BTreeMap;

use coppice_api::{HostDisk, HostMemory, HostReport, HostRoom, HostSandboxes, HostSlots};

use crate::admission::{AdmissionError, Room, RoomConfig};
use crate::entry::status_word;
use crate::host::Shared;
use crate::meter::{self, Facts, Sums};
use crate::{slots, templates};

/// The template whose size the room is told in, and that size where there is no such template: MiB and bytes.
const TEMPLATE: &str = "base";
const MEMORY_MIB: u64 = 512;
const DISK_LEN: u64 = 2 << 30;

pub(crate) async fn report(shared: &Shared) -> Result<HostReport, AdmissionError> {
    let size = match templates::image(shared, TEMPLATE).await {
        Ok((image, _)) => (u64::from(image.manifest().machine.memory_mib), image.manifest().disk.len),
        Err(_) => (MEMORY_MIB, DISK_LEN),
    };
    let slots = slots::call(shared, |slots| Ok(slots.capacity())).await.unwrap_or_default();
    let slots = HostSlots { taken: u64::from(slots.0), limit: u64::from(slots.1) };
    let (pending, facts, sums) = shared.admission.look(|| meter::sums(shared))?;
    let (config, limit) = (&shared.admission.config, shared.admission.limit);
    let left = config.headroom(limit, &facts, &sums);
    let left = Room {
        sandboxes: left.sandboxes.saturating_sub(pending.sandboxes),
        memory: left.memory.saturating_sub(pending.memory),
        disk: left.disk.saturating_sub(pending.disk),
    };
    Ok(HostReport {
        engine: crate::host::engine_words(shared),
        sandboxes: sandboxes(shared, (&sums, pending), limit),
        memory: memory(config, (&facts, &sums), (pending, left), shared.measured_ms_ago()),
        disk: disk(config, (&facts, &sums), (pending, left)),
        room: room(config, left, &slots, size),
        slots,
    })
}

fn sandboxes(shared: &Shared, (sums, pending): (&Sums, Room), limit: u64) -> HostSandboxes {
    let mut by_status = BTreeMap::new();
    shared.each(|entry| *by_status.entry(status_name(entry.status())).or_insert(0) += 1);
    HostSandboxes { total: sums.sandboxes, by_status, being_made: pending.sandboxes, limit }
}

/// As the API spells it.
fn status_name(status: coppice_api::SandboxStatus) -> String {
    let name = serde_json::to_value(status).ok().and_then(|value| value.as_str().map(str::to_owned));
    name.unwrap_or_else(|| status_word(status).to_owned())
}

fn memory(
    config: &RoomConfig,
    (facts, sums): (&Facts, &Sums),
    (pending, left): (Room, Room),
    measured_ms_ago: Option<u64>,
) -> HostMemory {
    HostMemory {
        total: facts.memory_total,
        available: facts.memory_available,
        limit: config.memory_limit,
        reserve: config.memory_reserve,
        pss: sums.private.saturating_add(sums.images),
        private: sums.private,
        images: sums.images,
        promised: sums.memory_promised,
        overcommit: config.memory_overcommit.as_f64(),
        promised_counted: sums.memory_counted,
        being_made: pending.memory,
        headroom: left.memory,
        measured_ms_ago,
    }
}

fn disk(config: &RoomConfig, (facts, sums): (&Facts, &Sums), (pending, left): (Room, Room)) -> HostDisk {
    HostDisk {
        total: facts.disk_total,
        free: facts.disk_free,
        reserve: config.disk_reserve,
        promised: sums.disk_promised,
        overcommit: config.disk_overcommit.as_f64(),
        promised_counted: sums.disk_counted,
        being_made: pending.disk,
        headroom: left.disk,
    }
}

fn room(config: &RoomConfig, left: Room, slots: &HostSlots, (memory_mb, disk_len): (u64, u64)) -> HostRoom {
    let each = config.fresh(memory_mb, disk_len);
    let limits = [
        ("memory", left.memory / each.memory.max(1)),
        ("disk", left.disk / each.disk.max(1)),
        ("slots", slots.limit.saturating_sub(slots.taken)),
        ("sandboxes", left.sandboxes),
    ];
    let (bound_by, sandboxes) = limits.into_iter().min_by_key(|(_, number)| *number).unwrap_or_default();
    HostRoom { memory_mb, disk_mb: disk_len >> 20, sandboxes, bound_by: bound_by.into() }
}

/// Shows the same as metrics. What can't be read is shown as it was.
pub(crate) async fn observe(shared: &Shared) {
    let Ok(report) = report(shared).await else { return };
    let memory = &report.memory;
    let disk = &report.disk;
    let bytes = [
        ("coppice_host_memory_bytes", "total", memory.total),
        ("coppice_host_memory_bytes", "available", memory.available),
        ("coppice_host_memory_bytes", "private", memory.private),
        ("coppice_host_memory_bytes", "images", memory.images),
        ("coppice_host_memory_bytes", "promised", memory.promised),
        ("coppice_host_memory_bytes", "promised_counted", memory.promised_counted),
        ("coppice_host_memory_bytes", "being_made", memory.being_made),
        ("coppice_host_memory_bytes", "headroom", memory.headroom),
        ("coppice_host_disk_bytes", "total", disk.total),
        ("coppice_host_disk_bytes", "free", disk.free),
        ("coppice_host_disk_bytes", "promised", disk.promised),
        ("coppice_host_disk_bytes", "promised_counted", disk.promised_counted),
        ("coppice_host_disk_bytes", "being_made", disk.being_made),
        ("coppice_host_disk_bytes", "headroom", disk.headroom),
    ];
    for (name, what, value) in bytes {
        metrics::gauge!(name, "what" => what).set(mib(value));
    }
    metrics::gauge!("coppice_host_room_sandboxes").set(u32::try_from(report.room.sandboxes).unwrap_or(u32::MAX));
}

/// Bytes as a float, exact to a MiB: a gauge has no integers.
fn mib(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes >> 20).unwrap_or(u32::MAX)) * f64::from(1_u32 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_room_is_what_the_narrowest_limit_leaves() {
        let config = RoomConfig::default();
        let left = Room { sandboxes: 50, memory: 1440 << 20, disk: 3 << 30 };
        let slots = HostSlots { taken: 3, limit: 100 };
        let told = room(&config, left, &slots, (512, 2 << 30));
        assert_eq!((told.sandboxes, told.bound_by.as_str()), (10, "memory"));
        let told = room(&config, left, &HostSlots { taken: 97, limit: 100 }, (512, 2 << 30));
        assert_eq!((told.sandboxes, told.bound_by.as_str()), (3, "slots"));
        let told = room(&config, Room { disk: 0, ..left }, &slots, (512, 2 << 30));
        assert_eq!((told.sandboxes, told.bound_by.as_str()), (0, "disk"));
    }
}
