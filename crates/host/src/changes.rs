//! What a sandbox has changed on its disk since its fork point.
//!
//! The disk is read on the host, by a reader that trusts nothing in it ([`coppice_disk::ext4_read`]), and compared with the
//! disk that the sandbox began with ([`crate::fork_point`]). So it is answered in every state, a hibernated sandbox is not
//! woken, and nothing that a guest made is run or mounted. A disk that a guest writes to is looked at through a clone of one
//! instant; what the guest had not written then is missing, and the answer says so. Who wants that as well asks for a flush: the
//! clone is then made as for a plain fork, of a disk whose file system was flushed and stood still.
//!
//! A sandbox that was forked with its memory also brings along what its parent had not written to its disk at the fork, and
//! writes it to its own later. That is no change of its own, and is told from those by the guest's clock, which was right when
//! the guest first ran: it is counted, and not listed.
//!
//! What it does not see: other file systems than the root disk (`/run`, `/dev/shm`), and what a guest writes to its disk
//! past its own file system.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coppice_api::{
    ChangeBytes, ChangeCounts, ChangedAspect, ChangedKind, ChangedPath, Changes, ErrorClass, ForkPoint, SandboxStatus,
};
use coppice_disk::StagingError;
use coppice_disk::changes::{self as disk_changes, Aspect, Bounds, Changed, Missing};
use coppice_disk::ext4_read::{Ext4Image, Ext4ReadError, Kind, Patience};
use jiff::Timestamp;
use rustix::fs::{CWD, Mode, OFlags};
use tracing::debug;
use uuid::Uuid;

use crate::Coded;
use crate::actor::{Op, OpError};
use crate::api::ChangesSpec;
use crate::entry::{AccessError, Entry, status_word};
use crate::fork_point;
use crate::host::Shared;
use crate::record::SandboxRecord;

/// Comparisons at once on a host: they use a core each.
pub(crate) const AT_ONCE: usize = 2;
/// How long one waits for its turn, and how long it may take: together below the 30 s after which clients give up.
const TURN: Duration = Duration::from_secs(12);
const PATIENCE: Duration = Duration::from_secs(12);
/// Names that are looked at in both disks together, and bytes that are compared.
const NAMES: usize = 1_500_000;
const CONTENT: u64 = 512 << 20;

/// Longest between two ticks of a guest's clock, nanoseconds.
const TICK: i128 = 10_000_000;

const NOT_FLUSHED: &str = "as of what was on the disk: what the guest has not written to it yet (writes of the last half \
                           minute, as a rule) is not in here; POST to the same path has a running guest write it first";
const FLUSH_FAILED: &str = "the guest did not flush its disk in time: what it had not written to it yet is not in here";

/// Why it can't be said.
#[derive(Debug, thiserror::Error)]
pub enum ChangesError {
    /// No such sandbox.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// There is nothing to compare with.
    #[error("the disk that sandbox {0} began with was not kept")]
    NoForkPoint(Uuid),
    /// Its machine writes to its disk, and that can't be cloned.
    #[error("the disk of sandbox {0} can't be looked at while it runs: this host's file system has no reflinks")]
    NoReflink(Uuid),
    /// Others are before it.
    #[error("too many disks are being compared; this one had no turn within {TURN:?}")]
    Busy,
    /// It became something else meanwhile.
    #[error("sandbox {0} was changed while its disk was looked at")]
    Moved(Uuid),
    /// One of the files can't be used.
    #[error("the disk of the sandbox can't be looked at")]
    Io(#[source] std::io::Error),
    /// There is no place for a clone of it.
    #[error("no place could be made for a clone of the sandbox's disk")]
    Staging(#[from] StagingError),
    /// It can't be cloned.
    #[error(transparent)]
    Clone(#[from] OpError),
    /// What the guest has on its disk can't be read, or what it began with.
    #[error("the file system on the sandbox's disk can't be read")]
    Unreadable(#[from] Ext4ReadError),
    /// A bug: the task that compared panicked.
    #[error("the comparison was interrupted")]
    Interrupted,
}

impl Coded for ChangesError {
    fn code(&self) -> &'static str {
        match self {
            Self::Access(e) => e.code(),
            Self::NoForkPoint(_) => "fork_point_gone",
            Self::NoReflink(_) => "needs_reflink",
            Self::Busy | Self::Moved(_) => "busy",
            Self::Io(_) | Self::Staging(_) => "disk_failed",
            Self::Clone(e) => e.code(),
            Self::Unreadable(Ext4ReadError::Stopped) => "disk_too_large",
            Self::Unreadable(_) => "file_system_unreadable",
            Self::Interrupted => "interrupted",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Access(e) => e.class(),
            Self::NoForkPoint(_) | Self::NoReflink(_) | Self::Unreadable(_) => ErrorClass::Conflict,
            Self::Busy | Self::Moved(_) => ErrorClass::Transient,
            Self::Clone(e) => e.class(),
            Self::Io(e) if coppice_disk::is_no_space(e) => ErrorClass::Capacity,
            Self::Staging(StagingError::NoSpace { .. }) => ErrorClass::Capacity,
            Self::Io(_) | Self::Staging(_) | Self::Interrupted => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Access(e) => e.hint(),
            Self::Clone(e) => e.hint(),
            Self::NoForkPoint(_) => Some("sandboxes that an earlier version made have none; their forks do".into()),
            Self::NoReflink(_) => {
                Some("POST to the same path flushes and copies the disk, or pause the sandbox".into())
            }
            _ => None,
        }
    }
}

/// A disk that nobody writes to.
struct Still {
    disk: File,
    at: Timestamp,
    flushed: bool,
    note: Option<&'static str>,
}

pub(crate) async fn changes(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    spec: ChangesSpec,
) -> Result<Changes, ChangesError> {
    let entry = shared.entry(workspace, id)?;
    let turn = tokio::time::timeout(TURN, shared.comparisons.acquire()).await;
    let _turn = turn.map_err(|_| ChangesError::Busy)?.map_err(|_| ChangesError::Interrupted)?;
    let begun = Instant::now();

    let (dir, record) = (shared.sandbox_dir(entry.id), entry.record());
    let opened = blocking(move || Ok(fork_point::open(&dir, &record))).await?;
    let (origin, since) = opened.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => ChangesError::NoForkPoint(entry.id),
        _ => ChangesError::Io(error),
    })?;
    let still = if spec.flush && entry.live().status == SandboxStatus::Running {
        flushed(shared, &entry).await?
    } else {
        as_it_is(shared, &entry).await?
    };
    let took_disk = begun.elapsed();
    let answer = compare(&entry.record(), origin, since, still, spec).await?;
    debug!(?took_disk, took = ?begun.elapsed(), counts = ?answer.counts, "changes");
    metrics::histogram!("coppice_changes_seconds").record(begun.elapsed().as_secs_f64());
    Ok(answer)
}

/// A clone of a disk that was flushed and stood still: what a plain fork makes.
async fn flushed(shared: &Shared, entry: &Arc<Entry>) -> Result<Still, ChangesError> {
    let _in_use = entry.in_use();
    // Removed when this is done or given up, and locked until then: others clean up there.
    let data = shared.data.clone();
    let staged = tokio::task::spawn_blocking(move || data.stage("changes")).await;
    let staged = staged.map_err(|_| ChangesError::Interrupted)??;
    let at = Timestamp::now();
    let entry = Arc::clone(entry);
    // In a task of its own: the clone must not appear after it was removed.
    let cloned = tokio::spawn(async move {
        let clone = staged.path().join(coppice_snapshot::DISK_FILE);
        let captured = entry.ask(|reply| Op::CloneDisk(clone.clone(), reply)).await?;
        let opened = blocking(move || {
            let disk = File::open(clone)?;
            drop(staged);
            Ok(disk)
        });
        Ok::<_, ChangesError>((opened.await?, captured.flushed))
    });
    let (disk, flushed) = cloned.await.map_err(|_| ChangesError::Interrupted)??;
    Ok(Still { disk, at, flushed, note: (!flushed).then_some(FLUSH_FAILED) })
}

/// The disk without asking anybody: that of a machine through a clone without a name, that of an image itself.
async fn as_it_is(shared: &Shared, entry: &Entry) -> Result<Still, ChangesError> {
    /// A sandbox may leave its machine, or get one, between the look at its record and at its files.
    const TRIES: usize = 3;
    for _ in 0..TRIES {
        let record = entry.record();
        let status = entry.live().status;
        if status == SandboxStatus::Creating || status == SandboxStatus::Stopping {
            return Err(AccessError::NotRunning { id: entry.id, status: status_word(status) }.into());
        }
        let (path, image) = place(shared, &record);
        let (staging, at) = (shared.data.staging_dir(), Timestamp::now());
        let taken = blocking(move || {
            let disk = File::open(path)?;
            if image { Ok((disk, true)) } else { clone_unnamed(disk, &staging) }
        });
        let (disk, still) = match taken.await {
            Err(ChangesError::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => continue,
            taken => taken?,
        };
        // Without a clone the disk itself is read, which only is of one instant while nobody writes to it.
        if !still && status == SandboxStatus::Running {
            return Err(ChangesError::NoReflink(entry.id));
        }
        return Ok(Still { disk, at, flushed: false, note: Some(NOT_FLUSHED) });
    }
    Err(ChangesError::Moved(entry.id))
}

/// Where the disk is, and whether it is one of an image, which is immutable.
fn place(shared: &Shared, record: &SandboxRecord) -> (PathBuf, bool) {
    let image = record.image.filter(|_| record.status == SandboxStatus::Hibernated);
    let dir = image.map_or_else(|| shared.sandbox_dir(record.id), |image| shared.snapshot_dir(image));
    (dir.join(coppice_snapshot::DISK_FILE), image.is_some())
}

/// A clone that has no name, so that nothing can be left of it; the disk itself, and `false`, where there are no reflinks.
fn clone_unnamed(disk: File, dir: &Path) -> std::io::Result<(File, bool)> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let unnamed: OwnedFd = match rustix::fs::openat(CWD, dir, flags, Mode::RUSR | Mode::WUSR) {
        Ok(unnamed) => unnamed,
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => return Ok((disk, false)),
        Err(errno) => return Err(errno.into()),
    };
    let unnamed = File::from(unnamed);
    let cloned = coppice_disk::reflink_fd(&disk, &unnamed)?;
    Ok(if cloned { (unnamed, true) } else { (disk, false) })
}

/// Stops the reader when nobody waits for it any more.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

async fn compare(
    record: &SandboxRecord,
    origin: File,
    since: ForkPoint,
    still: Still,
    spec: ChangesSpec,
) -> Result<Changes, ChangesError> {
    let patience = Patience { deadline: Some(Instant::now() + PATIENCE), ..Patience::default() };
    let _stop = StopOnDrop(Arc::clone(&patience.stop));
    let Still { disk, at, flushed, note } = still;
    // Of after the clone and before its guest ran. A guest's files have the time of its last tick.
    let first = record.created_at.as_nanosecond() - TICK;
    let compared = tokio::task::spawn_blocking(move || {
        let (old, new) = (Ext4Image::open(origin, patience.clone())?, Ext4Image::open(disk, patience)?);
        let below: Vec<Vec<u8>> = spec.below.into_iter().map(String::into_bytes).collect();
        let bounds = Bounds { since: Some(first), listed: spec.limit, names: NAMES, content: CONTENT };
        disk_changes::compare(&old, &new, &below, bounds)
    });
    let found = compared.await.map_err(|_| ChangesError::Interrupted)??;
    let incomplete = incomplete(&found);
    let lists = [&found.added, &found.modified, &found.deleted];
    Ok(Changes {
        sandbox_id: record.id.to_string(),
        since,
        at: at.to_string(),
        flushed,
        truncated: lists.iter().any(|list| list.count > list.entries.len() as u64),
        incomplete,
        note: note.map(str::to_owned),
        counts: ChangeCounts {
            added: found.added.count,
            modified: found.modified.count,
            deleted: found.deleted.count,
            earlier: found.earlier,
        },
        bytes: ChangeBytes { added: found.added.bytes, modified: found.modified.bytes, deleted: found.deleted.bytes },
        added: found.added.entries.into_iter().map(to_api).collect(),
        modified: found.modified.entries.into_iter().map(to_api).collect(),
        deleted: found.deleted.entries.into_iter().map(to_api).collect(),
    })
}

/// In words, what an answer does not have.
fn incomplete(found: &disk_changes::Changes) -> Option<String> {
    let mut reasons = Vec::new();
    match found.missing {
        Some(Missing::TooManyNames) => {
            reasons.push(format!("there are more than {NAMES} names: what comes after {} is missing", last(found)));
        }
        Some(Missing::TooSlow) => {
            reasons.push(format!("it took more than {PATIENCE:?}: what comes after {} is missing", last(found)));
        }
        None => {}
    }
    if found.unreadable > 0 {
        reasons.push(format!("{} names or directories on the disk can't be read", found.unreadable));
    }
    if found.not_compared > 0 {
        reasons.push(format!(
            "{} files are listed as modified although they may not be: too much to compare",
            found.not_compared
        ));
    }
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

/// The last path that is listed.
fn last(found: &disk_changes::Changes) -> String {
    let lists = [&found.added, &found.modified, &found.deleted];
    let last = lists.iter().filter_map(|list| list.entries.last()).map(|entry| &entry.path).max();
    last.map_or_else(|| "the beginning".to_owned(), |path| String::from_utf8_lossy(path).into_owned())
}

fn to_api(changed: Changed) -> ChangedPath {
    let kind = match changed.kind {
        Kind::File => ChangedKind::File,
        Kind::Directory => ChangedKind::Dir,
        Kind::Symlink => ChangedKind::Symlink,
        Kind::Fifo => ChangedKind::Fifo,
        Kind::Socket => ChangedKind::Socket,
        Kind::CharDevice => ChangedKind::CharDevice,
        Kind::BlockDevice => ChangedKind::BlockDevice,
    };
    let aspect = |aspect| match aspect {
        Aspect::Content => ChangedAspect::Content,
        Aspect::Kind => ChangedAspect::Type,
        Aspect::Mode => ChangedAspect::Mode,
        Aspect::Owner => ChangedAspect::Owner,
        Aspect::Target => ChangedAspect::Target,
        Aspect::Device => ChangedAspect::Device,
        Aspect::Attributes => ChangedAspect::Attributes,
    };
    let modified = !changed.aspects.is_empty();
    ChangedPath {
        path: String::from_utf8_lossy(&changed.path).into_owned(),
        kind,
        size: changed.size,
        size_before: modified.then_some(changed.size_before),
        mode: format!("{:04o}", changed.mode),
        changed: changed.aspects.into_iter().map(aspect).collect(),
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, ChangesError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| ChangesError::Interrupted)?.map_err(ChangesError::Io)
}
