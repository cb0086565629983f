//! The frequency of the host's time stamp counter, which is what a guest's TSC counts with under TCG.
//!
//! It is measured against the monotonic clock: processors and hypervisors that say it in CPUID are too few. It does not
//! judge whether the TSC is steady.

/// In kHz; `None` where it can't be had. Takes 60 ms.
#[cfg(target_arch = "x86_64")]
pub(crate) fn khz() -> Option<u32> {
    let mut samples = [0, 1, 2].map(|_| sample());
    samples.sort_unstable();
    // A machine with a TSC below 100 MHz or above 20 GHz was not measured right.
    u32::try_from(samples[1]).ok().filter(|khz| (100_000..20_000_000).contains(khz))
}

/// Where QEMU doesn't count with an x86 TSC, the kernel has to find out by itself.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn khz() -> Option<u32> {
    None
}

#[cfg(target_arch = "x86_64")]
#[expect(clippy::disallowed_methods, reason = "runs on a blocking thread, once")]
fn sample() -> u64 {
    let now = || {
        let before = tsc();
        let at = std::time::Instant::now();
        // In the middle between two readings, so that a preemption shows up as little as possible.
        (before + (tsc() - before) / 2, at)
    };
    let (from, begin) = now();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let (to, end) = now();
    let nanoseconds = u64::try_from((end - begin).as_nanos()).unwrap_or(u64::MAX).max(1);
    to.wrapping_sub(from).saturating_mul(1_000_000) / nanoseconds
}

#[cfg(target_arch = "x86_64")]
fn tsc() -> u64 {
    // SAFETY: RDTSC is on every x86-64 processor; it has no operands and touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn two_measurements_agree() {
        let (a, b) = (super::khz().unwrap(), super::khz().unwrap());
        assert!(a.abs_diff(b) < a / 500, "{a} {b}");
    }
}
