//! A host whose machines are fakes: everything that can go wrong with a machine, wrong on command.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod admission;
mod hibernate;
mod stress;
mod ttl;
mod warm;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coppice_api::{
    CreateSandboxRequest, EgressPolicy, ErrorClass, Fork, LifecyclePatch, NetworkRequest, PromoteRequest, Sandbox,
    SandboxStatus,
};
use coppice_disk::DataDir;
use coppice_engine::{BootSpec, CapturePlan, Engine, VmPlace};
use coppice_guest_proto::v1::ResumeReason;
use coppice_host::{ChangesSpec, ForkSpec, Host, HostApi, HostConfig, HostError, RoomConfig};
use coppice_image::Catalog;
use coppice_image::catalog::TemplateInfo;
use coppice_net::dns::DnsConfig;
use coppice_net::{Egress, Slots};
use coppice_snapshot::{MachineSpec, PendingImage, digest_sparse_file};
use coppice_testkit::fake_engine::FakeEngine;
use coppice_testkit::fake_slots::FakeSlots;
use coppice_testkit::handshake;
use futures::StreamExt;
use tokio::net::UdpSocket;
use uuid::Uuid;

const W: &str = "default";

struct World {
    engine: Arc<FakeEngine>,
    slots: Arc<FakeSlots>,
    data: DataDir,
    host: Arc<Host>,
    dir: tempfile::TempDir,
}

fn machine() -> MachineSpec {
    MachineSpec { cpus: 1, memory_mib: 128, kernel: "k1".into(), initramfs: "i1".into(), cmdline: String::new() }
}

/// A data directory with one template, baked by the fake engine.
async fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let data = DataDir::open(dir.path()).unwrap();
    let engine = Arc::new(FakeEngine::new());
    let kernel = data.kernel_dir("k1").unwrap();
    std::fs::create_dir(&kernel).unwrap();
    std::fs::write(kernel.join("vmlinuz"), "k").unwrap();
    std::fs::write(kernel.join("initramfs-i1"), "i").unwrap();
    bake(&data, engine.as_ref(), dir.path()).await;
    let slots = Arc::new(FakeSlots::new(64));
    let host = start(&data, &engine, &slots).await;
    World { engine, slots, data, host, dir }
}

async fn start(data: &DataDir, engine: &Arc<FakeEngine>, slots: &Arc<FakeSlots>) -> Arc<Host> {
    start_with_dns(data, engine, slots, None).await
}

async fn start_with_dns(
    data: &DataDir,
    engine: &Arc<FakeEngine>,
    slots: &Arc<FakeSlots>,
    dns: Option<DnsConfig>,
) -> Arc<Host> {
    Host::start(config(data, engine, slots, dns)).await.unwrap()
}

fn config(data: &DataDir, engine: &Arc<FakeEngine>, slots: &Arc<FakeSlots>, dns: Option<DnsConfig>) -> HostConfig {
    HostConfig {
        data_dir: data.clone(),
        engine: Arc::clone(engine) as Arc<dyn Engine>,
        slots: Arc::clone(slots) as Arc<dyn Slots>,
        dns,
        catalog: Catalog::new(data.clone()),
        default_ttl: Duration::from_secs(600),
        max_sandboxes: 64,
        room: RoomConfig::default(),
        reap_interval: Duration::from_millis(100),
    }
}

async fn bake(data: &DataDir, engine: &FakeEngine, scratch: &Path) {
    let generation = data.template_dir("base", "g1").unwrap();
    std::fs::create_dir_all(&generation).unwrap();
    let rootfs = generation.join("rootfs.ext4");
    std::fs::write(&rootfs, "rootfs").unwrap();
    let run_dir = scratch.join("bake");
    std::fs::create_dir(&run_dir).unwrap();
    let disk = scratch.join("bake.disk");
    std::fs::write(&disk, "").unwrap();
    let place = VmPlace { id: Uuid::new_v4(), run_dir, disk, console_log: scratch.join("bake.log") };
    let kernel = coppice_image::guest_kernel(data, "k1", "i1").unwrap();
    let vm = engine
        .boot(BootSpec {
            place,
            machine: machine(),
            kernel,
            nic: coppice_testkit::fake_engine::nic(),
            jail: coppice_engine::JailSlot::unslotted(),
        })
        .await
        .unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    let session = vm.open_session(deadline).await.unwrap();
    session.resume(handshake::request(ResumeReason::Bake), deadline).await.unwrap();
    let image = PendingImage::create(&generation.join("snapshot")).unwrap();
    vm.capture(CapturePlan { image, id: Uuid::new_v4(), durable: true, hold: None }).await.unwrap();
    vm.kill().await.unwrap();
    let info = TemplateInfo {
        name: "base".into(),
        generation: "g1".into(),
        recipe_id: "r".into(),
        label: String::new(),
        description: String::new(),
        category: String::new(),
        aliases: vec!["ubuntu-24.04".into()],
        cpus: 1,
        memory_mib: 128,
        disk_mib: 1,
        suite: "bookworm".into(),
        packages: Vec::new(),
        kernel: "k1".into(),
        initramfs: "i1".into(),
        rootfs: digest_sparse_file(&std::fs::File::open(&rootfs).unwrap()).unwrap(),
        baked_at: jiff::Timestamp::now(),
    };
    std::fs::write(generation.join("template.json"), info.encode().unwrap()).unwrap();
    std::fs::write(data.template_home("base").unwrap().join("current"), "g1\n").unwrap();
}

fn names(dir: &Path) -> BTreeSet<String> {
    std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

fn spec(count: i64) -> ForkSpec {
    ForkSpec { count, ..ForkSpec::default() }
}

impl World {
    async fn create(&self) -> Sandbox {
        self.host.create(W, CreateSandboxRequest::default()).await.unwrap()
    }

    async fn write(&self, id: &str, path: &str, text: &'static str) {
        let body = futures::stream::iter([Ok(Bytes::from(text))]).boxed();
        assert_eq!(self.host.write_file(W, id, path, body).await.unwrap(), text.len() as u64);
    }

    async fn read(&self, id: &str, path: &str) -> Result<String, HostError> {
        let mut body = self.host.read_file(W, id, path).await?.body;
        let mut text = Vec::new();
        while let Some(piece) = body.next().await {
            text.extend_from_slice(&piece?);
        }
        Ok(String::from_utf8(text).unwrap())
    }

    async fn ids(&self) -> BTreeSet<String> {
        self.host.list(W).await.unwrap().into_iter().map(|s| s.id).collect()
    }

    /// Exactly these sandboxes exist: in the list, as processes, as files.
    async fn exactly<'a>(&self, expected: impl IntoIterator<Item = &'a String>) {
        let expected: BTreeSet<String> = expected.into_iter().cloned().collect();
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        loop {
            let seen = (self.ids().await, names(&self.data.sandboxes_dir()), names(&self.data.run_dir()));
            let all = seen == (expected.clone(), expected.clone(), expected.clone());
            let machines = self.engine.alive().len() == expected.len();
            if all && machines && self.slots.taken().len() == expected.len() {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "{seen:?}, {:?}, not {expected:?}", self.engine.alive());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn snapshots(&self) -> BTreeSet<String> {
        names(&self.data.snapshots_dir())
    }

    /// A snapshot that is deleted goes when who was just using it has its files open.
    async fn no_snapshots(&self) {
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        while !self.snapshots().is_empty() {
            assert!(std::time::Instant::now() < deadline, "{:?}", self.snapshots());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// The same with names that are asked of this resolver.
    async fn with_dns(self, resolver: SocketAddr) -> Self {
        self.host.stop().await;
        let dns = Some(DnsConfig::new(vec![resolver]));
        let host = start_with_dns(&self.data, &self.engine, &self.slots, dns).await;
        Self { host, ..self }
    }

    /// What a guest is told when it asks for the address of a name: code and address.
    async fn resolve(&self, guest: &Sandbox, name: &str) -> (u8, Option<[u8; 4]>) {
        // See FakeSlots: a loopback address stands for the guest's.
        let own: Ipv4Addr = guest.guest_ip.replacen("10.", "127.", 1).parse().unwrap();
        let socket = UdpSocket::bind((own, 0)).await.unwrap();
        let mut question = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            question.push(u8::try_from(label.len()).unwrap());
            question.extend_from_slice(label.as_bytes());
        }
        question.extend_from_slice(&[0, 0, 1, 0, 1]);
        socket.send_to(&question, self.slots.dns_address().unwrap()).await.unwrap();
        let mut reply = [0; 512];
        let length = tokio::time::timeout(Duration::from_secs(20), socket.recv(&mut reply)).await.unwrap().unwrap();
        let answered = reply[7] > 0;
        (reply[3] & 15, answered.then(|| reply[length - 4..length].try_into().unwrap()))
    }

    /// As `kill -9` and a new daemon on the same host.
    async fn restart(self) -> Self {
        self.host.stop().await;
        let host = start(&self.data, &self.engine, &self.slots).await;
        Self { host, ..self }
    }
}

fn ids(fork: &Fork) -> Vec<String> {
    fork.children.iter().map(|c| c.id.clone()).collect()
}

#[tokio::test]
async fn a_live_fork_has_memory_and_disk_and_a_disk_fork_only_the_disk() {
    let w = world().await;
    let parent = w.create().await.id;
    w.write(&parent, "/root/disk", "d").await;
    w.write(&parent, "/dev/shm/memory", "m").await;

    let live = w.host.fork_tree(W, &parent, spec(3)).await.unwrap();
    assert_eq!(live.children.len(), 3);
    for (child, index) in live.children.iter().zip(0..) {
        assert_eq!(child.metadata["fork_index"], index.to_string());
        assert_eq!(child.metadata["fork_parent_id"], parent);
        assert_eq!(w.read(&child.id, "/root/disk").await.unwrap(), "d");
        assert_eq!(w.read(&child.id, "/dev/shm/memory").await.unwrap(), "m");
    }
    let cold = w.host.fork_disk(W, &parent, spec(1)).await.unwrap();
    assert!(cold.flushed);
    assert_eq!(w.read(&cold.children[0].id, "/root/disk").await.unwrap(), "d");
    let gone = w.read(&cold.children[0].id, "/dev/shm/memory").await.unwrap_err();
    assert_eq!((gone.class(), gone.code()), (ErrorClass::NotFound, "file_not_found"));
    w.exactly([&parent].into_iter().chain(&ids(&live)).chain(&ids(&cold))).await;
    assert!(names(&w.data.staging_dir()).is_empty(), "the common clone of a disk fork stays for no one");
}

#[tokio::test]
async fn a_disk_whose_guest_does_not_flush_it_is_cloned_as_it_is_and_that_is_said() {
    let w = world().await;
    let parent = w.create().await.id;
    w.write(&parent, "/root/disk", "d").await;
    w.engine.script(|s| s.fail_quiesces = 1);
    let unflushed = w.host.fork_disk(W, &parent, spec(2)).await.unwrap();
    assert!(!unflushed.flushed && unflushed.inherited.contains("AS IT WAS ON THE HOST"), "{}", unflushed.inherited);
    assert_eq!(unflushed.children.len(), 2);
    let flushed = w.host.fork_disk(W, &parent, spec(1)).await.unwrap();
    assert!(flushed.flushed && !flushed.inherited.contains("AS IT WAS"), "{}", flushed.inherited);
    for child in ids(&unflushed).iter().chain(&ids(&flushed)) {
        assert_eq!(w.read(child, "/root/disk").await.unwrap(), "d");
    }
}

#[tokio::test]
async fn a_snapshot_that_is_deleted_while_it_is_used_harms_nobody() {
    let w = world().await;
    let source = w.create().await.id;
    w.write(&source, "/dev/shm/memory", "m").await;
    for round in 0..8 {
        let snapshot = w.host.snapshot(W, &source).await.unwrap().id;
        w.engine.script(|s| s.start_delay = Duration::from_millis(round / 2));
        let request = CreateSandboxRequest { from_snapshot: Some(snapshot.clone()), ..Default::default() };
        let delete = async {
            tokio::time::sleep(Duration::from_millis(round)).await;
            w.host.delete_snapshot(W, &snapshot).await
        };
        let (made, deleted) = tokio::join!(w.host.create(W, request), delete);
        deleted.unwrap();
        let mut all = vec![source.clone()];
        if let Ok(made) = made {
            assert_eq!(w.read(&made.id, "/dev/shm/memory").await.unwrap(), "m");
            // Its memory is of a file without a name by now.
            let child = w.host.fork_tree(W, &made.id, spec(1)).await.unwrap().children.remove(0);
            assert_eq!(w.read(&child.id, "/dev/shm/memory").await.unwrap(), "m");
            all.extend([made.id, child.id]);
        }
        w.exactly(&all).await;
        for made in all.drain(1..) {
            w.host.delete(W, &made).await.unwrap();
        }
        w.exactly(&all).await;
        w.no_snapshots().await;
    }
}

#[tokio::test]
async fn a_guest_that_does_not_acknowledge_is_torn_down_and_reported() {
    let w = world().await;
    w.engine.script(|s| s.refuse_resume = 1);
    let error = w.host.create(W, CreateSandboxRequest::default()).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (ErrorClass::Internal, "guest_unresponsive"));
    w.exactly([]).await;
}

#[tokio::test]
async fn children_that_fail_are_reported_by_index_and_the_others_live() {
    let w = world().await;
    let parent = w.create().await.id;
    w.engine.script(|s| s.refuse_resume = 1);
    let fork = w.host.fork_tree(W, &parent, spec(4)).await.unwrap();
    assert_eq!((fork.children.len(), fork.errors.len()), (3, 1));
    let mut indexes: Vec<u32> = fork.children.iter().map(|c| c.metadata["fork_index"].parse().unwrap()).collect();
    assert!(indexes.is_sorted());
    indexes.push(fork.errors[0].index);
    indexes.sort_unstable();
    assert_eq!(indexes, [0, 1, 2, 3]);
    w.exactly([&parent].into_iter().chain(&ids(&fork))).await;
}

#[tokio::test]
async fn every_sandbox_has_an_address_of_its_own_and_keeps_it_across_a_restart() {
    let w = world().await;
    let parent = w.create().await;
    let fork = w.host.fork_tree(W, &parent.id, spec(4)).await.unwrap();
    let all: Vec<&Sandbox> = std::iter::once(&parent).chain(&fork.children).collect();
    let addresses: BTreeSet<&str> = all.iter().map(|s| s.guest_ip.as_str()).collect();
    assert!(addresses.len() == 5 && !addresses.contains(""));
    let before: BTreeMap<String, String> = all.iter().map(|s| (s.id.clone(), s.guest_ip.clone())).collect();
    let w = w.restart().await;
    let after: BTreeMap<String, String> =
        w.host.list(W).await.unwrap().into_iter().map(|s| (s.id, s.guest_ip)).collect();
    assert_eq!(before, after);
    assert_eq!(w.slots.taken().len(), 5, "what lives keeps its slot");
    for id in before.keys() {
        w.host.delete(W, id).await.unwrap();
    }
    assert!(w.slots.taken().is_empty());
}

#[tokio::test]
async fn without_a_network_slot_nothing_is_made_and_the_number_is_said() {
    let w = world().await;
    let taken: Vec<_> = (0..64).map(|_| w.slots.take(&Egress::Open).unwrap()).collect();
    let error = w.host.create(W, CreateSandboxRequest::default()).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (ErrorClass::Capacity, "no_network_slot"));
    assert!(error.chain().contains("64"), "{}", error.chain());
    for slot in taken {
        w.slots.put(slot.index).unwrap();
    }
    w.exactly([]).await;
}

fn allow(entries: &[&str]) -> NetworkRequest {
    let entries = entries.iter().map(|entry| (*entry).to_owned()).collect();
    NetworkRequest { egress: Some(EgressPolicy::Allow(entries)) }
}

fn with_network(network: NetworkRequest) -> CreateSandboxRequest {
    CreateSandboxRequest { network: Some(network), ..CreateSandboxRequest::default() }
}

#[tokio::test]
async fn a_policy_holds_from_the_start_in_children_and_after_a_restart() {
    let w = world().await;
    let parent = w.host.create(W, with_network(allow(&["Example.ORG.", "203.0.113.7/32:443"]))).await.unwrap();
    let canonical = EgressPolicy::Allow(vec!["example.org".into(), "203.0.113.7:443".into()]);
    assert_eq!(parent.network.egress, canonical);
    let live = w.host.fork_tree(W, &parent.id, spec(2)).await.unwrap();
    let disk = w.host.fork_disk(W, &parent.id, spec(1)).await.unwrap();
    assert!(live.children.iter().chain(&disk.children).all(|child| child.network == parent.network));
    let applied = w.slots.taken();
    assert_eq!(applied.len(), 4);
    assert!(applied.values().all(|egress| *egress == Egress::allow(&["example.org", "203.0.113.7:443"]).unwrap()));

    let none = NetworkRequest { egress: Some(EgressPolicy::None) };
    let changed = w.host.set_network(W, &parent.id, none).await.unwrap();
    assert_eq!(changed.egress, EgressPolicy::None);
    assert_eq!(w.slots.taken().values().filter(|egress| **egress == Egress::None).count(), 1, "in force at once");
    let said_nothing = w.host.set_network(W, &parent.id, NetworkRequest::default()).await.unwrap();
    assert_eq!(said_nothing, changed);
    // A change of something else does not bring the old policy back.
    w.host.pause(W, &parent.id).await.unwrap();
    w.host
        .set_lifecycle(W, &parent.id, LifecyclePatch { ttl_seconds: Some(500), ..LifecyclePatch::default() })
        .await
        .unwrap();
    let before = w.slots.taken();
    let w = w.restart().await;
    assert_eq!(w.slots.taken(), before);
    assert_eq!(w.host.network(W, &parent.id).await.unwrap(), changed);
    assert_eq!(w.host.get(W, &live.children[0].id).await.unwrap().network.egress, canonical);
    // A paused sandbox's policy can be changed, too.
    w.host.set_network(W, &parent.id, allow(&["example.net"])).await.unwrap();
    assert!(w.slots.taken().values().any(|egress| *egress == Egress::allow(&["example.net"]).unwrap()));
}

#[tokio::test]
async fn a_policy_that_can_not_be_applied_is_taken_back_and_starts_no_sandbox() {
    let w = world().await;
    let id = w.host.create(W, with_network(allow(&["example.org"]))).await.unwrap().id;
    w.slots.fail_policies(true);
    let error = w.host.set_network(W, &id, allow(&["example.net"])).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (ErrorClass::Internal, "network_failed"));
    let error = w.host.create(W, with_network(allow(&["example.net"]))).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (ErrorClass::Internal, "network_failed"));
    w.exactly([&id]).await;
    let policy = EgressPolicy::Allow(vec!["example.org".into()]);
    assert_eq!(w.host.network(W, &id).await.unwrap().egress, policy);
    w.slots.fail_policies(false);
    let w = w.restart().await;
    assert_eq!(w.host.network(W, &id).await.unwrap().egress, policy);
    assert_eq!(w.slots.taken().into_values().collect::<Vec<_>>(), [Egress::allow(&["example.org"]).unwrap()]);
}

/// A resolver for which every name has this address.
async fn resolver(address: [u8; 4]) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let own = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 512];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
            let end = buffer[12..length].iter().position(|byte| *byte == 0).unwrap() + 12 + 5;
            let mut reply = buffer[..end].to_vec();
            reply[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
            reply.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
            reply.extend_from_slice(&address);
            socket.send_to(&reply, from).await.unwrap();
        }
    });
    own
}

#[tokio::test]
async fn names_are_resolved_by_the_policy_that_is_in_force() {
    const WEB: [u8; 4] = [203, 0, 113, 9];
    const REFUSED: u8 = 5;
    let resolver = resolver(WEB).await;
    let w = world().await.with_dns(resolver).await;
    let listed = w.host.create(W, with_network(allow(&["example.org:443"]))).await.unwrap();
    let open = w.create().await;
    assert_eq!(w.resolve(&listed, "example.org").await, (0, Some(WEB)));
    assert_eq!(w.resolve(&listed, "example.net").await, (REFUSED, None));
    assert_eq!(w.resolve(&open, "example.net").await, (0, Some(WEB)));
    let opened = w.slots.opened();
    assert_eq!(opened.len(), 1, "{opened:?}");
    assert_eq!((opened[0].1.address, opened[0].1.port), (WEB.into(), Some(443)));
    let child = w.host.fork_tree(W, &listed.id, spec(1)).await.unwrap().children.remove(0);
    assert_eq!(w.resolve(&child, "example.net").await, (REFUSED, None));
    w.host.set_network(W, &listed.id, allow(&["example.net"])).await.unwrap();
    assert_eq!(w.resolve(&listed, "example.org").await, (REFUSED, None));
    assert_eq!(w.resolve(&child, "example.org").await, (0, Some(WEB)));
    // A new run knows what was in force.
    let w = w.with_dns(resolver).await;
    assert_eq!(w.resolve(&listed, "example.org").await, (REFUSED, None));
    assert_eq!(w.resolve(&listed, "example.net").await, (0, Some(WEB)));
    w.host.delete(W, &listed.id).await.unwrap();
    let nobody = tokio::time::timeout(Duration::from_millis(300), w.resolve(&listed, "example.net")).await;
    assert!(nobody.is_err(), "{nobody:?}");
}

#[tokio::test]
async fn what_is_no_policy_changes_nothing() {
    let w = world().await;
    let id = w.create().await.id;
    for (entry, code) in [("1.2.3.4/33", "bad_network"), ("a b", "bad_network"), ("10.0.0.0/8", "private_network")] {
        for error in [
            w.host.create(W, with_network(allow(&["example.org", entry]))).await.unwrap_err(),
            w.host.set_network(W, &id, allow(&["example.org", entry])).await.unwrap_err(),
        ] {
            assert_eq!((error.class(), error.code()), (ErrorClass::Caller, code));
            assert!(error.chain().contains(entry), "{}", error.chain());
        }
    }
    let many = w.host.set_network(W, &id, allow(&["example.org"; 65])).await.unwrap_err();
    assert_eq!((many.class(), many.code()), (ErrorClass::Caller, "bad_network"));
    for (workspace, id) in [("other", id.as_str()), (W, "00000000-0000-0000-0000-000000000000")] {
        assert_eq!(w.host.network(workspace, id).await.unwrap_err().class(), ErrorClass::NotFound);
        let error = w.host.set_network(workspace, id, allow(&["10.0.0.1"])).await.unwrap_err();
        assert_eq!(error.class(), ErrorClass::NotFound);
    }
    assert_eq!(w.host.network(W, &id).await.unwrap().egress, EgressPolicy::Open);
    assert_eq!(w.slots.taken().into_values().collect::<Vec<_>>(), [Egress::Open]);
    w.exactly([&id]).await;
    w.host.delete(W, &id).await.unwrap();
    assert_eq!(w.host.set_network(W, &id, allow(&["example.org"])).await.unwrap_err().class(), ErrorClass::NotFound);
}

#[tokio::test]
async fn a_fork_without_a_child_is_an_error_and_leaves_only_the_parent() {
    let w = world().await;
    let parent = w.create().await.id;
    w.engine.script(|s| s.fail_restores = 2);
    let error = w.host.fork_tree(W, &parent, spec(2)).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (ErrorClass::Internal, "restore_failed"));
    w.exactly([&parent]).await;
    assert!(w.snapshots().is_empty());
    w.write(&parent, "/x", "still alive").await;
}

#[tokio::test]
async fn a_capture_without_space_is_a_capacity_refusal_and_the_parent_is_unharmed() {
    let w = world().await;
    let parent = w.create().await.id;
    type Attempt = fn(&World, &str) -> futures::future::BoxFuture<'static, Option<HostError>>;
    let attempts: [Attempt; 3] = [
        |w, id| {
            let (host, id) = (Arc::clone(&w.host), id.to_owned());
            Box::pin(async move { host.fork_tree(W, &id, spec(2)).await.err() })
        },
        |w, id| {
            let (host, id) = (Arc::clone(&w.host), id.to_owned());
            Box::pin(async move { host.fork_disk(W, &id, spec(1)).await.err() })
        },
        |w, id| {
            let (host, id) = (Arc::clone(&w.host), id.to_owned());
            Box::pin(async move { host.snapshot(W, &id).await.err() })
        },
    ];
    for attempt in attempts {
        w.engine.script(|s| s.no_space = 1);
        let error = attempt(&w, &parent).await.unwrap();
        assert_eq!((error.class(), error.code()), (ErrorClass::Capacity, "no_storage"));
        assert_eq!(w.host.get(W, &parent).await.unwrap().status, SandboxStatus::Running);
        w.exactly([&parent]).await;
        assert!(w.snapshots().is_empty());
    }
}

#[tokio::test]
async fn whoever_hangs_up_leaves_nothing_whenever_it_is() {
    let w = world().await;
    let parent = w.create().await.id;
    w.engine.script(|s| s.start_delay = Duration::from_millis(3));
    for patience in [0u64, 1, 2, 3, 4, 6, 8, 12] {
        let patience = Duration::from_millis(patience);
        let create = w.host.create(W, CreateSandboxRequest::default());
        let fork = w.host.fork_tree(W, &parent, spec(3));
        let cold = w.host.fork_disk(W, &parent, spec(2));
        let (created, forked, cold) = tokio::join!(
            tokio::time::timeout(patience, create),
            tokio::time::timeout(patience, fork),
            tokio::time::timeout(patience, cold)
        );
        let mut expected = vec![parent.clone()];
        expected.extend(created.ok().map(|s| s.unwrap().id));
        expected.extend(forked.ok().map(|f| ids(&f.unwrap())).unwrap_or_default());
        expected.extend(cold.ok().map(|f| ids(&f.unwrap())).unwrap_or_default());
        w.exactly(&expected).await;
        for id in expected.iter().skip(1) {
            w.host.delete(W, id).await.unwrap();
        }
    }
    w.exactly([&parent]).await;
    // The captures of those who hung up are undone in the background, too.
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    while !(w.snapshots().is_empty() && names(&w.data.staging_dir()).is_empty()) {
        let left = (w.snapshots(), names(&w.data.staging_dir()));
        assert!(std::time::Instant::now() < deadline, "left over: {left:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_fork_snapshot_goes_with_its_last_child_and_a_kept_one_when_it_is_deleted() {
    let w = world().await;
    let parent = w.create().await.id;
    let fork = w.host.fork_tree(W, &parent, spec(2)).await.unwrap();
    let snapshot = fork.snapshot_id.clone().unwrap();
    assert_eq!(w.snapshots(), [snapshot.clone()].into());
    assert!(w.host.list_snapshots(W, None).await.unwrap().is_empty(), "only what a client keeps is listed");
    w.host.delete(W, &fork.children[0].id).await.unwrap();
    assert_eq!(w.snapshots(), [snapshot].into());
    w.host.delete(W, &fork.children[1].id).await.unwrap();
    assert!(w.snapshots().is_empty());

    w.write(&parent, "/dev/shm/x", "kept").await;
    let kept = w.host.snapshot(W, &parent).await.unwrap();
    w.host.delete(W, &parent).await.unwrap();
    let request = CreateSandboxRequest { from_snapshot: Some(kept.id.clone()), ..Default::default() };
    let again = w.host.create(W, request.clone()).await.unwrap();
    assert_eq!(w.read(&again.id, "/dev/shm/x").await.unwrap(), "kept");
    let foreign = w.host.create("another", request).await.unwrap_err();
    assert_eq!(foreign.code(), "snapshot_not_found");
    w.host.delete_snapshot(W, &kept.id).await.unwrap();
    assert!(w.snapshots().is_empty());
    assert_eq!(w.read(&again.id, "/dev/shm/x").await.unwrap(), "kept");
}

#[tokio::test]
async fn promote_deletes_siblings_of_the_same_fork_only() {
    let w = world().await;
    let parent = w.create().await.id;
    let metadata = [("explore_ttl".to_owned(), "60".to_owned())].into();
    let fork = w.host.fork_tree(W, &parent, ForkSpec { count: 3, metadata, ..ForkSpec::default() }).await.unwrap();
    assert!(fork.children.iter().all(|c| c.ttl_seconds == 60));
    let other = w.host.fork_tree(W, &parent, spec(2)).await.unwrap();
    let winner = fork.children[1].id.clone();
    let foreign = PromoteRequest { cleanup_siblings: true, tree_id: Some(other.tree_id.clone()) };
    assert_eq!(w.host.promote(W, &winner, foreign).await.unwrap_err().code(), "foreign_tree");
    let request = PromoteRequest { cleanup_siblings: true, tree_id: None };
    let reply = w.host.promote(W, &winner, request.clone()).await.unwrap();
    let losers = [&fork.children[0].id, &fork.children[2].id].map(Clone::clone);
    assert_eq!(BTreeSet::from_iter(reply.deleted), BTreeSet::from(losers));
    assert_eq!(w.host.get(W, &winner).await.unwrap().ttl_seconds, 600);
    assert!(w.host.promote(W, &winner, request.clone()).await.unwrap().deleted.is_empty());
    assert_eq!(w.host.promote(W, &parent, request).await.unwrap_err().code(), "not_a_fork_child");
    w.exactly([&parent, &winner].into_iter().chain(&ids(&other))).await;
}

#[tokio::test]
async fn of_siblings_that_are_promoted_at_once_whoever_is_answered_lives() {
    let w = world().await;
    let parent = w.create().await.id;
    for _ in 0..20 {
        let children = ids(&w.host.fork_tree(W, &parent, spec(3)).await.unwrap());
        let request = || PromoteRequest { cleanup_siblings: true, tree_id: None };
        let promoted = futures::future::join_all(children.iter().map(|id| w.host.promote(W, id, request()))).await;
        let winners: Vec<String> = promoted.iter().flatten().map(|reply| reply.winner.clone()).collect();
        assert!(!winners.is_empty());
        for refused in promoted.iter().filter_map(|reply| reply.as_ref().err()) {
            assert_eq!(refused.class(), ErrorClass::NotFound);
        }
        w.exactly([&parent].into_iter().chain(&winners)).await;
        for id in winners {
            w.host.delete(W, &id).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_snapshot_that_is_deleted_while_it_is_used_serves_its_users_and_goes_once() {
    let w = world().await;
    let parent = w.create().await.id;
    w.write(&parent, "/dev/shm/x", "kept").await;
    for wait in [0u64, 1, 2, 4] {
        let kept = w.host.snapshot(W, &parent).await.unwrap();
        w.engine.script(|s| s.start_delay = Duration::from_millis(3));
        let request = CreateSandboxRequest { from_snapshot: Some(kept.id.clone()), ..Default::default() };
        let delete = async {
            tokio::time::sleep(Duration::from_millis(wait)).await;
            tokio::join!(w.host.delete_snapshot(W, &kept.id), w.host.delete_snapshot(W, &kept.id))
        };
        let (made, (once, twice)) = tokio::join!(w.host.create(W, request), delete);
        assert!(once.is_ok() != twice.is_ok(), "{once:?} {twice:?}");
        match made {
            Ok(made) => {
                assert_eq!(w.read(&made.id, "/dev/shm/x").await.unwrap(), "kept");
                w.host.delete(W, &made.id).await.unwrap();
            }
            Err(e) => assert_eq!(e.code(), "snapshot_not_found", "{}", e.chain()),
        }
        w.exactly([&parent]).await;
        w.no_snapshots().await;
    }
}

/// Opens the data directory while something is being staged there, as `coppice template build` does, or a second server before
/// it finds out that it is one. Answers how much is staged then.
async fn opened_meanwhile(w: &World) -> usize {
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while names(&w.data.staging_dir()).is_empty() {
        assert!(std::time::Instant::now() < deadline, "nothing was staged");
        tokio::task::yield_now().await;
    }
    DataDir::open(w.data.root()).unwrap();
    names(&w.data.staging_dir()).len()
}

#[tokio::test]
async fn a_look_at_a_flushed_disk_is_not_disturbed_by_who_opens_the_data_directory() {
    let w = world().await;
    let id = w.create().await.id;
    w.engine.script(|s| s.capture_delay = Duration::from_millis(20));
    let spec = ChangesSpec { limit: 10, below: Vec::new(), flush: true };
    let (looked, left) = tokio::join!(w.host.changes(W, &id, spec), opened_meanwhile(&w));
    assert_eq!(left, 1);
    // It was cloned and opened; a fake's disk has no file system.
    assert_eq!(looked.unwrap_err().code(), "file_system_unreadable");
    assert!(names(&w.data.staging_dir()).is_empty());
}

#[tokio::test]
async fn a_disk_fork_is_not_disturbed_by_who_opens_the_data_directory() {
    let w = world().await;
    let parent = w.create().await.id;
    w.write(&parent, "/root/disk", "d").await;
    w.engine.script(|s| s.start_delay = Duration::from_millis(20));
    let (fork, left) = tokio::join!(w.host.fork_disk(W, &parent, spec(2)), opened_meanwhile(&w));
    assert_eq!(left, 1);
    for child in ids(&fork.unwrap()) {
        assert_eq!(w.read(&child, "/root/disk").await.unwrap(), "d");
    }
}

#[tokio::test]
async fn a_machine_that_dies_is_a_failed_sandbox_with_a_reason_that_can_be_deleted() {
    let w = world().await;
    let id = w.create().await.id;
    w.engine.crash(w.engine.alive()[0]);
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    let sandbox = loop {
        let sandbox = w.host.get(W, &id).await.unwrap();
        if sandbox.status == SandboxStatus::Failed {
            break sandbox;
        }
        assert!(std::time::Instant::now() < deadline, "{sandbox:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert!(sandbox.error.unwrap().contains("signal 9"));
    let refused = w.host.fork_tree(W, &id, spec(1)).await.unwrap_err();
    assert_eq!((refused.class(), refused.code()), (ErrorClass::Conflict, "sandbox_failed"));
    assert_eq!(w.read(&id, "/x").await.unwrap_err().code(), "sandbox_failed");
    w.host.delete(W, &id).await.unwrap();
    w.exactly([]).await;
}

#[tokio::test]
async fn idle_sandboxes_are_reaped_and_the_count_goes_on_across_a_restart() {
    let w = world().await;
    let ttl = |seconds| CreateSandboxRequest { ttl_seconds: Some(seconds), ..Default::default() };
    let short = w.host.create(W, ttl(1)).await.unwrap().id;
    let long = w.host.create(W, ttl(60)).await.unwrap().id;
    let persistent = CreateSandboxRequest { persistent: Some(true), ..ttl(1) };
    let persistent = w.host.create(W, persistent).await.unwrap().id;
    let w = w.restart().await;
    assert_eq!(w.ids().await.len(), 3);
    w.exactly([&long, &persistent]).await;
    assert!(!w.ids().await.contains(&short));
}

#[tokio::test]
async fn after_a_restart_machines_are_taken_over_and_what_belongs_to_nothing_is_removed() {
    let w = world().await;
    let parent = w.create().await.id;
    w.write(&parent, "/dev/shm/x", "memory").await;
    let fork = w.host.fork_tree(W, &parent, spec(2)).await.unwrap();
    let dead = w.create().await.id;
    // A machine that ends while nobody watches, and directories that a crash in the middle of something would leave.
    let pid = w.engine.alive().into_iter().max().unwrap();
    let orphan = Uuid::new_v4().to_string();
    for dir in [w.data.sandboxes_dir(), w.data.run_dir(), w.data.snapshots_dir()] {
        std::fs::create_dir(dir.join(&orphan)).unwrap();
    }
    // And a machine that was started just before a crash, and never recorded.
    let scratch = tempfile::tempdir().unwrap();
    std::fs::write(scratch.path().join("disk"), "").unwrap();
    let (run_dir, disk) = (scratch.path().to_owned(), scratch.path().join("disk"));
    let place = VmPlace { id: Uuid::new_v4(), run_dir, disk, console_log: scratch.path().join("log") };
    let kernel = coppice_image::guest_kernel(&w.data, "k1", "i1").unwrap();
    let (nic, jail) = (coppice_testkit::fake_engine::nic(), coppice_engine::JailSlot { index: 63 });
    let before = w.engine.alive().len();
    drop(w.engine.boot(BootSpec { place, machine: machine(), kernel, nic, jail }).await.unwrap());
    assert_eq!(w.engine.alive().len(), before + 1);
    w.host.stop().await;
    w.engine.crash(pid);
    let w = w.restart().await;
    assert_eq!(w.read(&parent, "/dev/shm/x").await.unwrap(), "memory");
    assert_eq!(w.read(&fork.children[1].id, "/dev/shm/x").await.unwrap(), "memory");
    assert_eq!(w.host.get(W, &dead).await.unwrap().status, SandboxStatus::Failed);
    assert_eq!(w.snapshots(), [fork.snapshot_id.clone().unwrap()].into());
    assert!(!names(&w.data.sandboxes_dir()).contains(&orphan) && !names(&w.data.run_dir()).contains(&orphan));
    w.host.delete(W, &dead).await.unwrap();
    w.exactly([&parent].into_iter().chain(&ids(&fork))).await;
}

#[tokio::test]
async fn another_workspace_sees_nothing() {
    let w = world().await;
    let id = w.create().await.id;
    let other = "other";
    assert!(w.host.list(other).await.unwrap().is_empty());
    for error in [
        w.host.get(other, &id).await.unwrap_err(),
        w.host.delete(other, &id).await.unwrap_err(),
        w.host.fork_tree(other, &id, spec(1)).await.unwrap_err(),
        w.host.snapshot(other, &id).await.unwrap_err(),
        w.host.stat(other, &id, "/").await.unwrap_err(),
    ] {
        assert_eq!((error.class(), error.code()), (ErrorClass::NotFound, "sandbox_not_found"));
    }
    w.exactly([&id]).await;
}

#[tokio::test]
async fn operations_at_once_end_in_an_allowed_order() {
    let w = world().await;
    for _ in 0..10 {
        let id = w.create().await.id;
        let (fork, delete, pause, fork2) = tokio::join!(
            w.host.fork_tree(W, &id, spec(2)),
            w.host.delete(W, &id),
            w.host.pause(W, &id),
            w.host.fork_disk(W, &id, spec(1)),
        );
        delete.unwrap();
        let allowed = |e: &HostError| matches!(e.class(), ErrorClass::NotFound | ErrorClass::Conflict);
        assert!(pause.is_ok() || pause.as_ref().is_err_and(allowed), "{pause:?}");
        let mut left = Vec::new();
        for fork in [fork, fork2] {
            match fork {
                Ok(fork) => left.extend(ids(&fork)),
                Err(e) => assert!(allowed(&e), "{e}"),
            }
        }
        w.exactly(&left).await;
        for id in left {
            w.host.delete(W, &id).await.unwrap();
        }
    }
    assert!(w.snapshots().is_empty());
    drop(w.dir);
}

#[tokio::test]
async fn what_counts_for_quotas_is_what_the_workspace_has_and_keeps() {
    let world = world().await;
    let new = world.host.size_of_new(W, &CreateSandboxRequest::default()).await.unwrap();
    assert_eq!((new.id.as_str(), new.memory_mib), ("", 128));
    let parent = world.create().await;
    let fork = world.host.fork_tree(W, &parent.id, spec(2)).await.unwrap();
    let kept = world.host.snapshot(W, &parent.id).await.unwrap();
    world.host.create("other", CreateSandboxRequest::default()).await.unwrap();

    let held = world.host.holdings(W).await.unwrap();
    let expected: BTreeSet<_> = ids(&fork).into_iter().chain([parent.id.clone()]).collect();
    assert_eq!(held.sandboxes.iter().map(|one| one.id.clone()).collect::<BTreeSet<_>>(), expected);
    assert!(held.sandboxes.iter().all(|one| one.memory_mib == 128));
    // The snapshot that the fork made for itself is not one that the workspace keeps.
    assert_eq!(held.snapshots.iter().map(|one| &one.id).collect::<Vec<_>>(), [&kept.id]);

    let world = world.restart().await;
    assert_eq!(world.host.holdings(W).await.unwrap(), held);
    world.host.delete(W, &parent.id).await.unwrap();
    world.host.delete_snapshot(W, &kept.id).await.unwrap();
    let left = world.host.holdings(W).await.unwrap();
    assert_eq!((left.sandboxes.len(), left.snapshots.len()), (2, 0));
    assert_eq!(world.host.holdings("nobody").await.unwrap(), coppice_host::Holdings::default());
}
