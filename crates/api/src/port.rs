//! Ports of a sandbox, and links to them.

use serde::{Deserialize, Serialize};

/// Longest life of a preview link, seconds: 7 days.
pub const MAX_PREVIEW_TTL_SECONDS: i64 = 7 * 24 * 3600;

/// How a port came into the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PortSource {
    /// A client named it.
    User,
    /// Something listens there.
    Detected,
}

/// One TCP port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Port {
    /// Its number.
    pub port: u16,
    /// What the client called it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Whether something in the guest listens there now.
    pub listening: bool,
    /// What listens does so on a loopback address of the guest's only, where nothing outside the guest reaches it.
    #[serde(default)]
    pub loopback_only: bool,
    /// How it came into the list.
    pub source: PortSource,
    /// Its preview host needs no token.
    #[serde(default)]
    pub public: bool,
    /// Leads to it, for holders of a token.
    pub proxy_url: String,
    /// Its preview host, where the server has a suffix for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preview_url: Option<String>,
}

/// Body of `POST …/ports`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct OpenPortRequest {
    /// 1 to 65535, but not 22.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(required = true, nullable = false, minimum = 1, maximum = 65535)]
    pub port: Option<i64>,
    /// What to call it. Default `service`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Let everybody who knows the sandbox's id use its preview host without a token. Default false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public: Option<bool>,
}

/// Body of `POST …/preview` and `POST …/preview-token`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct PreviewRequest {
    /// 1 to 65535, but not 22.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(required = true, nullable = false, minimum = 1, maximum = 65535)]
    pub port: Option<i64>,
    /// How long the link is valid: 1 to 604800, default 3600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
    /// Paths that it leads to, with what is below them. Empty: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paths: Option<Vec<String>>,
}

/// A link that was just made. Its token can't be seen again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Preview {
    /// To list and revoke it by.
    pub id: String,
    /// Where it leads; needs no other token.
    pub url: String,
    /// The same on the port's preview host, where the server has a suffix for them: for pages that name their own files
    /// from the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_url: Option<String>,
    /// What is secret about it.
    pub token: String,
    /// The sandbox.
    pub sandbox_id: String,
    /// The port.
    pub port: u16,
    /// Paths that it leads to; empty: all.
    pub paths: Vec<String>,
    /// RFC 3339.
    pub expires_at: String,
}

/// A link that is still valid, without its token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct PreviewLink {
    /// To revoke it by.
    pub id: String,
    /// The sandbox.
    pub sandbox_id: String,
    /// The port.
    pub port: u16,
    /// Paths that it leads to; empty: all.
    pub paths: Vec<String>,
    /// RFC 3339.
    pub created_at: String,
    /// RFC 3339.
    pub expires_at: String,
}
