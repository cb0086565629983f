//! Running commands.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use coppice_api::{ExecReply, ExecRequest};
use coppice_host::ExecSpec;
use http::header::CONTENT_TYPE;

use super::Answer;
use crate::auth::Caller;
use crate::exec::{Bounds, Follow, Outcome, collect, frames};
use crate::input::{Input, SandboxId};
use crate::openapi::{OfSandbox, Runs};
use crate::pad::{Padding, respond};
use crate::{Control, check, sse};

/// Runs a command and answers when it has ended.
///
/// A command that runs into its timeout is killed with its process group and answered with 504 and the words
/// `command timeout after 2s`. A client that hangs up kills its command.
///
/// **Slow commands.** After 20 s the response starts: status 200, then a space every 10 s, then the JSON (white space
/// before JSON is legal), so that clients which wait 30 s for the next byte don't give up. From then on a timeout is a
/// reply with `exit_code` 124, output so far, and `command timeout after Ns` as the last line of `stderr`; output
/// beyond the limit is `exit_code` 137 with the reason there; any other failure ends the body early, which clients
/// report as a broken connection.
///
/// Each of stdout and stderr may be 16 MiB; a command that writes more is killed: 413. `exec/stream` has no limit.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec", tag = "exec", params(OfSandbox),
    request_body(content = ExecRequest, example = json!({"cmd": "echo hello; exit 3", "timeout_seconds": 60})),
    responses((status = 200, description = "It ended. A command that fails is no error of the API.", body = ExecReply,
        example = json!({"stdout": "hello\n", "stderr": "", "exit_code": 3, "duration_ms": 12})), Runs))]
pub(crate) async fn exec(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    Input(request): Input<ExecRequest>,
) -> Answer<Response> {
    let timing = &control.config().timing;
    let spec = check::exec(request, timing)?;
    let padding = Padding { after: timing.pad_after, every: timing.pad_every };
    Ok(respond(run(control, caller, id, spec), padding, early, late).await)
}

async fn run(control: Control, caller: Caller, id: String, spec: ExecSpec) -> (Outcome, Instant) {
    let start = Instant::now();
    let bounds = Bounds { each: control.config().limits.exec_output, total: Arc::clone(control.output()) };
    let follow = follow(&control, &spec);
    let outcome = match control.host().exec(caller.workspace(), &id, spec).await {
        Ok(stream) => collect(stream, follow, bounds).await,
        Err(error) => Outcome::not_started(error),
    };
    (outcome, start)
}

fn early((outcome, _): (Outcome, Instant)) -> Response {
    match outcome.early() {
        Ok(json) => ([(CONTENT_TYPE, "application/json")], json).into_response(),
        Err(error) => error.into_response(),
    }
}

fn late((outcome, start): (Outcome, Instant)) -> Option<Bytes> {
    outcome.late(start.elapsed())
}

fn follow(control: &Control, spec: &ExecSpec) -> Follow {
    let timing = &control.config().timing;
    Follow {
        timeout: spec.timeout.unwrap_or(timing.exec_default),
        grace: timing.exec_grace,
        stop: control.stop().now.clone(),
    }
}

/// Runs a command and streams what it writes.
///
/// Server-sent events: `stdout` and `stderr` with `{"chunk":"..."}`, then `exit` with
/// `{"exit_code":0,"duration_ms":12}` as the last, or `error` with `{"error":"..."}` if the command ran into its
/// timeout (the sentence contains `timeout`) or its connection broke. Each event is one line of ASCII JSON; chunks are
/// never cut inside a character; bytes that are no UTF-8 are U+FFFD. A comment is sent every 15 s of silence. A client
/// that hangs up kills its command.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec/stream", tag = "exec", params(OfSandbox),
    request_body(content = ExecRequest, example = json!({"cmd": "make test", "timeout_seconds": 600})),
    responses((status = 200, description = "It started.", body = String, content_type = "text/event-stream",
        example = "event: stdout\ndata: {\"chunk\":\"hi\\n\"}\n\nevent: exit\ndata: {\"exit_code\":0,\"duration_ms\":12}\n\n"),
        Runs))]
pub(crate) async fn stream(
    State(control): State<Control>,
    caller: Caller,
    SandboxId(id): SandboxId,
    Input(request): Input<ExecRequest>,
) -> Answer<Response> {
    let spec = check::exec(request, &control.config().timing)?;
    let follow = follow(&control, &spec);
    let stream = control.host().exec(caller.workspace(), &id, spec).await?;
    Ok(sse::response(frames(stream, follow), control.config().timing.keepalive))
}
