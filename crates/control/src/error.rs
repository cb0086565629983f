//! Errors as HTTP responses: `{"error":"sentence","code":"stable_snake_case","hint"?}`.
//!
//! The status comes from [`ErrorClass::status`] alone, but for two that are HTTP's own business (405, 408).
//! What the words of a 5xx make published clients do is handled here, and only here: see [`scrub`].

use std::borrow::Cow;

use axum::response::{IntoResponse, Response};
use coppice_api::{ErrorBody, ErrorClass};
use coppice_host::HostError;
use http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};

use crate::json;
use crate::tokens::TokenError;

/// An error on its way to the client.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    status: StatusCode,
    retry_after: Option<u32>,
    code: Cow<'static, str>,
    message: String,
    hint: Option<String>,
}

impl ApiError {
    /// An error of a class, with the sentence made safe for clients.
    pub(crate) fn new(class: ErrorClass, code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        let (status, retry_after) = class.status();
        let (code, mut message) = (code.into(), message.into());
        if message.trim().is_empty() {
            message = code.to_string();
        }
        // A Transient error means that nothing was started, so a client may send the request again.
        if status >= 500 && class != ErrorClass::Transient {
            message = scrub(&message);
        }
        if class == ErrorClass::Timeout && !message.to_ascii_lowercase().contains("timeout") {
            message = format!("timeout: {message}");
        }
        Self {
            status: StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            retry_after,
            code,
            message,
            hint: None,
        }
    }

    /// The same with what to do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// A mistake in the request. 400.
    pub(crate) fn invalid(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Caller, code, message)
    }

    /// No such sandbox, snapshot, template, token or workspace. 404.
    pub(crate) fn not_found(what: &'static str, id: &str) -> Self {
        let id: String = id.chars().take(80).collect();
        Self::new(ErrorClass::NotFound, format!("{what}_not_found"), format!("{what} {id} not found"))
    }

    /// No valid token. 401.
    pub(crate) fn unauthorized(message: &'static str) -> Self {
        Self::new(ErrorClass::Unauthorized, "unauthorized", message).hint(
            "send `Authorization: Bearer pds_...`; the server wrote a token to credentials.env in its data directory",
        )
    }

    /// The server was started without auth, so there are no tokens and workspaces. 409.
    pub(crate) fn no_tokens() -> Self {
        Self::new(ErrorClass::Conflict, "auth_is_off", "this server asks for no tokens, and so has no workspaces")
            .hint("start it without --no-auth")
    }

    /// No such route. 404.
    pub(crate) fn route_not_found(path: &str) -> Self {
        let shown: String = path.chars().take(200).collect();
        let error = Self::new(ErrorClass::NotFound, "route_not_found", format!("no route {shown}"));
        if path.len() > 1 && path.ends_with('/') { error.hint("leave out the slash at the end") } else { error }
    }

    /// The path exists with other methods. 405.
    pub(crate) fn method_not_allowed(method: &str, path: &str) -> Self {
        let message = format!("{method} is not a method of {path}");
        Self { status: StatusCode::METHOD_NOT_ALLOWED, ..Self::invalid("method_not_allowed", message) }
    }

    /// The client stopped sending its request. 408.
    pub(crate) fn request_timeout() -> Self {
        let message = "the request's body stopped arriving";
        Self { status: StatusCode::REQUEST_TIMEOUT, ..Self::invalid("request_timeout", message) }
    }

    /// The connection must go on with another protocol. 426.
    pub(crate) fn upgrade_required(message: &'static str) -> Self {
        Self { status: StatusCode::UPGRADE_REQUIRED, ..Self::invalid("upgrade_required", message) }
    }

    /// The same, for those who asked for a page of a sandbox and not for the sandbox. 503.
    pub(crate) fn unavailable(self) -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, ..self }
    }

    /// Stable, snake_case.
    pub(crate) fn code(&self) -> &str {
        &self.code
    }

    /// The sentence.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

impl From<HostError> for ApiError {
    fn from(error: HostError) -> Self {
        let api = Self::new(error.class(), error.code(), error.chain());
        match error.hint() {
            Some(hint) => api.hint(hint),
            None => api,
        }
    }
}

impl From<TokenError> for ApiError {
    fn from(error: TokenError) -> Self {
        tracing::error!(error = &error as &dyn std::error::Error, "the database of tokens failed");
        Self::new(ErrorClass::Internal, "token_database", "the database of tokens and workspaces failed")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error() {
            tracing::error!(code = %self.code, status = self.status.as_u16(), error = %self.message, "request failed");
        }
        let body = ErrorBody { error: self.message, code: self.code.into_owned(), hint: self.hint };
        let bytes = json::ascii(&body).unwrap_or_else(|_| br#"{"error":"internal error","code":"internal"}"#.to_vec());
        let mut response = (self.status, bytes).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Words by which published clients decide that a guest is still warming up and send the request **again** (for 20 s),
/// and what to say in their place when the first request may have done something.
const WARM_UP_WORDS: [(&str, &str); 3] = [
    ("connect: connection refused", "connecting was refused"),
    ("no route to host", "host not reachable"),
    ("i/o timeout", "input/output timeout"),
];

/// The sentence without the words that make a client repeat a command. Letter case does not save a word.
pub(crate) fn scrub(message: &str) -> String {
    let mut text = message.to_owned();
    for (word, instead) in WARM_UP_WORDS {
        while let Some(at) = text.to_ascii_lowercase().find(word) {
            text.replace_range(at..at + word.len(), instead);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_words_are_replaced() {
        let text = scrub("dial: I/O Timeout; connect: Connection refused; no route to host; no route to host");
        let lower = text.to_ascii_lowercase();
        for (word, _) in WARM_UP_WORDS {
            assert!(!lower.contains(word), "{text}");
        }
        assert!(lower.contains("timeout"));
    }

    #[test]
    fn classes_keep_their_promises() {
        assert!(ApiError::new(ErrorClass::Timeout, "x", "took too long").message().contains("timeout"));
        assert_eq!(ApiError::new(ErrorClass::Transient, "x", "no route to host").message(), "no route to host");
        assert_eq!(ApiError::new(ErrorClass::Internal, "some_code", "  ").message(), "some_code");
    }
}
