//! The engine conformance suite against the scriptable fake.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_engine::{
    BootSpec, CaptureError, CapturePlan, Engine, GuestKernel, JailSlot, SessionError, VmPlace, VmState,
};
use coppice_guest_proto::v1::ResumeReason;
use coppice_snapshot::{MachineSpec, PendingImage};
use coppice_testkit::engine_conformance::{Fixtures, Guest, run};
use coppice_testkit::fake_engine::{self, FakeEngine};
use coppice_testkit::handshake;
use uuid::Uuid;

fn machine() -> MachineSpec {
    MachineSpec { cpus: 1, memory_mib: 128, kernel: "k".into(), initramfs: "i".into(), cmdline: String::new() }
}

fn kernel() -> GuestKernel {
    GuestKernel { vmlinuz: "/k".into(), initramfs: "/i".into() }
}

#[tokio::test]
async fn the_fake_engine_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("rootfs");
    std::fs::write(&disk, vec![1; 4096]).unwrap();
    let engine = Arc::new(FakeEngine::new());
    let crash = Arc::clone(&engine);
    let fixtures = Fixtures {
        dir: dir.path().to_owned(),
        disk,
        kernel: kernel(),
        machine: machine(),
        guest: Guest::Fake,
        patience: Duration::from_secs(5),
        nic: Arc::new(fake_engine::nic),
        crash: Arc::new(move |pid| crash.crash(pid)),
    };
    run(Arc::clone(&engine) as Arc<dyn Engine>, fixtures).await;
    assert!(engine.alive().is_empty());
}

#[tokio::test]
async fn the_script_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let engine = FakeEngine::new();
    let spec = |name: &str| {
        let run_dir = dir.path().join(name);
        std::fs::create_dir(&run_dir).unwrap();
        let disk = dir.path().join(format!("{name}.disk"));
        std::fs::write(&disk, b"").unwrap();
        let console_log = dir.path().join(format!("{name}.log"));
        let place = VmPlace { id: Uuid::new_v4(), run_dir, disk, console_log };
        BootSpec { place, machine: machine(), kernel: kernel(), nic: fake_engine::nic(), jail: JailSlot::unslotted() }
    };
    let soon = || Instant::now() + Duration::from_millis(50);
    engine.script(|s| s.fail_boots = 1);
    engine.boot(spec("a")).await.unwrap_err();
    engine.script(|s| s.mute = 1);
    let mute = engine.boot(spec("b")).await.unwrap();
    assert!(matches!(mute.open_session(soon()).await, Err(SessionError::Timeout { .. })));
    engine.script(|s| s.refuse_resume = 1);
    let refuses = engine.boot(spec("c")).await.unwrap();
    let session = refuses.open_session(soon()).await.unwrap();
    session.resume(handshake::request(ResumeReason::Create), soon()).await.unwrap_err();
    engine.script(|s| s.die_after = Some((1, Duration::from_millis(5))));
    let dies = engine.boot(spec("d")).await.unwrap();
    let mut state = dies.state();
    state.wait_for(|s| matches!(s, VmState::Dead(_))).await.unwrap();
    engine.script(|s| (s.no_space, s.fail_captures) = (1, 1));
    let vm = engine.boot(spec("e")).await.unwrap();
    for _ in 0..2 {
        let image = PendingImage::create(&dir.path().join("image")).unwrap();
        let error =
            vm.capture(CapturePlan { image, id: Uuid::new_v4(), durable: false, hold: None }).await.unwrap_err();
        assert!(matches!(error, CaptureError::NoSpace | CaptureError::Memory(_)), "{error}");
        assert!(!dir.path().join("image").exists());
    }
    let session = vm.open_session(soon()).await.unwrap();
    session.run(&["true"], Duration::from_secs(1)).await.unwrap_err();
    session.resume(handshake::request(ResumeReason::Create), soon()).await.unwrap();
    let output =
        session.run(&["/bin/sh", "-c", "echo a > /x; echo b >> /x && cat /x; nonsense"], Duration::from_secs(1));
    let output = output.await.unwrap();
    assert_eq!((output.stdout.as_slice(), output.exit_code), (&b"a\nb\n"[..], 127));
    let slow = session.run(&["sleep", "5"], Duration::from_millis(30)).await.unwrap();
    assert!(slow.timed_out);
}
