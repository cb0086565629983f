//! WriteFile: a file appears complete or not at all.
//!
//! The content goes to a temporary file in the same directory, which is synced and renamed over the target; the temporary
//! file is removed on any failure and when the call is dropped. The mode and owner of a file that is replaced are
//! kept. A symbolic link is followed, as a shell's `>` does: the link stays and its target is replaced.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use coppice_guest_proto::v1::{WriteFileInput, WriteFileReply, WriteFileStart, write_file_input::Input};
use tonic::{Status, Streaming};

use crate::{service::Agent, status::from_io};

const DEFAULT_MODE: u32 = 0o644;
/// Links that are followed to the target (`MAXSYMLINKS`, include/linux/namei.h).
const MAX_LINKS: usize = 40;

/// Serves the call.
pub(crate) async fn write(agent: &Agent, mut input: Streaming<WriteFileInput>) -> Result<WriteFileReply, Status> {
    let start = match input.message().await?.and_then(|message| message.input) {
        Some(Input::Start(start)) => start,
        _ => return Err(Status::invalid_argument("the first message of WriteFile must be `start`")),
    };
    if start.mode > 0o7777 {
        return Err(Status::invalid_argument(format!("{:#o} are not permission bits", start.mode)));
    }
    let path = agent.path(&start.path)?;
    let mut pending = agent.blocking(move || Pending::create(&path, start)).await?;
    let mut bytes = 0u64;
    loop {
        let data = match input.message().await?.map(|message| message.input) {
            Some(Some(Input::Data(data))) => data,
            Some(Some(Input::End(_))) => break,
            Some(Some(Input::Start(_))) => return Err(Status::invalid_argument("`start` was sent twice")),
            Some(None) => continue,
            // What is there may be a part of the file only.
            None => return Err(Status::invalid_argument("WriteFile ended without `end`: the file is not written")),
        };
        bytes = bytes.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        pending = agent.blocking(move || pending.append(&data)).await?;
    }
    agent.blocking(move || pending.publish()).await?;
    Ok(WriteFileReply { bytes })
}

/// A temporary file that is not the target yet. Dropping it removes it.
struct Pending {
    /// As the host calls the target.
    name: String,
    target: PathBuf,
    temp: Temp,
    file: File,
}

struct Temp {
    path: PathBuf,
    published: bool,
}

impl Drop for Temp {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        let path = std::mem::take(&mut self.path);
        let remove = move || {
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!("can't remove {}: {error}", path.display());
            }
        };
        // A dropped call is dropped by the session's task, which must not wait for a disk.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(remove)),
            Err(_) => remove(),
        }
    }
}

impl Pending {
    fn create(path: &Path, start: WriteFileStart) -> Result<Self, Status> {
        let failed = |error: io::Error| from_io(&start.path, &error);
        if start.path.ends_with('/') {
            return Err(Status::failed_precondition(format!("{}: is a directory", start.path)));
        }
        let target = follow(path).map_err(failed)?;
        let replaced = match fs::symlink_metadata(&target) {
            Ok(metadata) if metadata.is_dir() => {
                return Err(Status::failed_precondition(format!("{}: is a directory", start.path)));
            }
            Ok(metadata) if !metadata.is_file() => {
                return Err(Status::failed_precondition(format!("{}: not a regular file", start.path)));
            }
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        let (Some(dir), Some(_)) = (target.parent(), target.file_name()) else {
            return Err(Status::invalid_argument(format!("{}: not the name of a file", start.path)));
        };
        if replaced.is_none() {
            fs::create_dir_all(dir).map_err(failed)?;
        }
        let temp = dir.join(format!(".coppice-{}", uuid::Uuid::new_v4()));
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temp).map_err(failed)?;
        let temp = Temp { path: temp, published: false };
        let mode = match (start.mode, &replaced) {
            (0, Some(replaced)) => replaced.mode() & 0o7777,
            (0, None) => DEFAULT_MODE,
            (mode, _) => mode,
        };
        if let Some(replaced) = &replaced {
            std::os::unix::fs::fchown(&file, Some(replaced.uid()), Some(replaced.gid())).map_err(failed)?;
        }
        // After the owner, whose change clears set-id bits; and not at creation, where the umask would apply.
        file.set_permissions(fs::Permissions::from_mode(mode)).map_err(failed)?;
        Ok(Self { name: start.path, target, temp, file })
    }

    fn append(mut self, data: &[u8]) -> Result<Self, Status> {
        self.file.write_all(data).map_err(|e| from_io(&self.name, &e))?;
        Ok(self)
    }

    fn publish(mut self) -> Result<(), Status> {
        let result = self.file.sync_all().and_then(|()| fs::rename(&self.temp.path, &self.target));
        result.map_err(|e| from_io(&self.name, &e))?;
        self.temp.published = true;
        Ok(())
    }
}

/// The file that a path leads to, through symbolic links in its last component. It need not exist.
fn follow(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&path) {
            Ok(link) => path = path.parent().unwrap_or(Path::new("/")).join(link),
            // Not a link, or nothing there.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => return Ok(path),
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}
