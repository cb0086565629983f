//! Whether `/dev/kvm` can run a stock kernel.
//!
//! That the device is there says little: there are para-virtual KVMs that interpret kernel code at some million instructions
//! a second. So a tiny long-mode guest counts down in kernel mode, and is timed. The verdict is kept for this boot of the
//! host. This module does not check who may open the device.

use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

/// What the probe found, with a sentence that says why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// A stock kernel can run.
    Suitable(String),
    /// It can't, or not at a usable speed.
    Unsuitable(String),
}

/// Least speed of kernel code, instructions a second. Hardware does 500 million and more, an interpreter far below 50.
const LEAST: u64 = 100_000_000;
/// How long all of the probe may take; an interpreter of 2 million instructions a second needs half a second.
const LIMIT: Duration = Duration::from_secs(5);

#[derive(Serialize, Deserialize)]
struct Cached {
    boot_id: String,
    verdict: Verdict,
}

/// The verdict of this boot of the host: from `cache` when it is there, else by probing. Blocking.
pub(crate) fn cached(cache: Option<&Path>) -> Verdict {
    let boot_id = crate::process::boot_id().unwrap_or_default();
    let known = cache.and_then(|path| serde_json::from_slice::<Cached>(&std::fs::read(path).ok()?).ok());
    if let Some(known) = known.filter(|known| !boot_id.is_empty() && known.boot_id == boot_id) {
        return known.verdict;
    }
    let verdict = probe();
    if let (Some(path), Ok(json)) = (cache, serde_json::to_vec(&Cached { boot_id, verdict: verdict.clone() }))
        && let Err(error) = coppice_disk::fsync::replace_file(path, &json, 0o644)
    {
        tracing::warn!(path = %path.display(), %error, "the verdict about /dev/kvm can't be kept");
    }
    verdict
}

/// Probes in a thread of its own: a system call that never returns costs that thread, and nothing else.
fn probe() -> Verdict {
    if !Path::new("/dev/kvm").exists() {
        return Verdict::Unsuitable("this host has no /dev/kvm".to_owned());
    }
    let (answer, result) = mpsc::channel();
    std::thread::spawn(move || {
        // Nobody may wait any more.
        answer.send(instructions_per_second()).ok();
    });
    match result.recv_timeout(LIMIT) {
        Ok(Ok(speed)) => judge(speed),
        Ok(Err(error)) => Verdict::Unsuitable(format!("/dev/kvm can't run a guest: {error}")),
        Err(_timeout) => Verdict::Unsuitable(format!("/dev/kvm did not run a tiny guest within {LIMIT:?}")),
    }
}

fn judge(speed: u64) -> Verdict {
    let millions = format!("{}.{}", speed / 1_000_000, speed / 100_000 % 10);
    if speed >= LEAST {
        Verdict::Suitable(format!("/dev/kvm runs kernel code at {millions} million instructions a second"))
    } else {
        Verdict::Unsuitable(format!(
            "/dev/kvm runs kernel code at {millions} million instructions a second: it can't run a stock kernel"
        ))
    }
}

fn instructions_per_second() -> Result<u64, kvm_ioctls::Error> {
    // Unmapped after the machine that uses it is gone: locals are dropped in reverse order.
    let memory = Memory::new()?;
    let vm = Kvm::new()?.create_vm()?;
    let mut vcpu = long_mode_vcpu(&vm, &memory)?;
    // The first entry brings in the pages that the code is in: measured in a nested host, 20 ms.
    count_down(&mut vcpu, 100)?;
    // Short runs first: on an interpreter long ones would take too long.
    let first = best(&mut vcpu, 2, 100_000)?;
    if first < LEAST / 4 { Ok(first) } else { best(&mut vcpu, 8, 2_000_000) }
}

/// The best of some runs: a host that has other things to do makes them slower, nothing makes them faster.
fn best(vcpu: &mut VcpuFd, runs: usize, count: u64) -> Result<u64, kvm_ioctls::Error> {
    (0..runs).try_fold(0, |best, _| Ok(best.max(count_down(vcpu, count)?)))
}

/// Guest-physical addresses: three page tables that map the first 2 MiB to themselves, then code.
const PML4: usize = 0x1000;
const PDPT: usize = 0x2000;
const PD: usize = 0x3000;
const CODE: usize = 0x4000;
const SIZE: usize = 2 << 20;
/// `1: dec rax; jnz 1b; hlt`: two instructions for each count.
const LOOP: [u8; 6] = [0x48, 0xff, 0xc8, 0x75, 0xfb, 0xf4];

struct Memory(*mut u8);

impl Memory {
    fn new() -> Result<Self, kvm_ioctls::Error> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let address = unsafe { mmap_anonymous(std::ptr::null_mut(), SIZE, prot, MapFlags::PRIVATE) }
            .map_err(|errno| kvm_ioctls::Error::new(errno.raw_os_error()))?;
        let memory = Self(address.cast());
        // Present and writable; the last one maps a page of 2 MiB.
        for (table, entry) in [(PML4, PDPT | 3), (PDPT, PD | 3), (PD, 0x83)] {
            memory.write(table, &entry.to_le_bytes());
        }
        memory.write(CODE, &LOOP);
        Ok(memory)
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= SIZE, "inside guest memory");
        // SAFETY: checked to be inside the mapping, which has no other user while no virtual CPU runs.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.add(at), bytes.len()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is owned by this value, and the machine that used it is gone.
        if let Err(error) = unsafe { rustix::mm::munmap(self.0.cast(), SIZE) } {
            tracing::warn!(%error, "the probe's memory was not unmapped");
        }
    }
}

fn long_mode_vcpu(vm: &VmFd, memory: &Memory) -> Result<VcpuFd, kvm_ioctls::Error> {
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: SIZE as u64,
        userspace_addr: memory.0.expose_provenance() as u64,
    };
    // SAFETY: the range is one mapping that outlives the machine (see `instructions_per_second`).
    unsafe { vm.set_user_memory_region(region)? };
    let vcpu = vm.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    let flat = kvm_segment {
        limit: u32::MAX,
        selector: 16,
        type_: 3,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    };
    (sregs.ds, sregs.es, sregs.ss, sregs.fs, sregs.gs) = (flat, flat, flat, flat, flat);
    sregs.cs = kvm_segment { selector: 8, type_: 11, db: 0, l: 1, ..flat };
    sregs.cr3 = PML4 as u64;
    sregs.cr4 |= 1 << 5; // PAE
    sregs.cr0 |= 1 << 31 | 1; // PG, PE
    sregs.efer |= 1 << 8 | 1 << 10; // LME, LMA
    vcpu.set_sregs(&sregs)?;
    Ok(vcpu)
}

fn count_down(vcpu: &mut VcpuFd, count: u64) -> Result<u64, kvm_ioctls::Error> {
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rax, regs.rflags) = (CODE as u64, count, 2);
    vcpu.set_regs(&regs)?;
    let begin = Instant::now();
    loop {
        match vcpu.run() {
            Ok(VcpuExit::Hlt) => break,
            Ok(VcpuExit::Intr) => {}
            Ok(_unexpected) => return Err(kvm_ioctls::Error::new(libc::EPROTO)),
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => return Err(error),
        }
    }
    let nanoseconds = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1);
    Ok((count * 2).saturating_mul(1_000_000_000) / nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_decides() {
        assert!(matches!(judge(2_000_000), Verdict::Unsuitable(reason) if reason.contains("2.0 million")));
        assert!(matches!(judge(900_000_000), Verdict::Suitable(_)));
    }

    #[test]
    fn the_verdict_is_kept_for_this_boot_only() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("kvm.json");
        let first = cached(Some(&cache));
        assert!(cache.exists());
        let made_up = Verdict::Suitable("made up".into());
        let write = |boot_id: String| {
            std::fs::write(&cache, serde_json::to_vec(&Cached { boot_id, verdict: made_up.clone() }).unwrap()).unwrap();
        };
        write(crate::process::boot_id().unwrap());
        assert_eq!(cached(Some(&cache)), made_up);
        write("another boot".into());
        assert_ne!(cached(Some(&cache)), made_up);
        eprintln!("{first:?}");
    }
}
