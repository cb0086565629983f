//! The `qemu` engine: QEMU's microvm machine, with KVM where that can run a stock kernel, with TCG anywhere else.
//!
//! | module | what it is for |
//! |---|---|
//! | [`run_dir`] | sockets, log, memory file |
//! | [`start`] | boot, restore, adopt |
//! | [`qmp`] | the monitor's protocol |
//! | [`watch`] | events and the end of the process become a state |
//! | [`console`] | the serial console |
//! | [`vm`] | the handle: pause, resume, sessions, stats, kill |
//! | [`capture`] | one pause: memory, devices, disk |
//! | [`memory`], [`arena`], [`memory_file`] | written pages: found and copied, staged, written out |
//!
//! It needs no rights of its own: processes are started, ended and read by [`Privileged`], which also builds the command
//! line and puts every VMM into its jail.

mod arena;
mod capture;
mod console;
mod memory;
mod memory_file;
mod qmp;
mod run_dir;
mod start;
mod vm;
mod watch;

use std::sync::Arc;

use async_trait::async_trait;
use coppice_snapshot::{EngineKind, MachineImage};

use crate::privileged::{Privileged, ProcessId, VmmFacts, major_minor};
use crate::{
    AdoptError, BootError, BootSpec, Capabilities, Engine, EngineError, JailReport, Rebind, RestoreError, Vm, VmError,
    VmRecord,
};

/// Configuration of the engine.
#[derive(Debug, Clone)]
pub struct QemuConfig {
    /// Bound of the memory that captures in progress stage pages in, bytes, all together.
    pub staging_bytes: u64,
}

impl Default for QemuConfig {
    fn default() -> Self {
        Self { staging_bytes: 1 << 30 }
    }
}

/// The engine.
#[derive(Debug)]
pub struct QemuEngine {
    facts: Arc<Facts>,
}

/// What was found out once, and what all VMs share.
#[derive(Debug)]
pub(crate) struct Facts {
    privileged: Arc<dyn Privileged>,
    capabilities: Capabilities,
    /// Major and minor version of QEMU.
    version: (u32, u32),
    boot_id: String,
    arenas: arena::ArenaPool,
}

impl QemuEngine {
    /// On a privileged side, which examined the host.
    ///
    /// # Errors
    /// That it can't be reached, or that its facts make no sense.
    pub async fn new(privileged: Arc<dyn Privileged>, config: QemuConfig) -> Result<Self, EngineError> {
        let asked = Arc::clone(&privileged);
        let facts = tokio::task::spawn_blocking(move || asked.facts()).await;
        let facts = facts.unwrap_or_else(|error| Err(std::io::Error::other(error)));
        let facts =
            facts.map_err(|source| EngineError::System { what: "asking what VMMs there are".to_owned(), source })?;
        let VmmFacts { version: text, accel, accel_reason, boot_id, jail } = facts;
        let version = major_minor(&text).ok_or_else(|| EngineError::Version(text.clone()))?;
        tracing::info!(version = text, ?accel, reason = accel_reason, ?jail, "qemu engine");
        if jail == JailReport::Off {
            tracing::warn!("VMMs have no jail: a guest that breaks out of QEMU has the rights of this user");
        }
        let capabilities = Capabilities { engine: EngineKind::Qemu, version: text, accel, accel_reason };
        let arenas = arena::ArenaPool::new(Arc::clone(&privileged), config.staging_bytes);
        Ok(Self { facts: Arc::new(Facts { privileged, capabilities, version, boot_id, arenas }) })
    }
}

#[async_trait]
impl Engine for QemuEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.facts.capabilities
    }

    async fn boot(&self, spec: BootSpec) -> Result<Arc<dyn Vm>, BootError> {
        Ok(Arc::new(start::boot(&self.facts, spec).await?))
    }

    async fn restore(&self, image: &MachineImage, rebind: Rebind) -> Result<Arc<dyn Vm>, RestoreError> {
        Ok(Arc::new(start::restore(&self.facts, image, rebind).await?))
    }

    async fn adopt(&self, record: VmRecord) -> Result<Arc<dyn Vm>, AdoptError> {
        Ok(Arc::new(start::adopt(&self.facts, record).await?))
    }

    async fn end_strays(&self, keep: &[VmRecord]) -> Result<usize, VmError> {
        let keep: Vec<ProcessId> = keep.iter().map(|vm| ProcessId { pid: vm.pid, start_time: vm.pid_start }).collect();
        let privileged = Arc::clone(&self.facts.privileged);
        let ended = tokio::task::spawn_blocking(move || privileged.end_strays(&keep)).await;
        let ended = ended.unwrap_or_else(|error| Err(std::io::Error::other(error)));
        let failed = |source| VmError::System { what: "ending VMs that nobody knows".to_owned(), source };
        Ok(ended.map_err(failed)?.len())
    }
}
