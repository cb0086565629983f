//! A host that does what the test says.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coppice_api::{
    BootMode, ChangeBytes, ChangeCounts, ChangedKind, ChangedPath, Changes, CreateSandboxRequest, DirEntry, ErrorClass,
    Fork, ForkPoint, ForkPointKind, Lifecycle, LifecyclePatch, Network, NetworkRequest, PromoteReply, PromoteRequest,
    Sandbox, SandboxStatus, Snapshot, Template,
};
use coppice_host::{
    ByteStream, ChangesSpec, Coded, DetectedPort, ExecEvent, ExecExit, ExecSpec, ExecStream, FileRead, ForkSpec,
    GuestStream, Held, Holdings, HostApi, HostError, HostInfo,
};
use futures::StreamExt as _;
use tokio::net::TcpStream;
use uuid::Uuid;

/// One thing that a scripted stream does.
#[derive(Debug, Clone)]
pub enum Act {
    Out(Vec<u8>),
    Err(Vec<u8>),
    Sleep(u64),
    Exit(i32),
    TimedOut,
    Fail(ErrorClass, &'static str),
    Hang,
    /// Write without end and without pause.
    Flood(Vec<u8>),
}

#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct FakeError {
    class: ErrorClass,
    code: &'static str,
    text: String,
}

impl Coded for FakeError {
    fn code(&self) -> &'static str {
        self.code
    }
    fn class(&self) -> ErrorClass {
        self.class
    }
    fn hint(&self) -> Option<String> {
        (self.class == ErrorClass::Conflict).then(|| "resume it".to_owned())
    }
}

fn error(class: ErrorClass, code: &'static str, text: impl Into<String>) -> HostError {
    FakeError { class, code, text: text.into() }.into()
}

#[derive(Debug, Default)]
pub struct Fake {
    sandboxes: Mutex<BTreeMap<String, (String, Sandbox)>>,
    pub files: Mutex<BTreeMap<String, Bytes>>,
    snapshots: Mutex<Vec<Snapshot>>,
    /// What each call was, with its arguments.
    calls: Mutex<Vec<String>>,
    failures: Mutex<HashMap<&'static str, (ErrorClass, &'static str)>>,
    scripts: Mutex<HashMap<String, Vec<Act>>>,
    specs: Mutex<Vec<ExecSpec>>,
    /// What listens in every sandbox.
    pub services: Mutex<BTreeMap<u16, SocketAddr>>,
    /// Ports that listen on a loopback address only.
    pub loopback: Mutex<Vec<u16>>,
    /// How long create and fork take after what they make is listed, milliseconds.
    pub pace: AtomicU64,
    /// Streams given out and not dropped.
    open: Arc<AtomicUsize>,
}

struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Fake {
    pub fn add_sandbox(&self, workspace: &str) -> String {
        let id = Uuid::new_v4().to_string();
        self.insert(workspace, Sandbox { id: id.clone(), ..sandbox() });
        id
    }

    pub fn remove_sandbox(&self, id: &str) {
        self.sandboxes.lock().unwrap().remove(id);
    }

    fn insert(&self, workspace: &str, sandbox: Sandbox) {
        self.sandboxes.lock().unwrap().insert(sandbox.id.clone(), (workspace.to_owned(), sandbox));
    }

    /// What a command, a file (`read PATH`) or a log (`follow`) does.
    pub fn script(&self, name: &str, acts: impl Into<Vec<Act>>) {
        self.scripts.lock().unwrap().insert(name.to_owned(), acts.into());
    }

    /// A call that fails.
    pub fn fail(&self, call: &'static str, class: ErrorClass, text: &'static str) {
        self.failures.lock().unwrap().insert(call, (class, text));
    }

    /// The call works again.
    pub fn mend(&self, call: &'static str) {
        self.failures.lock().unwrap().remove(call);
    }

    async fn take_time(&self) {
        tokio::time::sleep(Duration::from_millis(self.pace.load(Ordering::SeqCst))).await;
    }

    pub fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    pub fn last_spec(&self) -> ExecSpec {
        self.specs.lock().unwrap().last().unwrap().clone()
    }

    pub fn open_streams(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    /// Waits until every stream was dropped.
    pub async fn quiet(&self) {
        for _ in 0..400 {
            if self.open_streams() == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} streams are still open", self.open_streams());
    }

    fn called(&self, call: &'static str, workspace: &str, arguments: &str) -> Result<(), HostError> {
        self.calls.lock().unwrap().push(format!("{call} {workspace} {arguments}").trim_end().to_owned());
        let failure = self.failures.lock().unwrap().get(call).copied();
        match failure {
            Some((ErrorClass::Internal, "panic")) => panic!("scripted panic"),
            Some((class, text)) => Err(error(class, "scripted", text)),
            None => Ok(()),
        }
    }

    fn find(&self, call: &'static str, workspace: &str, id: &str) -> Result<Sandbox, HostError> {
        self.called(call, workspace, id)?;
        match self.sandboxes.lock().unwrap().get(id) {
            Some((owner, sandbox)) if owner == workspace => Ok(sandbox.clone()),
            _ => Err(error(ErrorClass::NotFound, "sandbox_not_found", format!("sandbox {id} not found"))),
        }
    }

    fn running(&self, call: &'static str, workspace: &str, id: &str) -> Result<Sandbox, HostError> {
        let sandbox = self.find(call, workspace, id)?;
        if sandbox.status != SandboxStatus::Running {
            return Err(error(ErrorClass::Conflict, "sandbox_not_running", "it is paused, not running"));
        }
        Ok(sandbox)
    }

    fn play(&self, acts: Vec<Act>) -> ExecStream {
        self.open.fetch_add(1, Ordering::SeqCst);
        let state = (acts.into_iter(), Open(self.open.clone()), None::<Bytes>);
        futures::stream::unfold(state, |(mut acts, open, flood)| async move {
            if let Some(bytes) = flood {
                return Some((Ok(ExecEvent::Stdout(bytes.clone())), (acts, open, Some(bytes))));
            }
            let exit = |exit_code, timed_out| {
                Ok(ExecEvent::Exit(ExecExit { exit_code, timed_out, duration: Duration::from_millis(12) }))
            };
            loop {
                let item = match acts.next()? {
                    Act::Sleep(ms) => {
                        tokio::time::sleep(Duration::from_millis(ms)).await;
                        continue;
                    }
                    Act::Hang => std::future::pending().await,
                    Act::Out(bytes) => Ok(ExecEvent::Stdout(bytes.into())),
                    Act::Err(bytes) => Ok(ExecEvent::Stderr(bytes.into())),
                    Act::Exit(code) => exit(code, false),
                    Act::TimedOut => exit(137, true),
                    Act::Fail(class, text) => Err(error(class, "scripted", text)),
                    Act::Flood(bytes) => {
                        let bytes = Bytes::from(bytes);
                        return Some((Ok(ExecEvent::Stdout(bytes.clone())), (acts, open, Some(bytes))));
                    }
                };
                return Some((item, (acts, open, None)));
            }
        })
        .boxed()
    }

    fn bytes(&self, acts: Vec<Act>) -> ByteStream {
        let events = self.play(acts);
        events
            .map(|event| {
                event.map(|event| match event {
                    ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes) => bytes,
                    ExecEvent::Exit(_) => Bytes::new(),
                })
            })
            .boxed()
    }

    fn scripted(&self, name: &str) -> Option<Vec<Act>> {
        self.scripts.lock().unwrap().get(name).cloned()
    }

    fn fork(&self, workspace: &str, parent: &Sandbox, spec: ForkSpec, mode: &str) -> Fork {
        let tree_id = Uuid::new_v4().to_string();
        let children: Vec<_> = (0..spec.count)
            .map(|index| {
                let mut child = Sandbox { id: Uuid::new_v4().to_string(), ..parent.clone() };
                child.metadata = spec.metadata.clone();
                child.on_ttl = spec.on_ttl.unwrap_or(parent.on_ttl);
                child.metadata.insert("fork_tree_id".into(), tree_id.clone());
                child.metadata.insert("fork_parent_id".into(), parent.id.clone());
                child.metadata.insert("fork_index".into(), index.to_string());
                self.insert(workspace, child.clone());
                child
            })
            .collect();
        Fork {
            children,
            errors: Vec::new(),
            parent_id: parent.id.clone(),
            snapshot_id: None,
            tree_id,
            at: "2026-01-01T00:00:00Z".into(),
            parent_paused_ms: 1.5,
            disk_clone: "reflink".into(),
            flushed: true,
            mode: mode.into(),
            inherited: "memory, processes, disk".into(),
            memory_bytes: 7,
            memory_written_bytes: 7,
            capture: None,
        }
    }
}

fn sandbox() -> Sandbox {
    Sandbox {
        id: String::new(),
        template: "base".into(),
        cpu: 1,
        memory_mb: 512,
        status: SandboxStatus::Running,
        guest_ip: String::new(),
        network: Network::default(),
        metadata: BTreeMap::new(),
        from_snapshot: None,
        boot_ms: 99,
        boot_mode: BootMode::Snapshot,
        boot: None,
        created_at: "2026-01-01T00:00:00Z".into(),
        persistent: false,
        ttl_seconds: 3600,
        on_ttl: coppice_api::OnTtl::default(),
        error: None,
    }
}

fn lifecycle(sandbox: &Sandbox, idle_seconds: u64) -> Lifecycle {
    let Sandbox { ttl_seconds, on_ttl, persistent, .. } = *sandbox;
    Lifecycle { ttl_seconds, on_ttl, persistent, idle_seconds }
}

fn entry(name: &str, size: usize, mode: &str) -> DirEntry {
    DirEntry { name: name.into(), is_dir: mode == "d", size: size as u64, mode: mode.into(), mtime: 1_700_000_000 }
}

fn no_file(path: &str) -> HostError {
    error(ErrorClass::NotFound, "file_not_found", format!("{path}: no such file or directory"))
}

#[async_trait]
impl HostApi for Fake {
    async fn observe(&self) {}

    async fn report(&self) -> Result<coppice_api::HostReport, HostError> {
        Ok(coppice_api::HostReport { engine: "fake 1".into(), ..coppice_api::HostReport::default() })
    }

    fn info(&self) -> HostInfo {
        HostInfo {
            engine: "fake 1".into(),
            accel_reason: "a test".into(),
            reflink: true,
            default_ttl: Duration::from_secs(3600),
        }
    }

    async fn create(&self, workspace: &str, request: CreateSandboxRequest) -> Result<Sandbox, HostError> {
        self.called("create", workspace, &serde_json::to_string(&request).unwrap())?;
        let template = request.template.unwrap_or_else(|| "base".into());
        if template == "no-such" {
            return Err(error(ErrorClass::Caller, "unknown_template", "unknown template \"no-such\""));
        }
        let sandbox = Sandbox {
            id: Uuid::new_v4().to_string(),
            template,
            metadata: request.metadata.unwrap_or_default(),
            from_snapshot: request.from_snapshot,
            network: Network { egress: request.network.and_then(|n| n.egress).unwrap_or_default() },
            persistent: request.persistent.unwrap_or_default(),
            on_ttl: request.on_ttl.unwrap_or_default(),
            ttl_seconds: request.ttl_seconds.unwrap_or(3600).unsigned_abs(),
            ..sandbox()
        };
        self.insert(workspace, sandbox.clone());
        self.take_time().await;
        Ok(sandbox)
    }

    async fn list(&self, workspace: &str) -> Result<Vec<Sandbox>, HostError> {
        self.called("list", workspace, "")?;
        let all = self.sandboxes.lock().unwrap();
        Ok(all.values().filter(|(owner, _)| owner == workspace).map(|(_, sandbox)| sandbox.clone()).collect())
    }

    async fn get(&self, workspace: &str, id: &str) -> Result<Sandbox, HostError> {
        self.find("get", workspace, id)
    }

    async fn delete(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        self.find("delete", workspace, id)?;
        self.sandboxes.lock().unwrap().remove(id);
        Ok(())
    }

    async fn pause(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        let sandbox = self.find("pause", workspace, id)?;
        self.insert(workspace, Sandbox { status: SandboxStatus::Paused, ..sandbox });
        Ok(())
    }

    async fn resume(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        let sandbox = self.find("resume", workspace, id)?;
        self.insert(workspace, Sandbox { status: SandboxStatus::Running, ..sandbox });
        Ok(())
    }

    async fn hibernate(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        let sandbox = self.find("hibernate", workspace, id)?;
        let guest_ip = String::new();
        self.insert(workspace, Sandbox { status: SandboxStatus::Hibernated, guest_ip, ..sandbox });
        Ok(())
    }

    async fn wake(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        let sandbox = self.find("wake", workspace, id)?;
        self.insert(workspace, Sandbox { status: SandboxStatus::Running, ..sandbox });
        Ok(())
    }

    async fn lifecycle(&self, workspace: &str, id: &str) -> Result<Lifecycle, HostError> {
        let sandbox = self.find("lifecycle", workspace, id)?;
        Ok(lifecycle(&sandbox, 1))
    }

    async fn set_lifecycle(&self, workspace: &str, id: &str, patch: LifecyclePatch) -> Result<Lifecycle, HostError> {
        let mut sandbox = self.find("set_lifecycle", workspace, id)?;
        sandbox.ttl_seconds = patch.ttl_seconds.map_or(sandbox.ttl_seconds, i64::unsigned_abs);
        sandbox.on_ttl = patch.on_ttl.unwrap_or(sandbox.on_ttl);
        sandbox.persistent = patch.persistent.unwrap_or(sandbox.persistent);
        self.insert(workspace, sandbox.clone());
        Ok(lifecycle(&sandbox, 0))
    }

    async fn network(&self, workspace: &str, id: &str) -> Result<Network, HostError> {
        Ok(self.find("network", workspace, id)?.network)
    }

    async fn set_network(&self, workspace: &str, id: &str, request: NetworkRequest) -> Result<Network, HostError> {
        let mut sandbox = self.find("set_network", workspace, id)?;
        sandbox.network.egress = request.egress.unwrap_or(sandbox.network.egress);
        self.insert(workspace, sandbox.clone());
        Ok(sandbox.network)
    }

    async fn exec(&self, workspace: &str, id: &str, spec: ExecSpec) -> Result<ExecStream, HostError> {
        self.find("exec", workspace, id)?;
        self.specs.lock().unwrap().push(spec.clone());
        let acts = self.scripted(&spec.argv[2]);
        Ok(self.play(acts.unwrap_or_else(|| vec![Act::Out(spec.argv[2].clone().into_bytes()), Act::Exit(0)])))
    }

    async fn changes(&self, workspace: &str, id: &str, spec: ChangesSpec) -> Result<Changes, HostError> {
        self.find("changes", workspace, id)?;
        let asked = format!("{} /{} flush={}", spec.limit, spec.below.join("/"), spec.flush);
        self.called("asked", workspace, &asked)?;
        let added = ChangedPath {
            path: "/root/a\u{1b}[2J\u{85}\n".into(),
            kind: ChangedKind::File,
            size: 5,
            size_before: None,
            mode: "0644".into(),
            changed: Vec::new(),
        };
        Ok(Changes {
            sandbox_id: id.to_owned(),
            since: ForkPoint { kind: ForkPointKind::Fork, id: "p".into(), at: "2026-01-01T00:00:00Z".into() },
            at: "2026-01-01T00:00:01Z".into(),
            flushed: spec.flush,
            added: vec![added],
            modified: Vec::new(),
            deleted: Vec::new(),
            counts: ChangeCounts { added: 1, ..ChangeCounts::default() },
            bytes: ChangeBytes { added: 5, ..ChangeBytes::default() },
            truncated: false,
            incomplete: None,
            note: None,
        })
    }

    async fn read_file(&self, workspace: &str, id: &str, path: &str) -> Result<FileRead, HostError> {
        self.find("read_file", workspace, id)?;
        if let Some(acts) = self.scripted(&format!("read {path}")) {
            return Ok(FileRead { size: 0, body: self.bytes(acts) });
        }
        let file = self.files.lock().unwrap().get(path).cloned().ok_or_else(|| no_file(path))?;
        let pieces: Vec<_> = file.chunks(64 << 10).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
        Ok(FileRead { size: file.len() as u64, body: futures::stream::iter(pieces).boxed() })
    }

    async fn write_file(&self, workspace: &str, id: &str, path: &str, body: ByteStream) -> Result<u64, HostError> {
        self.find("write_file", workspace, id)?;
        self.open.fetch_add(1, Ordering::SeqCst);
        let _open = Open(self.open.clone());
        let mut body = body;
        let mut bytes = Vec::new();
        while let Some(piece) = body.next().await {
            let piece =
                piece.map_err(|cause| error(ErrorClass::Internal, "write_failed", format!("undone: {cause}")))?;
            bytes.extend_from_slice(&piece);
        }
        let length = bytes.len() as u64;
        self.files.lock().unwrap().insert(path.to_owned(), bytes.into());
        Ok(length)
    }

    async fn list_dir(&self, workspace: &str, id: &str, path: &str) -> Result<Vec<DirEntry>, HostError> {
        self.find("list_dir", workspace, id)?;
        let start = format!("{}/", path.trim_end_matches('/'));
        let files = self.files.lock().unwrap();
        let mut entries = BTreeMap::new();
        for (name, bytes) in files.iter().filter_map(|(name, bytes)| Some((name.strip_prefix(&start)?, bytes))) {
            let (name, entry) = match name.split_once('/') {
                Some((folder, _)) => (folder, entry(folder, 0, "d")),
                None => (name, entry(name, bytes.len(), "f")),
            };
            entries.insert(name.to_owned(), entry);
        }
        Ok(entries.into_values().collect())
    }

    async fn stat(&self, workspace: &str, id: &str, path: &str) -> Result<DirEntry, HostError> {
        self.find("stat", workspace, id)?;
        if path == "/" {
            return Ok(entry("/", 0, "d"));
        }
        let files = self.files.lock().unwrap();
        let bytes = files.get(path).ok_or_else(|| no_file(path))?;
        Ok(entry(path.rsplit('/').next().unwrap(), bytes.len(), "f"))
    }

    async fn remove(&self, workspace: &str, id: &str, path: &str) -> Result<(), HostError> {
        self.find("remove", workspace, id)?;
        self.files.lock().unwrap().remove(path).map(drop).ok_or_else(|| no_file(path))
    }

    async fn logs(&self, workspace: &str, id: &str, _tail: Option<u64>) -> Result<Bytes, HostError> {
        self.find("logs", workspace, id)?;
        Ok(Bytes::from_static("boot \u{e9}\nline two\nlogin: \n".as_bytes()))
    }

    async fn follow_logs(&self, workspace: &str, id: &str) -> Result<ByteStream, HostError> {
        self.find("follow_logs", workspace, id)?;
        Ok(self.bytes(self.scripted("follow").unwrap_or_else(|| vec![Act::Out(b"boot\n42\nlogin: ".to_vec())])))
    }

    async fn ports(&self, workspace: &str, id: &str) -> Result<Vec<DetectedPort>, HostError> {
        self.running("ports", workspace, id)?;
        let open = self.services.lock().unwrap().keys().map(|port| (*port, false)).collect::<Vec<_>>();
        let closed = self.loopback.lock().unwrap().iter().map(|port| (*port, true)).collect::<Vec<_>>();
        let all = open.into_iter().chain(closed);
        Ok(all.map(|(port, loopback_only)| DetectedPort { port, loopback_only }).collect())
    }

    async fn connect(&self, workspace: &str, id: &str, port: u16) -> Result<GuestStream, HostError> {
        self.running("connect", workspace, id)?;
        let address = self.services.lock().unwrap().get(&port).copied();
        let refused = || error(ErrorClass::Upstream, "port_refused", format!("nothing listens on {port}"));
        Ok(TcpStream::connect(address.ok_or_else(refused)?).await.unwrap().into())
    }

    async fn owner(&self, id: &str) -> Result<String, HostError> {
        self.called("owner", "", id)?;
        let found = self.sandboxes.lock().unwrap().get(id).map(|(owner, _)| owner.clone());
        found.ok_or_else(|| error(ErrorClass::NotFound, "sandbox_not_found", format!("sandbox {id} not found")))
    }

    async fn snapshot(&self, workspace: &str, id: &str) -> Result<Snapshot, HostError> {
        let sandbox = self.find("snapshot", workspace, id)?;
        let snapshot = Snapshot {
            id: Uuid::new_v4().to_string(),
            sandbox_id: sandbox.id,
            template: sandbox.template,
            size_bytes: 1,
            created_at: sandbox.created_at,
            workspace: workspace.into(),
        };
        self.snapshots.lock().unwrap().insert(0, snapshot.clone());
        Ok(snapshot)
    }

    async fn list_snapshots(&self, workspace: &str, sandbox: Option<&str>) -> Result<Vec<Snapshot>, HostError> {
        self.called("list_snapshots", workspace, sandbox.unwrap_or(""))?;
        let all = self.snapshots.lock().unwrap();
        Ok(all
            .iter()
            .filter(|s| s.workspace == workspace && sandbox.is_none_or(|id| id == s.sandbox_id))
            .cloned()
            .collect())
    }

    async fn get_snapshot(&self, workspace: &str, id: &str) -> Result<Snapshot, HostError> {
        self.called("get_snapshot", workspace, id)?;
        let found = self.snapshots.lock().unwrap().iter().find(|s| s.workspace == workspace && s.id == id).cloned();
        found.ok_or_else(|| error(ErrorClass::NotFound, "snapshot_not_found", format!("snapshot {id} not found")))
    }

    async fn delete_snapshot(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        self.get_snapshot(workspace, id).await?;
        self.snapshots.lock().unwrap().retain(|s| s.id != id);
        Ok(())
    }

    async fn fork_disk(&self, workspace: &str, id: &str, spec: ForkSpec) -> Result<Fork, HostError> {
        let parent = self.find("fork_disk", workspace, id)?;
        let fork = self.fork(workspace, &parent, spec, "disk");
        self.take_time().await;
        Ok(fork)
    }

    async fn fork_warm(&self, workspace: &str, id: &str, spec: ForkSpec) -> Result<Fork, HostError> {
        let parent = self.find("fork_warm", workspace, id)?;
        if parent.status == SandboxStatus::Stopped {
            return Err(error(ErrorClass::Conflict, "sandbox_not_running", format!("sandbox {id} is stopped")));
        }
        let fork = self.fork(workspace, &parent, spec, "warm");
        let successor = fork.children[0].id.clone();
        if let Some((_, parent)) = self.sandboxes.lock().unwrap().get_mut(id) {
            parent.status = SandboxStatus::Stopped;
            parent.metadata.insert("successor".into(), successor);
        }
        self.take_time().await;
        Ok(fork)
    }

    async fn fork_tree(&self, workspace: &str, id: &str, spec: ForkSpec) -> Result<Fork, HostError> {
        let parent = self.find("fork_tree", workspace, id)?;
        let mut fork = self.fork(workspace, &parent, spec, "fork-tree");
        if parent.template == "barren" {
            fork.children.clear();
        }
        self.take_time().await;
        Ok(fork)
    }

    async fn promote(&self, workspace: &str, id: &str, request: PromoteRequest) -> Result<PromoteReply, HostError> {
        let winner = self.find("promote", workspace, id)?;
        let tree_id = winner.metadata.get("fork_tree_id").cloned().unwrap_or_default();
        if request.tree_id.is_some_and(|asked| asked != tree_id) {
            return Err(error(ErrorClass::Caller, "foreign_tree", "tree_id is not this sandbox's tree"));
        }
        let mut deleted = Vec::new();
        self.sandboxes.lock().unwrap().retain(|key, (_, sandbox)| {
            let loser = request.cleanup_siblings && key != id && sandbox.metadata.get("fork_tree_id") == Some(&tree_id);
            if loser {
                deleted.push(key.clone());
            }
            !loser
        });
        Ok(PromoteReply { winner: id.into(), tree_id, deleted, failures: BTreeMap::new() })
    }

    async fn templates(&self, workspace: &str) -> Result<Vec<Template>, HostError> {
        self.called("templates", workspace, "")?;
        Ok(vec![template()])
    }

    async fn template(&self, workspace: &str, name: &str) -> Result<Template, HostError> {
        self.called("template", workspace, name)?;
        let private = Template { name: "private".into(), is_global: false, workspace: "default".into(), ..template() };
        let mine = |template: &Template| template.name == name && (template.is_global || workspace == "default");
        let found = [template(), private].into_iter().find(mine);
        found.ok_or_else(|| error(ErrorClass::NotFound, "template_not_found", format!("template {name} not found")))
    }

    async fn delete_template(&self, workspace: &str, name: &str) -> Result<(), HostError> {
        self.template(workspace, name).await?;
        Err(error(ErrorClass::Forbidden, "template_is_global", "a global template can't be deleted"))
    }

    async fn delete_global_template(&self, name: &str) -> Result<(), HostError> {
        self.called("delete_global_template", "", name)
    }

    async fn holdings(&self, workspace: &str) -> Result<Holdings, HostError> {
        self.called("holdings", workspace, "")?;
        let held = |id: &str| Held { id: id.to_owned(), memory_mib: 512, disk_mib: 1024 };
        let sandboxes = self.sandboxes.lock().unwrap();
        let snapshots = self.snapshots.lock().unwrap();
        Ok(Holdings {
            sandboxes: sandboxes
                .iter()
                .filter(|(_, (owner, sandbox))| owner == workspace && sandbox.status != SandboxStatus::Stopped)
                .map(|(id, _)| held(id))
                .collect(),
            snapshots: snapshots.iter().filter(|s| s.workspace == workspace).map(|s| held(&s.id)).collect(),
        })
    }

    async fn size_of_new(&self, workspace: &str, _: &CreateSandboxRequest) -> Result<Held, HostError> {
        self.called("size_of_new", workspace, "")?;
        Ok(Held { id: String::new(), memory_mib: 512, disk_mib: 1024 })
    }
}

fn template() -> Template {
    Template {
        name: "base".into(),
        rootfs_path: "/x".into(),
        size_bytes: 1,
        cpu: 1,
        memory_mb: 512,
        is_global: true,
        workspace: String::new(),
        label: "Base".into(),
        description: "Debian".into(),
        category: "os".into(),
        base: String::new(),
        tools: Vec::new(),
        meta: BTreeMap::new(),
    }
}
