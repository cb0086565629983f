//! The engine conformance suite against real VMs. Needs root, QEMU, and what `coppice setup` prepares in the data
//! directory; says **skipped, because** when something is missing.

#![expect(clippy::unwrap_used, reason = "tests: a failure is a panic")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_engine::{
    BootSpec, CaptureError, CapturePlan, Engine, GuestSession, JailSlot, Local, LocalConfig, Nic, QemuConfig,
    QemuEngine, Rebind, Vm, VmPlace, VmState,
};
use coppice_guest_proto::v1::ResumeReason;
use coppice_snapshot::{MachineSpec, PendingImage};
use coppice_testkit::engine_conformance::{Fixtures, Guest, run};
use coppice_testkit::{assets, handshake};
use uuid::Uuid;

fn fixtures(dir: &Path) -> Result<Fixtures, String> {
    let assets = assets::find()?;
    let machine = MachineSpec {
        cpus: 1,
        memory_mib: 256,
        kernel: "test".into(),
        initramfs: "test".into(),
        cmdline: String::new(),
    };
    Ok(Fixtures {
        dir: dir.to_owned(),
        disk: assets.rootfs,
        kernel: assets.kernel,
        machine,
        guest: Guest::Real,
        patience: Duration::from_secs(90),
        nic: Arc::new(|| Nic::isolated().unwrap()),
        crash: Arc::new(|pid| {
            // Gone already is fine.
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
            }
        }),
    })
}

/// The engine and a directory of its own, or why not.
async fn prepare() -> Result<(Arc<dyn Engine>, tempfile::TempDir, Fixtures), String> {
    drop(tracing_subscriber::fmt().with_max_level(tracing::Level::INFO).with_test_writer().try_init());
    if !rustix::process::geteuid().is_root() {
        return Err("it needs root".to_owned());
    }
    let local = tokio::task::spawn_blocking(|| Local::new(LocalConfig::default())).await.unwrap();
    let local = Arc::new(local.map_err(|error| error.to_string())?);
    let engine = QemuEngine::new(local, QemuConfig::default()).await.map_err(|error| error.to_string())?;
    let home = if Path::new(assets::DATA).is_dir() { assets::DATA } else { "/tmp" };
    let dir = tempfile::Builder::new().prefix("engine-").tempdir_in(home).map_err(|error| error.to_string())?;
    // As the daemon's own directories: nobody else may look in.
    let private = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(dir.path(), private).map_err(|error| error.to_string())?;
    let fixtures = fixtures(dir.path())?;
    Ok((Arc::new(engine), dir, fixtures))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_qemu_engine_conforms() {
    match prepare().await {
        Ok((engine, _dir, fixtures)) => run(engine, fixtures).await,
        Err(reason) => eprintln!("skipped, because {reason}"),
    }
}

/// The driver has the device, and can bring it up and down: it answers on its control queue.
const DEVICE: &str = "ip link set eth0 up && ip link set eth0 promisc on && ip link set eth0 promisc off && \
                      cat /sys/class/net/eth0/address";

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_of_two_processors_with_a_network_device_forks() {
    let (engine, dir, mut fixtures) = match prepare().await {
        Ok(ready) => ready,
        Err(reason) => return eprintln!("skipped, because {reason}"),
    };
    fixtures.machine.cpus = 2;
    let vm = boot(&engine, &fixtures, dir.path(), "p").await;
    let session = open(&vm, &fixtures, ResumeReason::Bake).await;
    assert_eq!(shell(&session, "nproc").await, "2\n");
    assert!(shell(&session, DEVICE).await.starts_with("02:63:"));
    let image = PendingImage::create(&dir.path().join("image")).unwrap();
    let plan = CapturePlan { image, id: Uuid::new_v4(), durable: false, hold: None };
    let image = vm.capture(plan).await.unwrap().image;
    let place = place(dir.path(), "c", &image.disk_path());
    let rebind = Rebind { place, kernel: fixtures.kernel.clone(), nic: (fixtures.nic)(), jail: JailSlot::unslotted() };
    let child = engine.restore(&image, rebind).await.unwrap();
    let session = open(&child, &fixtures, ResumeReason::Fork).await;
    // Both processors work, and so does their timer.
    assert!(shell(&session, DEVICE).await.starts_with("02:63:"));
    let line = "for cpu in 0 1; do taskset -c $cpu sh -c 'sleep 0.2; grep -c processor /proc/cpuinfo' || exit; done";
    assert_eq!(shell(&session, line).await, "2\n2\n");
    child.kill().await.unwrap();
    vm.kill().await.unwrap();
}

/// A file system of 4 GiB, gone when this is dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn make(dir: &Path) -> Option<Self> {
        let (image, mount) = (dir.join("small.xfs"), dir.join("small"));
        std::fs::create_dir(&mount).ok()?;
        std::fs::File::create(&image).ok()?.set_len(4 << 30).ok()?;
        let ok = |program: &str, args: &[&std::ffi::OsStr]| {
            std::process::Command::new(program).args(args).status().is_ok_and(|status| status.success())
        };
        let made = ok("mkfs.xfs", &["-q".as_ref(), "-m".as_ref(), "reflink=1".as_ref(), image.as_ref()])
            && ok("mount", &["-o".as_ref(), "loop".as_ref(), image.as_ref(), mount.as_ref()]);
        made.then_some(Self(mount))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a failed test may leave a file open for a moment. The loop device goes with the mount.
        drop(std::process::Command::new("umount").arg("-l").arg(&self.0).status());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_host_disk_is_named_and_survived() {
    let (engine, dir, fixtures) = match prepare().await {
        Ok(ready) => ready,
        Err(reason) => return eprintln!("skipped, because {reason}"),
    };
    let Some(disk) = SmallDisk::make(dir.path()) else {
        return eprintln!("skipped, because a loop-mounted XFS can't be made here");
    };
    let vm = boot(&engine, &fixtures, &disk.0, "p").await;
    let session = open(&vm, &fixtures, ResumeReason::Bake).await;
    // Leave some MiB.
    let free = coppice_disk::free_space(&disk.0).unwrap().available;
    let ballast = std::fs::File::create(disk.0.join("ballast")).unwrap();
    let all_but = free.saturating_sub(12 << 20);
    rustix::fs::fallocate(&ballast, rustix::fs::FallocateFlags::empty(), 0, all_but).unwrap();

    let image = PendingImage::create(&disk.0.join("image")).unwrap();
    let plan = CapturePlan { image, id: Uuid::new_v4(), durable: true, hold: None };
    let error = vm.capture(plan).await.unwrap_err();
    assert!(matches!(error, CaptureError::NoSpace), "{error:?}");
    assert!(!disk.0.join("image").exists());
    assert_eq!(*vm.state().borrow(), VmState::Running);
    assert_eq!(shell(&session, "echo fine").await, "fine\n");

    let line =
        "dd if=/dev/urandom of=/root/big bs=1M count=60 conv=fsync 2>/dev/null && sha256sum /root/big > /root/sum";
    let writes = tokio::spawn({
        let session = session.clone();
        async move { shell(&session, line).await }
    });
    let mut state = vm.state();
    let stopped = state.wait_for(|s| matches!(s, VmState::IoError(_)));
    let stopped = tokio::time::timeout(fixtures.patience, stopped).await.unwrap().unwrap().clone();
    assert!(matches!(&stopped, VmState::IoError(reason) if reason.contains("No space left")), "{stopped:?}");
    ballast.set_len(0).unwrap();
    vm.resume().await.unwrap();
    tokio::time::timeout(fixtures.patience, writes).await.unwrap().unwrap();
    assert_eq!(*vm.state().borrow(), VmState::Running);
    shell(&session, "sync; echo 3 > /proc/sys/vm/drop_caches; sha256sum -c /root/sum").await;
    vm.kill().await.unwrap();
}

fn place(dir: &Path, name: &str, disk: &Path) -> VmPlace {
    let run_dir = dir.join(name);
    std::fs::create_dir(&run_dir).unwrap();
    let own = dir.join(format!("{name}.disk"));
    coppice_disk::clone_file(disk, &own).unwrap();
    VmPlace { id: Uuid::new_v4(), run_dir, disk: own, console_log: dir.join(format!("{name}.log")) }
}

async fn boot(engine: &Arc<dyn Engine>, fixtures: &Fixtures, dir: &Path, name: &str) -> Arc<dyn Vm> {
    let place = place(dir, name, &fixtures.disk);
    let (machine, kernel) = (fixtures.machine.clone(), fixtures.kernel.clone());
    let (nic, jail) = ((fixtures.nic)(), JailSlot::unslotted());
    engine.boot(BootSpec { place, machine, kernel, nic, jail }).await.unwrap()
}

async fn open(vm: &Arc<dyn Vm>, fixtures: &Fixtures, reason: ResumeReason) -> GuestSession {
    let deadline = Instant::now() + fixtures.patience;
    let session = vm.open_session(deadline).await.unwrap();
    session.resume(handshake::request(reason), deadline).await.unwrap();
    session
}

async fn shell(session: &GuestSession, line: &str) -> String {
    let output = session.run(&["/bin/sh", "-c", line], Duration::from_secs(90)).await.unwrap();
    assert_eq!(output.exit_code, 0, "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
