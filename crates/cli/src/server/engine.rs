//! Which engine runs the VMs of this host.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use coppice_disk::DataDir;
use coppice_engine::{Engine, QemuConfig, QemuEngine, VmmUser};

use crate::error::CliError;

/// Whom VMs run as.
const VMM_USER: &str = "coppice-vmm";

/// Choice of the engine.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// What runs VMs; auto: the best that this host can run
    #[arg(long, env = "COPPICE_ENGINE", value_enum, default_value_t = EngineChoice::Auto)]
    engine: EngineChoice,
    /// The QEMU program, when it is in no usual place
    #[arg(long, env = "COPPICE_QEMU", value_name = "FILE")]
    qemu: Option<PathBuf>,
    /// Unprivileged user that VMs run as
    #[arg(long, default_value = VMM_USER, value_name = "NAME")]
    vmm_user: String,
}

/// The engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineChoice {
    /// The best that this host can run.
    Auto,
    /// QEMU, with KVM where that can run a stock kernel, else emulated.
    Qemu,
}

impl EngineArgs {
    /// Starts it: finds the program, and probes what this host can do.
    pub async fn start(&self, data: &DataDir) -> Result<Arc<dyn Engine>, CliError> {
        let mut config = self.config();
        config.probe_cache = Some(data.root().join(PROBE_CACHE));
        // One engine so far: auto is qemu.
        let (EngineChoice::Auto | EngineChoice::Qemu) = self.engine;
        let engine = QemuEngine::new(config).await.map_err(|error| {
            CliError::failed("engine", "virtual machines can't be run here")
                .because(error)
                .hint("`coppice doctor` says what is missing; `make setup` installs it on Debian")
        })?;
        Ok(Arc::new(engine))
    }

    /// What was asked for, as the engine takes it.
    #[must_use]
    pub fn config(&self) -> QemuConfig {
        let mut config = QemuConfig { user: VmmUser::Named(self.vmm_user.clone()), ..QemuConfig::default() };
        if let Some(program) = &self.qemu {
            config.program.clone_from(program);
        }
        config
    }

    /// Whom VMs run as.
    #[must_use]
    pub fn user(&self) -> &str {
        &self.vmm_user
    }
}

/// In the data directory: what the probe of `/dev/kvm` found in this boot of the host.
const PROBE_CACHE: &str = "kvm-probe.json";
