//! The half of `coppice up` that is root: it makes everything ready that needs root, starts the other half as a user of
//! its own, and does for it what [`coppice_broker::Server`] allows. It listens nowhere and parses nothing that a client
//! or a guest said.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use coppice_broker::Server;
use coppice_broker::half::{self, Identity};
use coppice_engine::Privileged;
use coppice_net::{MAX_SLOTS, NetConfig, Network, instance_id};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::net::TcpSocket;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};

use super::{UpArgs, raise_file_limit};
use crate::commands::Context;
use crate::error::CliError;
use crate::progress::Shown;
use crate::server::{self, UpLock, user};

/// How long the other half may take to be gone after it has closed its socket; its runtime then ends.
const END: Duration = Duration::from_millis(700);
/// Network slots beside those of the most sandboxes: what was given back is made new before it is taken again.
const SPARE_SLOTS: u32 = 16;
/// Network slots that are kept ready.
const READY_SLOTS: u32 = 16;

pub(super) async fn run(context: &Context<'_>, args: &UpArgs) -> Result<ExitCode, CliError> {
    server::need_root("up")?;
    args.log.start(context.output)?;
    let mut asked = Asked::listen()?;
    raise_file_limit();
    let user = user::find(user::SERVER)?;
    let ready = tokio::select! {
        ready = Box::pin(prepare(context, args, user)) => ready?,
        _ = asked.next() => return Err(CliError::Interrupted(Some("the server was not started yet".into()))),
    };
    let half = ready.start(user)?;
    half.accompany(asked).await
}

/// Requests to stop, caught from the beginning, so that none falls between two waits.
struct Asked {
    interrupt: Signals,
    terminate: Signals,
}

impl Asked {
    fn listen() -> Result<Self, CliError> {
        let catch =
            |kind| signal(kind).map_err(|error| CliError::failed("signals", "can't catch signals").because(error));
        Ok(Self { interrupt: catch(SignalKind::interrupt())?, terminate: catch(SignalKind::terminate())? })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.terminate.recv() => Signal::TERM,
        }
    }
}

/// Everything that the other half needs.
struct Ready {
    privileged: Arc<dyn Privileged>,
    network: Arc<Network>,
    lock: UpLock,
    listener: OwnedFd,
}

async fn prepare(context: &Context<'_>, args: &UpArgs, user: Identity) -> Result<Ready, CliError> {
    // A new data directory: nothing is made when the address is in use. Otherwise the other half of a server that was killed
    // a moment ago may still have the address, and is waited for with the lock.
    let is_new = !context.global.data_dir.join(server::lock::FILE).exists();
    let early = if is_new { Some(bind(args.listen)?) } else { None };
    let shown = Arc::new(Shown::new(context.output));
    let data = server::open_data_dir(&context.global.data_dir, &args.volume, &shown).await?;
    let lock = UpLock::take(data.root()).await?;
    if !data.reflink() {
        tracing::warn!("the data directory has no reflinks: every fork copies whole disks, which is slow");
    }
    // Before a long preparation, which must not end with "address in use". The other half listens when it is ready; until
    // then connections are refused.
    let listener = early.map_or_else(|| bind(args.listen), Ok)?;
    let id = instance_id(data.root());
    let privileged = args.engine.privileged(id.clone(), &data).await?;
    if !args.no_prepare {
        let engine = server::engine(Arc::clone(&privileged)).await?;
        let what = (args.templates.clone(), false, false);
        server::prepare_templates(&data, engine.as_ref(), &args.prepare, what, context.output).await?;
    }
    user::give(data, user).await?;
    let limit = u32::from(args.max_sandboxes).saturating_add(SPARE_SLOTS).min(MAX_SLOTS);
    // The last: what was begun here before stays when this is interrupted, and that costs nothing.
    let network =
        open_network(NetConfig { id, limit, ready: READY_SLOTS.min(limit), bandwidth: args.bandwidth() }).await?;
    Ok(Ready { privileged, network: Arc::new(network), lock, listener })
}

/// An address that is taken, and where nobody listens yet. An error now is one that `listen` would give later.
fn bind(address: SocketAddr) -> Result<OwnedFd, CliError> {
    let bound = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.as_fd().try_clone_to_owned()
    };
    bound().map_err(|error: io::Error| super::cant_listen(&address, error))
}

async fn open_network(config: NetConfig) -> Result<Network, CliError> {
    blocking(move || {
        if let Some(missing) = coppice_net::check().into_iter().next() {
            let what = format!("sandboxes can't have a network here: {} is missing", missing.what);
            return Err(CliError::failed("no_network", what).hint(missing.hint));
        }
        Network::open(config).map_err(|error| {
            CliError::failed("network", "the network of the sandboxes can't be set up")
                .because(error)
                .hint("`coppice doctor` says what is missing")
        })
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CliError> + Send + 'static,
) -> Result<T, CliError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(CliError::failed("broke", "the server could not be prepared").because(error)))
}

impl Ready {
    /// Starts the other half, and serves it on threads of their own.
    fn start(self, user: Identity) -> Result<Half, CliError> {
        let failed =
            |error: io::Error| CliError::failed("start", "the unprivileged half can't be started").because(error);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let gifts = vec![self.listener, self.lock.share().map_err(failed)?];
        let child = half::start(user, std::env::args_os(), (super::HALF_VARIABLE, "true"), theirs).map_err(failed)?;
        let held = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let held = held.map(|pid| pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from));
        let pidfd = held.unwrap_or_else(|| Err(io::ErrorKind::InvalidData.into())).map_err(failed)?;
        let server = Server::new(self.privileged, self.network);
        let (over, served) = tokio::sync::oneshot::channel();
        std::thread::Builder::new()
            .name("broker".into())
            .spawn(move || {
                if let Err(error) = server.serve(&ours, gifts) {
                    tracing::error!(%error, "the unprivileged half said something that is not understood");
                }
                // Nobody waits when the process ends already.
                over.send(()).unwrap_or_default();
            })
            .map_err(failed)?;
        Ok(Half { child, pidfd, served, _lock: self.lock })
    }
}

/// The other half, as it runs.
struct Half {
    child: Child,
    pidfd: OwnedFd,
    served: tokio::sync::oneshot::Receiver<()>,
    _lock: UpLock,
}

impl Half {
    /// Tells it when this process is asked to stop, and ends as it ends.
    async fn accompany(self, mut asked: Asked) -> Result<ExitCode, CliError> {
        let Self { mut child, pidfd, served, _lock } = self;
        let tell = |signal| {
            if let Err(error) = pidfd_send_signal(&pidfd, signal) {
                tracing::debug!(%error, "the unprivileged half is gone already");
            }
        };
        let mut ended = tokio::task::spawn_blocking(move || child.wait());
        let mut told = None;
        let mut late = Box::pin(async {
            // Also when its sender is dropped.
            served.await.unwrap_or_default();
            tokio::time::sleep(END).await;
        });
        let status = loop {
            tokio::select! {
                status = &mut ended => break status,
                signal = asked.next(), if told.is_none() => {
                    tell(signal);
                    told = Some(signal);
                }
                // It can do nothing any more without us.
                () = &mut late => {
                    tell(Signal::KILL);
                    break ended.await;
                }
            }
        };
        let status = status.unwrap_or_else(|error| Err(io::Error::other(error)));
        let status =
            status.map_err(|error| CliError::failed("died", "the server can't be waited for").because(error))?;
        outcome(status, told)
    }
}

/// It said itself what was the matter, unless a signal ended it.
fn outcome(status: ExitStatus, told: Option<Signal>) -> Result<ExitCode, CliError> {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
        // Told before it could listen to that.
        (None, signal) if told.is_some_and(|told| Some(told.as_raw()) == signal) => {
            Err(CliError::Interrupted(Some("the server was not started yet".into())))
        }
        (None, signal) => {
            let how = signal.map_or_else(|| "ended".into(), |signal| format!("was killed by signal {signal}"));
            Err(CliError::failed("died", format!("the unprivileged half of the server {how}"))
                .hint("sandboxes run on; `coppice up` takes over again"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_by_a_signal_is_told_apart_from_one_that_was_asked_for() {
        let exited = |code: i32| ExitStatus::from_raw(code << 8);
        let killed = ExitStatus::from_raw;
        assert!(matches!(outcome(exited(3), None), Ok(code) if format!("{code:?}").contains('3')));
        assert!(matches!(outcome(killed(15), Some(Signal::TERM)), Err(CliError::Interrupted(_))));
        let died = outcome(killed(9), Some(Signal::TERM)).unwrap_err();
        assert!(died.code() == "died" && died.to_string().contains("signal 9"), "{died}");
        assert_eq!(outcome(killed(15), None).unwrap_err().code(), "died");
    }
}
