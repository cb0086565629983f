//! What a call can fail with.

use std::time::Duration;

/// Any failure of a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The server's address is not one.
    #[error("{url:?} is not an HTTP address: {reason}")]
    BaseUrl {
        /// As given.
        url: String,
        /// Why not.
        reason: String,
    },
    /// The server's address asks for TLS.
    #[error("{url} asks for TLS, which this client does not have built in")]
    NoTls {
        /// As given.
        url: String,
    },
    /// The token can't be sent in a header.
    #[error("the API key holds characters that an HTTP header can't carry")]
    BadToken,
    /// The HTTP client could not be made.
    #[error("could not set up the HTTP client")]
    Setup(#[source] reqwest::Error),
    /// The server could not be reached, or the connection broke. Whether the server acted is unknown.
    #[error("could not {action}: no answer from {server}")]
    Transport {
        /// What was asked for, e.g. `create the sandbox`.
        action: &'static str,
        /// Scheme, host and port.
        server: String,
        /// What happened.
        #[source]
        source: reqwest::Error,
    },
    /// The server refused.
    #[error("{0}")]
    Api(Box<ApiError>),
    /// The server's answer is not what it should be.
    #[error("could not {action}: the answer of the server can't be understood: {reason}")]
    Decode {
        /// What was asked for.
        action: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A command's stream reported that it can't go on.
    #[error("{message}")]
    Exec {
        /// The server's sentence.
        message: String,
        /// The command ran into its deadline and was killed.
        timed_out: bool,
    },
    /// A command's stream ended without its exit code.
    #[error("the command's output ended before its exit code came; whether it finished is unknown")]
    Interrupted,
    /// What was to be uploaded could not be read.
    #[error("could not read what was to be sent")]
    Upload(#[source] std::io::Error),
}

impl ClientError {
    /// Stable, snake_case: the server's code, or one of this client's own.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::BaseUrl { .. } => "bad_api_address",
            Self::NoTls { .. } => "tls_not_supported",
            Self::BadToken => "bad_api_key",
            Self::Setup(_) => "client_setup",
            Self::Transport { .. } => "no_answer",
            Self::Api(error) => &error.code,
            Self::Decode { .. } => "bad_answer",
            Self::Exec { timed_out: true, .. } => "exec_timeout",
            Self::Exec { .. } => "exec_failed",
            Self::Interrupted => "exec_interrupted",
            Self::Upload(_) => "upload_failed",
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::BaseUrl { .. } => Some("give it like http://127.0.0.1:8080".into()),
            Self::NoTls { .. } => Some(
                "use the server's http:// address, directly, through an ssh tunnel or a local TLS-terminating proxy"
                    .into(),
            ),
            Self::BadToken => Some("copy the key again, without line ends".into()),
            Self::Transport { source, .. } if source.is_connect() => {
                Some("is the server running? Start it with `coppice up`, and check the API address".into())
            }
            Self::Api(error) => error.hint.clone(),
            _ => None,
        }
    }

    /// The HTTP status of the refusal, if it was one.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Api(error) => Some(error.status),
            _ => None,
        }
    }

    /// There is no such thing (any more).
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(404)
    }

    /// A deadline passed: the command's in the guest, or this client's for the answer.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::Exec { timed_out, .. } => *timed_out,
            Self::Api(error) => error.status == 504 || mentions_timeout(&error.message),
            Self::Transport { source, .. } => source.is_timeout(),
            _ => false,
        }
    }
}

/// Whether a sentence of the server's says that a deadline passed. The wire has no other mark for it in a stream.
pub(crate) fn mentions_timeout(message: &str) -> bool {
    let lower = message.to_ascii_lowercase();
    lower.contains("timeout") || lower.contains("timed out") || lower.contains("deadline exceeded")
}

/// A refusal of the server's.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// Stable, snake_case; `http_STATUS` where the server gave none.
    pub code: String,
    /// A sentence.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// When the server wants to be asked again.
    pub retry_after: Option<Duration>,
    /// The body was JSON with a sentence in it, as an answer of Coppice's own is (a proxy's mostly isn't).
    pub(crate) well_formed: bool,
}

impl From<ApiError> for ClientError {
    fn from(error: ApiError) -> Self {
        Self::Api(Box::new(error))
    }
}
