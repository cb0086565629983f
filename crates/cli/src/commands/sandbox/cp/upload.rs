//! From here into a sandbox.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use coppice_client::api::ExecRequest;
use coppice_client::{Client, WriteBody};
use tokio_util::io::ReaderStream;

use super::{Copied, join};
use crate::error::CliError;
use crate::words;

pub(super) async fn run(client: &Client, id: &str, local: &str, path: &str) -> Result<Copied, CliError> {
    if local == "-" {
        let reply = client.write_file(id, path, WriteBody::stream(ReaderStream::new(tokio::io::stdin()), None)).await?;
        return Ok(Copied { files: 1, bytes: reply.bytes, ..Copied::default() });
    }
    let source = PathBuf::from(local);
    let meta = tokio::fs::metadata(&source).await.map_err(|error| unreadable(&source, error))?;
    let target = target(client, id, &source, path).await?;
    let mut copied = Copied::default();
    if !meta.is_dir() {
        file(client, id, &source, &target, &mut copied).await?;
        return Ok(copied);
    }
    let mut todo = vec![(source, target)];
    while let Some((source, target)) = todo.pop() {
        let mut entries = tokio::fs::read_dir(&source).await.map_err(|error| unreadable(&source, error))?;
        while let Some(entry) = entries.next_entry().await.map_err(|error| unreadable(&source, error))? {
            let from = entry.path();
            let name = entry.file_name();
            let Some(name) = name.to_str() else {
                copied.left_out.push(from.display().to_string());
                continue;
            };
            let kind = entry.file_type().await.map_err(|error| unreadable(&from, error))?;
            let to = join(&target, name);
            if kind.is_dir() {
                todo.push((from, to));
            } else if kind.is_file() {
                file(client, id, &from, &to, &mut copied).await?;
            } else {
                copied.left_out.push(from.display().to_string());
            }
        }
    }
    Ok(copied)
}

/// Into a directory, under the source's name; else to the path itself.
async fn target(client: &Client, id: &str, source: &Path, path: &str) -> Result<String, CliError> {
    let into = match client.stat(id, path).await {
        Ok(entry) => entry.is_dir,
        Err(error) if error.is_not_found() => path.ends_with('/'),
        Err(error) => return Err(error.into()),
    };
    if !into {
        return Ok(path.to_owned());
    }
    let whole = std::fs::canonicalize(source).map_err(|error| unreadable(source, error))?;
    let name = source.file_name().or_else(|| whole.file_name()).and_then(|name| name.to_str());
    name.map(|name| join(path, name))
        .ok_or_else(|| CliError::usage(format!("{} has no name to copy it under; name the target", source.display())))
}

async fn file(client: &Client, id: &str, from: &Path, to: &str, copied: &mut Copied) -> Result<(), CliError> {
    let file = tokio::fs::File::open(from).await.map_err(|error| unreadable(from, error))?;
    let meta = file.metadata().await.map_err(|error| unreadable(from, error))?;
    let size = meta.is_file().then_some(meta.len());
    let reply = client.write_file(id, to, WriteBody::stream(ReaderStream::new(file), size)).await?;
    copied.files += 1;
    copied.bytes += reply.bytes;
    let mode = meta.permissions().mode() & 0o777;
    if meta.is_file() && mode & 0o111 != 0 {
        let cmd = format!("chmod {mode:o} {}", words::shell_word(to));
        let request = ExecRequest { cmd, timeout_seconds: Some(20.0), ..ExecRequest::default() };
        let reply = client.exec(id, &request).await?;
        if reply.exit_code != 0 {
            let message = format!("{to} was copied, but could not be made executable: {}", reply.stderr.trim());
            return Err(CliError::failed("chmod_failed", message));
        }
    }
    Ok(())
}

fn unreadable(path: &Path, error: std::io::Error) -> CliError {
    CliError::failed("unreadable", format!("can't read {}", path.display())).because(error)
}
