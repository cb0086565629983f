//! Errors on the wire: `{"error":"sentence","code":"stable_snake_case"}`, and the class that decides the HTTP status.

use serde::{Deserialize, Serialize};

/// Body of every error response. `error` is always a non-empty string: published clients show an object as a Python
/// dict, and stop retrying.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ErrorBody {
    /// A sentence for people.
    #[schema(example = "sandbox 6f0c… not found")]
    pub error: String,
    /// Stable, for programs.
    #[schema(example = "sandbox_not_found")]
    pub code: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// What kind of failure an error is. Each error has exactly one; one function maps it to a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// The request is wrong; the same request will fail again. 400.
    Caller,
    /// No valid token. 401.
    Unauthorized,
    /// Known, but not allowed. 403.
    Forbidden,
    /// No such thing, or not the caller's. 404.
    NotFound,
    /// Right request, wrong moment: the thing is in another state. 409.
    Conflict,
    /// Larger than a limit. 413.
    TooLarge,
    /// The host has no room. **Means that nothing was made.** 507.
    Capacity,
    /// Busy for now. **Means that nothing was made.** 503 with Retry-After.
    Transient,
    /// It can't be used at the moment, and is as it was; a client should not try again by itself. 503 without Retry-After.
    Unavailable,
    /// A limit of the caller's own, which waiting doesn't lift. 429 without Retry-After.
    Quota,
    /// Too many requests in a moment; nothing was made. 429 with Retry-After.
    RateLimited,
    /// A deadline passed in the guest. 504; the sentence contains "timeout", which clients look for.
    Timeout,
    /// What listens in the guest, or nothing that does, failed the request. 502.
    Upstream,
    /// Ours. 500.
    Internal,
}

impl ErrorClass {
    /// The HTTP status, and the Retry-After header in seconds.
    #[must_use]
    pub fn status(self) -> (u16, Option<u32>) {
        match self {
            Self::Caller => (400, None),
            Self::Unauthorized => (401, None),
            Self::Forbidden => (403, None),
            Self::NotFound => (404, None),
            Self::Conflict => (409, None),
            Self::TooLarge => (413, None),
            Self::Capacity => (507, None),
            Self::Transient => (503, Some(5)),
            Self::Unavailable => (503, None),
            Self::Quota => (429, None),
            Self::RateLimited => (429, Some(1)),
            Self::Timeout => (504, None),
            Self::Upstream => (502, None),
            Self::Internal => (500, None),
        }
    }
}
