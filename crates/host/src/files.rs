//! Files of a sandbox, through its guest: the host follows no path in a guest's file system. (What is on the disk of one is read in
//! [`crate::changes`].)

use std::sync::Arc;
use std::time::Duration;

use coppice_api::DirEntry;
use coppice_guest_proto::v1::write_file_input::Input;
use coppice_guest_proto::v1::{
    self, FileType, ListDirRequest, ReadFileRequest, RemoveRequest, StatRequest, WriteFileEnd, WriteFileInput,
    WriteFileStart,
};
use futures::StreamExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::HostError;
use crate::api::{ByteStream, FileRead};
use crate::entry::InUse;
use crate::guest_error::GuestCallError;
use crate::host::Shared;

/// How long a guest may take for one step: an answer, or the next piece. Below the 30 s after which clients give up, so that
/// they see the error.
const STEP: Duration = Duration::from_secs(20);
/// Most entries of a listing.
const MAX_ENTRIES: usize = 200_000;

type Client = v1::guest_client::GuestClient<tonic::transport::Channel>;

async fn client(shared: &Shared, workspace: &str, id: &str) -> Result<(Client, InUse), GuestCallError> {
    let entry = shared.entry(workspace, id)?;
    let in_use = entry.in_use();
    Ok((entry.session().await?.client(), in_use))
}

async fn bounded<T, E: Into<GuestCallError>>(step: impl Future<Output = Result<T, E>>) -> Result<T, GuestCallError> {
    tokio::time::timeout(STEP, step).await.map_err(|_| GuestCallError::Timeout(STEP))?.map_err(Into::into)
}

pub(crate) async fn read(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    path: &str,
) -> Result<FileRead, GuestCallError> {
    let (mut client, in_use) = client(shared, workspace, id).await?;
    let request = ReadFileRequest { path: path.to_owned(), offset: 0, length: 0 };
    let mut chunks = bounded(client.read_file(request)).await?.into_inner();
    // Errors of opening come with the first piece: they must be an answer, not a broken body.
    let first = bounded(chunks.message()).await?;
    let size = first.as_ref().map_or(0, |chunk| chunk.size);
    let rest = futures::stream::unfold(Some((chunks, in_use)), |state| async move {
        let (mut chunks, in_use) = state?;
        match bounded(chunks.message()).await {
            Ok(Some(chunk)) => Some((Ok(chunk.data.into()), Some((chunks, in_use)))),
            Ok(None) => None,
            Err(e) => Some((Err(HostError::from(e)), None)),
        }
    });
    let first = futures::stream::iter(first.map(|chunk| Ok(chunk.data.into())));
    Ok(FileRead { size, body: first.chain(rest).boxed() })
}

/// The pieces go through a short queue, so that an error of the body can cancel the call: the guest then removes what it
/// has of the file.
pub(crate) async fn write(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    path: &str,
    mut body: ByteStream,
) -> Result<u64, HostError> {
    let (mut client, _in_use) = client(shared, workspace, id).await?;
    let (pieces, queue) = mpsc::channel(4);
    let start = Input::Start(WriteFileStart { path: path.to_owned(), mode: 0 });
    let feed = async {
        let mut next = Some(Ok(start));
        while let Some(input) = next {
            let message = WriteFileInput { input: Some(input?) };
            // The guest answered before the end: its answer says why.
            if pieces.send(message).await.is_err() {
                return Ok(());
            }
            next = body.next().await.map(|piece| piece.map(|bytes| Input::Data(bytes.to_vec())));
        }
        // Only this word makes it a whole file: a stream that merely stops is one that broke off.
        let end = WriteFileInput { input: Some(Input::End(WriteFileEnd {})) };
        drop(pieces.send(end).await);
        drop(pieces);
        Ok::<_, HostError>(())
    };
    let call = async move { client.write_file(ReceiverStream::new(queue)).await };
    tokio::pin!(feed, call);
    let answer = tokio::select! {
        // Dropping the call on an error of the body resets the stream in the guest.
        fed = &mut feed => {
            fed?;
            bounded(call).await.map_err(HostError::from)?
        }
        answer = &mut call => answer.map_err(GuestCallError::from)?,
    };
    Ok(answer.into_inner().bytes)
}

pub(crate) async fn list(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    path: &str,
) -> Result<Vec<DirEntry>, GuestCallError> {
    let (mut client, _in_use) = client(shared, workspace, id).await?;
    let mut batches = bounded(client.list_dir(ListDirRequest { path: path.to_owned() })).await?.into_inner();
    let mut entries = Vec::new();
    while let Some(batch) = bounded(batches.message()).await? {
        if entries.len() + batch.entries.len() > MAX_ENTRIES {
            return Err(GuestCallError::Exhausted(format!("{path} has more than {MAX_ENTRIES} entries")));
        }
        entries.extend(batch.entries.into_iter().map(to_api));
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

pub(crate) async fn stat(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    path: &str,
) -> Result<DirEntry, GuestCallError> {
    let (mut client, _in_use) = client(shared, workspace, id).await?;
    Ok(to_api(bounded(client.stat(StatRequest { path: path.to_owned() })).await?.into_inner()))
}

pub(crate) async fn remove(shared: &Arc<Shared>, workspace: &str, id: &str, path: &str) -> Result<(), GuestCallError> {
    let (mut client, _in_use) = client(shared, workspace, id).await?;
    bounded(client.remove(RemoveRequest { path: path.to_owned() })).await?;
    Ok(())
}

fn to_api(entry: v1::DirEntry) -> DirEntry {
    let mode = match entry.r#type() {
        FileType::Regular => "f",
        FileType::Directory => "d",
        FileType::Symlink => "l",
        FileType::Fifo => "p",
        FileType::Socket => "s",
        FileType::CharDevice => "c",
        FileType::BlockDevice => "b",
        FileType::Unspecified => "?",
    };
    DirEntry {
        name: String::from_utf8_lossy(&entry.name).into_owned(),
        is_dir: entry.r#type() == FileType::Directory,
        size: entry.size,
        mode: mode.to_owned(),
        mtime: entry.mtime_unix_s,
    }
}
