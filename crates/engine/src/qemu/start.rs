//! Starting a VM: boot, restore, adopt. All three end in a [`Connected`] process and a [`QemuVm`].
//!
//! Whatever fails or is cancelled on the way leaves no process and no file. Guests are not waited for: that is
//! [`crate::Vm::open_session`].

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_snapshot::{EngineKind, MachineImage, MachineSpec, Manifest, OpenImageError};

use super::Facts;
use super::run_dir::{self, Endpoints, Files, RunDir, StartFiles};
use super::vm::{Connected, Origin, QemuVm};
use crate::privileged::{ProcessId, SpawnOrder, Spawned, StartKind, major_minor};
use crate::process::Process;
use crate::{
    AdoptError, BootError, BootSpec, JailSlot, Nic, Rebind, RestoreError, RestoreTimings, VmError, VmPlace, VmRecord,
    VmState,
};

/// How long QEMU may take until its monitor answers. Generous: many may start at once on few processors.
const START: Duration = Duration::from_secs(60);
/// How long the monitor of a running QEMU may take after the daemon was restarted.
const ADOPT: Duration = Duration::from_secs(15);

/// A process that is killed when its start does not get to its end.
struct Guard {
    process: Option<Arc<Process>>,
    run_dir: RunDir,
}

impl Guard {
    fn disarm(mut self) {
        self.process = None;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(process) = self.process.take() else { return };
        if let Err(error) = process.kill() {
            tracing::error!(%error, pid = process.id().pid, "a VM that failed to start can't be killed");
        }
        self.run_dir.clear();
        // Reap it; where there is no runtime any more the daemon ends, and init reaps.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { process.ended().await });
        }
    }
}

/// What is to be started, beside its files.
struct Launch<'a> {
    place: &'a VmPlace,
    machine: &'a MachineSpec,
    kind: StartKind,
    nic: Nic,
    jail: JailSlot,
}

/// Starts QEMU, negotiates with its monitor, and has its jail checked. `open` opens its files, on a blocking thread.
async fn launch<E: From<VmError> + Send + 'static>(
    facts: &Arc<Facts>,
    launch: Launch<'_>,
    open: impl FnOnce(&RunDir) -> Result<Files, E> + Send + 'static,
) -> Result<(Guard, Connected), E> {
    let Launch { place, machine, kind, nic, jail } = launch;
    let run_dir = RunDir(place.run_dir.clone());
    let order = SpawnOrder { machine: machine.clone(), start: kind, mac: nic.mac, jail };
    let shared = Arc::clone(facts);
    let started = tokio::task::spawn_blocking(move || {
        let mut guard = Guard { process: None, run_dir };
        let spawned = open(&guard.run_dir).and_then(|files| Ok(spawn(&shared, &guard.run_dir, &order, &files, &nic)?));
        match spawned {
            // From here on the guard owns it, also when nobody waits for this thread any more.
            Ok(process) => guard.process = Some(Arc::new(process)),
            Err(error) => {
                guard.run_dir.clear();
                return Err(error);
            }
        }
        Ok(guard)
    });
    let guard = started.await.map_err(|error| E::from(system("starting QEMU", io::Error::other(error))))??;
    let process = guard.process.clone().ok_or_else(|| VmError::Dead { reason: "it was not started".to_owned() })?;
    let id = process.id();
    let connected = Connected::new(process, place, START).await?;
    coppice_fault::point!("vmm.connected");
    // It has opened all that it needs. Whatever does not hold now ends it.
    let privileged = Arc::clone(&facts.privileged);
    let confirmed = tokio::task::spawn_blocking(move || privileged.confirm(id)).await;
    confirmed.unwrap_or_else(|error| Err(system("checking QEMU's jail", io::Error::other(error))))?;
    Ok((guard, connected))
}

fn spawn(facts: &Facts, run_dir: &RunDir, order: &SpawnOrder, files: &Files, nic: &Nic) -> Result<Process, VmError> {
    let endpoints = Endpoints::make(run_dir)?;
    let spawned = facts.privileged.spawn(order, endpoints.fds(files, &nic.tap))?;
    let id = spawned.id;
    Process::watch(Arc::clone(&facts.privileged), spawned).map_err(|source| {
        // Nobody else knows of it.
        if let Err(error) = facts.privileged.kill(id) {
            tracing::error!(%error, pid = id.pid, "a VM that can't be watched can't be killed");
        }
        system("watching QEMU", source)
    })
}

fn system(what: &str, source: io::Error) -> VmError {
    VmError::System { what: what.to_owned(), source }
}

/// Boots a machine.
pub(crate) async fn boot(facts: &Arc<Facts>, spec: BootSpec) -> Result<QemuVm, BootError> {
    let BootSpec { place, machine, kernel, nic, jail } = spec;
    let (shape, disk) = (machine.clone(), place.disk.clone());
    let open = move |run_dir: &RunDir| {
        let vmlinuz = open_file("guest kernel", &kernel.vmlinuz, false).map_err(missing)?;
        let initramfs = open_file("initramfs", &kernel.initramfs, false).map_err(missing)?;
        let disk = open_file("disk", &disk, true).map_err(missing)?;
        let memory = run_dir::fresh_memory(run_dir, &shape)?;
        Ok(Files { memory, disk, start: StartFiles::Boot { vmlinuz, initramfs } })
    };
    let what = Launch { place: &place, machine: &machine, kind: StartKind::Boot, nic, jail };
    let (guard, connected) = launch::<BootError>(facts, what, open).await?;
    connected.watch.running().await?;
    // The guest's first session is on port 0.
    let origin = Origin { boot_id: facts.boot_id.clone(), channel_port: 1, memory_base: None, restore: None };
    guard.disarm();
    Ok(QemuVm::new(Arc::clone(facts), place, machine, connected, origin))
}

/// Restores an image.
pub(crate) async fn restore(facts: &Arc<Facts>, image: &MachineImage, rebind: Rebind) -> Result<QemuVm, RestoreError> {
    let begin = Instant::now();
    let manifest = image.manifest();
    compatible(facts, manifest)?;
    let Rebind { place, kernel: _, nic, jail } = rebind;
    let machine = manifest.machine.clone();
    let (dir, memory, devices) = (image.dir().to_owned(), image.memory_path(), image.devices_path());
    let disk = place.disk.clone();
    let expected = manifest.memory.len;
    let open = move |_: &RunDir| {
        let gone = |_: Problem| RestoreError::Image(OpenImageError::Missing(dir.clone()));
        let memory = open_file("memory", &memory, false).map_err(gone)?;
        let devices = open_file("devices", &devices, false).map_err(gone)?;
        let disk = open_file("disk", &disk, true).map_err(missing_restore)?;
        // QEMU would make a file that is too short longer, and so change an image.
        if memory.metadata().map(|meta| meta.len()).ok() != Some(expected) {
            return Err(RestoreError::Image(OpenImageError::Missing(dir.clone())));
        }
        Ok(Files { memory, disk, start: StartFiles::Restore { devices } })
    };
    let what = Launch { place: &place, machine: &machine, kind: StartKind::Restore, nic, jail };
    let (guard, connected) = launch::<RestoreError>(facts, what, open).await?;
    let spawned = begin.elapsed();
    tokio::time::timeout(START, connected.watch.running())
        .await
        .unwrap_or_else(|_elapsed| Err(VmError::Timeout { command: "incoming".to_owned(), after: START }))?;
    let timings = RestoreTimings { spawn: spawned, load: begin.elapsed().saturating_sub(spawned) };
    let origin = Origin {
        boot_id: facts.boot_id.clone(),
        channel_port: manifest.channel_port,
        memory_base: Some(image.memory_path()),
        restore: Some(timings),
    };
    guard.disarm();
    Ok(QemuVm::new(Arc::clone(facts), place, machine, connected, origin))
}

/// The microvm machine has no versions of its own: device state is for one minor version of QEMU, and one accelerator.
fn compatible(facts: &Facts, manifest: &Manifest) -> Result<(), RestoreError> {
    let here = &facts.capabilities;
    let same = manifest.engine == EngineKind::Qemu
        && manifest.accel == here.accel
        && major_minor(&manifest.engine_version) == Some(facts.version);
    if same {
        return Ok(());
    }
    let say = |engine, version: &str, accel| format!("{engine:?} {version} {accel:?}").to_lowercase();
    Err(RestoreError::Incompatible {
        captured: say(manifest.engine, &manifest.engine_version, manifest.accel),
        here: say(here.engine, &here.version, here.accel),
    })
}

/// Takes over a running VM.
pub(crate) async fn adopt(facts: &Arc<Facts>, record: VmRecord) -> Result<QemuVm, AdoptError> {
    // A pid of another boot, or one that was given to another process, is not ours.
    if record.boot_id != facts.boot_id {
        return Err(AdoptError::Gone);
    }
    let id = ProcessId { pid: record.pid, start_time: record.pid_start };
    let privileged = Arc::clone(&facts.privileged);
    let held = tokio::task::spawn_blocking(move || privileged.adopt(id)).await;
    let held = held.unwrap_or_else(|error| Err(system("taking over a VM", io::Error::other(error))))?;
    let spawned = Spawned { id, pidfd: held.ok_or(AdoptError::Gone)? };
    let process = Process::watch(Arc::clone(&facts.privileged), spawned);
    let process = process.map_err(|source| system("watching QEMU", source))?;
    let connected = Connected::new(Arc::new(process), &record.place, ADOPT).await?;
    if let VmState::Dead(_) = connected.watch.get() {
        return Err(AdoptError::Gone);
    }
    let origin = Origin {
        boot_id: record.boot_id,
        channel_port: record.channel_port,
        memory_base: record.memory_base,
        restore: record.restore,
    };
    Ok(QemuVm::new(Arc::clone(facts), record.place, record.machine, connected, origin))
}

struct Problem {
    what: &'static str,
    path: PathBuf,
    error: io::Error,
}

impl Problem {
    fn system(self) -> VmError {
        VmError::System { what: format!("opening the {} at {}", self.what, self.path.display()), source: self.error }
    }
}

fn open_file(what: &'static str, path: &Path, write: bool) -> Result<File, Problem> {
    let open = OpenOptions::new().read(true).write(write).open(path);
    open.map_err(|error| Problem { what, path: path.to_owned(), error })
}

fn missing(problem: Problem) -> BootError {
    match problem.error.kind() {
        io::ErrorKind::NotFound => BootError::Missing { what: problem.what, path: problem.path },
        _ => problem.system().into(),
    }
}

fn missing_restore(problem: Problem) -> RestoreError {
    match problem.error.kind() {
        io::ErrorKind::NotFound => RestoreError::Missing { what: problem.what, path: problem.path },
        _ => problem.system().into(),
    }
}
