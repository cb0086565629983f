//! Measures the qemu engine alone, without host or API:
//! `cargo run --release -p coppice-testkit --example engine_bench [MEMORY_MIB [ROUNDS [INITRAMFS]]]`, as root, after `coppice setup`.
//!
//! Prints raw samples; asserts nothing. A child's time goes from the clone of its disk to the end of its first command.
#![expect(clippy::unwrap_used, reason = "a measuring tool: a failure is a panic")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_engine::{
    BootSpec, CapturePlan, Engine, GuestKernel, GuestSession, JailSlot, Local, LocalConfig, Nic, QemuConfig,
    QemuEngine, Rebind, Vm, VmPlace,
};
use coppice_guest_proto::v1::{InfoRequest, ResumeReason};
use coppice_snapshot::{MachineImage, MachineSpec, PendingImage};
use coppice_testkit::{assets, handshake};
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone)]
struct Bench {
    engine: Arc<QemuEngine>,
    kernel: GuestKernel,
    dir: PathBuf,
}

/// A machine that has answered its first command.
struct Child {
    vm: Arc<dyn Vm>,
    session: GuestSession,
    /// Wall time of: disk clone, restore, session, handshake, first command.
    steps: [Duration; 5],
    /// CPU time of the VMM in milliseconds, after: restore, session, handshake, first command.
    cpu: [f64; 4],
}

#[tokio::main]
async fn main() {
    let filter = "warn,coppice_engine::qemu::capture=debug";
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let mut args = std::env::args().skip(1);
    let memory_mib = args.next().map_or(512, |n| n.parse().unwrap());
    let rounds = args.next().map_or(3, |n| n.parse().unwrap());
    let assets = assets::find().unwrap();
    let mut kernel = assets.kernel;
    kernel.initramfs = args.next().map_or(kernel.initramfs, PathBuf::from);
    let local = Arc::new(Local::new(LocalConfig::default()).unwrap());
    let engine = Arc::new(QemuEngine::new(local, QemuConfig::default()).await.unwrap());
    println!("{:?}", engine.capabilities());
    let dir = tempfile::Builder::new().prefix("bench-").tempdir_in(assets::DATA).unwrap();
    let bench = Bench { engine, kernel, dir: dir.path().to_owned() };

    let first = bench.boot(&assets.rootfs, memory_mib).await;
    println!("--- a template: a durable capture of the booted machine");
    let template = bench.capture(&first, true).await;
    first.kill().await.unwrap();
    println!("--- a machine of the template");
    let parent = bench.child(template.clone()).await;
    println!("create: {}", steps(&parent));
    dirty(&parent.session).await;
    warm(&parent).await;
    println!("--- its children");
    for _ in 0..rounds {
        for count in [1, 4, 16] {
            let image = bench.capture(&parent.vm, false).await;
            let children = bench.fan_out(&image, count).await;
            end(children).await;
            std::fs::remove_dir_all(image.dir()).unwrap();
        }
    }
    println!("--- a child of a child");
    let image = bench.capture(&parent.vm, false).await;
    let children = bench.fan_out(&image, 1).await;
    for child in &children {
        let image = bench.capture(&child.vm, false).await;
        end(bench.fan_out(&image, 1).await).await;
    }
    end(children).await;
    parent.vm.kill().await.unwrap();
}

async fn end(children: Vec<Child>) {
    for child in children {
        child.vm.kill().await.unwrap();
    }
}

/// What a program that works leaves in memory.
async fn dirty(session: &GuestSession) {
    let work = "import os; x = [os.urandom(1 << 20) for i in range(40)]; print(len(x))";
    session.run(&["/usr/bin/python3", "-c", work], PATIENCE).await.unwrap();
}

/// What the same calls cost when their code was translated before.
async fn warm(machine: &Child) {
    for call in ["handshake", "handshake", "info", "info", "/bin/true", "/bin/true"] {
        let (begin, cpu) = (Instant::now(), cpu_ms(&machine.vm));
        match call {
            "handshake" => drop(handshake_of(&machine.session).await),
            "info" => drop(machine.session.client().info(InfoRequest {}).await.unwrap()),
            command => drop(machine.session.run(&[command], PATIENCE).await.unwrap()),
        }
        println!("again {call}: {} ms, CPU {:.1} ms", ms(begin.elapsed()), cpu_ms(&machine.vm) - cpu);
    }
}

async fn handshake_of(session: &GuestSession) -> u64 {
    let request = handshake::request(ResumeReason::Fork);
    session.resume(request, Instant::now() + PATIENCE).await.unwrap().took_us
}

impl Bench {
    fn place(&self) -> VmPlace {
        let id = Uuid::new_v4();
        let short: String = id.simple().to_string().chars().take(8).collect();
        let run_dir = self.dir.join(&short);
        std::fs::create_dir(&run_dir).unwrap();
        let (disk, console_log) = (self.dir.join(format!("{short}.ext4")), self.dir.join(format!("{short}.log")));
        VmPlace { id, run_dir, disk, console_log }
    }

    async fn boot(&self, rootfs: &Path, memory_mib: u32) -> Arc<dyn Vm> {
        let place = self.place();
        coppice_disk::clone_file(rootfs, &place.disk).unwrap();
        let id = || "bench".to_owned();
        let machine = MachineSpec { cpus: 1, memory_mib, kernel: id(), initramfs: id(), cmdline: String::new() };
        let (kernel, nic, jail) = (self.kernel.clone(), Nic::isolated().unwrap(), JailSlot::unslotted());
        let spec = BootSpec { place, machine, kernel, nic, jail };
        let begin = Instant::now();
        let vm = self.engine.boot(spec).await.unwrap();
        let spawned = begin.elapsed();
        let session = vm.open_session(Instant::now() + PATIENCE).await.unwrap();
        let answered = begin.elapsed();
        handshake_of(&session).await;
        session.run(&["/bin/true"], PATIENCE).await.unwrap();
        println!(
            "cold boot: monitor after {} ms, session after {} ms, first command after {} ms; CPU {:.0} ms",
            ms(spawned),
            ms(answered),
            ms(begin.elapsed()),
            cpu_ms(&vm)
        );
        vm
    }

    async fn child(&self, image: MachineImage) -> Child {
        // A host has it ready.
        let (nic, jail) = (Nic::isolated().unwrap(), JailSlot::unslotted());
        let begin = Instant::now();
        let place = self.place();
        coppice_disk::clone_file_async(image.disk_path(), place.disk.clone()).await.unwrap();
        let cloned = begin.elapsed();
        let vm = self.engine.restore(&image, Rebind { place, kernel: self.kernel.clone(), nic, jail }).await.unwrap();
        let (restored, restore_cpu) = (begin.elapsed(), cpu_ms(&vm));
        let session = vm.open_session(Instant::now() + PATIENCE).await.unwrap();
        let (opened, session_cpu) = (begin.elapsed(), cpu_ms(&vm));
        handshake_of(&session).await;
        let (resumed, resume_cpu) = (begin.elapsed(), cpu_ms(&vm));
        session.run(&["/bin/true"], PATIENCE).await.unwrap();
        let steps = [cloned, restored - cloned, opened - restored, resumed - opened, begin.elapsed() - resumed];
        let cpu = [restore_cpu, session_cpu, resume_cpu, cpu_ms(&vm)];
        Child { vm, session, steps, cpu }
    }

    async fn capture(&self, vm: &Arc<dyn Vm>, durable: bool) -> MachineImage {
        let id = Uuid::new_v4();
        let begin = Instant::now();
        let image = PendingImage::create(&self.dir.join(id.simple().to_string())).unwrap();
        let captured = vm.capture(CapturePlan { image, id, durable, hold: None }).await.unwrap();
        let t = captured.timings;
        println!(
            "capture, durable {durable}: {} ms, paused {} ms (stop {}, devices {}, disk {}, memory {}) for {} MiB; publish {} with {} MiB written; {:?}",
            ms(begin.elapsed()),
            ms(t.paused),
            ms(t.stop),
            ms(t.devices),
            ms(t.disk),
            ms(t.memory),
            captured.memory_bytes >> 20,
            ms(t.publish),
            captured.memory_written_bytes >> 20,
            captured.disk_clone
        );
        captured.image
    }

    async fn fan_out(&self, image: &MachineImage, count: u32) -> Vec<Child> {
        let begin = Instant::now();
        let start = |_| {
            let (bench, image) = (self.clone(), image.clone());
            tokio::spawn(async move { bench.child(image).await })
        };
        let children = futures::future::join_all((0..count).map(start)).await;
        let all = begin.elapsed();
        let children: Vec<Child> = children.into_iter().map(Result::unwrap).collect();
        let mut pss = 0;
        for child in &children {
            pss += child.vm.stats().await.unwrap().pss_bytes;
        }
        let mean = |step: usize| children.iter().filter_map(|c| c.cpu.get(step)).sum::<f64>() / f64::from(count);
        println!(
            "{count} children: all answered after {} ms; PSS {} MiB each; CPU each after restore {:.0}, session {:.0}, handshake {:.0}, command {:.0} ms",
            ms(all),
            (pss / u64::from(count)) >> 20,
            mean(0),
            mean(1),
            mean(2),
            mean(3)
        );
        children.iter().take(4).for_each(|child| println!("    {}", steps(child)));
        children
    }
}

fn steps(child: &Child) -> String {
    let [clone, restore, session, handshake, command] = child.steps.map(ms);
    format!("clone {clone}, restore {restore}, session {session}, handshake {handshake}, first command {command} ms")
}

/// CPU time of all threads of a VMM, milliseconds, exact.
fn cpu_ms(vm: &Arc<dyn Vm>) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", vm.record().pid)).unwrap();
    let time = |task: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    };
    tasks.filter_map(time).sum::<Duration>().as_secs_f64() * 1000.0
}

fn ms(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1000.0)
}
