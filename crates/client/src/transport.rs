//! One HTTP exchange: address, token, deadline, and what is made of the answer. Knows no route.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use coppice_api::ErrorBody;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER};
use reqwest::{Method, RequestBuilder, Response, Url};
use serde::de::DeserializeOwned;

use crate::retry::{self, Refusal, RetryPolicy};
use crate::{ApiError, ClientError};

/// For a call that only looks something up.
pub(crate) const QUICK: Duration = Duration::from_secs(60);
/// For a call that starts machines: sixteen may cold-boot on a busy host.
pub(crate) const SLOW: Duration = Duration::from_secs(600);
/// Largest JSON answer that is read.
const MAX_JSON: usize = 64 << 20;
/// Largest error body that is read.
const MAX_ERROR: usize = 64 << 10;

/// A connection to one server with one token. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    base: Url,
    retry: RetryPolicy,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("base", &self.base.as_str()).field("retry", &self.retry).finish_non_exhaustive()
    }
}

impl Client {
    /// A client of the server at `base_url` (`http://host:port`, with or without `/v1`). Nothing is sent yet.
    pub fn new(base_url: &str, token: &str) -> Result<Self, ClientError> {
        let base = parse_base(base_url)?;
        let mut bearer = HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| ClientError::BadToken)?;
        bearer.set_sensitive(true);
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("coppice/", env!("CARGO_PKG_VERSION")))
            .default_headers(HeaderMap::from_iter([(AUTHORIZATION, bearer)]))
            .connect_timeout(Duration::from_secs(10))
            .tcp_keepalive(Duration::from_secs(15))
            .redirect(reqwest::redirect::Policy::none());
        if is_loopback(&base) {
            builder = builder.no_proxy();
        }
        Ok(Self { http: builder.build().map_err(ClientError::Setup)?, base, retry: RetryPolicy::default() })
    }

    /// The same, with another patience for create, fork and fork-tree.
    #[must_use]
    pub fn with_retry(mut self, retry: RetryPolicy) -> Self {
        self.retry = retry;
        self
    }

    /// Scheme, host, port and path prefix of the server.
    #[must_use]
    pub fn server(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// A request to `/v1/…`; each segment is escaped.
    pub(crate) fn v1(&self, method: Method, segments: &[&str]) -> RequestBuilder {
        let mut path = vec!["v1"];
        path.extend_from_slice(segments);
        self.request(method, &path)
    }

    /// A request to a path below the server's address.
    pub(crate) fn request(&self, method: Method, segments: &[&str]) -> RequestBuilder {
        let mut url = self.base.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        self.http.request(method, url)
    }

    /// Sends it, and gives the answer if it is a 2xx.
    pub(crate) async fn send(&self, action: &'static str, request: RequestBuilder) -> Result<Response, ClientError> {
        let response = request.send().await.map_err(|error| self.transport(action, error))?;
        if response.status().is_success() { Ok(response) } else { Err(self.refusal(response).await.into()) }
    }

    /// Sends it, and reads the answer as JSON.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        action: &'static str,
        request: RequestBuilder,
    ) -> Result<T, ClientError> {
        let response = self.send(action, request).await?;
        let body = self.body(action, response, MAX_JSON).await?;
        serde_json::from_slice(&body).map_err(|error| ClientError::Decode { action, reason: error.to_string() })
    }

    /// Sends it, and takes any 2xx for done.
    pub(crate) async fn done(&self, action: &'static str, request: RequestBuilder) -> Result<(), ClientError> {
        let response = self.send(action, request).await?;
        self.body(action, response, MAX_JSON).await.map(drop)
    }

    /// As [`Self::json`], but asked again while the server has no room and the budget lasts. Only for calls whose refusal
    /// means that nothing was made.
    pub(crate) async fn json_retrying<T: DeserializeOwned>(
        &self,
        action: &'static str,
        request: impl Fn() -> RequestBuilder,
    ) -> Result<T, ClientError> {
        let start = Instant::now();
        let mut attempt = 0_u32;
        loop {
            let error = match self.json(action, request()).await {
                Err(ClientError::Api(error)) => error,
                other => return other,
            };
            let count = usize::try_from(attempt).unwrap_or(usize::MAX);
            let Some(wait) = retry::wait(&error, count, self.retry.budget, start.elapsed(), fastrand::f64()) else {
                return Err(ClientError::Api(error));
            };
            attempt = attempt.saturating_add(1);
            tracing::info!(action, attempt, status = error.status, ?wait, "the server has no room; asking again");
            if let Some(tell) = &self.retry.on_wait {
                tell(&Refusal { action, attempt, error: *error, wait });
            }
            tokio::time::sleep(wait).await;
        }
    }

    /// The whole body, of at most `limit` bytes.
    pub(crate) async fn body(
        &self,
        action: &'static str,
        mut response: Response,
        limit: usize,
    ) -> Result<Bytes, ClientError> {
        let mut body = BytesMut::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.transport(action, error))? {
            if body.len().saturating_add(chunk.len()) > limit {
                return Err(ClientError::Decode { action, reason: format!("it is larger than {limit} bytes") });
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body.freeze())
    }

    pub(crate) fn transport(&self, action: &'static str, error: reqwest::Error) -> ClientError {
        ClientError::Transport { action, server: self.server().to_owned(), source: error.without_url() }
    }

    pub(crate) async fn refusal(&self, mut response: Response) -> ApiError {
        let status = response.status();
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        let retry_after = header(RETRY_AFTER).and_then(retry::parse_retry_after);
        let location = header(LOCATION).map(str::to_owned);
        let mut body = Vec::new();
        while let Ok(Some(chunk)) = response.chunk().await {
            body.extend_from_slice(&chunk);
            if body.len() > MAX_ERROR {
                body.truncate(MAX_ERROR);
                break;
            }
        }
        let fallback = ApiError {
            status: status.as_u16(),
            code: format!("http_{}", status.as_u16()),
            message: String::new(),
            hint: None,
            retry_after,
            well_formed: false,
        };
        if let Some(location) = location.filter(|_| status.is_redirection()) {
            return ApiError { message: format!("the server says that it is at {location}"), ..fallback };
        }
        match error_body(&body) {
            Some((message, code, hint)) => {
                ApiError { message, code: code.unwrap_or(fallback.code), hint, well_formed: true, ..fallback }
            }
            None => ApiError { message: plain_message(&body, status), ..fallback },
        }
    }
}

/// Sentence, code and hint of an error body, if it is one.
fn error_body(body: &[u8]) -> Option<(String, Option<String>, Option<String>)> {
    if let Ok(ErrorBody { error, code, hint }) = serde_json::from_slice(body)
        && !error.trim().is_empty()
    {
        return Some((error, Some(code), hint));
    }
    let value: serde_json::Value = serde_json::from_slice(body).ok()?;
    let message = value.get("error").and_then(serde_json::Value::as_str).filter(|text| !text.trim().is_empty())?;
    Some((message.to_owned(), None, None))
}

/// What a person is told when the body is no error body: its first line, if it is short text.
fn plain_message(body: &[u8], status: reqwest::StatusCode) -> String {
    let text = std::str::from_utf8(body).unwrap_or_default().trim();
    let line = text.lines().next().unwrap_or_default();
    let readable = !line.is_empty() && line.len() <= 300 && !line.starts_with('<') && !line.contains(char::is_control);
    if readable { format!("HTTP {status}: {line}") } else { format!("the server answered HTTP {status}") }
}

fn parse_base(text: &str) -> Result<Url, ClientError> {
    let bad = |reason: &str| ClientError::BaseUrl { url: text.to_owned(), reason: reason.to_owned() };
    let trimmed = text.trim().trim_end_matches('/');
    let trimmed = trimmed.strip_suffix("/v1").unwrap_or(trimmed).trim_end_matches('/');
    let url = Url::parse(trimmed).map_err(|error| bad(&error.to_string()))?;
    match url.scheme() {
        "http" => {}
        "https" => return Err(ClientError::NoTls { url: text.to_owned() }),
        _ => return Err(bad("it does not begin with http://")),
    }
    if url.host().is_none() {
        return Err(bad("it names no host"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(bad("it has a query or fragment"));
    }
    Ok(url)
}

/// A proxy of the environment's never leads to this machine.
fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_addresses_with_and_without_v1_are_the_same() {
        for base in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", " http://h:1 "] {
            assert_eq!(parse_base(base).unwrap().as_str(), "http://h:1/", "{base}");
        }
        let client = Client::new("http://h/base/v1/", "t").unwrap();
        let request = client.v1(Method::GET, &["sandboxes", "a/b c?"]).build().unwrap();
        assert_eq!(request.url().as_str(), "http://h/base/v1/sandboxes/a%2Fb%20c%3F");
    }

    #[test]
    fn addresses_that_are_none_say_why() {
        assert!(matches!(parse_base("https://h"), Err(ClientError::NoTls { .. })));
        for base in ["", "h:8080", "localhost:8080", "ftp://h", "http://", "http://h/?a=b", "nonsense"] {
            let error = parse_base(base).unwrap_err();
            assert!(matches!(error, ClientError::BaseUrl { .. }), "{base}: {error}");
            assert!(error.hint().is_some());
        }
        assert!(matches!(Client::new("http://h", "a\nb"), Err(ClientError::BadToken)));
    }

    #[test]
    fn loopback_is_recognized() {
        for (base, expected) in [
            ("http://127.0.0.1:1", true),
            ("http://localhost", true),
            ("http://[::1]:8080", true),
            ("http://10.0.0.1", false),
            ("http://localhost.example", false),
        ] {
            assert_eq!(is_loopback(&parse_base(base).unwrap()), expected, "{base}");
        }
    }

    #[test]
    fn error_bodies_of_other_shapes_still_say_something() {
        let status = reqwest::StatusCode::BAD_GATEWAY;
        assert_eq!(plain_message(b"<html>", status), "the server answered HTTP 502 Bad Gateway");
        assert_eq!(plain_message(b"upstream is gone\nmore", status), "HTTP 502 Bad Gateway: upstream is gone");
        assert_eq!(error_body(br#"{"error":"no"}"#), Some(("no".into(), None, None)));
        assert_eq!(error_body(br#"{"error":{"a":1}}"#), None);
        assert_eq!(error_body(br#"{"error":" "}"#), None);
    }
}
