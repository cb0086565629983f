//! Commands in a sandbox.
//!
//! Any number at once, past the actor. Dropping the stream cancels the call, and the guest kills the command's process
//! group. The guest keeps the deadline; the host only makes sure that a guest which doesn't is not waited for.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_guest_proto::limits::CHUNK;
use coppice_guest_proto::v1::exec_input::Input;
use coppice_guest_proto::v1::exec_output::Output;
use coppice_guest_proto::v1::{ExecInput, ExecOutput, ExecStart, StdinClose};
use futures::{Stream, StreamExt};

use crate::api::{ExecEvent, ExecExit, ExecSpec, ExecStream};
use crate::entry::InUse;
use crate::guest_error::GuestCallError;
use crate::host::Shared;

/// What a guest gets on top of a command's deadline, to kill and report.
const GRACE: Duration = Duration::from_secs(10);

pub(crate) async fn exec(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    spec: ExecSpec,
) -> Result<ExecStream, GuestCallError> {
    let entry = shared.entry(workspace, id)?;
    let in_use = entry.in_use();
    let mut client = entry.session().await?.client();
    let deadline = spec.timeout.map(|timeout| Instant::now() + timeout + GRACE);
    let timeout = spec.timeout;
    let started = client.exec(inputs(spec));
    let output = match deadline {
        None => started.await?,
        Some(at) => tokio::time::timeout_at(at.into(), started)
            .await
            .map_err(|_| GuestCallError::Timeout(timeout.unwrap_or_default() + GRACE))??,
    };
    metrics::counter!("coppice_execs_total").increment(1);
    let state = Running { output: Box::pin(output.into_inner()), deadline, timeout, done: false, _in_use: in_use };
    Ok(futures::stream::unfold(state, |mut running| async move {
        let event = running.next().await?;
        Some((event.map_err(Into::into), running))
    })
    .boxed())
}

struct Running {
    output: Pin<Box<tonic::Streaming<ExecOutput>>>,
    deadline: Option<Instant>,
    timeout: Option<Duration>,
    done: bool,
    _in_use: InUse,
}

impl Running {
    async fn next(&mut self) -> Option<Result<ExecEvent, GuestCallError>> {
        while !self.done {
            let message = match self.deadline {
                None => self.output.next().await,
                Some(at) => match tokio::time::timeout_at(at.into(), self.output.next()).await {
                    Ok(message) => message,
                    Err(_) => {
                        self.done = true;
                        return Some(Err(GuestCallError::Timeout(self.timeout.unwrap_or_default() + GRACE)));
                    }
                },
            };
            let output = match message {
                Some(Ok(message)) => message.output,
                Some(Err(status)) => {
                    self.done = true;
                    return Some(Err(status.into()));
                }
                None => {
                    self.done = true;
                    return Some(Err(GuestCallError::Protocol("a command ended without an exit code")));
                }
            };
            match output {
                Some(Output::Stdout(bytes)) => return Some(Ok(ExecEvent::Stdout(bytes.into()))),
                Some(Output::Stderr(bytes)) => return Some(Ok(ExecEvent::Stderr(bytes.into()))),
                Some(Output::Exit(exit)) => {
                    self.done = true;
                    return Some(Ok(ExecEvent::Exit(ExecExit {
                        exit_code: exit.exit_code,
                        timed_out: exit.timed_out,
                        duration: Duration::from_millis(exit.duration_ms),
                    })));
                }
                Some(Output::Started(_)) | None => {}
            }
        }
        None
    }
}

/// The start, then standard input in pieces. The stream stays open afterwards: its end would tell the guest nothing that
/// the close message doesn't.
fn inputs(spec: ExecSpec) -> impl Stream<Item = ExecInput> + Send + 'static {
    let start = ExecStart {
        argv: spec.argv,
        env: spec.env.into_iter().collect(),
        cwd: spec.cwd.unwrap_or_default(),
        user: spec.user.unwrap_or_default(),
        timeout_ms: spec.timeout.map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
        stdin: spec.stdin.is_some(),
    };
    let mut messages = vec![Input::Start(start)];
    if let Some(stdin) = spec.stdin {
        messages.extend(stdin.chunks(CHUNK).map(|chunk| Input::Stdin(chunk.to_vec())));
        messages.push(Input::StdinClose(StdinClose {}));
    }
    futures::stream::iter(messages.into_iter().map(|input| ExecInput { input: Some(input) }))
}
