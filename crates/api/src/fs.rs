//! Files in a sandbox.

use serde::{Deserialize, Serialize};

/// One name in a directory; lstat semantics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct DirEntry {
    /// Last component; bytes that are not UTF-8 are U+FFFD.
    pub name: String,
    /// False for a symbolic link to a directory: clients walk trees by it.
    pub is_dir: bool,
    /// Bytes.
    pub size: u64,
    /// Type letter as find(1) prints it: `f`, `d`, `l`, `p`, `s`, `c`, `b`.
    pub mode: String,
    /// Modification time, whole seconds since the Unix epoch (an integer: clients parse it as one).
    pub mtime: i64,
}

/// Answer of `GET …/fs/dir`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct DirListing {
    /// As asked.
    pub path: String,
    /// Without `.` and `..`, sorted by name.
    pub entries: Vec<DirEntry>,
}

/// Answer of `PUT …/fs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct WriteReply {
    /// As asked.
    pub path: String,
    /// Bytes written.
    pub bytes: u64,
}
