//! `coppice sandbox cp`: files and directories, in and out.
//!
//! Contents and executable bits are copied; owners, times and symbolic links inside directories are not (links are named
//! and left out). A guest's names are never trusted: one that would leave the target directory is refused.

mod download;
mod upload;

use clap::Args;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::{resolve, words};

/// Arguments of `coppice sandbox cp`.
#[derive(Debug, Args)]
pub struct CpArgs {
    /// What to copy: a local path, or ID:/path in a sandbox. `-`: standard input
    source: String,
    /// Where to: a local path, or ID:/path in a sandbox. `-`: standard output. An existing directory is copied into
    target: String,
}

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Side {
    Local(String),
    Guest { id: String, path: String },
}

/// What was copied.
#[derive(Debug, Default)]
struct Copied {
    files: u64,
    bytes: u64,
    /// Links, sockets and the like.
    left_out: Vec<String>,
    /// What went less well, for a person.
    notes: Vec<String>,
}

pub(crate) async fn run(context: &Context<'_>, args: CpArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let (copied, to_stdout) = match (side(&args.source)?, side(&args.target)?) {
        (Side::Local(local), Side::Guest { id, path }) => {
            let id = resolve::sandbox(&client, &id).await?;
            (upload::run(&client, &id, &local, &path).await?, false)
        }
        (Side::Guest { id, path }, Side::Local(local)) => {
            let id = resolve::sandbox(&client, &id).await?;
            (download::run(context, &client, &id, &path, &local).await?, local == "-")
        }
        (Side::Local(_), Side::Local(_)) => {
            return Err(CliError::usage("neither side is in a sandbox").hint("name it like 6f0c1a2b:/root/file"));
        }
        (Side::Guest { .. }, Side::Guest { .. }) => {
            return Err(CliError::usage("both sides are in sandboxes").hint("copy through a local file"));
        }
    };
    for path in &copied.left_out {
        context.output.note(&format!("left out, because it is no file or directory: {path}"));
    }
    for note in &copied.notes {
        context.output.note(note);
    }
    if to_stdout {
        return Ok(());
    }
    let number = words::count(usize::try_from(copied.files).unwrap_or(usize::MAX), "file", "files");
    let value = json!({"files": copied.files, "bytes": copied.bytes, "left_out": copied.left_out});
    context.output.done(&value, &format!("copied {number}, {}", words::size(copied.bytes)))
}

/// `ID:/path` is in a sandbox; anything else is local (`./a:/b` too).
fn side(text: &str) -> Result<Side, CliError> {
    if text.is_empty() {
        return Err(CliError::usage("a path is empty"));
    }
    let Some((id, path)) = text.split_once(':') else { return Ok(Side::Local(text.to_owned())) };
    if id.is_empty() || id.contains('/') || id.starts_with('.') {
        return Ok(Side::Local(text.to_owned()));
    }
    if !path.starts_with('/') {
        return Err(CliError::usage(format!("the path in {text:?} must be absolute, like {id}:/root/{path}")));
    }
    Ok(Side::Guest { id: id.to_owned(), path: path.to_owned() })
}

/// Joins a guest's directory and a name.
fn join(dir: &str, name: &str) -> String {
    format!("{}/{name}", dir.trim_end_matches('/'))
}

/// The last part of a path in a guest.
fn base(path: &str) -> Option<&str> {
    path.trim_end_matches('/').rsplit('/').next().filter(|name| !name.is_empty() && *name != "." && *name != "..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides() {
        let guest = |id: &str, path: &str| Side::Guest { id: id.into(), path: path.into() };
        assert_eq!(side("6f0c:/root/a b:c").unwrap(), guest("6f0c", "/root/a b:c"));
        for local in ["-", "a", "./a:/b", "/x:/y", "../a:b"] {
            assert_eq!(side(local).unwrap(), Side::Local(local.into()), "{local}");
        }
        assert!(side("6f0c:root").is_err() && side("").is_err() && side("6f0c:").is_err());
    }

    #[test]
    fn paths_in_a_guest() {
        assert_eq!((join("/", "a"), join("/b/", "a")), ("/a".into(), "/b/a".into()));
        assert_eq!((base("/a/b/"), base("/"), base("/a/..")), (Some("b"), None, None));
    }
}
