//! Reading: file contents, directory listings and stat.
//!
//! Each piece is read on a blocking thread when the host has taken the one before it, so a slow host holds no thread
//! and no more than a chunk. Nothing here blocks on what it opens: only regular files are read.
//!
//! Writing is in [`crate::write_file`], deleting in [`crate::remove`].

use std::{
    fs::{self, File},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::Path,
    sync::Arc,
};

use coppice_guest_proto::{
    limits::CHUNK,
    v1::{DirEntries, DirEntry, FileChunk, FileType, ListDirRequest, ReadFileRequest, StatRequest},
};
use futures::{Stream, stream};
use tonic::Status;

use crate::{service::Agent, status::from_io};

/// Most entries in one message of a listing; with names of 255 bytes that stays far below the message limit.
const LIST_BATCH: usize = 256;

struct Reading {
    file: File,
    name: String,
    position: u64,
    /// Where to stop; `u64::MAX` for the end of the file.
    end: u64,
    /// Size to tell in the first chunk.
    size: Option<u64>,
    done: bool,
}

/// Opens a file and streams a range of it.
pub(crate) async fn read(
    agent: Arc<Agent>,
    request: ReadFileRequest,
) -> Result<impl Stream<Item = Result<FileChunk, Status>>, Status> {
    let path = agent.path(&request.path)?;
    let reading = agent.blocking(move || open(&path, request)).await?;
    Ok(stream::try_unfold((agent, reading), |(agent, mut reading)| async move {
        if reading.done {
            return Ok(None);
        }
        let (reading, chunk) = agent.blocking(move || next_chunk(&mut reading).map(|chunk| (reading, chunk))).await?;
        Ok(chunk.map(|chunk| (chunk, (agent, reading))))
    }))
}

fn open(path: &Path, request: ReadFileRequest) -> Result<Reading, Status> {
    let failed = |error: io::Error| from_io(&request.path, &error);
    // Never waits for the other end of a FIFO, and makes no terminal the agent's own.
    let file =
        fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_dir() {
        return Err(Status::failed_precondition(format!("{}: is a directory", request.path)));
    }
    if !metadata.is_file() {
        return Err(Status::failed_precondition(format!("{}: not a regular file", request.path)));
    }
    let end = match request.length {
        0 => u64::MAX,
        length => request.offset.saturating_add(length),
    };
    Ok(Reading { file, name: request.path, position: request.offset, end, size: Some(metadata.len()), done: false })
}

/// The next chunk; the first even if it is empty, since it tells the size.
fn next_chunk(reading: &mut Reading) -> Result<Option<FileChunk>, Status> {
    let want = usize::try_from(reading.end.saturating_sub(reading.position)).unwrap_or(CHUNK).min(CHUNK);
    let mut data = vec![0; want];
    let mut filled = 0;
    // Files in /proc give what they have in pieces, and say 0 as their size: only a read of nothing is the end.
    while let Some(rest) = data.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match reading.file.read_at(rest, reading.position) {
            Ok(0) => {
                reading.done = true;
                break;
            }
            Ok(n) => {
                filled += n;
                reading.position = reading.position.saturating_add(u64::try_from(n).unwrap_or(u64::MAX));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(from_io(&reading.name, &error)),
        }
    }
    reading.done |= reading.position >= reading.end;
    data.truncate(filled);
    let size = reading.size.take();
    Ok((size.is_some() || !data.is_empty()).then(|| FileChunk { data, size: size.unwrap_or(0) }))
}

/// Streams the entries of a directory, unsorted, without `.` and `..`.
pub(crate) async fn list(
    agent: Arc<Agent>,
    request: ListDirRequest,
) -> Result<impl Stream<Item = Result<DirEntries, Status>>, Status> {
    let path = agent.path(&request.path)?;
    let name = request.path;
    let (entries, name) =
        agent.blocking(move || Ok((fs::read_dir(path).map_err(|e| from_io(&name, &e))?, name))).await?;
    Ok(stream::try_unfold(Some((agent, entries, name)), |state| async move {
        let Some((agent, mut entries, name)) = state else { return Ok(None) };
        let work = move || {
            let batch = next_batch(&mut entries).map_err(|e| from_io(&name, &e))?;
            Ok((batch, entries, name))
        };
        let (batch, entries, name) = agent.blocking(work).await?;
        let more = batch.len() == LIST_BATCH;
        let state = more.then_some((agent, entries, name));
        Ok((more || !batch.is_empty()).then_some((DirEntries { entries: batch }, state)))
    }))
}

fn next_batch(entries: &mut fs::ReadDir) -> io::Result<Vec<DirEntry>> {
    let mut batch = Vec::new();
    while batch.len() < LIST_BATCH {
        let Some(entry) = entries.next().transpose()? else { break };
        match entry.metadata() {
            Ok(metadata) => batch.push(describe(entry.file_name().as_bytes(), &metadata)),
            // Deleted since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(batch)
}

/// Describes one file. A symbolic link is described itself.
pub(crate) async fn stat(agent: &Agent, request: StatRequest) -> Result<DirEntry, Status> {
    let path = agent.path(&request.path)?;
    let work = move || {
        let metadata = fs::symlink_metadata(&path).map_err(|e| from_io(&request.path, &e))?;
        let name = Path::new(&request.path).file_name().map_or(&b"/"[..], OsStrExt::as_bytes);
        Ok(describe(name, &metadata))
    };
    agent.blocking(work).await
}

fn describe(name: &[u8], metadata: &fs::Metadata) -> DirEntry {
    let kind = metadata.file_type();
    let file_type = if kind.is_file() {
        FileType::Regular
    } else if kind.is_dir() {
        FileType::Directory
    } else if kind.is_symlink() {
        FileType::Symlink
    } else if kind.is_fifo() {
        FileType::Fifo
    } else if kind.is_socket() {
        FileType::Socket
    } else if kind.is_char_device() {
        FileType::CharDevice
    } else if kind.is_block_device() {
        FileType::BlockDevice
    } else {
        FileType::Unspecified
    };
    DirEntry {
        name: name.to_vec(),
        r#type: file_type.into(),
        size: metadata.len(),
        mode: metadata.mode() & 0o7777,
        mtime_unix_s: metadata.mtime(),
        uid: metadata.uid(),
        gid: metadata.gid(),
    }
}
