//! What is left of a bake that fails: nothing. With an engine whose guests do as they are told.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use coppice_disk::{DataDir, Quiet};
use coppice_engine::{
    AdoptError, BootError, BootSpec, Capabilities, CaptureError, CapturePlan, Captured, DiskClone, Engine,
    GuestSession, Rebind, RestoreError, SessionError, Vm, VmError, VmPlace, VmRecord, VmState, VmStats,
};
use coppice_image::{BakeError, Ingredients, Initramfs, Kernel, KernelInfo, Recipes, Rootfs, bake, reclaim};
use coppice_snapshot::{Accel, Digest, EngineKind, MachineImage, MachineSpec};
use tokio::sync::{broadcast, watch};

/// Boots VMs whose console says `console` and whose guest never answers.
#[derive(Debug)]
struct DeafEngine {
    capabilities: Capabilities,
    console: &'static str,
    answers: Answer,
    alive: Arc<AtomicUsize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    TimesOut,
    Hangs,
    DoesNotStart,
}

#[derive(Debug)]
struct DeafVm {
    place: VmPlace,
    machine: MachineSpec,
    answers: Answer,
    alive: Arc<AtomicUsize>,
    state: watch::Sender<VmState>,
}

impl DeafEngine {
    fn new(console: &'static str, answers: Answer) -> Self {
        let capabilities = Capabilities {
            engine: EngineKind::Fake,
            version: "1".into(),
            accel: Accel::Tcg,
            accel_reason: "a fake".into(),
        };
        Self { capabilities, console, answers, alive: Arc::default() }
    }

    fn vm(&self, place: VmPlace, machine: MachineSpec) -> Arc<dyn Vm> {
        let state = watch::Sender::new(VmState::Running);
        Arc::new(DeafVm { place, machine, answers: self.answers, alive: Arc::clone(&self.alive), state })
    }
}

#[async_trait]
impl Engine for DeafEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn boot(&self, spec: BootSpec) -> Result<Arc<dyn Vm>, BootError> {
        if self.answers == Answer::DoesNotStart {
            return Err(BootError::Vm(VmError::ProgramMissing { program: "qemu".into() }));
        }
        std::fs::write(&spec.place.console_log, self.console).unwrap_or_default();
        self.alive.fetch_add(1, Ordering::SeqCst);
        Ok(self.vm(spec.place, spec.machine))
    }

    async fn restore(&self, _image: &MachineImage, _rebind: Rebind) -> Result<Arc<dyn Vm>, RestoreError> {
        Err(RestoreError::Vm(VmError::NoSpace))
    }

    async fn adopt(&self, record: VmRecord) -> Result<Arc<dyn Vm>, AdoptError> {
        Ok(self.vm(record.place, record.machine))
    }

    async fn end_strays(&self, _keep: &[VmRecord]) -> Result<usize, VmError> {
        Ok(0)
    }
}

#[async_trait]
impl Vm for DeafVm {
    async fn open_session(&self, _deadline: Instant) -> Result<GuestSession, SessionError> {
        if self.answers == Answer::Hangs {
            std::future::pending::<()>().await;
        }
        Err(SessionError::Timeout { after: Duration::from_secs(1), console: String::new() })
    }

    async fn pause(&self) -> Result<(), VmError> {
        Ok(())
    }

    async fn resume(&self) -> Result<(), VmError> {
        Ok(())
    }

    async fn capture(&self, _plan: CapturePlan) -> Result<Captured, CaptureError> {
        Err(CaptureError::NoSpace)
    }

    async fn clone_disk(&self, _dest: &Path) -> Result<DiskClone, CaptureError> {
        Err(CaptureError::NoSpace)
    }

    async fn stats(&self) -> Result<VmStats, VmError> {
        Ok(VmStats::default())
    }

    async fn kill(&self) -> Result<(), VmError> {
        self.alive.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }

    fn record(&self) -> VmRecord {
        VmRecord {
            place: self.place.clone(),
            machine: self.machine.clone(),
            pid: 1,
            pid_start: 1,
            boot_id: "b".into(),
            channel_port: 0,
            memory_base: None,
            restore: None,
        }
    }

    fn state(&self) -> watch::Receiver<VmState> {
        self.state.subscribe()
    }

    fn console(&self) -> broadcast::Receiver<Bytes> {
        broadcast::channel(1).1
    }
}

struct World {
    dir: tempfile::TempDir,
    data: DataDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("data")).unwrap();
        std::fs::write(dir.path().join("rootfs"), "rootfs").unwrap();
        let data = DataDir::open(&dir.path().join("data")).unwrap();
        Self { dir, data }
    }

    async fn bake(&self, engine: &DeafEngine) -> Result<String, BakeError> {
        let info = KernelInfo {
            id: "k".into(),
            package: "p".into(),
            version: "1".into(),
            release: "1".into(),
            wanted: Vec::new(),
        };
        let from = Ingredients {
            recipe: &Recipes::builtin().resolve("base").unwrap(),
            recipe_id: "r",
            kernel: &Kernel { info, dir: self.dir.path().into() },
            initramfs: &Initramfs { id: "i".into(), path: self.dir.path().join("i") },
            rootfs: &Rootfs { key: "r".into(), path: self.dir.path().join("rootfs"), digest: Digest::of(b"") },
        };
        bake(&self.data, engine, from, &Quiet).await
    }

    fn assert_nothing_left(&self, engine: &DeafEngine) {
        assert_eq!(engine.alive.load(Ordering::SeqCst), 0, "no VM");
        for dir in [self.data.staging_dir(), self.data.run_dir(), self.data.templates_dir()] {
            let left: Vec<_> = std::fs::read_dir(&dir).unwrap().collect();
            assert!(left.is_empty(), "{left:?}");
        }
    }
}

#[tokio::test]
async fn a_kernel_that_does_not_boot_is_named_with_its_console() {
    let world = World::new();
    let engine = DeafEngine::new("Linux version 6.1\n\x1b[31mKernel panic - not syncing\n", Answer::TimesOut);
    let error = world.bake(&engine).await.unwrap_err();
    assert!(matches!(error, BakeError::KernelDidNotBoot { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("Kernel panic") && !text.contains('\x1b'), "{text}");
    world.assert_nothing_left(&engine);
}

#[tokio::test]
async fn a_guest_that_never_answers_is_told_from_a_kernel_that_does_not_boot() {
    let world = World::new();
    let engine = DeafEngine::new("Run /init as init process\nagent: no port\n", Answer::TimesOut);
    let error = world.bake(&engine).await.unwrap_err();
    assert!(matches!(error, BakeError::NeverAnswered { .. }), "{error:?}");
    world.assert_nothing_left(&engine);
}

#[tokio::test]
async fn an_engine_that_cannot_start_leaves_nothing() {
    let world = World::new();
    let engine = DeafEngine::new("", Answer::DoesNotStart);
    assert!(matches!(world.bake(&engine).await, Err(BakeError::Boot(_))));
    world.assert_nothing_left(&engine);
}

#[tokio::test]
async fn a_cancelled_bake_leaves_nothing() {
    let world = World::new();
    let engine = DeafEngine::new("", Answer::Hangs);
    let cancelled = tokio::time::timeout(Duration::from_millis(300), world.bake(&engine)).await;
    assert!(cancelled.is_err());
    tokio::task::yield_now().await;
    world.assert_nothing_left(&engine);
}

#[tokio::test]
async fn what_a_killed_bake_left_is_reclaimed() {
    let world = World::new();
    let engine = DeafEngine::new("", Answer::TimesOut);
    // As left by a process that is gone: a run directory that nobody has locked, with the record of a running VM.
    let left = world.data.run_dir().join("bake.1.1");
    std::fs::create_dir(&left).unwrap();
    engine.alive.fetch_add(1, Ordering::SeqCst);
    let place = VmPlace {
        id: uuid::Uuid::new_v4(),
        run_dir: left.clone(),
        disk: left.join("disk"),
        console_log: left.join("console"),
    };
    let machine =
        MachineSpec { cpus: 1, memory_mib: 128, kernel: "k".into(), initramfs: "i".into(), cmdline: String::new() };
    let record = engine.vm(place, machine).record();
    std::fs::write(left.join("vm.json"), serde_json::to_vec(&record).unwrap()).unwrap();
    reclaim(&world.data, &engine).await.unwrap();
    world.assert_nothing_left(&engine);
}
