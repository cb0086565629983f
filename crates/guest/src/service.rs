//! The service: shared state of the agent, and one thin method per call that checks the gate and hands over.
//!
//! The work is in the module named after the call. What a session owns is only its token ([`SessionService`]): commands
//! and freezes outlive it.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use coppice_guest_proto::{
    limits::MAX_COMMANDS,
    v1::{self, guest_server::Guest},
};
use futures::stream::BoxStream;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    hold::Hold,
    quiesce::Quiesce,
    reaper::{ReapMode, Reaper},
    resume::{Identity, ResumeState},
    system::System,
};

/// Blocking file operations at one time. Each is short; more wait.
const MAX_BLOCKING: usize = 32;

/// What a service needs from its surroundings.
pub struct ServiceConfig {
    /// Where effects on the whole machine go.
    pub system: Arc<dyn System>,
    /// Whose children are reaped.
    pub reap: ReapMode,
}

/// The guest's side of the protocol. Cheap to clone; all clones are one agent.
#[derive(Clone)]
pub struct GuestService {
    agent: Arc<Agent>,
}

/// State of the agent.
pub(crate) struct Agent {
    pub system: Arc<dyn System>,
    pub reaper: Arc<Reaper>,
    pub quiesce: Quiesce,
    pub hold: Arc<Hold>,
    pub resume: ResumeState,
    pub commands: Arc<Semaphore>,
    blocking: Semaphore,
    session: Mutex<CancellationToken>,
}

impl GuestService {
    /// Starts an agent: its reaper runs in the background while the service lives. Must be called in a tokio runtime.
    pub fn new(config: ServiceConfig) -> io::Result<Self> {
        Ok(Self {
            agent: Arc::new(Agent {
                quiesce: Quiesce::new(config.system.clone()),
                hold: Arc::new(Hold::new(config.system.clone())),
                system: config.system,
                reaper: Reaper::start(config.reap)?,
                resume: ResumeState::default(),
                commands: Arc::new(Semaphore::new(MAX_COMMANDS)),
                blocking: Semaphore::new(MAX_BLOCKING),
                session: Mutex::new(CancellationToken::new()),
            }),
        })
    }

    /// The generation of the last successful handshake.
    #[must_use]
    pub fn generation(&self) -> Option<Vec<u8>> {
        self.agent.resume.identity().map(|identity| identity.generation.clone())
    }

    /// Commands that are running now.
    #[must_use]
    pub fn running_commands(&self) -> usize {
        self.agent.running_commands()
    }

    /// Ends the session that is being served, if any, and makes the token of the next.
    pub(crate) fn begin_session(&self) -> CancellationToken {
        let next = CancellationToken::new();
        let mut session = self.agent.session.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *session, next.clone()).cancel();
        next
    }

    pub(crate) fn for_session(&self, session: CancellationToken) -> SessionService {
        SessionService { agent: self.agent.clone(), session }
    }
}

impl Agent {
    /// The gate before every call but Resume and Info.
    fn identity(&self) -> Result<Arc<Identity>, Status> {
        self.resume.identity().ok_or_else(|| Status::failed_precondition("the resume handshake has not been done yet"))
    }

    /// Resolves a path of the protocol.
    pub(crate) fn path(&self, path: &str) -> Result<PathBuf, Status> {
        crate::status::check_path(self.system.root(), path)
    }

    pub(crate) fn running_commands(&self) -> usize {
        MAX_COMMANDS.saturating_sub(self.commands.available_permits())
    }

    /// Runs blocking file work on a thread of its own, a bounded number at a time.
    pub(crate) async fn blocking<T, F>(&self, work: F) -> Result<T, Status>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, Status> + Send + 'static,
    {
        let _permit = self.blocking.acquire().await.map_err(|_| Status::internal("the agent is ending"))?;
        tokio::task::spawn_blocking(work).await.map_err(|e| Status::internal(format!("the agent failed: {e}")))?
    }
}

/// The service as one session sees it.
#[derive(Clone)]
pub(crate) struct SessionService {
    agent: Arc<Agent>,
    session: CancellationToken,
}

type Reply<T> = Result<Response<T>, Status>;
type ReplyStream<T> = BoxStream<'static, Result<T, Status>>;

#[tonic::async_trait]
impl Guest for SessionService {
    type ExecStream = ReplyStream<v1::ExecOutput>;
    type ReadFileStream = ReplyStream<v1::FileChunk>;
    type ListDirStream = ReplyStream<v1::DirEntries>;

    async fn resume(&self, request: Request<v1::ResumeRequest>) -> Reply<v1::ResumeReply> {
        crate::resume::resume(self.agent.clone(), request.into_inner()).await.map(Response::new)
    }

    async fn info(&self, _: Request<v1::InfoRequest>) -> Reply<v1::InfoReply> {
        let uptime = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let uptime = Duration::try_from(uptime).unwrap_or_default();
        Ok(Response::new(v1::InfoReply {
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel_release: rustix::system::uname().release().to_string_lossy().into_owned(),
            generation: self.agent.resume.identity().map(|i| i.generation.clone()).unwrap_or_default(),
            uptime_ms: u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX),
            running_commands: u32::try_from(self.agent.running_commands()).unwrap_or(u32::MAX),
        }))
    }

    async fn exec(&self, request: Request<Streaming<v1::ExecInput>>) -> Reply<Self::ExecStream> {
        let identity = self.agent.identity()?;
        let output = crate::exec::exec(&self.agent, &self.session, &identity, request.into_inner()).await?;
        Ok(Response::new(Box::pin(output)))
    }

    async fn read_file(&self, request: Request<v1::ReadFileRequest>) -> Reply<Self::ReadFileStream> {
        self.agent.identity()?;
        let chunks = crate::files::read(self.agent.clone(), request.into_inner()).await?;
        Ok(Response::new(Box::pin(chunks)))
    }

    async fn write_file(&self, request: Request<Streaming<v1::WriteFileInput>>) -> Reply<v1::WriteFileReply> {
        self.agent.identity()?;
        crate::write_file::write(&self.agent, request.into_inner()).await.map(Response::new)
    }

    async fn list_dir(&self, request: Request<v1::ListDirRequest>) -> Reply<Self::ListDirStream> {
        self.agent.identity()?;
        let entries = crate::files::list(self.agent.clone(), request.into_inner()).await?;
        Ok(Response::new(Box::pin(entries)))
    }

    async fn stat(&self, request: Request<v1::StatRequest>) -> Reply<v1::DirEntry> {
        self.agent.identity()?;
        crate::files::stat(&self.agent, request.into_inner()).await.map(Response::new)
    }

    async fn remove(&self, request: Request<v1::RemoveRequest>) -> Reply<v1::RemoveReply> {
        self.agent.identity()?;
        crate::remove::remove(&self.agent, request.into_inner()).await.map(Response::new)
    }

    async fn list_ports(&self, _: Request<v1::ListPortsRequest>) -> Reply<v1::ListPortsReply> {
        self.agent.identity()?;
        let list = || crate::ports::list(Path::new("/proc")).map_err(|e| crate::status::from_io(&"/proc/net", &e));
        self.agent.blocking(list).await.map(Response::new)
    }

    async fn quiesce(&self, request: Request<v1::QuiesceRequest>) -> Reply<v1::QuiesceReply> {
        self.agent.identity()?;
        self.agent.quiesce.freeze(request.into_inner()).await.map(Response::new)
    }

    async fn thaw(&self, _: Request<v1::ThawRequest>) -> Reply<v1::ThawReply> {
        self.agent.identity()?;
        Ok(Response::new(self.agent.quiesce.thaw().await))
    }

    async fn hold(&self, request: Request<v1::HoldRequest>) -> Reply<v1::HoldReply> {
        self.agent.identity()?;
        self.agent.hold.hold(request.into_inner()).await.map(Response::new)
    }

    async fn release(&self, _: Request<v1::ReleaseRequest>) -> Reply<v1::ReleaseReply> {
        self.agent.identity()?;
        self.agent.hold.release().await.map(Response::new)
    }
}
