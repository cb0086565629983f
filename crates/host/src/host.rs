//! The host: what its operations share, how it starts, and the [`HostApi`] that leads to them.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use coppice_api::{
    Changes, CreateSandboxRequest, DirEntry, Fork, HostReport, Lifecycle, LifecyclePatch, Network, NetworkRequest,
    PromoteReply, PromoteRequest, Sandbox, Snapshot, Template,
};
use coppice_disk::DataDir;
use coppice_engine::{Engine, GuestKernel};
use coppice_image::Catalog;
use coppice_net::dns::{Directory, DnsConfig, DnsProxy, TrackedSlots};
use coppice_net::{NetError, Slots};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use uuid::Uuid;

use crate::admission::{Admission, RoomConfig};
use crate::api::{
    ByteStream, ChangesSpec, DetectedPort, ExecSpec, ExecStream, FileRead, ForkSpec, Held, Holdings, HostApi, HostInfo,
};
use crate::entry::{AccessError, Entry};
use crate::store::{Store, StoreError};
use crate::{
    GuestStream, HostError, capacity, changes, connect, create, exec, files, fork_disk, fork_tree, fork_warm, holdings,
    lifecycle, logs, meter, network, ports, promote, reaper, recovery, slots, snapshots, templates,
};

/// What a host needs.
#[derive(Debug)]
pub struct HostConfig {
    /// Where everything is.
    pub data_dir: DataDir,
    /// What runs VMs.
    pub engine: Arc<dyn Engine>,
    /// The network that sandboxes get their places on.
    pub slots: Arc<dyn Slots>,
    /// How the names that sandboxes ask for are resolved. None: not at all, nobody listens.
    pub dns: Option<DnsConfig>,
    /// The templates.
    pub catalog: Catalog,
    /// Idle TTL of a sandbox that asks for none.
    pub default_ttl: Duration,
    /// Most sandboxes on this host.
    pub max_sandboxes: usize,
    /// What it gives to them.
    pub room: RoomConfig,
    /// How often idle sandboxes are looked for.
    pub reap_interval: Duration,
}

/// Why a host can't start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its records.
    #[error("the host's records can't be used")]
    Store(#[from] StoreError),
    /// VMs that nobody knows any more can't be ended.
    #[error("VMs that an earlier run left can't be ended")]
    Strays(#[from] coppice_engine::VmError),
    /// Its network.
    #[error("the sandboxes' network can't be used")]
    Network(#[from] NetError),
    /// What a crash left can't be reclaimed.
    #[error("what an earlier run left in {path} can't be removed")]
    Reclaim {
        /// What is left.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// What all operations of a host share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub data: DataDir,
    pub engine: Arc<dyn Engine>,
    pub slots: Arc<dyn Slots>,
    pub catalog: Catalog,
    pub store: Store,
    pub admission: Admission,
    pub default_ttl: Duration,
    /// Snapshots whose contents were compared with their checksums in this run.
    pub verified: Mutex<HashSet<Uuid>>,
    /// Snapshots that machines are just being started from.
    pub leases: Mutex<HashMap<Uuid, Weak<snapshots::Lease>>>,
    /// Comparisons of disks that may go on at once.
    pub comparisons: Semaphore,
    entries: RwLock<HashMap<Uuid, Arc<Entry>>>,
    /// When all machines were last measured.
    measured: Mutex<Option<Instant>>,
}

impl Shared {
    /// The sandbox with this id, if it is the workspace's. A string that is no id is one that doesn't exist.
    pub(crate) fn entry(&self, workspace: &str, id: &str) -> Result<Arc<Entry>, AccessError> {
        let not_found = || AccessError::NotFound(id.chars().take(64).collect());
        let parsed: Uuid = id.parse().map_err(|_| not_found())?;
        let entry = self.entries.read().unwrap_or_else(PoisonError::into_inner).get(&parsed).cloned();
        entry.filter(|entry| entry.workspace == workspace).ok_or_else(not_found)
    }

    /// The workspace of the sandbox with this id.
    pub(crate) fn owner(&self, id: &str) -> Result<String, AccessError> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let entry = id.parse().ok().and_then(|id: Uuid| entries.get(&id));
        entry.map(|entry| entry.workspace.clone()).ok_or_else(|| AccessError::NotFound(id.chars().take(64).collect()))
    }

    /// All sandboxes, oldest first.
    pub(crate) fn all(&self) -> Vec<Arc<Entry>> {
        let mut all: Vec<_> = self.entries.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        // Children of one fork have one time: they come by their index.
        all.sort_by_cached_key(|entry| {
            let record = entry.record();
            (record.created_at, record.lineage.map(|lineage| lineage.index), entry.id)
        });
        all
    }

    /// Looks at every sandbox, in no order.
    pub(crate) fn each(&self, look: impl FnMut(&Entry)) {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.values().map(Arc::as_ref).for_each(look);
    }

    pub(crate) fn measured_now(&self) {
        *self.measured.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    pub(crate) fn measured_ms_ago(&self) -> Option<u64> {
        let at = *self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        at.map(|at| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// How many sandboxes there are; one that is stopped has nothing any more but a record.
    pub(crate) fn count(&self) -> usize {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.values().filter(|entry| !entry.is_stopped()).count()
    }

    pub(crate) fn has(&self, id: Uuid) -> bool {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).contains_key(&id)
    }

    pub(crate) fn insert(&self, entry: Arc<Entry>) {
        self.entries.write().unwrap_or_else(PoisonError::into_inner).insert(entry.id, entry);
        self.gauge();
    }

    fn gauge(&self) {
        metrics::gauge!("coppice_sandboxes").set(u32::try_from(self.count()).unwrap_or(u32::MAX));
    }

    /// Files of a sandbox. The id is a UUID, and so a plain name.
    pub(crate) fn sandbox_dir(&self, id: Uuid) -> PathBuf {
        self.data.sandboxes_dir().join(id.to_string())
    }

    /// Sockets of a sandbox's VM.
    pub(crate) fn vm_dir(&self, id: Uuid) -> PathBuf {
        self.data.run_dir().join(id.to_string())
    }

    pub(crate) fn snapshot_dir(&self, id: Uuid) -> PathBuf {
        self.data.snapshots_dir().join(id.to_string())
    }

    /// Kernel and initramfs that an image was captured with.
    pub(crate) fn guest_kernel(&self, machine: &coppice_snapshot::MachineSpec) -> GuestKernel {
        templates::guest_kernel(&self.data, machine)
    }

    /// Removes the last traces of a sandbox whose VM is gone: files, record, and fork snapshots that only it needed.
    pub(crate) async fn forget(&self, id: Uuid) -> Result<(), StoreError> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
        self.gauge();
        remove_tree(self.vm_dir(id)).await;
        coppice_fault::point!("delete.run-directory");
        remove_tree(self.sandbox_dir(id)).await;
        coppice_fault::point!("delete.files");
        self.store.delete_sandbox(id).await?;
        coppice_fault::point!("delete.record");
        self.drop_unreferenced_snapshots().await
    }

    /// Removes snapshots of forks and hibernations that no sandbox refers to. VMs that still map one keep reading the unlinked file.
    pub(crate) async fn drop_unreferenced_snapshots(&self) -> Result<(), StoreError> {
        for id in self.store.drop_unreferenced_snapshots().await? {
            debug!(snapshot = %id, "no sandbox refers to this snapshot any more");
            remove_tree(self.snapshot_dir(id)).await;
        }
        Ok(())
    }
}

/// Removes a directory tree that may be gone already. What can't be removed is logged and reclaimed at the next start.
pub(crate) async fn remove_tree(path: PathBuf) {
    match tokio::fs::remove_dir_all(&path).await {
        Ok(()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => warn!(path = %path.display(), error = %e, "can't be removed"),
    }
}

/// Answers the names that guests ask for.
async fn serve_dns(shared: &Shared, config: DnsConfig, policies: Arc<TrackedSlots>) -> Result<DnsProxy, NetError> {
    let sockets = slots::call(shared, |slots| slots.dns_sockets()).await?;
    DnsProxy::start(config, sockets, policies as Arc<dyn Directory>)
        .map_err(|source| NetError::System { what: "answering the names that guests ask for".into(), source })
}

/// Engine with its version and accelerator.
pub(crate) fn engine_words(shared: &Shared) -> String {
    let engine = shared.engine.capabilities();
    format!("{:?} {} ({:?})", engine.engine, engine.version, engine.accel).to_lowercase()
}

/// One host.
#[derive(Debug)]
pub struct Host {
    shared: Arc<Shared>,
    stop: CancellationToken,
    dns: Mutex<Option<DnsProxy>>,
}

impl Host {
    /// Opens the records, takes over the VMs that outlived the last run, finishes or undoes what it left half-done, and
    /// starts looking for idle sandboxes.
    ///
    /// # Errors
    /// When records or left-over files can't be dealt with. A single sandbox that can't be taken over is no error: it is
    /// shown as failed.
    pub async fn start(config: HostConfig) -> Result<Arc<Self>, StartError> {
        let store = Store::open(&config.data_dir.host_db()).await?;
        // Everything that changes a slot goes through it: the DNS proxy must know the policies that are in force.
        let slots = TrackedSlots::new(config.slots);
        let shared = Arc::new(Shared {
            admission: Admission::new(config.data_dir.root().to_owned(), config.max_sandboxes, config.room),
            data: config.data_dir,
            engine: config.engine,
            slots: Arc::clone(&slots) as Arc<dyn Slots>,
            catalog: config.catalog,
            store,
            default_ttl: config.default_ttl,
            verified: Mutex::default(),
            leases: Mutex::default(),
            comparisons: Semaphore::new(changes::AT_ONCE),
            entries: RwLock::default(),
            measured: Mutex::default(),
        });
        recovery::run(&shared).await?;
        let dns = match config.dns {
            Some(dns) => Some(serve_dns(&shared, dns, slots).await?),
            None => None,
        };
        templates::prune(&shared).await;
        let stop = CancellationToken::new();
        drop(tokio::spawn(meter::run(Arc::clone(&shared), stop.clone())));
        drop(tokio::spawn(reaper::run(Arc::clone(&shared), config.reap_interval, stop.clone())));
        Ok(Arc::new(Self { shared, stop, dns: Mutex::new(dns) }))
    }

    /// Stops looking after sandboxes and writes down when each was last used. Their VMs keep running.
    pub async fn stop(&self) {
        self.stop.cancel();
        drop(self.dns.lock().unwrap_or_else(PoisonError::into_inner).take());
        reaper::save_last_used(&self.shared).await;
    }

    /// Deletes every sandbox; answers how many could not be.
    pub async fn delete_all(&self) -> usize {
        let all = self.shared.all();
        let deleted = futures::future::join_all(all.iter().map(|entry| entry.ask(crate::actor::Op::Delete))).await;
        deleted.iter().filter(|d| d.is_err()).count()
    }

    /// Number of sandboxes.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shared.count()
    }
}

#[async_trait]
impl HostApi for Host {
    fn info(&self) -> HostInfo {
        HostInfo {
            engine: engine_words(&self.shared),
            accel_reason: self.shared.engine.capabilities().accel_reason.clone(),
            reflink: self.shared.data.reflink(),
            default_ttl: self.shared.default_ttl,
        }
    }

    async fn observe(&self) {
        slots::observe(&self.shared).await;
        capacity::observe(&self.shared).await;
    }

    async fn report(&self) -> Result<HostReport, HostError> {
        Ok(capacity::report(&self.shared).await?)
    }

    async fn create(&self, workspace: &str, request: CreateSandboxRequest) -> Result<Sandbox, HostError> {
        Ok(create::create(&self.shared, workspace, request).await?)
    }

    async fn list(&self, workspace: &str) -> Result<Vec<Sandbox>, HostError> {
        let mine = self.shared.all().into_iter().filter(|entry| entry.workspace == workspace);
        Ok(mine.map(|entry| entry.record().to_api()).collect())
    }

    async fn get(&self, workspace: &str, id: &str) -> Result<Sandbox, HostError> {
        Ok(self.shared.entry(workspace, id)?.record().to_api())
    }

    async fn delete(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        Ok(lifecycle::delete(&self.shared, workspace, id).await?)
    }

    async fn pause(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        Ok(lifecycle::pause(&self.shared, workspace, id).await?)
    }

    async fn resume(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        Ok(lifecycle::resume(&self.shared, workspace, id).await?)
    }

    async fn hibernate(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        Ok(lifecycle::hibernate(&self.shared, workspace, id).await?)
    }

    async fn wake(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        Ok(lifecycle::wake(&self.shared, workspace, id).await?)
    }

    async fn lifecycle(&self, workspace: &str, id: &str) -> Result<Lifecycle, HostError> {
        Ok(lifecycle::get(&self.shared, workspace, id)?)
    }

    async fn set_lifecycle(&self, workspace: &str, id: &str, patch: LifecyclePatch) -> Result<Lifecycle, HostError> {
        Ok(lifecycle::set(&self.shared, workspace, id, patch).await?)
    }

    async fn network(&self, workspace: &str, id: &str) -> Result<Network, HostError> {
        Ok(network::get(&self.shared, workspace, id)?)
    }

    async fn set_network(&self, workspace: &str, id: &str, request: NetworkRequest) -> Result<Network, HostError> {
        Ok(network::set(&self.shared, workspace, id, request).await?)
    }

    async fn exec(&self, workspace: &str, id: &str, spec: ExecSpec) -> Result<ExecStream, HostError> {
        Ok(exec::exec(&self.shared, workspace, id, spec).await?)
    }

    async fn read_file(&self, workspace: &str, id: &str, path: &str) -> Result<FileRead, HostError> {
        Ok(files::read(&self.shared, workspace, id, path).await?)
    }

    async fn write_file(&self, workspace: &str, id: &str, path: &str, body: ByteStream) -> Result<u64, HostError> {
        files::write(&self.shared, workspace, id, path, body).await
    }

    async fn list_dir(&self, workspace: &str, id: &str, path: &str) -> Result<Vec<DirEntry>, HostError> {
        Ok(files::list(&self.shared, workspace, id, path).await?)
    }

    async fn stat(&self, workspace: &str, id: &str, path: &str) -> Result<DirEntry, HostError> {
        Ok(files::stat(&self.shared, workspace, id, path).await?)
    }

    async fn remove(&self, workspace: &str, id: &str, path: &str) -> Result<(), HostError> {
        Ok(files::remove(&self.shared, workspace, id, path).await?)
    }

    async fn changes(&self, workspace: &str, id: &str, spec: ChangesSpec) -> Result<Changes, HostError> {
        Ok(changes::changes(&self.shared, workspace, id, spec).await?)
    }

    async fn logs(&self, workspace: &str, id: &str, tail_bytes: Option<u64>) -> Result<Bytes, HostError> {
        Ok(logs::read(&self.shared, workspace, id, tail_bytes).await?)
    }

    async fn follow_logs(&self, workspace: &str, id: &str) -> Result<ByteStream, HostError> {
        Ok(logs::follow(&self.shared, workspace, id).await?)
    }

    async fn ports(&self, workspace: &str, id: &str) -> Result<Vec<DetectedPort>, HostError> {
        Ok(ports::list(&self.shared, workspace, id).await?)
    }

    async fn connect(&self, workspace: &str, id: &str, port: u16) -> Result<GuestStream, HostError> {
        Ok(connect::connect(&self.shared, workspace, id, port).await?)
    }

    async fn owner(&self, id: &str) -> Result<String, HostError> {
        Ok(self.shared.owner(id)?)
    }

    async fn snapshot(&self, workspace: &str, id: &str) -> Result<Snapshot, HostError> {
        Ok(snapshots::create(&self.shared, workspace, id).await?)
    }

    async fn list_snapshots(&self, workspace: &str, sandbox_id: Option<&str>) -> Result<Vec<Snapshot>, HostError> {
        Ok(snapshots::list(&self.shared, workspace, sandbox_id).await?)
    }

    async fn get_snapshot(&self, workspace: &str, id: &str) -> Result<Snapshot, HostError> {
        Ok(snapshots::get(&self.shared, workspace, id).await?.to_api())
    }

    async fn delete_snapshot(&self, workspace: &str, id: &str) -> Result<(), HostError> {
        Ok(snapshots::delete(&self.shared, workspace, id).await?)
    }

    async fn fork_disk(&self, workspace: &str, id: &str, spec: ForkSpec) -> Result<Fork, HostError> {
        Ok(fork_disk::fork_disk(&self.shared, workspace, id, spec).await?)
    }

    async fn fork_tree(&self, workspace: &str, id: &str, spec: ForkSpec) -> Result<Fork, HostError> {
        Ok(fork_tree::fork_tree(&self.shared, workspace, id, spec).await?)
    }

    async fn fork_warm(&self, workspace: &str, id: &str, spec: ForkSpec) -> Result<Fork, HostError> {
        Ok(fork_warm::fork_warm(&self.shared, workspace, id, spec).await?)
    }

    async fn promote(&self, workspace: &str, id: &str, request: PromoteRequest) -> Result<PromoteReply, HostError> {
        Ok(promote::promote(&self.shared, workspace, id, request).await?)
    }

    async fn templates(&self, _workspace: &str) -> Result<Vec<Template>, HostError> {
        Ok(templates::list(&self.shared).await?)
    }

    async fn template(&self, _workspace: &str, name: &str) -> Result<Template, HostError> {
        Ok(templates::get(&self.shared, name).await?)
    }

    async fn delete_template(&self, _workspace: &str, name: &str) -> Result<(), HostError> {
        Ok(templates::delete(&self.shared, name).await?)
    }

    async fn delete_global_template(&self, name: &str) -> Result<(), HostError> {
        Ok(templates::delete_global(&self.shared, name).await?)
    }

    async fn holdings(&self, workspace: &str) -> Result<Holdings, HostError> {
        Ok(holdings::of(&self.shared, workspace).await?)
    }

    async fn size_of_new(&self, workspace: &str, request: &CreateSandboxRequest) -> Result<Held, HostError> {
        Ok(holdings::of_new(&self.shared, workspace, request).await?)
    }
}
