//! The one interface through which the control plane reaches a host.
//!
//! In process today; it takes and gives plain data and streams, so that it can cross a socket. Every call names the
//! workspace that asks: a sandbox, snapshot or template of another one does not exist for it.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coppice_api::{
    Changes, CreateSandboxRequest, DirEntry, Fork, HostReport, Lifecycle, LifecyclePatch, Network, NetworkRequest,
    OnTtl, PromoteReply, PromoteRequest, Sandbox, Snapshot, Template,
};
use futures::stream::BoxStream;

use crate::{GuestStream, HostError};

/// What the control plane may ask of a host.
#[async_trait]
pub trait HostApi: Send + Sync + std::fmt::Debug {
    /// What this host is.
    fn info(&self) -> HostInfo;
    /// Brings the metrics up to date that are read somewhere else and not counted here, e.g. packets that were dropped.
    async fn observe(&self);

    /// What it has, what of it is used and promised, and what fits still. For admins.
    async fn report(&self) -> Result<HostReport, HostError>;

    /// Creates a sandbox from a template or a snapshot; answers when its guest has acknowledged the resume handshake.
    async fn create(&self, workspace: &str, request: CreateSandboxRequest) -> Result<Sandbox, HostError>;
    /// All sandboxes of the workspace, oldest first.
    async fn list(&self, workspace: &str) -> Result<Vec<Sandbox>, HostError>;
    /// One sandbox.
    async fn get(&self, workspace: &str, id: &str) -> Result<Sandbox, HostError>;
    /// Ends and removes it. A second call is [`coppice_api::ErrorClass::NotFound`].
    async fn delete(&self, workspace: &str, id: &str) -> Result<(), HostError>;
    /// Stops its virtual CPUs. Idempotent.
    async fn pause(&self, workspace: &str, id: &str) -> Result<(), HostError>;
    /// Lets them run, and steps the guest's clock. Idempotent.
    async fn resume(&self, workspace: &str, id: &str) -> Result<(), HostError>;
    /// Keeps it in an image on the disk and ends its machine. Idempotent. Any use wakes it: commands, files, ports,
    /// connections, snapshots and forks of it; looking at it does not.
    async fn hibernate(&self, workspace: &str, id: &str) -> Result<(), HostError>;
    /// Brings a hibernated one back; answers when its guest has acknowledged the resume handshake. Idempotent.
    async fn wake(&self, workspace: &str, id: &str) -> Result<(), HostError>;
    /// TTL and idleness.
    async fn lifecycle(&self, workspace: &str, id: &str) -> Result<Lifecycle, HostError>;
    /// Changes the TTL.
    async fn set_lifecycle(&self, workspace: &str, id: &str, patch: LifecyclePatch) -> Result<Lifecycle, HostError>;
    /// What it may reach.
    async fn network(&self, workspace: &str, id: &str) -> Result<Network, HostError>;
    /// Changes what it may reach; the new policy holds when this answers.
    async fn set_network(&self, workspace: &str, id: &str, request: NetworkRequest) -> Result<Network, HostError>;

    /// Runs a command. Dropping the stream before `Exit` kills the command's process group.
    async fn exec(&self, workspace: &str, id: &str, spec: ExecSpec) -> Result<ExecStream, HostError>;
    /// Reads a file.
    async fn read_file(&self, workspace: &str, id: &str, path: &str) -> Result<FileRead, HostError>;
    /// Writes a file, complete or not at all; answers the bytes written. An error of `body` undoes it.
    async fn write_file(&self, workspace: &str, id: &str, path: &str, body: ByteStream) -> Result<u64, HostError>;
    /// Entries of a directory, sorted by name.
    async fn list_dir(&self, workspace: &str, id: &str, path: &str) -> Result<Vec<DirEntry>, HostError>;
    /// One entry, lstat semantics.
    async fn stat(&self, workspace: &str, id: &str, path: &str) -> Result<DirEntry, HostError>;
    /// Removes a file or a tree.
    async fn remove(&self, workspace: &str, id: &str, path: &str) -> Result<(), HostError>;
    /// How its files differ from those that it began with, read from its disk. Wakes nothing, and changes nothing unless
    /// the guest is to flush.
    async fn changes(&self, workspace: &str, id: &str, spec: ChangesSpec) -> Result<Changes, HostError>;
    /// The console log so far (bounded by the host), last `tail_bytes` of it when given.
    async fn logs(&self, workspace: &str, id: &str, tail_bytes: Option<u64>) -> Result<Bytes, HostError>;
    /// The last few KiB of the console, then what comes, until the sandbox ends.
    async fn follow_logs(&self, workspace: &str, id: &str) -> Result<ByteStream, HostError>;

    /// TCP ports on which something in the guest listens. Wakes a hibernated one; changes nothing else, and counts as no use
    /// of the sandbox.
    async fn ports(&self, workspace: &str, id: &str) -> Result<Vec<DetectedPort>, HostError>;
    /// A connection to a TCP port of the guest. The sandbox counts as used until it is dropped; it breaks when the
    /// machine ends.
    async fn connect(&self, workspace: &str, id: &str, port: u16) -> Result<GuestStream, HostError>;
    /// Workspace of a sandbox, for requests that name nothing but its id.
    async fn owner(&self, id: &str) -> Result<String, HostError>;

    /// Captures memory, device state and disk at one instant; the sandbox runs on.
    async fn snapshot(&self, workspace: &str, id: &str) -> Result<Snapshot, HostError>;
    /// Snapshots, newest first; of one sandbox when given.
    async fn list_snapshots(&self, workspace: &str, sandbox_id: Option<&str>) -> Result<Vec<Snapshot>, HostError>;
    /// One snapshot.
    async fn get_snapshot(&self, workspace: &str, id: &str) -> Result<Snapshot, HostError>;
    /// Removes a snapshot; sandboxes made from it go on.
    async fn delete_snapshot(&self, workspace: &str, id: &str) -> Result<(), HostError>;

    /// Children with the parent's flushed disk; they boot.
    async fn fork_disk(&self, workspace: &str, id: &str, spec: ForkSpec) -> Result<Fork, HostError>;
    /// Children with the parent's memory and disk.
    async fn fork_tree(&self, workspace: &str, id: &str, spec: ForkSpec) -> Result<Fork, HostError>;
    /// One child with the parent's memory, disk and place on the network; the parent is stopped once the child has acknowledged.
    /// Whoever hangs up does not undo it.
    async fn fork_warm(&self, workspace: &str, id: &str, spec: ForkSpec) -> Result<Fork, HostError>;
    /// Makes a child independent; deletes its siblings when asked.
    async fn promote(&self, workspace: &str, id: &str, request: PromoteRequest) -> Result<PromoteReply, HostError>;

    /// Templates that the workspace may use.
    async fn templates(&self, workspace: &str) -> Result<Vec<Template>, HostError>;
    /// One template, by name or alias.
    async fn template(&self, workspace: &str, name: &str) -> Result<Template, HostError>;
    /// Removes a template of the workspace's own that no sandbox needs any more. A global one is
    /// [`coppice_api::ErrorClass::Forbidden`].
    async fn delete_template(&self, workspace: &str, name: &str) -> Result<(), HostError>;
    /// Removes a template that is offered to every workspace. Only for requests of an admin's.
    async fn delete_global_template(&self, name: &str) -> Result<(), HostError>;

    /// What of the workspace counts for its quotas. What is still being made is not in it.
    async fn holdings(&self, workspace: &str) -> Result<Holdings, HostError>;
    /// What one more sandbox of this request would hold; its `id` is empty. Makes nothing.
    async fn size_of_new(&self, workspace: &str, request: &CreateSandboxRequest) -> Result<Held, HostError>;
}

/// What of a workspace counts for its quotas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holdings {
    /// All sandboxes, whatever they do.
    pub sandboxes: Vec<Held>,
    /// Snapshots that it keeps.
    pub snapshots: Vec<Held>,
}

/// One sandbox or snapshot, by what it may come to fill.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// Of the sandbox or snapshot.
    pub id: String,
    /// Guest memory, MiB.
    pub memory_mib: u64,
    /// Size of its files, holes included, MiB: a sandbox's disk; a snapshot's disk and memory.
    pub disk_mib: u64,
}

/// Bytes in pieces.
pub type ByteStream = BoxStream<'static, Result<Bytes, HostError>>;

/// What a command does, in order; `Exit` is the last item. A stream that ends without it, or with an error, broke.
pub type ExecStream = BoxStream<'static, Result<ExecEvent, HostError>>;

/// One thing that a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// It wrote to standard output.
    Stdout(Bytes),
    /// It wrote to standard error.
    Stderr(Bytes),
    /// It ended.
    Exit(ExecExit),
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecExit {
    /// Exit code, or 128 + signal.
    pub exit_code: i32,
    /// It was killed at its deadline.
    pub timed_out: bool,
    /// From start to exit in the guest.
    pub duration: Duration,
}

/// A command to run.
#[derive(Debug, Clone, Default)]
pub struct ExecSpec {
    /// Program and arguments, e.g. `["/bin/sh", "-c", "…"]`.
    pub argv: Vec<String>,
    /// On top of the sandbox's environment.
    pub env: BTreeMap<String, String>,
    /// Absolute working directory.
    pub cwd: Option<String>,
    /// Name or uid.
    pub user: Option<String>,
    /// Standard input; absent: /dev/null.
    pub stdin: Option<Bytes>,
    /// When its process group is killed.
    pub timeout: Option<Duration>,
}

/// What changes of a sandbox are asked for.
#[derive(Debug, Clone, Default)]
pub struct ChangesSpec {
    /// Most entries in each list.
    pub limit: usize,
    /// Names from the root: only what they lead to, and what is in it.
    pub below: Vec<String>,
    /// A guest that runs writes what it has to its disk first.
    pub flush: bool,
}

/// A TCP port of a guest on which something listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DetectedPort {
    /// Its number.
    pub port: u16,
    /// On a loopback address only: nothing outside the guest reaches it.
    pub loopback_only: bool,
}

/// A file being read.
pub struct FileRead {
    /// Size when it was opened, bytes. A file of /proc says 0 and has contents.
    pub size: u64,
    /// Its contents.
    pub body: ByteStream,
}

impl std::fmt::Debug for FileRead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileRead").field("size", &self.size).finish_non_exhaustive()
    }
}

/// How a sandbox is to be forked.
#[derive(Debug, Clone, Default)]
pub struct ForkSpec {
    /// Number of children, 1 to [`coppice_api::MAX_FORK_COUNT`]. Anything else is an error of the caller's.
    pub count: i64,
    /// For every child; reserved keys are ignored.
    pub metadata: BTreeMap<String, String>,
    /// What becomes of a child that was idle for its TTL. None: as of the parent, or `delete` for one that is explored.
    pub on_ttl: Option<OnTtl>,
}

/// What a host is.
#[derive(Debug, Clone, serde::Serialize)]
pub struct HostInfo {
    /// Engine with its version and accelerator, e.g. `qemu 7.2.22 (tcg)`.
    pub engine: String,
    /// Why this accelerator.
    pub accel_reason: String,
    /// Whether disks and memory images are cloned by reference.
    pub reflink: bool,
    /// TTL of a sandbox that asks for none.
    pub default_ttl: Duration,
}
