//! What the files of a sandbox have become since its fork point.

use serde::{Deserialize, Serialize};

/// Entries in each list of [`Changes`] when the request doesn't say.
pub const DEFAULT_CHANGES_LISTED: usize = 1000;
/// Most entries in each list of [`Changes`].
pub const MAX_CHANGES_LISTED: usize = 10_000;

/// Answer of `GET` and `POST /v1/sandboxes/{id}/changes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Changes {
    /// What was compared.
    pub sandbox_id: String,
    /// What it was compared with: the disk that it began with.
    pub since: ForkPoint,
    /// When its disk was looked at.
    pub at: String,
    /// Whether its guest wrote everything to the disk just before. If not, what it had not written by itself yet (the last
    /// half minute, as a rule) is missing.
    pub flushed: bool,
    /// In it and not at the fork point, by path.
    pub added: Vec<ChangedPath>,
    /// In both, and not the same. Times alone are no change.
    pub modified: Vec<ChangedPath>,
    /// At the fork point, and no more. A renamed file is one deleted and one added.
    pub deleted: Vec<ChangedPath>,
    /// How many there are, also of those that are not listed.
    pub counts: ChangeCounts,
    /// Sizes, also of those that are not listed.
    pub bytes: ChangeBytes,
    /// A list was cut at `limit`.
    pub truncated: bool,
    /// Why some changes may not even be counted: a sentence. Absent when everything was looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<String>,
    /// What to know about this answer: a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// What a sandbox began with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ForkPoint {
    /// What it is.
    pub kind: ForkPointKind,
    /// Of the parent sandbox, of the snapshot, or the template's name.
    pub id: String,
    /// When that disk was as it is compared with.
    pub at: String,
}

/// What a sandbox was made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ForkPointKind {
    /// A fork of a sandbox.
    Fork,
    /// A snapshot.
    Snapshot,
    /// A template.
    Template,
}

/// One path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ChangedPath {
    /// From the root. What the guest named it: bytes that are not UTF-8 are U+FFFD, everything else is as it is.
    #[schema(example = "/root/app.py")]
    pub path: String,
    /// What it is; of something deleted, what it was.
    #[serde(rename = "type")]
    pub kind: ChangedKind,
    /// Bytes, as it is; of something deleted, as it was. 0 for what is neither file nor link.
    pub size: u64,
    /// Of a modified one: bytes at the fork point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_before: Option<u64>,
    /// Permissions in octal digits.
    #[schema(example = "0644")]
    pub mode: String,
    /// Of a modified one: what of it is not as it was.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changed: Vec<ChangedAspect>,
}

/// What a path leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChangedKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link; its size is that of its target's name.
    Symlink,
    /// A named pipe.
    Fifo,
    /// The name of a socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

/// What is not as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChangedAspect {
    /// A file's bytes.
    Content,
    /// It is another kind of thing.
    Type,
    /// Permissions.
    Mode,
    /// User or group.
    Owner,
    /// Where a symbolic link leads.
    Target,
    /// A device's numbers.
    Device,
    /// Extended attributes, ACLs among them.
    Attributes,
}

/// Numbers of paths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ChangeCounts {
    /// In the sandbox only.
    pub added: u64,
    /// Not the same.
    pub modified: u64,
    /// At the fork point only.
    pub deleted: u64,
    /// Differences that are in no list, since they are older than the sandbox by its guest's clock: what its parent had not
    /// written to its disk yet when it was forked.
    pub earlier: u64,
}

/// Bytes of files and links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ChangeBytes {
    /// Of those that were added.
    pub added: u64,
    /// Of those that were modified, as they are.
    pub modified: u64,
    /// Of those that were deleted, as they were.
    pub deleted: u64,
}
