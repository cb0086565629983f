//! The console log of a sandbox. Reading it never touches the machine.

use std::io::SeekFrom;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coppice_api::{ErrorClass, SandboxStatus};
use futures::StreamExt;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};

use crate::api::ByteStream;
use crate::entry::{AccessError, Entry};
use crate::host::Shared;
use crate::launch::CONSOLE_LOG;
use crate::{Coded, HostError};

/// What a follower is shown of the past, bytes.
const CONTEXT: u64 = 4096;
/// Most of a log that is read at once, bytes; the engine keeps the file below it.
const MAX_LOG: u64 = 16 << 20;
/// How often a followed file is looked at. The console is for people: this is no hot path.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

/// Why a log can't be read.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// No such sandbox.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The file can't be read.
    #[error("the console log can't be read")]
    Read(#[from] std::io::Error),
}

impl Coded for LogError {
    fn code(&self) -> &'static str {
        match self {
            Self::Access(e) => e.code(),
            Self::Read(_) => "log_unreadable",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Access(e) => e.class(),
            Self::Read(_) => ErrorClass::Internal,
        }
    }
}

fn path(shared: &Shared, entry: &Entry) -> std::path::PathBuf {
    shared.sandbox_dir(entry.id).join(CONSOLE_LOG)
}

pub(crate) async fn read(shared: &Shared, workspace: &str, id: &str, tail: Option<u64>) -> Result<Bytes, LogError> {
    let entry = shared.entry(workspace, id)?;
    let mut log = Followed { file: None, at: 0 };
    log.open(&path(shared, &entry), tail.unwrap_or(MAX_LOG).min(MAX_LOG)).await?;
    Ok(log.more(MAX_LOG).await?)
}

/// A log file that is read on from where one was.
struct Followed {
    file: Option<File>,
    at: u64,
}

impl Followed {
    /// Opens the file `tail` bytes before its end. There is none before the console wrote something.
    async fn open(&mut self, path: &std::path::Path, tail: u64) -> std::io::Result<()> {
        match File::open(path).await {
            Ok(file) => {
                self.at = file.metadata().await?.len().saturating_sub(tail);
                self.file = Some(file);
                Ok(())
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
        }
    }

    async fn more(&mut self, limit: u64) -> std::io::Result<Bytes> {
        let Some(file) = &mut self.file else { return Ok(Bytes::new()) };
        // The engine shortens a log that grew too long: go on at its new end.
        self.at = self.at.min(file.metadata().await?.len());
        file.seek(SeekFrom::Start(self.at)).await?;
        let mut bytes = Vec::new();
        file.take(limit).read_to_end(&mut bytes).await?;
        self.at += bytes.len() as u64;
        Ok(bytes.into())
    }
}

pub(crate) async fn follow(shared: &Arc<Shared>, workspace: &str, id: &str) -> Result<ByteStream, LogError> {
    let entry = shared.entry(workspace, id)?;
    let path = path(shared, &entry);
    let mut log = Followed { file: None, at: 0 };
    log.open(&path, CONTEXT).await?;
    let mut live = entry.watch();
    // Held weakly: a follower must not keep a deleted sandbox's record alive.
    drop(entry);
    let shared = Arc::downgrade(shared);
    let stream = async_stream(move |sender| async move {
        loop {
            if log.file.is_none() && log.open(&path, u64::MAX).await.is_err() {
                return;
            }
            match log.more(MAX_LOG).await {
                Ok(bytes) if bytes.is_empty() => {}
                Ok(bytes) => {
                    if sender.send(Ok(bytes)).await.is_err() {
                        return;
                    }
                    continue;
                }
                Err(e) => {
                    drop(sender.send(Err(HostError::from(LogError::from(e)))).await);
                    return;
                }
            }
            let status = live.borrow_and_update().status;
            let ended =
                matches!(status, SandboxStatus::Stopping | SandboxStatus::Stopped) || shared.strong_count() == 0;
            if ended || sender.is_closed() {
                return;
            }
            tokio::select! {
                changed = live.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(FOLLOW_INTERVAL) => {}
                () = sender.closed() => return,
            }
        }
    });
    Ok(stream)
}

/// A stream of what a task sends; the task ends when nobody reads.
fn async_stream<F, T>(task: T) -> ByteStream
where
    F: Future<Output = ()> + Send + 'static,
    T: FnOnce(tokio::sync::mpsc::Sender<Result<Bytes, HostError>>) -> F,
{
    let (sender, receiver) = tokio::sync::mpsc::channel(8);
    drop(tokio::spawn(task(sender)));
    tokio_stream::wrappers::ReceiverStream::new(receiver).boxed()
}
