//! Files in a sandbox.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, BodyDataStream};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use coppice_api::{DirEntry, DirListing, ErrorClass, WriteReply};
use coppice_host::{ByteStream, Coded};
use futures::StreamExt as _;
use http::StatusCode;
use http::header::CONTENT_TYPE;
use tokio::sync::Mutex;

use super::Answer;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::input::{Ignored, Params, PieceError, SandboxId, content_length, drain, next_piece};
use crate::openapi::{Changes, Looks, OfSandbox, Writes};
use crate::{Control, check};

/// Reads a file.
///
/// The body is the file's bytes, chunked. A file that can't be read to its end aborts the body.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs", tag = "files", params(OfSandbox,
        ("path" = String, Query, description = "Absolute path", example = "/etc/hostname")),
    responses((status = 200, description = "The file.", body = Vec<u8>,
        content_type = "application/octet-stream"), Looks))]
pub(crate) async fn read(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    params: Params,
) -> Answer<Response> {
    let path = check::path(params.get("path"))?;
    let mut body = control.host().read_file(caller.workspace(), &id, path).await?.body;
    // The first piece decides about the status: a directory, say, fails at its first read.
    let first = match body.next().await.transpose()? {
        Some(first) => futures::stream::iter([Ok(first)]),
        None => return Ok(bytes(Body::empty())),
    };
    let rest = body.map(|piece| {
        piece.map_err(|error| {
            tracing::error!(%error, "a file could not be read to its end");
            std::io::Error::other("the file could not be read to its end")
        })
    });
    Ok(bytes(Body::from_stream(first.chain(rest))))
}

fn bytes(body: Body) -> Response {
    ([(CONTENT_TYPE, "application/octet-stream")], body).into_response()
}

/// Writes a file, complete or not at all.
///
/// The body is the file's bytes, up to 1 GiB (the operator may set another limit); more is 413 and leaves the file as
/// it was. Parent directories are made, an existing file is replaced.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/fs", tag = "files", params(OfSandbox,
        ("path" = String, Query, description = "Absolute path", example = "/root/patch.diff")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "Written.", body = WriteReply), Writes))]
pub(crate) async fn write(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    params: Params,
    request: Request,
) -> Answer<Json<WriteReply>> {
    let limit = control.config().limits.upload;
    let (parts, body) = request.into_parts();
    let upload = Arc::new(Upload::new(body, limit, control.config().timing.upload_idle));
    let fits = content_length(&parts.headers).is_none_or(|length| length <= limit);
    let checked = if fits { check::path(params.get("path")) } else { Err(UploadError::TooLarge(limit).into()) };
    let path = match checked {
        Ok(path) => path,
        Err(error) => {
            upload.drain().await;
            return Err(error);
        }
    };
    match control.host().write_file(caller.workspace(), &id, path, Arc::clone(&upload).stream()).await {
        Ok(bytes) => Ok(Json(WriteReply { path: path.to_owned(), bytes })),
        Err(error) => match upload.failure().await {
            Some(cause) => Err(cause.into()),
            None => {
                upload.drain().await;
                Err(error.into())
            }
        },
    }
}

/// Why an upload was not taken to its end.
#[derive(Debug, Clone, Copy, thiserror::Error)]
enum UploadError {
    /// More bytes than the limit.
    #[error("the file is larger than {0} bytes, which is the most that one request may write")]
    TooLarge(u64),
    /// The client went away.
    #[error("the file's bytes ended early")]
    Broken,
    /// The client sent nothing for too long.
    #[error("the file's bytes stopped arriving")]
    Silent,
}

impl Coded for UploadError {
    fn code(&self) -> &'static str {
        match self {
            Self::TooLarge(_) => "file_too_large",
            Self::Broken => "body_broken",
            Self::Silent => "request_timeout",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::TooLarge(_) => ErrorClass::TooLarge,
            Self::Broken | Self::Silent => ErrorClass::Caller,
        }
    }
}

impl From<UploadError> for ApiError {
    fn from(error: UploadError) -> Self {
        match error {
            UploadError::Silent => Self::request_timeout(),
            other => Self::new(other.class(), other.code(), other.to_string()),
        }
    }
}

/// A body on its way into a file, which remembers how it failed: what the host makes of that is its own.
struct Upload {
    state: Mutex<UploadState>,
    limit: u64,
    idle: Duration,
}

struct UploadState {
    body: BodyDataStream,
    taken: u64,
    failure: Option<UploadError>,
}

impl Upload {
    fn new(body: Body, limit: u64, idle: Duration) -> Self {
        let state = UploadState { body: body.into_data_stream(), taken: 0, failure: None };
        Self { state: Mutex::new(state), limit, idle }
    }

    fn stream(self: Arc<Self>) -> ByteStream {
        futures::stream::unfold(self, |upload| async move {
            let piece = upload.next().await?;
            Some((piece.map_err(Into::into), upload))
        })
        .boxed()
    }

    async fn next(&self) -> Option<Result<Bytes, UploadError>> {
        let mut state = self.state.lock().await;
        if state.failure.is_some() {
            return None;
        }
        let error = match next_piece(&mut state.body, self.idle).await? {
            Ok(bytes) => {
                state.taken = state.taken.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
                if state.taken <= self.limit {
                    return Some(Ok(bytes));
                }
                drain(&mut state.body).await;
                UploadError::TooLarge(self.limit)
            }
            Err(PieceError::Broken) => UploadError::Broken,
            Err(PieceError::Silent) => UploadError::Silent,
        };
        state.failure = Some(error);
        Some(Err(error))
    }

    async fn failure(&self) -> Option<UploadError> {
        self.state.lock().await.failure
    }

    async fn drain(&self) {
        drain(&mut self.state.lock().await.body).await;
    }
}

/// Removes a file or a directory with all that is in it.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/fs", tag = "files", params(OfSandbox,
        ("path" = String, Query, description = "Absolute path; not the root", example = "/tmp/build")),
    responses((status = 204, description = "Gone."), Changes))]
pub(crate) async fn remove(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    params: Params,
    _: Ignored,
) -> Answer<StatusCode> {
    control.host().remove(caller.workspace(), &id, check::removable(params.get("path"))?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists a directory.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/dir", tag = "files", params(OfSandbox,
        ("path" = Option<String>, Query, description = "Absolute path; default `/`", example = "/root")),
    responses((status = 200, description = "Its entries, by name.", body = DirListing), Looks))]
pub(crate) async fn dir(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    params: Params,
) -> Answer<Json<DirListing>> {
    let path = check::path(Some(params.get("path").unwrap_or("/")))?;
    let entries = control.host().list_dir(caller.workspace(), &id, path).await?;
    Ok(Json(DirListing { path: path.to_owned(), entries }))
}

/// What a path is. Does not follow a symbolic link at its end.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/stat", tag = "files", params(OfSandbox,
        ("path" = String, Query, description = "Absolute path", example = "/root")),
    responses((status = 200, description = "The entry.", body = DirEntry), Looks))]
pub(crate) async fn stat(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    params: Params,
) -> Answer<Json<DirEntry>> {
    let path = check::path(params.get("path"))?;
    Ok(Json(control.host().stat(caller.workspace(), &id, path).await?))
}
