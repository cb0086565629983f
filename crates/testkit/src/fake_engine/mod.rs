//! An engine without VMs: its "guests" live in this process, serve the guest protocol over in-memory streams, and keep
//! files by path. Captures and restores go through real image directories and real disk files, so that the code around an
//! engine does what it does with a real one.
//!
//! [`Script`] makes the next operations fail, hang, or take long. Files below `/run`, `/dev/shm` and `/tmp` are memory (they
//! survive capture and restore, not a boot); all others are the disk's. It does not imitate timing, or what a VM costs.

mod guest;
mod vm;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use coppice_engine::{
    AdoptError, BootError, BootSpec, Capabilities, Engine, Nic, Rebind, RestoreError, RestoreTimings, Vm, VmError,
    VmRecord,
};
use coppice_snapshot::{Accel, EngineKind, MachineImage, OpenImageError};

pub(crate) use guest::Files;
use vm::{FakeVm, Machine};

/// What goes wrong next. Counters count down with each operation that they hit.
#[derive(Debug, Clone, Default)]
pub struct Script {
    /// So many boots fail.
    pub fail_boots: u32,
    /// So many restores fail, after `pass_restores` have succeeded.
    pub fail_restores: u32,
    /// So many restores succeed before `fail_restores` counts.
    pub pass_restores: u32,
    /// So many captures fail.
    pub fail_captures: u32,
    /// So many captures and disk clones fail for want of space.
    pub no_space: u32,
    /// So many of the next VMs have a guest that never answers a hello.
    pub mute: u32,
    /// So many of the next VMs have a guest that refuses the resume handshake.
    pub refuse_resume: u32,
    /// So many of the next quiesces fail.
    pub fail_quiesces: u32,
    /// So many of the next VMs die this long after they were started.
    pub die_after: Option<(u32, Duration)>,
    /// How long each boot and restore takes.
    pub start_delay: Duration,
    /// How long each capture takes, with the machine paused, and each clone of a disk.
    pub capture_delay: Duration,
}

fn take(counter: &mut u32) -> bool {
    let hit = *counter > 0;
    *counter = counter.saturating_sub(1);
    hit
}

/// A network device for machines that have none.
///
/// # Panics
/// Where there is no `/dev/null`.
#[must_use]
pub fn nic() -> Nic {
    #[expect(clippy::expect_used, reason = "for tests")]
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    Nic { tap: Arc::new(null.into()), mac: Nic::random_mac() }
}

/// The engine. VMs outlive its handles; they are adopted from the same engine.
#[derive(Debug)]
pub struct FakeEngine {
    capabilities: Capabilities,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
pub(crate) struct Shared {
    script: Mutex<Script>,
    machines: Mutex<HashMap<i32, Arc<Machine>>>,
}

impl Shared {
    pub fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn machines(&self) -> MutexGuard<'_, HashMap<i32, Arc<Machine>>> {
        self.machines.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Far above what a kernel gives out (`PID_MAX_LIMIT` is 4,194,304).
static NEXT_PID: AtomicI32 = AtomicI32::new(1_000_000_000);

impl Default for FakeEngine {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeEngine {
    /// An engine whose guests behave.
    #[must_use]
    pub fn new() -> Self {
        let capabilities = Capabilities {
            engine: EngineKind::Fake,
            version: "1".to_owned(),
            accel: Accel::Tcg,
            accel_reason: "nothing is executed".to_owned(),
        };
        Self { capabilities, shared: Arc::default() }
    }

    /// Changes what goes wrong from now on.
    pub fn script(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.shared.script());
    }

    /// Pids of the VMs that are alive.
    #[must_use]
    pub fn alive(&self) -> Vec<i32> {
        self.shared.machines().keys().copied().collect()
    }

    /// Pids of the VMs whose virtual CPUs run.
    #[must_use]
    pub fn running(&self) -> Vec<i32> {
        let machines = self.shared.machines();
        machines.iter().filter(|(_, machine)| machine.runs()).map(|(pid, _)| *pid).collect()
    }

    /// Pid of the VM that has this id, while it is alive.
    #[must_use]
    pub fn pid_of(&self, id: uuid::Uuid) -> Option<i32> {
        let machines = self.shared.machines();
        machines.iter().find(|(_, machine)| machine.id() == id).map(|(pid, _)| *pid)
    }

    /// Ends a VM as a crash of its VMM would.
    pub fn crash(&self, pid: i32) {
        let machine = self.shared.machines().get(&pid).cloned();
        if let Some(machine) = machine {
            machine.die("killed by signal 9");
        }
    }

    async fn start(
        &self,
        place: coppice_engine::VmPlace,
        machine: coppice_snapshot::MachineSpec,
        memory: BTreeMap<String, Vec<u8>>,
        origin: Option<Origin>,
    ) -> Result<Arc<dyn Vm>, VmError> {
        let delay = self.shared.script().start_delay;
        tokio::time::sleep(delay).await;
        let system = |what: &str| {
            let what = what.to_owned();
            move |source| VmError::System { what, source }
        };
        let disk = Files::load_disk(&place.disk).map_err(system("reading the disk"))?;
        std::fs::write(place.run_dir.join("fake"), b"").map_err(system("making a file in the run directory"))?;
        let (mute, refuse_resume, die_after) = {
            let mut script = self.shared.script();
            let die_after = match &mut script.die_after {
                Some((count, after)) => take(count).then_some(*after),
                None => None,
            };
            (take(&mut script.mute), take(&mut script.refuse_resume), die_after)
        };
        let pid = NEXT_PID.fetch_add(1, Ordering::Relaxed);
        let files = Files { disk, memory, disk_path: place.disk.clone() };
        let machine = Arc::new(Machine::new(pid, Arc::clone(&self.shared), place, machine, files, origin));
        machine.knobs(mute, refuse_resume);
        machine.print(b"fake guest started\n");
        self.shared.machines().insert(pid, Arc::clone(&machine));
        if let Some(after) = die_after {
            let machine = Arc::clone(&machine);
            tokio::spawn(async move {
                tokio::time::sleep(after).await;
                machine.die("killed by signal 11");
            });
        }
        Ok(Arc::new(FakeVm::new(machine)))
    }
}

/// Where a restored machine came from.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub base: std::path::PathBuf,
    pub port: u8,
}

pub(crate) const TIMINGS: RestoreTimings =
    RestoreTimings { spawn: Duration::from_millis(1), load: Duration::from_millis(1) };

fn scripted() -> VmError {
    VmError::Refused { command: "start".to_owned(), reason: "the script says so".to_owned() }
}

#[async_trait]
impl Engine for FakeEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn boot(&self, spec: BootSpec) -> Result<Arc<dyn Vm>, BootError> {
        if take(&mut self.shared.script().fail_boots) {
            return Err(scripted().into());
        }
        if !spec.place.disk.exists() {
            return Err(BootError::Missing { what: "disk", path: spec.place.disk });
        }
        Ok(self.start(spec.place, spec.machine, BTreeMap::new(), None).await?)
    }

    async fn end_strays(&self, keep: &[VmRecord]) -> Result<usize, VmError> {
        let kept = |pid: &i32| keep.iter().any(|record| record.pid == *pid);
        let strays: Vec<i32> = self.alive().into_iter().filter(|pid| !kept(pid)).collect();
        strays.iter().for_each(|pid| self.crash(*pid));
        Ok(strays.len())
    }

    async fn restore(&self, image: &MachineImage, rebind: Rebind) -> Result<Arc<dyn Vm>, RestoreError> {
        let fails = {
            let mut script = self.shared.script();
            !take(&mut script.pass_restores) && take(&mut script.fail_restores)
        };
        if fails {
            return Err(scripted().into());
        }
        let manifest = image.manifest();
        if manifest.engine != EngineKind::Fake {
            let captured = format!("{:?}", manifest.engine);
            return Err(RestoreError::Incompatible { captured, here: "fake".to_owned() });
        }
        if !rebind.place.disk.exists() {
            return Err(RestoreError::Missing { what: "disk", path: rebind.place.disk });
        }
        let memory = Files::load_memory(&image.memory_path())
            .map_err(|_error| OpenImageError::Missing(image.dir().to_owned()))?;
        let origin = Origin { base: image.memory_path(), port: manifest.channel_port };
        Ok(self.start(rebind.place, manifest.machine.clone(), memory, Some(origin)).await?)
    }

    async fn adopt(&self, record: VmRecord) -> Result<Arc<dyn Vm>, AdoptError> {
        let machine = self.shared.machines().get(&record.pid).cloned().ok_or(AdoptError::Gone)?;
        Ok(Arc::new(FakeVm::new(machine)))
    }
}
