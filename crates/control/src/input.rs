//! Reading requests: bodies, queries, ids. Nothing here looks at `Content-Type`: published clients send JSON, nothing
//! at all, or nothing under `text/plain`, to the same routes.

use std::time::Duration;

use axum::body::BodyDataStream;
use axum::extract::{FromRequest, FromRequestParts, Path, RawPathParams, Request};
use bytes::{Bytes, BytesMut};
use coppice_api::ErrorClass;
use futures::StreamExt as _;
use http::header::CONTENT_LENGTH;
use http::request::Parts;
use http::{HeaderMap, Uri};
use percent_encoding::percent_decode;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Instant, timeout, timeout_at};
use uuid::Uuid;

use crate::Control;
use crate::error::ApiError;

/// How much of a body that is too large is read and thrown away, and for how long, so that a client which sends before
/// it reads gets the answer and not a reset connection.
const DRAIN_BYTES: u64 = 64 << 20;
const DRAIN_TIME: Duration = Duration::from_secs(10);

/// A JSON body. Empty, blank and `null` are the defaults; members that are `null` count as absent.
#[derive(Debug)]
pub(crate) struct Input<T>(pub(crate) T);

impl<T: DeserializeOwned + Default> FromRequest<Control> for Input<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, control: &Control) -> Result<Self, ApiError> {
        parse(&read(request, control).await?).map(Self)
    }
}

/// A body that has no meaning, read so that the connection can go on.
#[derive(Debug)]
pub(crate) struct Ignored;

impl FromRequest<Control> for Ignored {
    type Rejection = ApiError;

    async fn from_request(request: Request, control: &Control) -> Result<Self, ApiError> {
        read(request, control).await.map(|_| Self)
    }
}

async fn read(request: Request, control: &Control) -> Result<Bytes, ApiError> {
    let config = control.config();
    let limit = config.limits.json_body;
    let (parts, body) = request.into_parts();
    let mut stream = body.into_data_stream();
    let deadline = Instant::now() + config.timing.body_read;
    let mut bytes = BytesMut::new();
    let mut fits = content_length(&parts.headers).is_none_or(|length| length <= limit);
    while fits {
        match timeout_at(deadline, stream.next()).await {
            Ok(None) => return Ok(bytes.freeze()),
            Ok(Some(Ok(chunk))) => {
                bytes.extend_from_slice(&chunk);
                fits = u64::try_from(bytes.len()).is_ok_and(|length| length <= limit);
            }
            Ok(Some(Err(_))) => return Err(ApiError::invalid("body_broken", "the request's body ended early")),
            Err(_) => return Err(ApiError::request_timeout()),
        }
    }
    drain(&mut stream).await;
    let message = format!("the body is larger than {limit} bytes");
    Err(ApiError::new(ErrorClass::TooLarge, "body_too_large", message))
}

/// What the client says that its body's length is.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// Reads on to the end of a body that was refused, within limits.
pub(crate) async fn drain(stream: &mut BodyDataStream) {
    let deadline = Instant::now() + DRAIN_TIME;
    let mut rest = DRAIN_BYTES;
    while let Ok(Some(Ok(chunk))) = timeout_at(deadline, stream.next()).await {
        match rest.checked_sub(u64::try_from(chunk.len()).unwrap_or(u64::MAX)) {
            Some(left) => rest = left,
            None => return,
        }
    }
}

/// The next piece of a body that must not fall silent for longer than `idle`.
pub(crate) async fn next_piece(stream: &mut BodyDataStream, idle: Duration) -> Option<Result<Bytes, PieceError>> {
    match timeout(idle, stream.next()).await {
        Ok(None) => None,
        Ok(Some(Ok(bytes))) => Some(Ok(bytes)),
        Ok(Some(Err(_))) => Some(Err(PieceError::Broken)),
        Err(_) => Some(Err(PieceError::Silent)),
    }
}

/// Why the next piece of a body did not come.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PieceError {
    /// The connection ended.
    Broken,
    /// Nothing came for too long.
    Silent,
}

fn parse<T: DeserializeOwned + Default>(bytes: &[u8]) -> Result<T, ApiError> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|error| ApiError::invalid("invalid_json", format!("the body is not valid JSON: {error}")))?;
    let mut members = match value {
        Value::Null => return Ok(T::default()),
        Value::Object(members) => members,
        _ => return Err(ApiError::invalid("invalid_json", "the body must be a JSON object")),
    };
    members.retain(|_, value| !value.is_null());
    serde_path_to_error::deserialize(Value::Object(members)).map_err(|error| {
        let what = plain(&error.inner().to_string());
        match error.path().to_string().as_str() {
            "." => ApiError::invalid("invalid_field", what),
            path => ApiError::invalid("invalid_field", format!("`{path}`: {what}")),
        }
    })
}

/// A message of serde's in words of JSON, not of Rust.
fn plain(message: &str) -> String {
    let mut text = message.to_owned();
    for (rust, json) in [
        ("expected i64", "expected an integer"),
        ("expected u64", "expected an integer that is not negative"),
        ("expected f64", "expected a number"),
        ("expected a sequence", "expected a list"),
    ] {
        text = text.replace(rust, json);
    }
    // A value of the client's may be as large as its body.
    if text.len() > 300 { format!("{}...", text.chars().take(300).collect::<String>()) } else { text }
}

/// The `{id}` (or `{name}`) of a path, whatever it looks like.
#[derive(Debug)]
pub(crate) struct Segment(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(text)) => Ok(Self(text)),
            Err(_) => Err(ApiError::route_not_found(parts.uri.path())),
        }
    }
}

/// The id of a sandbox, as a lowercase UUID. Anything else is a sandbox that does not exist: 404.
#[derive(Debug)]
pub(crate) struct SandboxId(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for SandboxId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Segment(text) = Segment::from_request_parts(parts, state).await?;
        uuid(&text).map(Self).ok_or_else(|| ApiError::not_found("sandbox", &text))
    }
}

/// The id of a snapshot; see [`SandboxId`].
#[derive(Debug)]
pub(crate) struct SnapshotId(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for SnapshotId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Segment(text) = Segment::from_request_parts(parts, state).await?;
        uuid(&text).map(Self).ok_or_else(|| ApiError::not_found("snapshot", &text))
    }
}

/// A sandbox, and one of its TCP ports.
#[derive(Debug)]
pub(crate) struct SandboxPort {
    pub(crate) id: String,
    pub(crate) port: u16,
}

impl<S: Send + Sync> FromRequestParts<S> for SandboxPort {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let [id, port] = segments(parts, state, ["id", "port"]).await?;
        let id = uuid(&id).ok_or_else(|| ApiError::not_found("sandbox", &id))?;
        let digits = port.bytes().all(|b| b.is_ascii_digit());
        match port.parse() {
            Ok(port) if digits && port != 0 => Ok(Self { id, port }),
            _ => Err(ApiError::invalid("invalid_port", "the port in the path must be 1 to 65535")),
        }
    }
}

/// A sandbox, and a port that is served by HTTP.
#[derive(Debug)]
pub(crate) struct HttpPort {
    pub(crate) id: String,
    pub(crate) port: u16,
}

impl<S: Send + Sync> FromRequestParts<S> for HttpPort {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let SandboxPort { id, port } = SandboxPort::from_request_parts(parts, state).await?;
        Ok(Self { id, port: crate::ingress::port(Some(port.into()))? })
    }
}

/// A sandbox, and the id of a link to it, whatever it looks like.
#[derive(Debug)]
pub(crate) struct SandboxLink {
    pub(crate) id: String,
    pub(crate) link: String,
}

impl<S: Send + Sync> FromRequestParts<S> for SandboxLink {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let [id, link] = segments(parts, state, ["id", "link"]).await?;
        Ok(Self { id: uuid(&id).ok_or_else(|| ApiError::not_found("sandbox", &id))?, link })
    }
}

/// The token of a link, whatever it looks like. One that is no text is no token.
#[derive(Debug)]
pub(crate) struct LinkToken(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for LinkToken {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let [token] = segments(parts, state, ["token"]).await.unwrap_or_default();
        Ok(Self(token))
    }
}

/// Parameters of a path by name, decoded.
async fn segments<S: Send + Sync, const N: usize>(
    parts: &mut Parts,
    state: &S,
    names: [&str; N],
) -> Result<[String; N], ApiError> {
    let params = RawPathParams::from_request_parts(parts, state).await;
    let params = params.map_err(|_| ApiError::route_not_found(parts.uri.path()))?;
    let find = |wanted| params.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value.to_owned());
    Ok(names.map(|name| find(name).unwrap_or_default()))
}

/// The first segments of a path, and the rest of it with the query, exactly as they came. The rest begins with a slash.
pub(crate) fn split_path(uri: &Uri, segments: usize) -> (String, String) {
    let path = uri.path();
    let at = path.match_indices('/').nth(segments).map_or(path.len(), |(at, _)| at);
    let (prefix, rest) = path.split_at_checked(at).unwrap_or((path, ""));
    let rest = if rest.is_empty() { "/" } else { rest };
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    (prefix.to_owned(), format!("{rest}{query}"))
}

/// A UUID written with hyphens, in lower case.
pub(crate) fn uuid(text: &str) -> Option<String> {
    if text.len() != 36 {
        return None;
    }
    Uuid::try_parse(text).ok().map(|id| id.hyphenated().to_string())
}

/// The query string, decoded as a form: `+` is a space. The first of two equal names counts.
#[derive(Debug)]
pub(crate) struct Params(Vec<(String, String)>);

impl Params {
    /// The value of a name.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn parse(query: &str) -> Result<Self, ApiError> {
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let decoded = pairs.map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Some((decode(key)?, decode(value)?))
        });
        match decoded.collect::<Option<Vec<_>>>() {
            Some(pairs) => Ok(Self(pairs)),
            None => Err(ApiError::invalid("invalid_query", "the query string is not UTF-8")),
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Params {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Self::parse(parts.uri.query().unwrap_or_default())
    }
}

/// Strictly: bytes that are no UTF-8 would otherwise name another file than the one that was meant.
fn decode(text: &str) -> Option<String> {
    let spaced = text.replace('+', " ");
    percent_decode(spaced.as_bytes()).decode_utf8().ok().map(std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use coppice_api::{CreateSandboxRequest, ExecRequest, ForkRequest};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn empty_and_null_are_defaults() {
        for body in ["", " \r\n", "null", "{}", r#"{"mode":null,"count":null,"metadata":null}"#] {
            assert_eq!(parse::<ForkRequest>(body.as_bytes()).unwrap(), ForkRequest::default(), "{body}");
        }
        assert!(parse::<ExecRequest>(br#"{"cmd":"x","env":null,"stdin":null}"#).is_ok());
    }

    #[test]
    fn mistakes_are_named() {
        let error = |body: &str| parse::<CreateSandboxRequest>(body.as_bytes()).unwrap_err().message().to_owned();
        assert!(error("{").starts_with("the body is not valid JSON: "));
        assert_eq!(error("[1]"), "the body must be a JSON object");
        assert_eq!(error(r#"{"ttl_seconds":"x"}"#), "`ttl_seconds`: invalid type: string \"x\", expected an integer");
        assert!(error(r#"{"metadata":{"a":1}}"#).starts_with("`metadata.a`: invalid type: integer `1`"));
        assert!(error(r#"{"ttl_seconds":1.5}"#).contains("1.5"));
        assert!(error(&format!(r#"{{"ttl_seconds":"{}"}}"#, "x".repeat(5000))).len() < 400);
    }

    #[test]
    fn queries_are_forms() {
        let params = Params::parse("path=%2Ftmp%2Fa+b%26%C3%A9&x&=y&path=z").unwrap();
        assert_eq!(params.get("path"), Some("/tmp/a b&é"));
        assert_eq!(params.get("x"), Some(""));
        assert_eq!(params.get("nope"), None);
        assert!(Params::parse("path=%ff").is_err());
    }

    #[test]
    fn paths_are_split_as_they_came() {
        let split = |text: &str| split_path(&text.parse().unwrap(), 3);
        let both = |prefix: &str, rest: &str| (prefix.to_owned(), rest.to_owned());
        assert_eq!(split("/v1/p/t"), both("/v1/p/t", "/"));
        assert_eq!(split("/v1/p/t/"), both("/v1/p/t", "/"));
        assert_eq!(split("/v1/p/t?x=%2F"), both("/v1/p/t", "/?x=%2F"));
        assert_eq!(split("/v1/p/t//a/../%2e?"), both("/v1/p/t", "//a/../%2e?"));
    }

    #[test]
    fn ids_are_hyphenated_uuids() {
        let id = "0f8fad5b-d9cb-469f-a165-70867728950e";
        assert_eq!(uuid(&id.to_uppercase()).as_deref(), Some(id));
        for bad in
            ["", "nope", "0f8fad5bd9cb469fa16570867728950e", "{0f8fad5b-d9cb-469f-a165-70867728950}", "../../etc"]
        {
            assert_eq!(uuid(bad), None);
        }
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), query in any::<String>()) {
            let _parsed = parse::<ForkRequest>(&bytes);
            let _params = Params::parse(&query);
        }
    }
}
