//! The handle of one QEMU VM: pause, resume, sessions, stats, kill. Capture is in `capture.rs`.
//!
//! Dropping it closes the monitor, the console and the session, and leaves the VM running.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use coppice_guest_proto::session::other_port;
use coppice_snapshot::MachineSpec;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::Facts;
use super::console::Console;
use super::qmp::Qmp;
use super::run_dir::RunDir;
use super::watch::Watch;
use crate::privileged::ProcessStats;
use crate::process::Process;
use crate::{
    CaptureError, CapturePlan, Captured, DiskClone, GuestSession, RestoreTimings, SessionError, Vm, VmError, VmPlace,
    VmRecord, VmState, VmStats,
};

/// How long a monitor command may take. `stop` waits for block I/O to drain, on a disk that may be slow.
const COMMAND: Duration = Duration::from_secs(30);
/// How long a killed process may take to be gone (it may be in the middle of a disk write).
const KILL: Duration = Duration::from_secs(30);
/// How long the first try for a session lasts; each further one twice as long. Generous: a guest of a busy host is slow,
/// and the usual way ends long before.
const FIRST_TRY: Duration = Duration::from_secs(3);
/// Pause after a try that was refused at once.
const REFUSED: Duration = Duration::from_millis(20);

/// One VM.
#[derive(Debug)]
pub(crate) struct QemuVm(pub(crate) Arc<Inner>);

/// What handle and running captures share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub facts: Arc<Facts>,
    pub place: VmPlace,
    pub machine: MachineSpec,
    pub process: Arc<Process>,
    pub boot_id: String,
    pub memory_base: Option<std::path::PathBuf>,
    pub restore: Option<RestoreTimings>,
    pub qmp: Qmp,
    pub watch: Watch,
    pub console: Console,
    /// One of pause, resume, capture, disk clone at a time.
    pub operation: tokio::sync::Mutex<()>,
    session: Mutex<Session>,
    opening: tokio::sync::Mutex<()>,
    _console_task: Option<AbortOnDropHandle<()>>,
}

#[derive(Debug)]
struct Session {
    port: u8,
    end: CancellationToken,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Ok(session) = self.session.get_mut() {
            session.end.cancel();
        }
    }
}

/// A QEMU process whose monitor answers, on its way to a [`QemuVm`].
pub(crate) struct Connected {
    pub process: Arc<Process>,
    pub qmp: Qmp,
    pub watch: Watch,
    pub console: Console,
    console_task: Option<AbortOnDropHandle<()>>,
}

impl Connected {
    /// Connects to the sockets of a VM, watches its process, and negotiates with its monitor. Works while QEMU still
    /// starts, since its sockets listen before it does.
    pub async fn new(process: Arc<Process>, place: &VmPlace, timeout: Duration) -> Result<Self, VmError> {
        let run_dir = RunDir(place.run_dir.clone());
        let watch = Watch::new();
        let console = Console::new();
        tokio::spawn(watch.clone().run(Arc::clone(&process), run_dir.log(), console.clone()));
        let connect = |what: &'static str, path: std::path::PathBuf| async move {
            UnixStream::connect(path)
                .await
                .map_err(|source| VmError::System { what: format!("connecting to the VM's {what}"), source })
        };
        let stream = connect("console", run_dir.console()).await?;
        let task = tokio::spawn(console.clone().run(stream, place.console_log.clone()));
        let console_task = Some(AbortOnDropHandle::new(task));
        let events = watch.clone();
        let qmp = Qmp::new(connect("monitor", run_dir.monitor()).await?, move |event| events.apply_event(&event));
        let this = Self { process, qmp, watch, console, console_task };
        this.command("qmp_capabilities", json!({}), timeout).await?;
        // Events are only sent after the negotiation: this answer stands for all that happened before.
        let status = this.command("query-status", json!({}), timeout).await?;
        this.watch.apply_status(&status);
        Ok(this)
    }

    async fn command(&self, command: &'static str, arguments: Value, timeout: Duration) -> Result<Value, VmError> {
        tokio::select! {
            biased;
            answer = self.qmp.execute(command, arguments, timeout) => explain(answer, &self.watch).await,
            reason = self.watch.dead() => Err(VmError::Dead { reason }),
        }
    }
}

/// A closed monitor usually means that the process is ending; its reason says more.
async fn explain<T>(answer: Result<T, VmError>, watch: &Watch) -> Result<T, VmError> {
    match answer {
        Err(VmError::Dead { reason }) => {
            let reason = tokio::time::timeout(Duration::from_secs(2), watch.dead()).await.unwrap_or(reason);
            Err(VmError::Dead { reason })
        }
        answer => answer,
    }
}

/// What a [`QemuVm`] knows about where its machine came from.
pub(crate) struct Origin {
    pub boot_id: String,
    pub channel_port: u8,
    pub memory_base: Option<std::path::PathBuf>,
    pub restore: Option<RestoreTimings>,
}

impl QemuVm {
    pub fn new(facts: Arc<Facts>, place: VmPlace, machine: MachineSpec, connected: Connected, origin: Origin) -> Self {
        let Connected { process, qmp, watch, console, console_task } = connected;
        Self(Arc::new(Inner {
            facts,
            place,
            machine,
            process,
            boot_id: origin.boot_id,
            memory_base: origin.memory_base,
            restore: origin.restore,
            qmp,
            watch,
            console,
            operation: tokio::sync::Mutex::default(),
            session: Mutex::new(Session { port: origin.channel_port, end: CancellationToken::new() }),
            opening: tokio::sync::Mutex::default(),
            _console_task: console_task,
        }))
    }
}

impl Inner {
    /// Runs a monitor command.
    pub async fn command(&self, command: &'static str, arguments: Value) -> Result<Value, VmError> {
        if let VmState::Dead(reason) = self.watch.get() {
            return Err(VmError::Dead { reason });
        }
        explain(self.qmp.execute(command, arguments, COMMAND).await, &self.watch).await
    }

    /// The guest port of the latest session.
    pub fn channel_port(&self) -> u8 {
        self.session.lock().map(|s| s.port).unwrap_or_default()
    }

    /// Ends the session before and chooses the port of the next.
    fn next_session(&self) -> (u8, CancellationToken) {
        let end = CancellationToken::new();
        match self.session.lock() {
            Ok(mut session) => {
                session.end.cancel();
                session.end = end.clone();
                session.port = u8::try_from(other_port(usize::from(session.port))).unwrap_or(0);
                (session.port, end)
            }
            Err(_poisoned) => (0, end),
        }
    }

    async fn try_session(&self, port: u8, end: CancellationToken) -> Result<GuestSession, SessionError> {
        let path = RunDir(self.place.run_dir.clone()).port(port);
        GuestSession::open(UnixStream::connect(path).await?, end).await
    }
}

#[async_trait]
impl Vm for QemuVm {
    async fn open_session(&self, deadline: Instant) -> Result<GuestSession, SessionError> {
        let vm = &self.0;
        let begin = Instant::now();
        let _one_at_a_time = vm.opening.lock().await;
        let mut patience = FIRST_TRY;
        // QEMU keeps the hello until the guest opens the port, so the usual way is one try that simply waits. Further tries
        // are for what the preamble is there for: bytes of an earlier peer, or an agent that restarted.
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SessionError::Timeout { after: begin.elapsed(), console: vm.console.last_line() });
            }
            let (port, end) = vm.next_session();
            tokio::select! {
                session = vm.try_session(port, end) => match session {
                    Ok(session) => return Ok(session),
                    Err(error @ SessionError::Preamble(coppice_guest_proto::session::PreambleError::Version(_))) => {
                        return Err(error);
                    }
                    Err(error) => {
                        tracing::debug!(%error, port, "no session yet");
                        tokio::time::sleep(REFUSED.min(left)).await;
                    }
                },
                () = tokio::time::sleep(patience.min(left)) => patience = patience.saturating_mul(2),
                reason = vm.watch.dead() => return Err(SessionError::Dead { reason }),
            }
        }
    }

    async fn pause(&self) -> Result<(), VmError> {
        let _one_at_a_time = self.0.operation.lock().await;
        self.0.command("stop", json!({})).await.map(drop)
    }

    async fn resume(&self) -> Result<(), VmError> {
        let _one_at_a_time = self.0.operation.lock().await;
        self.0.command("cont", json!({})).await.map(drop)
    }

    async fn capture(&self, plan: CapturePlan) -> Result<Captured, CaptureError> {
        super::capture::capture(Arc::clone(&self.0), plan).await
    }

    async fn clone_disk(&self, dest: &Path) -> Result<DiskClone, CaptureError> {
        super::capture::clone_disk(Arc::clone(&self.0), dest.to_owned()).await
    }

    async fn stats(&self) -> Result<VmStats, VmError> {
        let (id, disk) = (self.0.process.id(), self.0.place.disk.clone());
        let privileged = Arc::clone(&self.0.facts.privileged);
        if let VmState::Dead(reason) = self.0.watch.get() {
            return Err(VmError::Dead { reason });
        }
        let read = move || {
            let ProcessStats { pss_bytes, private_bytes, cpu_time } = privileged.stats(id)?;
            let disk_bytes = coppice_disk::file_usage(&disk).map_err(|error| error.source)?;
            Ok(VmStats { pss_bytes, private_bytes, cpu_time, disk_bytes })
        };
        let measured: Result<std::io::Result<VmStats>, _> = tokio::task::spawn_blocking(read).await;
        measured
            .unwrap_or_else(|interrupted| Err(std::io::Error::other(interrupted)))
            .map_err(|source| VmError::System { what: "measuring the VM".to_owned(), source })
    }

    async fn kill(&self) -> Result<(), VmError> {
        self.0.watch.note_end("killed");
        let process = Arc::clone(&self.0.process);
        let killed = tokio::task::spawn_blocking(move || process.kill()).await;
        let killed = killed.unwrap_or_else(|interrupted| Err(std::io::Error::other(interrupted)));
        killed.map_err(|source| VmError::System { what: "killing the VM".to_owned(), source })?;
        tokio::time::timeout(KILL, self.0.watch.dead())
            .await
            .map_err(|_elapsed| VmError::Timeout { command: "SIGKILL".to_owned(), after: KILL })?;
        RunDir(self.0.place.run_dir.clone()).clear();
        Ok(())
    }

    fn record(&self) -> VmRecord {
        let vm = &self.0;
        VmRecord {
            place: vm.place.clone(),
            machine: vm.machine.clone(),
            pid: vm.process.id().pid,
            pid_start: vm.process.id().start_time,
            boot_id: vm.boot_id.clone(),
            channel_port: vm.channel_port(),
            memory_base: vm.memory_base.clone(),
            restore: vm.restore,
        }
    }

    fn state(&self) -> watch::Receiver<VmState> {
        self.0.watch.subscribe()
    }

    fn console(&self) -> broadcast::Receiver<Bytes> {
        self.0.console.follow()
    }
}
