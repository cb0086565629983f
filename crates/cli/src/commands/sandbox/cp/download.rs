//! From a sandbox to here. A file appears complete or not at all.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use coppice_client::api::ExecRequest;
use coppice_client::{Client, FileBody};
use tokio::io::AsyncWriteExt as _;

use super::{Copied, base, join};
use crate::commands::Context;
use crate::error::CliError;
use crate::words;

/// Deepest directory that is copied: a guest may show an endless tree.
const MAX_DEPTH: usize = 64;

pub(super) async fn run(
    context: &Context<'_>,
    client: &Client,
    id: &str,
    path: &str,
    local: &str,
) -> Result<Copied, CliError> {
    let mut copied = Copied::default();
    if local == "-" {
        let mut body = client.read_file(id, path).await?;
        while let Some(chunk) = body.chunk().await? {
            context.output.raw(&chunk)?;
        }
        return Ok(copied);
    }
    let entry = client.stat(id, path).await?;
    let mut target = PathBuf::from(local);
    if target.is_dir() {
        let name = base(path).ok_or_else(|| {
            CliError::usage(format!("{path} has no name to copy it under; name a target that does not exist yet"))
        })?;
        target.push(name);
    } else if local.ends_with('/') && !entry.is_dir {
        return Err(unwritable(&target, io::ErrorKind::NotADirectory.into()));
    }
    let mut made = BTreeMap::new();
    if entry.is_dir {
        directory(client, id, path, target, &mut copied, &mut made).await?;
    } else {
        file(client, id, path, &target, &mut copied).await?;
        made.insert(path.to_owned(), target);
    }
    if let Err(error) = executables(client, id, path, &made).await {
        copied.notes.push(format!("executable bits were not copied: {error}"));
    }
    Ok(copied)
}

/// Makes executable here what is executable there: the file API knows no modes.
async fn executables(client: &Client, id: &str, path: &str, made: &BTreeMap<String, PathBuf>) -> Result<(), CliError> {
    let path = path.trim_end_matches('/');
    let cmd =
        format!("find {} -type f -perm -u+x -print0", words::shell_word(if path.is_empty() { "/" } else { path }));
    let request = ExecRequest { cmd, timeout_seconds: Some(60.0), ..ExecRequest::default() };
    let reply = client.exec(id, &request).await?;
    // Only files that were copied just now; whatever else the guest names means nothing.
    for target in reply.stdout.split('\0').filter_map(|name| made.get(name)) {
        let meta = std::fs::metadata(target).map_err(|error| unwritable(target, error))?;
        let mode = meta.permissions().mode();
        // Executable for whom it is readable, as the umask allowed.
        let mode = mode | ((mode & 0o444) >> 2);
        std::fs::set_permissions(target, std::fs::Permissions::from_mode(mode))
            .map_err(|error| unwritable(target, error))?;
    }
    Ok(())
}

async fn directory(
    client: &Client,
    id: &str,
    path: &str,
    target: PathBuf,
    copied: &mut Copied,
    made: &mut BTreeMap<String, PathBuf>,
) -> Result<(), CliError> {
    let mut todo = vec![(path.to_owned(), target, 0_usize)];
    while let Some((from, to, depth)) = todo.pop() {
        if depth > MAX_DEPTH {
            return Err(CliError::failed("too_deep", format!("{from} is deeper than {MAX_DEPTH} directories")));
        }
        tokio::fs::create_dir_all(&to).await.map_err(|error| unwritable(&to, error))?;
        for entry in client.list_dir(id, &from).await? {
            let source = join(&from, &entry.name);
            if !is_plain_name(&entry.name) {
                return Err(CliError::failed(
                    "unsafe_name",
                    format!("{source:?} has a name that is not safe to write here"),
                ));
            }
            let target = to.join(&entry.name);
            match entry.mode.as_str() {
                _ if entry.is_dir => todo.push((source, target, depth + 1)),
                "f" => {
                    file(client, id, &source, &target, copied).await?;
                    made.insert(source, target);
                }
                _ => copied.left_out.push(source),
            }
        }
    }
    Ok(())
}

/// One component that stays where it is put.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
        && !name.contains('\0')
}

async fn file(client: &Client, id: &str, path: &str, target: &Path, copied: &mut Copied) -> Result<(), CliError> {
    let body = client.read_file(id, path).await?;
    let special = std::fs::metadata(target).is_ok_and(|meta| !meta.is_file());
    let failed = |error| unwritable(target, error);
    copied.bytes += if special {
        let file = tokio::fs::OpenOptions::new().write(true).open(target).await.map_err(failed)?;
        write(body, file, target).await?
    } else {
        let folder = target.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut builder = tempfile::Builder::new();
        // As a new file gets it; the umask takes its part.
        builder.prefix(".coppice-cp-").permissions(std::fs::Permissions::from_mode(0o666));
        let part = builder.tempfile_in(folder).map_err(failed)?;
        let file = tokio::fs::File::from_std(part.reopen().map_err(failed)?);
        let bytes = write(body, file, target).await?;
        part.persist(target).map_err(|error| unwritable(target, error.error))?;
        bytes
    };
    copied.files += 1;
    Ok(())
}

async fn write(mut body: FileBody, mut file: tokio::fs::File, target: &Path) -> Result<u64, CliError> {
    let mut bytes = 0_u64;
    while let Some(chunk) = body.chunk().await? {
        file.write_all(&chunk).await.map_err(|error| unwritable(target, error))?;
        bytes = bytes.saturating_add(u64::try_from(chunk.len()).unwrap_or(u64::MAX));
    }
    file.flush().await.map_err(|error| unwritable(target, error))?;
    Ok(bytes)
}

fn unwritable(path: &Path, error: io::Error) -> CliError {
    CliError::failed("unwritable", format!("can't write {}", path.display())).because(error)
}

#[cfg(test)]
mod tests {
    use super::is_plain_name;

    #[test]
    fn a_guest_cannot_name_its_way_out() {
        for name in ["a", "a b", "..a", ".hidden", "é"] {
            assert!(is_plain_name(name), "{name}");
        }
        for name in ["", ".", "..", "a/b", "/etc", "../x", "a/", "./a", "a\0b"] {
            assert!(!is_plain_name(name), "{name}");
        }
    }
}
