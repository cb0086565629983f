//! Running commands.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Body of `POST /v1/sandboxes/{id}/exec` and `…/exec/stream`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ExecRequest {
    /// Run by `/bin/sh -c` as root, in the home directory. Not empty.
    #[serde(default)]
    #[schema(example = "python3 -m pytest -q")]
    pub cmd: String,
    /// Seconds after which the command's process group is killed. Fractions are allowed. Default and maximum are the
    /// server's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// Environment on top of the sandbox's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Absolute working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User name or uid in the guest. Default root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Given to the command as its standard input, which is then closed. Absent: /dev/null.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
}

/// What a command did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ExecReply {
    /// Standard output; bytes that are not UTF-8 are U+FFFD.
    pub stdout: String,
    /// Standard error; bytes that are not UTF-8 are U+FFFD.
    pub stderr: String,
    /// Exit code, or 128 + signal.
    pub exit_code: i32,
    /// From start to exit in the guest.
    pub duration_ms: u64,
}

/// Data of the server-sent events `stdout` and `stderr`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct StreamChunk {
    /// Text; never split inside a UTF-8 sequence.
    pub chunk: String,
}

/// Data of the server-sent event `exit`, the last of a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct StreamExit {
    /// Exit code, or 128 + signal.
    pub exit_code: i32,
    /// From start to exit in the guest.
    pub duration_ms: u64,
}

/// Data of the server-sent event `error`, the last of a stream that broke.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct StreamError {
    /// A sentence; contains "timeout" when the command ran into its deadline.
    pub error: String,
}
