//! What runs VMs: the engine, its user, the guest agent, and whether a server runs already.

use std::path::Path;

use coppice_engine::{AccelChoice, EngineError, JailChoice, JailReport, Local, LocalConfig, Privileged as _};

use super::Check;
use super::storage::causes;
use crate::server::{self, EngineArgs};

/// QEMU and its version, and why KVM is used or not.
pub(super) async fn engine(args: &EngineArgs) -> Vec<Check> {
    // Only looked at: no jail is made.
    let config = LocalConfig { jail: JailChoice::Off, ..args.config() };
    let found = tokio::task::spawn_blocking(move || Local::new(config)).await;
    let found = found.unwrap_or_else(|error| Err(failed(std::io::Error::other(error))));
    match found.and_then(|local| local.facts().map_err(failed)) {
        Ok(can) => {
            let qemu = Check::ok("qemu", can.version.clone());
            let accel = format!("{:?}", can.accel).to_lowercase();
            let finding = format!("{accel}: {}", can.accel_reason);
            let slow = "works, but guest code is emulated: several times slower than on a host with KVM";
            vec![qemu, if accel == "kvm" { Check::ok("engine", finding) } else { Check::warn("engine", finding, slow) }]
        }
        Err(error @ (EngineError::Vm(_) | EngineError::TooOld { .. } | EngineError::Version(_))) => {
            vec![Check::fail("qemu", causes(&error), "apt-get install qemu-system-x86")]
        }
        Err(error) => vec![Check::fail("engine", causes(&error), "see the reason")],
    }
}

fn failed(source: std::io::Error) -> EngineError {
    EngineError::System { what: "examining the host".into(), source }
}

/// What holds VMMs back, made as `coppice up` makes it and let go again.
pub(super) async fn jail(args: &EngineArgs) -> Check {
    let config = LocalConfig { id: format!("doctor-{}", std::process::id()), accel: AccelChoice::Tcg, ..args.config() };
    let made = tokio::task::spawn_blocking(move || Local::new(config)).await;
    let made = made.unwrap_or_else(|error| Err(failed(std::io::Error::other(error))));
    match made.and_then(|local| local.facts().map_err(failed)).map(|facts| facts.jail) {
        Ok(JailReport::On { missing }) if missing.is_empty() => {
            Check::ok("jail", "a user, a cgroup and a system call filter for each VMM; empty namespaces")
        }
        Ok(JailReport::On { missing }) => Check::warn(
            "jail",
            format!("without {}", missing.join(", ")),
            "`coppice up` runs like that only when told to",
        ),
        Ok(JailReport::Off) => Check::fail("jail", "there is none", "VMMs are not held back"),
        Err(EngineError::NeedsRoot) => Check::fail("jail", "root makes it", "run this with sudo"),
        Err(error @ EngineError::NoCgroups(_)) => Check::fail(
            "jail",
            causes(&error),
            "mount the cgroup controllers cpu, memory and pids (v1 or v2), or give `coppice up` --without-cgroups",
        ),
        Err(error) => Check::fail("jail", causes(&error), "see the reason"),
    }
}

/// The user that the server runs as.
pub(super) fn user() -> Check {
    let name = server::user::SERVER;
    if server::user::exists(name) {
        return Check::ok("server user", name);
    }
    Check::fail("server user", format!("there is no user {name}"), "`coppice setup` makes it")
}

pub(super) fn agent() -> Check {
    let Ok(own) = std::env::current_exe() else {
        return Check::warn("guest agent", "can't tell where this program is", "give `coppice up` --agent");
    };
    let agent = own.with_file_name("coppice-guest");
    if agent.is_file() {
        return Check::ok("guest agent", agent.display().to_string());
    }
    let hint = "`make build` builds it; templates can't be made without";
    Check::warn("guest agent", format!("{} is missing", agent.display()), hint)
}

pub(super) fn server(dir: &Path) -> Check {
    match server::holder(dir) {
        Some(pid) => Check::ok("server", format!("runs, process {pid}")),
        None => Check::ok("server", "does not run"),
    }
}
