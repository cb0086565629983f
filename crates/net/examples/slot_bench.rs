//! What a slot costs: taken from those made ahead (open, and with an allow-list), and built cold. Prints every sample in
//! microseconds, and the medians.
//!
//! `slot_bench [SAMPLES]`, as root. What it makes is gone when it ends.

use std::time::{Duration, Instant};

use coppice_net::{Egress, NetConfig, NetError, Network, Slots, instance_id};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let samples: u32 = std::env::args().nth(1).map_or(Ok(100), |text| text.parse())?;
    let id = instance_id(format!("slot_bench-{}", std::process::id()).as_ref());
    let listed = Egress::allow(&["192.0.2.0/24", "198.51.100.7:443", "example.org"])?;
    print("take_ahead_us", &measure(&id, samples, samples, &Egress::Open)?);
    print("take_ahead_listed_us", &measure(&id, samples, samples, &listed)?);
    print("take_cold_us", &measure(&id, samples, 0, &Egress::Open)?);
    Ok(())
}

/// Takes so many slots one after the other, with so many made ahead.
fn measure(id: &str, samples: u32, ready: u32, egress: &Egress) -> Result<Vec<Duration>, NetError> {
    let network = Network::open(NetConfig { id: id.to_owned(), limit: samples, ready, bandwidth: Some(125_000_000) })?;
    network.reclaim(&[])?;
    let result = if network.settle(Duration::from_secs(120)) {
        take_all(&network, samples, egress)
    } else {
        Err(NetError::NotReady)
    };
    for index in 0..samples {
        network.put(index)?;
    }
    network.close()?;
    result
}

fn take_all(network: &Network, samples: u32, egress: &Egress) -> Result<Vec<Duration>, NetError> {
    let mut taken = Vec::new();
    for _ in 0..samples {
        let start = Instant::now();
        let slot = network.take(egress)?;
        taken.push(start.elapsed());
        drop(slot);
    }
    Ok(taken)
}

fn print(name: &str, samples: &[Duration]) {
    // Taking one that is ready is less than a microsecond.
    let mut micros: Vec<f64> = samples.iter().map(|taken| taken.as_secs_f64() * 1e6).collect();
    println!("{name} samples {}", micros.iter().map(|value| format!("{value:.2}")).collect::<Vec<_>>().join(" "));
    micros.sort_unstable_by(f64::total_cmp);
    println!("{name} p50 {:.2}", micros.get(micros.len() / 2).copied().unwrap_or_default());
}
