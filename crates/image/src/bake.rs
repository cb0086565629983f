//! Baking: a template's machine is booted once, warmed, and captured; every sandbox then starts from that instant.
//!
//! A fresh clone of the root file system is booted, the agent waited for, the handshake done with reason BAKE (no
//! identity), the recipe's warm commands run, everything synced, the machine captured, its files published by rename. Each
//! step is bounded in time. On failure or cancellation the VM ends and nothing is left; what a killed process left is
//! ended and removed by [`reclaim`]. It does not decide whether baking is needed ([`mod@crate::prepare`]).

use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use coppice_disk::staging::{self, Staging};
use coppice_disk::{CloneError, CloneKind, DataDir, Event, NameError, Progress, StagingError, clone_file_async};
use coppice_engine::{
    AdoptError, BootError, BootSpec, CaptureError, CapturePlan, Engine, GuestError, GuestSession, JailSlot, Nic,
    SessionError, Vm, VmError, VmPlace, VmRecord,
};
use coppice_guest_proto::v1::{ResumeReason, ResumeRequest};
use coppice_snapshot::{CreateImageError, MachineSpec, PendingImage};
use uuid::Uuid;

use crate::catalog::{ROOTFS_FILE, SNAPSHOT_DIR, TEMPLATE_FILE, TemplateInfo};
use crate::initramfs::Initramfs;
use crate::kernel::Kernel;
use crate::recipe::Recipe;
use crate::rootfs::Rootfs;

/// Until the agent answers. An emulated machine boots in 4 s alone, in 20 s on a busy host.
pub const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// For the handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);
/// For one warm command.
const WARM_LIMIT: Duration = Duration::from_secs(300);
/// Console lines in an error.
const CONSOLE_LINES: usize = 15;
/// Purpose of the run directories of bakes; how [`reclaim`] finds them.
const RUN_PURPOSE: &str = "bake";
/// The engine's record in a run directory.
const RECORD_FILE: &str = "vm.json";

/// A template was not baked; nothing is left of the attempt.
#[derive(Debug, thiserror::Error)]
pub enum BakeError {
    /// A directory could not be made or published.
    #[error("cannot store the template")]
    Staging(#[from] StagingError),
    /// The root file system could not be cloned.
    #[error("cannot clone the root file system")]
    Clone(#[from] CloneError),
    /// A bad name.
    #[error("cannot name the template")]
    Name(#[from] NameError),
    /// A file could not be written.
    #[error("cannot write {path}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The VM could not be started.
    #[error("the template's machine did not start")]
    Boot(#[from] BootError),
    /// The kernel said nothing, or stopped before it ran the agent.
    #[error("the guest kernel did not boot; its console ends:{console}")]
    KernelDidNotBoot {
        /// Last lines.
        console: String,
        /// What the engine said.
        #[source]
        source: Box<SessionError>,
    },
    /// The kernel ran the agent, but that did not answer.
    #[error("the guest booted, but its agent never answered; its console ends:{console}")]
    NeverAnswered {
        /// Last lines.
        console: String,
        /// What the engine said.
        #[source]
        source: Box<SessionError>,
    },
    /// The agent failed at something.
    #[error("the guest failed at {what}; its console ends:{console}")]
    Guest {
        /// At what.
        what: String,
        /// Last lines.
        console: String,
        /// Why.
        #[source]
        source: GuestError,
    },
    /// A warm command of the recipe failed.
    #[error("a warm command of the recipe failed with exit code {exit_code}: {command}\n{output}")]
    Warm {
        /// The command.
        command: String,
        /// Its exit code.
        exit_code: i32,
        /// The end of what it wrote.
        output: String,
    },
    /// There is no network device for it.
    #[error("a network device can't be made for the template's machine")]
    Nic(#[source] io::Error),
    /// The machine could not be captured.
    #[error("the template's machine could not be captured")]
    Capture(#[from] CaptureError),
    /// Its image could not be made.
    #[error("the machine image could not be made")]
    Image(#[from] CreateImageError),
    /// The VM could not be ended.
    #[error("the template's machine could not be ended")]
    Kill(#[source] VmError),
}

impl BakeError {
    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}

/// What a template is baked from.
#[derive(Debug, Clone, Copy)]
pub struct Ingredients<'a> {
    /// What to run and how large the machine is.
    pub recipe: &'a Recipe,
    /// Hash of all that it is made from.
    pub recipe_id: &'a str,
    /// The guest kernel.
    pub kernel: &'a Kernel,
    /// The initramfs.
    pub initramfs: &'a Initramfs,
    /// The root file system.
    pub rootfs: &'a Rootfs,
}

/// Bakes a template and publishes it as a new generation, whose name is returned. Making it the current one is the
/// caller's.
///
/// # Errors
/// [`BakeError`]; nothing is left.
pub async fn bake(
    data: &DataDir,
    engine: &dyn Engine,
    from: Ingredients<'_>,
    progress: &dyn Progress,
) -> Result<String, BakeError> {
    // Never the name of an earlier one: machines map files of their generation by path.
    let generation = format!("{}-{}", from.recipe_id, short_random());
    let staged = data.stage("bake")?;
    let run = RunDir { staging: Staging::new(&data.run_dir(), RUN_PURPOSE)? };
    let scratch = data.stage("bake-vm")?;
    let rootfs = staged.path().join(ROOTFS_FILE);
    let disk = scratch.path().join("disk.ext4");
    clone_file_async(from.rootfs.path.clone(), rootfs.clone()).await?;
    if clone_file_async(rootfs, disk.clone()).await? == CloneKind::Copy {
        progress.report(Event::Notice { what: "the data directory cannot share extents: disks are copied" });
    }

    let place = VmPlace {
        id: Uuid::new_v4(),
        run_dir: run.staging.path().to_path_buf(),
        disk,
        console_log: scratch.path().join("console.log"),
    };
    let console = place.console_log.clone();
    let machine = MachineSpec {
        cpus: from.recipe.cpus,
        memory_mib: from.recipe.memory_mib,
        kernel: from.kernel.info.id.clone(),
        initramfs: from.initramfs.id.clone(),
        cmdline: String::new(),
    };
    let kernel = coppice_engine::GuestKernel { vmlinuz: from.kernel.vmlinuz(), initramfs: from.initramfs.path.clone() };
    progress.report(Event::Detail { line: "booting" });
    // A machine that is restored from this one has a network; this one has only the device.
    let nic = tokio::task::spawn_blocking(Nic::isolated).await.unwrap_or_else(|error| Err(io::Error::other(error)));
    let (nic, jail) = (nic.map_err(BakeError::Nic)?, JailSlot::unslotted());
    let vm = Running::new(engine.boot(BootSpec { place, machine, kernel, nic, jail }).await?);
    let captured = async {
        run.write_record(&vm.0.record())?;
        let session = open_session(vm.0.as_ref(), &console).await?;
        warm(&session, from.recipe, &console, progress).await?;
        progress.report(Event::Detail { line: "capturing" });
        let image = PendingImage::create(&staged.path().join(SNAPSHOT_DIR))?;
        vm.0.capture(CapturePlan { image, id: Uuid::new_v4(), durable: true, hold: None })
            .await
            .map_err(BakeError::from)
    };
    let captured = captured.await;
    // Whatever happened, the VM is gone before the answer; dropping it covers only cancellation.
    let ended = vm.end().await.map_err(BakeError::Kill);
    captured?;
    ended?;

    let machine = (from.kernel.info.id.clone(), from.initramfs.id.clone());
    let info = TemplateInfo::new(from.recipe, generation.clone(), from.recipe_id.into(), machine, from.rootfs.digest);
    publish(data, staged, info).await?;
    Ok(generation)
}

/// Writes the description and makes the generation appear.
async fn publish(data: &DataDir, staged: Staging, info: TemplateInfo) -> Result<(), BakeError> {
    let target = data.template_dir(&info.name, &info.generation)?;
    let path = staged.path().join(TEMPLATE_FILE);
    let task = tokio::task::spawn_blocking(move || {
        let text = info.encode().map_err(|error| BakeError::at(&path)(io::Error::other(error)))?;
        fs::write(&path, text).map_err(BakeError::at(&path))?;
        staged.publish(&target).map_err(BakeError::from)
    });
    task.await.unwrap_or(Err(BakeError::Clone(CloneError::Interrupted)))
}

fn short_random() -> String {
    Uuid::new_v4().simple().to_string().chars().take(8).collect()
}

async fn open_session(vm: &dyn Vm, console: &Path) -> Result<GuestSession, BakeError> {
    vm.open_session(Instant::now() + BOOT_LIMIT).await.map_err(|source| {
        let text = console_tail(console);
        let source = Box::new(source);
        // What the kernel prints right before it starts PID 1.
        if text.whole.contains("Run /init as init process") {
            BakeError::NeverAnswered { console: text.tail, source }
        } else {
            BakeError::KernelDidNotBoot { console: text.tail, source }
        }
    })
}

/// Handshake, warm commands, sync, hold.
async fn warm(
    session: &GuestSession,
    recipe: &Recipe,
    console: &Path,
    progress: &dyn Progress,
) -> Result<(), BakeError> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |source| BakeError::Guest { what, console: console_tail(console).tail, source }
    };
    session.resume(handshake(), Instant::now() + HANDSHAKE_LIMIT).await.map_err(failed("the handshake"))?;
    for command in recipe.warm.iter().map(String::as_str).chain(["sync"]) {
        progress.report(Event::Detail { line: command });
        let run = session.run(&["/bin/sh", "-c", command], WARM_LIMIT).await.map_err(failed(command))?;
        if run.exit_code != 0 {
            let mut output = run.stdout;
            output.extend_from_slice(&run.stderr);
            let output = last_lines(&output).tail;
            return Err(BakeError::Warm { command: command.into(), exit_code: run.exit_code, output });
        }
    }
    // What a warm command left running goes on in each sandbox when that has become one, not before.
    session.hold().await.map_err(failed("holding its processes"))
}

fn handshake() -> ResumeRequest {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    ResumeRequest {
        generation: Uuid::new_v4().into_bytes().to_vec(),
        reason: ResumeReason::Bake.into(),
        wall_clock_unix_ns: i64::try_from(now.as_nanos()).unwrap_or(i64::MAX),
        // Random v4 UUIDs: 5 of them carry 610 random bits of the host's CSPRNG.
        entropy: (0..5).flat_map(|_| Uuid::new_v4().into_bytes()).collect(),
        ..ResumeRequest::default()
    }
}

/// A VM that does not outlive this value.
struct Running(Arc<dyn Vm>, bool);

impl Running {
    fn new(vm: Arc<dyn Vm>) -> Self {
        Self(vm, false)
    }

    async fn end(mut self) -> Result<(), VmError> {
        self.0.kill().await?;
        self.1 = true;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.1 {
            return;
        }
        let vm = Arc::clone(&self.0);
        let ending = async move {
            if let Err(error) = vm.kill().await {
                tracing::error!(%error, "cannot end the machine of a failed bake");
            }
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(ending)),
            Err(error) => tracing::error!(%error, "the machine of a failed bake is left to the next set-up"),
        }
    }
}

/// The directory of the VM's sockets, with its record for [`reclaim`].
struct RunDir {
    staging: Staging,
}

impl RunDir {
    fn write_record(&self, record: &VmRecord) -> Result<(), BakeError> {
        let path = self.staging.path().join(RECORD_FILE);
        let text = serde_json::to_vec(record).map_err(|error| BakeError::at(&path)(error.into()))?;
        fs::write(&path, text).map_err(BakeError::at(&path))
    }
}

/// Ends the machines of bakes whose process was killed, and removes what they left.
///
/// # Errors
/// [`BakeError::Staging`]; a machine that cannot be ended is logged.
pub async fn reclaim(data: &DataDir, engine: &dyn Engine) -> Result<(), BakeError> {
    for dir in staging::abandoned(&data.run_dir(), RUN_PURPOSE)? {
        let record = fs::read(dir.path().join(RECORD_FILE)).ok();
        let Some(record) = record.and_then(|text| serde_json::from_slice::<VmRecord>(&text).ok()) else { continue };
        match engine.adopt(record).await {
            Ok(vm) => {
                if let Err(error) = vm.kill().await {
                    tracing::error!(%error, "cannot end the machine of a bake that was killed");
                }
            }
            Err(AdoptError::Gone) => {}
            Err(error) => tracing::warn!(%error, "cannot take over the machine of a bake that was killed"),
        }
    }
    Ok(())
}

struct Text {
    whole: String,
    tail: String,
}

/// The end of a console, which a guest wrote: bounded, and with nothing that a terminal would obey.
fn console_tail(path: &Path) -> Text {
    const KEPT: u64 = 128 << 10;
    let read = || -> io::Result<Vec<u8>> {
        let mut file = fs::File::open(path)?;
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(KEPT)))?;
        let mut bytes = Vec::new();
        file.take(KEPT).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    last_lines(&read().unwrap_or_default())
}

fn last_lines(bytes: &[u8]) -> Text {
    let clean = |c: char| if c == '\n' || !c.is_control() { Some(c) } else { None };
    let whole: String = String::from_utf8_lossy(bytes).chars().filter_map(clean).collect();
    let lines: Vec<&str> = whole.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines.get(lines.len().saturating_sub(CONSOLE_LINES)..).unwrap_or_default();
    let mut tail: String = last.iter().map(|line| format!("\n  | {line}")).collect();
    if tail.is_empty() {
        tail.push_str("\n  | (nothing)");
    }
    Text { whole, tail }
}
