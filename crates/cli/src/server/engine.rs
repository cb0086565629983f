//! What runs the VMs of this host.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use coppice_disk::DataDir;
use coppice_engine::{
    CgroupChoice, Engine, EngineError, JailChoice, JailConfig, Local, LocalConfig, Privileged, QemuConfig, QemuEngine,
};
use coppice_net::instance_id;

use crate::error::CliError;

/// Choice of the engine.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// What runs VMs; auto: the best that this host can run
    #[arg(long, env = "COPPICE_ENGINE", value_enum, default_value_t = EngineChoice::Auto)]
    engine: EngineChoice,
    /// The QEMU program, when it is in no usual place
    #[arg(long, env = "COPPICE_QEMU", value_name = "FILE")]
    qemu: Option<PathBuf>,
    /// Run VMs also on a host without usable cgroups: nothing but their own size limits what they use then
    #[arg(long)]
    without_cgroups: bool,
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
    /// What starts VMMs, in this process: examines the host, and makes what their jails share.
    pub async fn privileged(&self, id: String, data: &DataDir) -> Result<Arc<dyn Privileged>, CliError> {
        let cgroups = if self.without_cgroups { CgroupChoice::IfAvailable } else { CgroupChoice::Required };
        let config = LocalConfig {
            probe_cache: Some(data.root().join(PROBE_CACHE)),
            id,
            jail: JailChoice::On(JailConfig { cgroups, ..JailConfig::default() }),
            ..self.config()
        };
        let made = tokio::task::spawn_blocking(move || Local::new(config)).await;
        match made {
            Ok(Ok(local)) => Ok(Arc::new(local)),
            Ok(Err(error)) => Err(no_engine(error)),
            Err(error) => Err(CliError::failed("engine", "virtual machines can't be run here").because(error)),
        }
    }

    /// The engine with all of it in this process, for commands that are no server: an instance of its own, since a server
    /// may run at the same time.
    pub async fn start(&self, data: &DataDir) -> Result<Arc<dyn Engine>, CliError> {
        let id = instance_id(&data.root().join("#command"));
        engine(self.privileged(id, data).await?).await
    }

    /// What was asked for, as far as it is not about an instance.
    #[must_use]
    pub fn config(&self) -> LocalConfig {
        // One engine so far: auto is qemu.
        let (EngineChoice::Auto | EngineChoice::Qemu) = self.engine;
        let mut config = LocalConfig::default();
        if let Some(program) = &self.qemu {
            config.program.clone_from(program);
        }
        config
    }
}

/// The engine, on what starts VMMs here or in another process.
pub async fn engine(privileged: Arc<dyn Privileged>) -> Result<Arc<dyn Engine>, CliError> {
    let engine = QemuEngine::new(privileged, QemuConfig::default()).await.map_err(no_engine)?;
    Ok(Arc::new(engine))
}

fn no_engine(error: EngineError) -> CliError {
    CliError::failed("engine", "virtual machines can't be run here")
        .because(error)
        .hint("`coppice doctor` says what is missing; `make setup` installs it on Debian")
}

/// In the data directory: what the probe of `/dev/kvm` found in this boot of the host.
const PROBE_CACHE: &str = "kvm-probe.json";
