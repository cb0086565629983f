//! Capture: memory, device state and disk of one instant, with the machine stopped as briefly as can be.
//!
//! Before the pause everything is made that can be: files, clones of what is immutable, staging memory; what the disk has
//! in the page cache is flushed. Inside the pause only: stop, device state, disk reflink, finding and copying written
//! pages, resume. After it: pages and device state go to their files, the manifest completes the image; what machines of
//! it will read of the cloned base is read ahead.
//!
//! The pause runs in a task of its own that always gets to the resume, also when nobody waits for it any more. It does not
//! decide when a capture is due or what becomes of the image.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_disk::{CloneError, CloneKind, clone_fd};
use coppice_snapshot::{CreateImageError, EngineKind, FileInfo, MachineImage, Manifest, PendingImage};
use rustix::fs::Advice;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::arena::Arena;
use super::memory::GuestMemory;
use super::memory_file::MemoryFile;
use super::run_dir::device_state_file;
use super::vm::Inner;
use crate::privileged::{Range, ranges_until, total};
use crate::{CaptureError, CapturePlan, CaptureTimings, Captured, DiskClone, VmError, VmState};

/// Largest device state that is kept. A machine of 64 CPUs has some hundred KiB; a VMM that was taken over may try more.
const MAX_DEVICES: u64 = 64 << 20;
/// Staging memory beyond what was written when it was looked at before the pause, bytes.
const MARGIN: u64 = 16 << 20;

/// Captures `vm`. When the caller is gone before it ends, the machine runs on and the image is removed.
pub(crate) async fn capture(vm: Arc<Inner>, plan: CapturePlan) -> Result<Captured, CaptureError> {
    detached(async move { run(&vm, plan).await }, |captured: Captured| {
        // Nobody knows of it: it never was.
        if let Err(error) = std::fs::remove_dir_all(captured.image.dir()) {
            tracing::warn!(%error, "an abandoned image was not removed");
        }
    })
    .await
}

/// Clones the disk of `vm` in a pause of its own.
pub(crate) async fn clone_disk(vm: Arc<Inner>, dest: PathBuf) -> Result<DiskClone, CaptureError> {
    let path = dest.clone();
    let abandon = move |_clone| drop(std::fs::remove_file(&path));
    detached(async move { run_clone_disk(&vm, &dest).await }, abandon).await
}

/// Runs `work` to its end even when the caller is cancelled; then `abandon` gets what it made.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, CaptureError>> + Send + 'static,
    abandon: impl FnOnce(T) + Send + 'static,
) -> Result<T, CaptureError> {
    let (answer, result) = oneshot::channel();
    tokio::spawn(async move {
        if let Err(Ok(made)) = answer.send(work.await) {
            abandon(made);
        }
    });
    result.await.unwrap_or_else(|_gone| Err(CaptureError::Memory(io::Error::other("the capture was interrupted"))))
}

async fn run(vm: &Arc<Inner>, plan: CapturePlan) -> Result<Captured, CaptureError> {
    let _one_at_a_time = vm.operation.lock().await;
    let mut ready = prepare(vm, plan).await?;
    coppice_fault::point!("capture.prepared");
    let fdset = hand_over(vm, &mut ready).await?;
    let paused = pause(vm, ready, fdset).await;
    // Failure would only leave one descriptor of a memfd open in QEMU, until the VM ends.
    if let Err(error) = vm.command("remove-fd", json!({"fdset-id": fdset})).await {
        tracing::debug!(%error, "the device state's descriptor was not removed");
    }
    let (ready, paused) = paused?;
    if vm.memory_base.is_some() && !ready.plan.durable {
        read_ahead(&ready);
    }
    let facts = ManifestFacts {
        engine_version: vm.facts.capabilities.version.clone(),
        accel: vm.facts.capabilities.accel,
        machine: vm.machine.clone(),
        channel_port: vm.channel_port(),
    };
    blocking(move || publish(ready, paused, facts)).await
}

/// Everything that is open and made before the pause.
struct Ready {
    plan: CapturePlan,
    memory: Arc<GuestMemory>,
    memory_file: MemoryFile,
    arena: Arena,
    disk: File,
    disk_clone: File,
    devices: File,
    devices_writer: Option<OwnedFd>,
}

async fn prepare(vm: &Arc<Inner>, plan: CapturePlan) -> Result<Ready, CaptureError> {
    let (id, disk_path) = (vm.process.id(), vm.place.disk.clone());
    let privileged = Arc::clone(&vm.facts.privileged);
    let len = u64::from(vm.machine.memory_mib) << 20;
    let has_base = vm.memory_base.is_some();
    let prepared = blocking(move || {
        let memory = GuestMemory::find(privileged, id, len).map_err(memory_error)?;
        let file = create(&plan.image.memory_path())?;
        // The base is immutable, so its clone may be made now. It is reached through the process that maps it: the image
        // that it belonged to may have been deleted.
        let base = has_base.then(|| memory.base());
        let (memory_file, _kind) = MemoryFile::new(file, base, memory.len()).map_err(memory_error)?;
        let disk_clone = create(&plan.image.disk_path())?;
        // What is dirty in the page cache would be written inside the pause, by the flush that a stop and a reflink do.
        let disk = File::open(&disk_path).and_then(|d| d.sync_data().map(|()| d)).map_err(disk_error)?;
        let (devices, writer) = device_state_file().map_err(memory_error)?;
        let written = total(&memory.written().map_err(memory_error)?);
        Ok((plan, memory, memory_file, disk, disk_clone, devices, writer, written))
    })
    .await?;
    let (plan, memory, memory_file, disk, disk_clone, devices, writer, written) = prepared;
    let memory = Arc::new(memory);
    // The machine runs on and writes more until it is stopped.
    let want = written.saturating_add(written / 8).saturating_add(MARGIN).min(len);
    let arena = vm.facts.arenas.take(want).await.map_err(memory_error)?;
    Ok(Ready { plan, memory, memory_file, arena, disk, disk_clone, devices, devices_writer: Some(writer) })
}

/// Gives QEMU the descriptor that it writes device state to, so that it needs no right to write anywhere.
async fn hand_over(vm: &Inner, ready: &mut Ready) -> Result<u64, CaptureError> {
    let refused = |reason: &str| VmError::Refused { command: "add-fd".to_owned(), reason: reason.to_owned() };
    let writer = ready.devices_writer.take().ok_or_else(|| refused("no descriptor"))?;
    let answer = vm.qmp.execute_with_fd("add-fd", json!({}), writer, Duration::from_secs(10)).await?;
    Ok(answer.get("fdset-id").and_then(Value::as_u64).ok_or_else(|| refused("no fdset-id in the answer"))?)
}

/// What came out of the pause.
struct Paused {
    captured_at: jiff::Timestamp,
    disk_clone: CloneKind,
    memory_bytes: u64,
    /// What is still staged in the arena.
    staged: Vec<Range>,
    timings: CaptureTimings,
}

/// The pause. Whatever goes wrong between stop and resume, the resume is sent.
async fn pause(vm: &Arc<Inner>, ready: Ready, fdset: u64) -> Result<(Ready, Paused), CaptureError> {
    let was_running = vm.watch.get() == VmState::Running;
    // 0. Hold. Not earlier: what was prepared takes longer with the size of the machine, and its processes stand still from here on.
    if let Some(session) = ready.plan.hold.as_ref().filter(|_| was_running) {
        session.hold().await.map_err(CaptureError::Hold)?;
    }
    coppice_fault::point!("capture.held");
    let begin = Instant::now();
    // 1. Stop. The virtual CPUs halt, then block I/O is drained: from here on nothing of the machine changes.
    let stopped = if was_running { vm.command("stop", json!({})).await.map(drop) } else { Ok(()) };
    let outcome = match stopped {
        Ok(()) => inside(vm, ready, fdset, begin).await,
        Err(error) => Err(error.into()),
    };
    coppice_fault::point!("capture.copied");
    // 5. Resume. Also after a stop that failed: it may have stopped nevertheless.
    let resumed = if was_running { vm.command("cont", json!({})).await.map(drop) } else { Ok(()) };
    coppice_fault::point!("capture.resumed");
    let total = begin.elapsed();
    let (ready, mut paused) = outcome?;
    resumed?;
    paused.timings.paused = total;
    Ok((ready, paused))
}

async fn inside(vm: &Arc<Inner>, ready: Ready, fdset: u64, begin: Instant) -> Result<(Ready, Paused), CaptureError> {
    coppice_fault::point!("capture.stopped");
    let captured_at = jiff::Timestamp::now();
    let stop = begin.elapsed();
    // 2. Device state, before memory: saving it may make devices write their last words into guest memory.
    //    `live: false`: QEMU neither resumes the machine nor gives up its disk.
    let arguments = json!({"filename": format!("/dev/fdset/{fdset}"), "live": false});
    vm.command("xen-save-devices-state", arguments).await?;
    let devices = begin.elapsed().saturating_sub(stop);
    // 3. and 4. Disk and memory do not touch each other: side by side.
    blocking(move || {
        let mut ready = ready;
        let (disk, memory) = std::thread::scope(|scope| {
            let (source, target) = (&ready.disk, &ready.disk_clone);
            let clone = scope.spawn(move || timed(|| clone_fd(source, target)));
            let memory = timed(|| stage(&ready.memory, &ready.memory_file, &mut ready.arena));
            (clone.join(), memory)
        });
        let (disk_clone, disk) =
            disk.map_err(|_panic| CaptureError::Disk(io::Error::other("the cloning thread panicked")))?;
        let disk_clone = disk_clone.map_err(clone_error)?;
        let (staged, memory) = memory;
        let (staged, memory_bytes) = staged.map_err(memory_error)?;
        let timings = CaptureTimings { stop, devices, disk, memory, ..CaptureTimings::default() };
        Ok((ready, Paused { captured_at, disk_clone, memory_bytes, staged, timings }))
    })
    .await
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let begin = Instant::now();
    (work(), begin.elapsed())
}

/// Copies all written pages into the arena. When they don't fit (the guest wrote more since it was looked at, or the arena
/// is at its limit), full rounds go to the file inside the pause: slower, never wrong. Answers with the last round.
fn stage(memory: &GuestMemory, file: &MemoryFile, arena: &mut Arena) -> io::Result<(Vec<Range>, u64)> {
    let mut ranges = memory.written()?;
    let bytes = total(&ranges);
    loop {
        let room = u64::try_from(arena.len()).unwrap_or(u64::MAX);
        let rest = if total(&ranges) > room { ranges.split_off(ranges_until(&ranges, room)) } else { Vec::new() };
        let len = usize::try_from(total(&ranges)).map_err(io::Error::other)?;
        let small = || io::Error::other("the staging memory is smaller than one range");
        if len > arena.len() {
            return Err(small());
        }
        memory.copy(&ranges, arena)?;
        if rest.is_empty() {
            return Ok((ranges, bytes));
        }
        file.write(&ranges, arena.bytes().get(..len).unwrap_or_default())?;
        ranges = rest;
    }
}

/// Has the kernel read into memory what the machine has mapped of its base image, which is about what machines of the new image
/// will read next: in their memory file it is a clone, of which no page is in memory, and they would wait for the disk. Runs
/// beside everything else and is waited for by nobody.
fn read_ahead(ready: &Ready) {
    let memory = Arc::clone(&ready.memory);
    let file = ready.memory_file.reader();
    let read = move || -> io::Result<u64> {
        let file = file?;
        let ranges = memory.read()?;
        for range in &ranges {
            rustix::fs::fadvise(&file, range.start, NonZeroU64::new(range.len), Advice::WillNeed)?;
        }
        Ok(total(&ranges))
    };
    let begin = Instant::now();
    drop(tokio::task::spawn_blocking(move || match read() {
        Ok(bytes) => tracing::debug!(bytes, took = ?begin.elapsed(), "read ahead"),
        Err(error) => tracing::debug!(%error, "nothing is read ahead"),
    }));
}

struct ManifestFacts {
    engine_version: String,
    accel: coppice_snapshot::Accel,
    machine: coppice_snapshot::MachineSpec,
    channel_port: u8,
}

/// After the pause: staged pages and device state to their files, checksums, manifest.
fn publish(ready: Ready, paused: Paused, facts: ManifestFacts) -> Result<Captured, CaptureError> {
    let begin = Instant::now();
    let Ready { plan, memory_file, mut arena, mut devices, memory, .. } = ready;
    let CapturePlan { image, id, durable, hold: _ } = plan;
    let len = usize::try_from(total(&paused.staged)).unwrap_or(0);
    let staged = arena.bytes().get(..len).unwrap_or_default();
    memory_file.write(&paused.staged, staged).map_err(memory_error)?;
    let memory_written_bytes = memory_file.written();
    tracing::debug!(bytes = len, memory_written_bytes, ranges = paused.staged.len(), took = ?begin.elapsed(), "memory written");
    coppice_fault::point!("capture.memory");
    drop(arena);
    let state = read_devices(&mut devices)?;
    write_new(&image.devices_path(), &state)?;
    let digest = |path: PathBuf| if durable { PendingImage::digest(&path).map(Some) } else { Ok(None) };
    let disk_len = image.disk_path().metadata().map_err(disk_error)?.len();
    let devices_len = u64::try_from(state.len()).unwrap_or(u64::MAX);
    let manifest = Manifest {
        id,
        captured_at: paused.captured_at,
        engine: EngineKind::Qemu,
        engine_version: facts.engine_version,
        accel: facts.accel,
        machine: facts.machine,
        channel_port: facts.channel_port,
        memory: FileInfo { len: memory.len(), digest: digest(image.memory_path()).map_err(image_error)? },
        devices: FileInfo {
            len: devices_len,
            digest: Some(PendingImage::digest(&image.devices_path()).map_err(image_error)?),
        },
        disk: FileInfo { len: disk_len, digest: digest(image.disk_path()).map_err(image_error)? },
    };
    let image: MachineImage = image.complete(manifest, durable).map_err(image_error)?;
    coppice_fault::point!("capture.published");
    let mut timings = paused.timings;
    timings.publish = begin.elapsed();
    let (disk_clone, memory_bytes) = (paused.disk_clone, paused.memory_bytes);
    Ok(Captured { image, disk_clone, memory_bytes, memory_written_bytes, timings })
}

fn read_devices(devices: &mut File) -> Result<Vec<u8>, CaptureError> {
    let mut state = Vec::new();
    devices.rewind().map_err(memory_error)?;
    devices.take(MAX_DEVICES + 1).read_to_end(&mut state).map_err(memory_error)?;
    let reason = match u64::try_from(state.len()) {
        Ok(1..=MAX_DEVICES) => return Ok(state),
        Ok(0) => "QEMU wrote no device state",
        _ => "QEMU wrote too much device state",
    };
    Err(VmError::Refused { command: "xen-save-devices-state".to_owned(), reason: reason.to_owned() }.into())
}

async fn run_clone_disk(vm: &Arc<Inner>, dest: &Path) -> Result<DiskClone, CaptureError> {
    let _one_at_a_time = vm.operation.lock().await;
    let (source, path) = (vm.place.disk.clone(), dest.to_owned());
    let (disk, target) = blocking(move || {
        let disk = File::open(&source).and_then(|disk| disk.sync_data().map(|()| disk)).map_err(disk_error)?;
        Ok((disk, create(&path)?))
    })
    .await?;
    let was_running = vm.watch.get() == VmState::Running;
    let begin = Instant::now();
    let stopped = if was_running { vm.command("stop", json!({})).await.map(drop) } else { Ok(()) };
    coppice_fault::point!("disk-clone.stopped");
    let cloned = match stopped {
        Ok(()) => blocking(move || clone_fd(&disk, &target).map_err(clone_error)).await,
        Err(error) => Err(error.into()),
    };
    let resumed = if was_running { vm.command("cont", json!({})).await.map(drop) } else { Ok(()) };
    let paused = begin.elapsed();
    match (cloned, resumed) {
        (Ok(kind), Ok(())) => Ok(DiskClone { kind, paused }),
        (Err(error), _) => {
            drop(std::fs::remove_file(dest));
            Err(error)
        }
        (_, Err(error)) => {
            drop(std::fs::remove_file(dest));
            Err(error.into())
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CaptureError> + Send + 'static,
) -> Result<T, CaptureError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(CaptureError::Memory(io::Error::other(error))))
}

fn create(path: &Path) -> Result<File, CaptureError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|source| image_error(CreateImageError::Write { path: path.to_owned(), source }))
}

fn write_new(path: &Path, data: &[u8]) -> Result<(), CaptureError> {
    create(path)?
        .write_all(data)
        .map_err(|source| image_error(CreateImageError::Write { path: path.to_owned(), source }))
}

fn memory_error(error: io::Error) -> CaptureError {
    if coppice_disk::is_no_space(&error) { CaptureError::NoSpace } else { CaptureError::Memory(error) }
}

fn disk_error(error: io::Error) -> CaptureError {
    if coppice_disk::is_no_space(&error) { CaptureError::NoSpace } else { CaptureError::Disk(error) }
}

fn clone_error(error: CloneError) -> CaptureError {
    match error {
        CloneError::NoSpace { .. } => CaptureError::NoSpace,
        CloneError::Io { source } => CaptureError::Disk(source),
        other => CaptureError::Disk(io::Error::other(other)),
    }
}

fn image_error(error: CreateImageError) -> CaptureError {
    match error {
        CreateImageError::Write { source, .. } if coppice_disk::is_no_space(&source) => CaptureError::NoSpace,
        other => other.into(),
    }
}
