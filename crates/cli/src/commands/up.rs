//! `coppice up`: the server. Standard output has nothing but the two lines that say how to reach it.
//!
//! It is two processes. What needs root is `root.rs`; it starts this program again as user `coppice`, and that half is the
//! rest of this file: host, control, DNS, all that hears clients and guests. If one ends, the other does; VMs live on.

mod root;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coppice_broker::{Broker, RemotePrivileged, RemoteSlots, half};
use coppice_control::{
    Auth, Control, ControlConfig, IngressConfig, IngressStore, PreviewSuffix, PublicUrl, TokenStore, api_url,
};
use coppice_disk::DataDir;
use coppice_engine::Engine;
use coppice_host::{Host, HostConfig, RoomConfig};
use coppice_image::Catalog;
use coppice_net::Slots;
use coppice_net::dns::DnsConfig;
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::net::TcpSocket;

use crate::commands::Context;
use crate::error::CliError;
use crate::interrupt::interrupted;
use crate::server::{self, DnsArgs, EngineArgs, LogArgs, PrepareArgs, RoomArgs, VolumeArgs, user};
use crate::words;

/// How often idle sandboxes are looked for.
const REAP_INTERVAL: Duration = Duration::from_secs(5);
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;
/// Set for the unprivileged half: tells the program which half it is.
const HALF_VARIABLE: &str = "COPPICE_UNPRIVILEGED_HALF";

/// Arguments of `coppice up`.
#[derive(Debug, Args)]
pub struct UpArgs {
    /// Where to listen; port 0: any free one
    #[arg(long, env = "COPPICE_LISTEN", default_value = "127.0.0.1:8080", value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Idle seconds after which a sandbox is deleted that asks for no TTL
    #[arg(long, default_value_t = 3600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    default_ttl: u64,
    /// Most sandboxes on this host
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_sandboxes: u16,
    #[command(flatten)]
    room: RoomArgs,
    /// Creates and forks of a workspace a second; twice as many may come at once. 0: any number
    #[arg(long, default_value_t = 32, value_name = "N")]
    create_rate: u32,
    /// Templates to make when they are missing or out of date
    #[arg(long, value_delimiter = ',', default_value = "base,code-interpreter", value_name = "NAME,…")]
    templates: Vec<String>,
    /// Make no templates; use those that are there
    #[arg(long)]
    no_prepare: bool,
    /// Most megabits a second that each sandbox sends to the outside, and that it receives; without it there is no limit
    #[arg(long, value_name = "MBIT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    bandwidth: Option<u32>,
    /// When stopped: delete all sandboxes instead of leaving them running
    #[arg(long)]
    stop_all: bool,
    /// No tokens: anyone who can reach the address may do anything
    #[arg(long)]
    no_auth: bool,
    /// Domain below which `PORT-SANDBOX.DOMAIN` leads to a port of a sandbox; with a port where URLs need one
    #[arg(long, env = "COPPICE_PREVIEW_SUFFIX", value_name = "DOMAIN[:PORT]", value_parser = PreviewSuffix::from_str)]
    preview_suffix: Option<PreviewSuffix>,
    /// Let everybody who knows a sandbox's id use all of its ports by `PORT-SANDBOX.DOMAIN`, without a token
    #[arg(long, requires = "preview_suffix")]
    public_previews: bool,
    /// Where clients reach this server, if a proxy is before it, e.g. <https://api.example.org>
    #[arg(long, env = "COPPICE_PUBLIC_URL", value_name = "URL", value_parser = PublicUrl::from_str)]
    public_url: Option<PublicUrl>,
    /// Not for people: this process is the unprivileged half, and has the other one at its standard input
    #[arg(long, env = HALF_VARIABLE, hide = true)]
    unprivileged_half: bool,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    dns: DnsArgs,
    #[command(flatten)]
    volume: VolumeArgs,
    #[command(flatten)]
    prepare: PrepareArgs,
    #[command(flatten)]
    log: LogArgs,
}

impl UpArgs {
    /// Bytes a second.
    fn bandwidth(&self) -> Option<u64> {
        self.bandwidth.map(|megabits| u64::from(megabits) * 1_000_000 / 8)
    }
}

pub(crate) async fn run(context: &Context<'_>, args: UpArgs) -> Result<ExitCode, CliError> {
    if !args.unprivileged_half {
        return root::run(context, &args).await;
    }
    run_unprivileged(context, &args).await.map(|()| ExitCode::SUCCESS)
}

/// When this process is asked to stop: one wait for both phases, so that nothing falls between them.
type Stop = Shared<BoxFuture<'static, ()>>;

async fn run_unprivileged(context: &Context<'_>, args: &UpArgs) -> Result<(), CliError> {
    let stop: Stop = interrupted().boxed().shared();
    args.log.start(context.output)?;
    let halves = Halves::meet()?;
    tokio::select! {
        biased;
        () = stop.clone() => Err(CliError::Interrupted(Some("the server was not started yet".into()))),
        started = Box::pin(start(context, args, halves)) => Box::pin(serve(context, args, started?, stop)).await,
    }
}

/// What the other half has for this one.
struct Halves {
    broker: Broker,
    listener: TcpSocket,
    /// The lock of the data directory: held for as long as this half lives, too.
    lock: OwnedFd,
}

impl Halves {
    fn meet() -> Result<Self, CliError> {
        let failed = |error| {
            CliError::failed("half", "the halves of the server don't find each other")
                .because(error)
                .hint("this is not for people; start `coppice up` without it")
        };
        half::check_unprivileged().map_err(failed)?;
        // Otherwise it is the name of the file that was executed, which is "exe".
        rustix::thread::set_name(c"coppice").map_err(|errno| failed(errno.into()))?;
        raise_file_limit();
        let (broker, inherited) = half::take_socket().and_then(Broker::connect).map_err(failed)?;
        let [listener, lock] = <[OwnedFd; 2]>::try_from(inherited.fds)
            .map_err(|_fds| failed(std::io::Error::from(std::io::ErrorKind::InvalidData)))?;
        end_with_the_other_half(broker.clone()).map_err(failed)?;
        Ok(Self { broker, listener: TcpSocket::from_std_stream(listener.into()), lock })
    }
}

/// Without the other half nothing can be done any more, and a new server waits for the lock: no tidying up, as after a
/// `kill -9`. VMs live on.
fn end_with_the_other_half(broker: Broker) -> std::io::Result<()> {
    let wait = move || {
        broker.wait_for_end();
        tracing::error!("the privileged half of the server is gone; sandboxes run on, `coppice up` takes over again");
        std::process::exit(1);
    };
    std::thread::Builder::new().name("lifeline".into()).spawn(wait).map(drop)
}

/// A host that is ready to be served.
struct Started {
    host: Arc<Host>,
    data: DataDir,
    slots: Arc<dyn Slots>,
    listener: TcpSocket,
    _lock: OwnedFd,
}

async fn start(context: &Context<'_>, args: &UpArgs, halves: Halves) -> Result<Started, CliError> {
    let data = DataDir::open(&context.global.data_dir).map_err(|error| {
        let hint =
            format!("user {} must be able to enter every directory above it; or give another --data-dir", user::SERVER);
        CliError::failed("data_dir", "the data directory can't be opened").because(error).hint(hint)
    })?;
    let Halves { broker, listener, lock } = halves;
    let slots: Arc<dyn Slots> = Arc::new(RemoteSlots::new(broker.clone()));
    tracing::info!(resolvers = ?args.dns.upstreams(), "names are asked of these for sandboxes");
    let engine = server::engine(Arc::new(RemotePrivileged::new(broker))).await?;
    let host = start_host(args, &data, engine, Arc::clone(&slots)).await?;
    Ok(Started { host, data, slots, listener, _lock: lock })
}

async fn start_host(
    args: &UpArgs,
    data: &DataDir,
    engine: Arc<dyn Engine>,
    slots: Arc<dyn Slots>,
) -> Result<Arc<Host>, CliError> {
    let config = HostConfig {
        data_dir: data.clone(),
        engine,
        dns: Some(DnsConfig::new(args.dns.upstreams())),
        slots,
        catalog: Catalog::new(data.clone()),
        default_ttl: Duration::from_secs(args.default_ttl),
        max_sandboxes: usize::from(args.max_sandboxes),
        room: RoomConfig::from(&args.room),
        reap_interval: REAP_INTERVAL,
    };
    let host = Host::start(config)
        .await
        .map_err(|error| CliError::failed("host", "the sandboxes of this host can't be looked after").because(error))?;
    if host.count() > 0 {
        tracing::info!(sandboxes = host.count(), "sandboxes of an earlier run were taken over");
    }
    Ok(host)
}

async fn serve(context: &Context<'_>, args: &UpArgs, started: Started, stopped: Stop) -> Result<(), CliError> {
    let Started { host, data, slots, listener, _lock } = started;
    let listener = listener.listen(BACKLOG).map_err(|error| cant_listen(&args.listen, error))?;
    let address = listener.local_addr().map_err(|error| CliError::failed("listen", "no address").because(error))?;
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "this address can be reached from other machines, without TLS: put a proxy before it");
    }
    let (auth, token) = auth(args, &data, address).await?;
    let mut config = ControlConfig::new(auth);
    config.limits.create_rate = args.create_rate;
    config.ingress = ingress(args, &data, address).await?;
    let control = Control::new(host.clone(), config)
        .map_err(|error| CliError::failed("control", "the API can't be served").because(error))?;
    announce(context, &data, address, &token)?;
    let served = control.serve(listener, stopped).await;
    stop(context, args, &host, slots).await?;
    served.map_err(|error| CliError::failed("serve", "the listener broke").because(error))
}

fn cant_listen(address: &SocketAddr, error: std::io::Error) -> CliError {
    CliError::failed("listen", format!("can't listen on {address}"))
        .because(error)
        .hint("another program may use the port; give another one with --listen")
}

/// Whom to let in, and the token to print.
async fn auth(args: &UpArgs, data: &DataDir, address: SocketAddr) -> Result<(Auth, String), CliError> {
    if args.no_auth {
        tracing::warn!("no tokens are asked for: anyone who can reach {address} may do anything");
        return Ok((Auth::Off, "none".into()));
    }
    let failed = |error| CliError::failed("tokens", "the tokens can't be used").because(error);
    let store = TokenStore::open(&data.control_db()).await.map_err(failed)?;
    let admin = store.ensure_admin_token(&data.credentials_env(), &api_url(address)).await.map_err(failed)?;
    Ok((Auth::Tokens(store), admin.token))
}

/// How ports of sandboxes are reached.
async fn ingress(args: &UpArgs, data: &DataDir, address: SocketAddr) -> Result<IngressConfig, CliError> {
    let failed = |error| CliError::failed("ingress", "ports and links can't be looked up").because(error);
    let store = IngressStore::open(&data.control_db()).await.map_err(failed)?;
    let suffix = args.preview_suffix.clone();
    Ok(IngressConfig {
        store,
        // Without a proxy before it, a server is where it listens.
        suffix: if args.public_url.is_none() { suffix.map(|suffix| suffix.or_port(address.port())) } else { suffix },
        public_previews: args.public_previews,
        public_url: args.public_url.clone(),
    })
}

/// The process that a person started, and ends: the other half.
fn server_pid() -> i32 {
    rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get())
}

/// How to reach it: the only thing on standard output.
fn announce(context: &Context<'_>, data: &DataDir, address: SocketAddr, token: &str) -> Result<(), CliError> {
    let (url, file): (String, PathBuf) = (api_url(address), data.credentials_env());
    let value = json!({"api": url, "api_key": token, "credentials": file, "pid": server_pid()});
    context.output.result(&value, |_| format!("export PANDASTACK_API={url}\nexport PANDASTACK_API_KEY={token}"))?;
    context.output.note(&format!("ready; on this host, `coppice` commands find it by {}", file.display()));
    Ok(())
}

/// VMs outlive the server unless they are not to.
async fn stop(context: &Context<'_>, args: &UpArgs, host: &Host, slots: Arc<dyn Slots>) -> Result<(), CliError> {
    let number = host.count();
    let sandboxes = words::count(number, "sandbox", "sandboxes");
    if args.stop_all {
        let left = host.delete_all().await;
        host.stop().await;
        if left > 0 {
            return Err(CliError::failed("not_deleted", format!("{left} of {sandboxes} could not be deleted")));
        }
        close_network(slots).await;
        context.output.note(&format!("stopped; {sandboxes} deleted"));
        return Ok(());
    }
    host.stop().await;
    match number {
        0 => {
            close_network(slots).await;
            context.output.note("stopped");
        }
        _ => context.output.note(&format!(
            "stopped; {sandboxes} keep{} running: `coppice up` takes over again, `coppice up --stop-all` ends them when it stops",
            if number == 1 { "s" } else { "" }
        )),
    }
    Ok(())
}

/// Nobody uses it any more. That it stays is no failure: the next server takes it over.
async fn close_network(slots: Arc<dyn Slots>) {
    let closed = tokio::task::spawn_blocking(move || slots.close()).await;
    if let Ok(Err(error)) = closed {
        tracing::warn!(%error, "the network of the sandboxes could not be removed");
    }
}

/// Each sandbox holds several files open, and the usual soft limit is small.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, wanted) {
        tracing::debug!(%error, "the limit of open files can't be raised");
    }
}
