//! The fake VM: state, pause, capture into real image directories, kill.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use coppice_disk::CloneError;
use coppice_engine::{
    CaptureError, CapturePlan, CaptureTimings, Captured, DiskClone, GuestSession, SessionError, Vm, VmError, VmPlace,
    VmRecord, VmState, VmStats,
};
use coppice_guest_proto::session::other_port;
use coppice_snapshot::{Accel, EngineKind, FileInfo, MachineSpec, Manifest, PendingImage};
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;

use super::guest::{self, Files};
use super::{Origin, Shared, TIMINGS, take};

/// A machine: what would be the process.
#[derive(Debug)]
pub(crate) struct Machine {
    pid: i32,
    shared: Arc<Shared>,
    place: VmPlace,
    spec: MachineSpec,
    origin: Option<Origin>,
    files: Mutex<Files>,
    state: watch::Sender<VmState>,
    console: broadcast::Sender<Bytes>,
    port: AtomicU8,
    mute: AtomicBool,
    refuse_resume: AtomicBool,
    /// Whether the file system stands still.
    pub frozen: AtomicBool,
    /// Whether the handshake was done since the start.
    pub resumed: Mutex<Option<Vec<u8>>>,
}

impl Machine {
    pub fn new(
        pid: i32,
        shared: Arc<Shared>,
        place: VmPlace,
        spec: MachineSpec,
        files: Files,
        origin: Option<Origin>,
    ) -> Self {
        Self {
            pid,
            shared,
            place,
            spec,
            files: Mutex::new(files),
            state: watch::Sender::new(VmState::Running),
            console: broadcast::Sender::new(64),
            port: AtomicU8::new(origin.as_ref().map_or(1, |o| o.port)),
            origin,
            mute: AtomicBool::new(false),
            refuse_resume: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            resumed: Mutex::new(None),
        }
    }

    pub fn id(&self) -> uuid::Uuid {
        self.place.id
    }

    pub fn knobs(&self, mute: bool, refuse_resume: bool) {
        self.mute.store(mute, Ordering::Relaxed);
        self.refuse_resume.store(refuse_resume, Ordering::Relaxed);
    }

    pub fn is_mute(&self) -> bool {
        self.mute.load(Ordering::Relaxed)
    }

    pub fn refuses_resume(&self) -> bool {
        self.refuse_resume.load(Ordering::Relaxed)
    }

    pub fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn print(&self, line: &[u8]) {
        let append = || {
            use std::io::Write;
            std::fs::OpenOptions::new().create(true).append(true).open(&self.place.console_log)?.write_all(line)
        };
        if let Err(error) = append() {
            tracing::debug!(%error, "the fake console was not written");
        }
        // No follower is fine.
        drop(self.console.send(Bytes::copy_from_slice(line)));
    }

    pub fn die(&self, reason: &str) {
        self.shared.machines().remove(&self.pid);
        self.set(VmState::Dead(reason.to_owned()));
    }

    fn set(&self, new: VmState) {
        self.state.send_if_modified(|state| {
            let change = *state != new && !matches!(state, VmState::Dead(_));
            if change {
                *state = new;
            }
            change
        });
    }

    fn check(&self) -> Result<VmState, VmError> {
        match self.state.borrow().clone() {
            VmState::Dead(reason) => Err(VmError::Dead { reason }),
            state => Ok(state),
        }
    }

    /// Whether the script has it that this quiesce fails.
    pub fn fails_quiesce(&self) -> bool {
        take(&mut self.shared.script().fail_quiesces)
    }

    pub fn runs(&self) -> bool {
        *self.state.borrow() == VmState::Running
    }

    /// Waits until the virtual CPUs run. Never answers for a dead machine: its streams are cut by then.
    pub async fn running(&self) {
        let mut state = self.state.subscribe();
        if state.wait_for(|s| *s == VmState::Running).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    async fn dead(&self) -> String {
        let mut state = self.state.subscribe();
        // The sender lives as long as `self`, so this doesn't fail.
        match state.wait_for(|s| matches!(s, VmState::Dead(_))).await.as_deref() {
            Ok(VmState::Dead(reason)) => reason.clone(),
            _ => String::new(),
        }
    }
}

/// A handle.
#[derive(Debug)]
pub(crate) struct FakeVm {
    machine: Arc<Machine>,
    session: Mutex<CancellationToken>,
    operation: tokio::sync::Mutex<()>,
}

impl Drop for FakeVm {
    fn drop(&mut self) {
        self.next_session().cancel();
    }
}

impl FakeVm {
    pub fn new(machine: Arc<Machine>) -> Self {
        Self { machine, session: Mutex::default(), operation: tokio::sync::Mutex::default() }
    }

    fn next_session(&self) -> CancellationToken {
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        session.cancel();
        *session = CancellationToken::new();
        session.clone()
    }

    fn write_image(&self, image: PendingImage, plan: (uuid::Uuid, bool)) -> Result<Captured, CaptureError> {
        let machine = &self.machine;
        let (id, durable) = plan;
        let bytes = u64::from(machine.spec.memory_mib) << 20;
        machine.files().save_memory(&image.memory_path(), bytes).map_err(CaptureError::Memory)?;
        std::fs::write(image.devices_path(), b"fake device state").map_err(CaptureError::Memory)?;
        let disk_clone = coppice_disk::clone_file(&machine.place.disk, &image.disk_path()).map_err(clone_error)?;
        let info = |path: std::path::PathBuf, hash: bool| {
            let len = path.metadata().map_err(CaptureError::Disk)?.len();
            let digest = if hash { Some(PendingImage::digest(&path)?) } else { None };
            Ok::<_, CaptureError>(FileInfo { len, digest })
        };
        let manifest = Manifest {
            id,
            captured_at: jiff::Timestamp::now(),
            engine: EngineKind::Fake,
            engine_version: "1".to_owned(),
            accel: Accel::Tcg,
            machine: machine.spec.clone(),
            channel_port: machine.port.load(Ordering::Relaxed),
            memory: info(image.memory_path(), durable)?,
            devices: info(image.devices_path(), true)?,
            disk: info(image.disk_path(), durable)?,
        };
        let image = image.complete(manifest, durable)?;
        let timings = CaptureTimings { paused: Duration::from_millis(1), ..CaptureTimings::default() };
        Ok(Captured { image, disk_clone, memory_bytes: 4096, memory_written_bytes: 4096, timings })
    }
}

fn clone_error(error: CloneError) -> CaptureError {
    match error {
        CloneError::NoSpace { .. } => CaptureError::NoSpace,
        other => CaptureError::Disk(std::io::Error::other(other)),
    }
}

#[async_trait]
impl Vm for FakeVm {
    async fn open_session(&self, deadline: Instant) -> Result<GuestSession, SessionError> {
        let begin = Instant::now();
        let machine = Arc::clone(&self.machine);
        machine.check().map_err(|dead| SessionError::Dead { reason: dead.to_string() })?;
        let end = self.next_session();
        let port = other_port(usize::from(machine.port.load(Ordering::Relaxed)));
        machine.port.store(u8::try_from(port).unwrap_or(0), Ordering::Relaxed);
        let (ours, theirs) = tokio::io::duplex(256 << 10);
        let (guest, cut) = (Arc::clone(&machine), end.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = guest::serve(Arc::clone(&guest), theirs) => {}
                _reason = guest.dead() => {}
                () = cut.cancelled() => {}
            }
            // The server has tasks of its own for what it accepted: they end when the other side of the stream does.
            cut.cancel();
        });
        let left = deadline.saturating_duration_since(Instant::now());
        tokio::select! {
            session = GuestSession::open(ours, end) => session,
            reason = machine.dead() => Err(SessionError::Dead { reason }),
            () = tokio::time::sleep(left) => {
                Err(SessionError::Timeout { after: begin.elapsed(), console: "fake guest started".to_owned() })
            }
        }
    }

    async fn pause(&self) -> Result<(), VmError> {
        let _one_at_a_time = self.operation.lock().await;
        self.machine.check()?;
        self.machine.set(VmState::Paused);
        Ok(())
    }

    async fn resume(&self) -> Result<(), VmError> {
        let _one_at_a_time = self.operation.lock().await;
        self.machine.check()?;
        self.machine.set(VmState::Running);
        Ok(())
    }

    async fn capture(&self, plan: CapturePlan) -> Result<Captured, CaptureError> {
        let _one_at_a_time = self.operation.lock().await;
        let before = self.machine.check()?;
        let (fails, no_space, delay) = {
            let mut script = self.machine.shared.script();
            let no_space = take(&mut script.no_space);
            (!no_space && take(&mut script.fail_captures), no_space, script.capture_delay)
        };
        if no_space {
            return Err(CaptureError::NoSpace);
        }
        if fails {
            return Err(CaptureError::Memory(std::io::Error::other("the script says so")));
        }
        if let Some(session) = plan.hold.as_ref().filter(|_| before == VmState::Running) {
            session.hold().await.map_err(CaptureError::Hold)?;
        }
        self.machine.set(VmState::Paused);
        let resume = Resume { machine: &self.machine, state: before };
        tokio::time::sleep(delay).await;
        let captured = self.write_image(plan.image, (plan.id, plan.durable));
        drop(resume);
        captured
    }

    async fn clone_disk(&self, dest: &Path) -> Result<DiskClone, CaptureError> {
        let _one_at_a_time = self.operation.lock().await;
        self.machine.check()?;
        if take(&mut self.machine.shared.script().no_space) {
            return Err(CaptureError::NoSpace);
        }
        let delay = self.machine.shared.script().capture_delay;
        tokio::time::sleep(delay).await;
        let kind = coppice_disk::clone_file(&self.machine.place.disk, dest).map_err(clone_error)?;
        Ok(DiskClone { kind, paused: Duration::from_millis(1) })
    }

    async fn stats(&self) -> Result<VmStats, VmError> {
        self.machine.check()?;
        let disk_bytes = coppice_disk::file_usage(&self.machine.place.disk).unwrap_or(0);
        Ok(VmStats { pss_bytes: 1 << 20, private_bytes: 1 << 20, cpu_time: Duration::from_millis(1), disk_bytes })
    }

    async fn kill(&self) -> Result<(), VmError> {
        self.machine.die("killed");
        match std::fs::remove_file(self.machine.place.run_dir.join("fake")) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                Err(VmError::System { what: "removing a file of the run directory".to_owned(), source })
            }
            _ => Ok(()),
        }
    }

    fn record(&self) -> VmRecord {
        let machine = &self.machine;
        VmRecord {
            place: machine.place.clone(),
            machine: machine.spec.clone(),
            pid: machine.pid,
            pid_start: 1,
            boot_id: "fake".to_owned(),
            channel_port: machine.port.load(Ordering::Relaxed),
            memory_base: machine.origin.as_ref().map(|o| o.base.clone()),
            restore: machine.origin.as_ref().map(|_| TIMINGS),
        }
    }

    fn state(&self) -> watch::Receiver<VmState> {
        self.machine.state.subscribe()
    }

    fn console(&self) -> broadcast::Receiver<Bytes> {
        self.machine.console.subscribe()
    }
}

/// Puts the state back that was before a capture, also when the capture is cancelled.
struct Resume<'a> {
    machine: &'a Machine,
    state: VmState,
}

impl Drop for Resume<'_> {
    fn drop(&mut self) {
        self.machine.set(self.state.clone());
    }
}
