//! What runs VMs: the engine, its user, the guest agent, and whether a server runs already.

use std::path::Path;

use coppice_engine::{Engine as _, EngineError, QemuEngine, VmmUser};

use super::Check;
use super::storage::causes;
use crate::server::{self, EngineArgs};

/// QEMU and its version, and why KVM is used or not.
pub(super) async fn engine(args: &EngineArgs) -> Vec<Check> {
    let mut config = args.config();
    // The user has a check of its own.
    config.user = VmmUser::Current;
    match QemuEngine::new(config).await {
        Ok(engine) => {
            let can = engine.capabilities();
            let accel = format!("{:?}", can.accel).to_lowercase();
            let qemu = Check::ok("qemu", can.version.clone());
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

pub(super) fn user(args: &EngineArgs) -> Check {
    let name = args.user();
    if server::user::exists(name) {
        return Check::ok("VM user", name);
    }
    Check::fail("VM user", format!("there is no user {name}"), "`coppice setup` makes it")
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
