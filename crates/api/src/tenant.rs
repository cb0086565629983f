//! Workspaces, their tokens and quotas, and the log of what was done with them.

use serde::{Deserialize, Serialize};

/// What a token may do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Everything in its own workspace.
    #[default]
    Member,
    /// That, and what concerns the whole server: workspaces, their quotas and tokens, global templates, the audit log.
    Admin,
}

impl Role {
    /// As it is on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Member => "member",
            Self::Admin => "admin",
        }
    }
}

/// A token, as it is listed: never the token itself, only its first characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Token {
    /// The first 12 characters. They name it, and let nobody in.
    #[schema(example = "pds_0f8fad5b")]
    pub prefix: String,
    /// What it is for.
    pub label: String,
    /// What it may do.
    pub role: Role,
    /// What it sees.
    pub workspace: String,
    /// RFC 3339.
    pub created_at: String,
    /// RFC 3339; absent: it lasts until it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    /// RFC 3339, to the minute; absent: never used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_at: Option<String>,
}

/// Answer of the calls that make a token: the only time that it can be seen.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CreatedToken {
    /// `pds_` and 32 hex digits.
    #[schema(example = "pds_0f8fad5bd9cb469fa16570867728950e")]
    pub token: String,
    /// What lists show of it.
    #[serde(flatten)]
    pub info: Token,
}

impl std::fmt::Debug for CreatedToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreatedToken").field("info", &self.info).finish_non_exhaustive()
    }
}

/// Body of the calls that make a token.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CreateTokenRequest {
    /// What it is for; at most 100 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Another name of `label`, which some clients send.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Default `member`. Only an admin makes admins.
    #[serde(default)]
    pub role: Role,
    /// Days until it expires; absent: it lasts until it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_days: Option<i64>,
    /// The same in seconds. At most one of the two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_seconds: Option<i64>,
}

/// What a workspace may have at most. What is absent is limited by the host only.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Quota {
    /// Sandboxes, whatever they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandboxes: Option<u64>,
    /// Guest memory of its sandboxes together, MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Children of one fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fan_out: Option<u64>,
    /// Snapshots that it keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<u64>,
    /// What its sandboxes and snapshots may come to fill on disk, MiB: the size of each sandbox's disk, and of each
    /// snapshot's disk and memory. What they share is counted for each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_mb: Option<u64>,
}

/// What a workspace has, in the units of [`Quota`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Usage {
    /// Sandboxes.
    pub sandboxes: u64,
    /// Their guest memory, MiB.
    pub memory_mb: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// What both may come to fill, MiB.
    pub disk_mb: u64,
}

/// A tenant: sandboxes, snapshots and tokens that no other tenant sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Workspace {
    /// `[a-z0-9][a-z0-9-]{0,62}`. No name has a special power.
    pub name: String,
    /// RFC 3339.
    pub created_at: String,
    /// What it may have.
    pub quota: Quota,
    /// What it has.
    pub usage: Usage,
    /// Tokens that are not revoked, expired ones included.
    pub tokens: u64,
}

/// One change that somebody asked for, done or refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct AuditEntry {
    /// Grows with time; for `before`.
    pub id: i64,
    /// When it was answered, RFC 3339.
    pub at: String,
    /// Whose token it was.
    pub workspace: String,
    /// The token's prefix; empty when the server asks for no tokens.
    pub token: String,
    /// HTTP method.
    pub method: String,
    /// The route, with names in braces.
    #[schema(example = "/v1/sandboxes/{id}/exec")]
    pub route: String,
    /// What was named or made; empty for neither.
    pub resource: String,
    /// HTTP status; 499: the client hung up before it was answered.
    pub status: u16,
    /// `x-request-id` of the answer.
    pub request_id: String,
}

/// Whether this can be a workspace's name: `[a-z0-9][a-z0-9-]{0,62}`.
#[must_use]
pub fn is_workspace_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    (1..=63).contains(&name.len())
        && name.bytes().all(|b| plain(b) || b == b'-')
        && name.bytes().next().is_some_and(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_workspaces_are_plain() {
        for good in ["a", "0", "default", "team-7", "a-", &"x".repeat(63)] {
            assert!(is_workspace_name(good), "{good}");
        }
        for bad in ["", "-a", "A", "a_b", "a.b", "a/b", "..", "é", "a b", "a\n", &"x".repeat(64)] {
            assert!(!is_workspace_name(bad), "{bad}");
        }
    }

    #[test]
    fn a_quota_with_a_mistyped_limit_is_not_unlimited() {
        assert!(serde_json::from_str::<Quota>(r#"{"sandbox":1}"#).is_err());
    }

    #[test]
    fn a_created_token_is_not_in_debug_output() {
        let text =
            r#"{"token":"pds_secret","prefix":"p","label":"l","role":"member","workspace":"w","created_at":"c"}"#;
        let token: CreatedToken = serde_json::from_str(text).unwrap();
        assert!(!format!("{token:?}").contains("pds_secret"));
    }
}
