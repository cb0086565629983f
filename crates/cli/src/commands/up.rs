//! `coppice up`: the server. Standard output has nothing but the two lines that say how to reach it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coppice_control::{Auth, Control, ControlConfig, TokenStore, api_url};
use coppice_disk::DataDir;
use coppice_engine::Engine;
use coppice_host::{Host, HostConfig};
use coppice_image::Catalog;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::net::TcpListener;

use crate::commands::Context;
use crate::error::CliError;
use crate::interrupt::interrupted;
use crate::progress::Shown;
use crate::server::{self, EngineArgs, LogArgs, PrepareArgs, UpLock, VolumeArgs};
use crate::words;

/// How often idle sandboxes are looked for.
const REAP_INTERVAL: Duration = Duration::from_secs(5);

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
    /// Templates to make when they are missing or out of date
    #[arg(long, value_delimiter = ',', default_value = "base,code-interpreter", value_name = "NAME,…")]
    templates: Vec<String>,
    /// Make no templates; use those that are there
    #[arg(long)]
    no_prepare: bool,
    /// When stopped: delete all sandboxes instead of leaving them running
    #[arg(long)]
    stop_all: bool,
    /// No tokens: anyone who can reach the address may do anything
    #[arg(long)]
    no_auth: bool,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    volume: VolumeArgs,
    #[command(flatten)]
    prepare: PrepareArgs,
    #[command(flatten)]
    log: LogArgs,
}

pub(crate) async fn run(context: &Context<'_>, args: UpArgs) -> Result<(), CliError> {
    server::need_root("up")?;
    args.log.start(context.output)?;
    // Tried now, so that a long preparation doesn't end with "address in use"; bound for good when there is something to serve.
    drop(bind(args.listen).await?);
    raise_file_limit();
    tokio::select! {
        started = Box::pin(start(context, &args)) => Box::pin(serve(context, &args, started?)).await,
        () = interrupted() => Err(CliError::Interrupted(Some("the server was not started yet".into()))),
    }
}

/// A host that is ready to be served.
struct Started {
    host: Arc<Host>,
    data: DataDir,
    _lock: UpLock,
}

async fn start(context: &Context<'_>, args: &UpArgs) -> Result<Started, CliError> {
    let shown = Arc::new(Shown::new(context.output));
    let data = server::open_data_dir(&context.global.data_dir, &args.volume, &shown).await?;
    let lock = UpLock::take(data.root())?;
    if !data.reflink() {
        tracing::warn!("the data directory has no reflinks: every fork copies whole disks, which is slow");
    }
    let engine = args.engine.start(&data).await?;
    if !args.no_prepare {
        let what = (args.templates.clone(), false, false);
        server::prepare_templates(&data, engine.as_ref(), &args.prepare, what, context.output).await?;
    }
    let host = start_host(args, &data, engine).await?;
    Ok(Started { host, data, _lock: lock })
}

async fn start_host(args: &UpArgs, data: &DataDir, engine: Arc<dyn Engine>) -> Result<Arc<Host>, CliError> {
    let config = HostConfig {
        data_dir: data.clone(),
        engine,
        catalog: Catalog::new(data.clone()),
        default_ttl: Duration::from_secs(args.default_ttl),
        max_sandboxes: usize::from(args.max_sandboxes),
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

async fn serve(context: &Context<'_>, args: &UpArgs, started: Started) -> Result<(), CliError> {
    let Started { host, data, _lock } = started;
    let listener = bind(args.listen).await?;
    let address = listener.local_addr().map_err(|error| CliError::failed("listen", "no address").because(error))?;
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "this address can be reached from other machines, without TLS: put a proxy before it");
    }
    let (auth, token) = auth(args, &data, address).await?;
    let control = Control::new(host.clone(), ControlConfig::new(auth))
        .map_err(|error| CliError::failed("control", "the API can't be served").because(error))?;
    announce(context, &data, address, &token)?;
    let served = control.serve(listener, interrupted()).await;
    stop(context, args, &host).await?;
    served.map_err(|error| CliError::failed("serve", "the listener broke").because(error))
}

async fn bind(listen: SocketAddr) -> Result<TcpListener, CliError> {
    TcpListener::bind(listen).await.map_err(|error| {
        CliError::failed("listen", format!("can't listen on {listen}"))
            .because(error)
            .hint("another program may use the port; give another one with --listen")
    })
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

/// How to reach it: the only thing on standard output.
fn announce(context: &Context<'_>, data: &DataDir, address: SocketAddr, token: &str) -> Result<(), CliError> {
    let (url, file): (String, PathBuf) = (api_url(address), data.credentials_env());
    let value = json!({"api": url, "api_key": token, "credentials": file, "pid": std::process::id()});
    context.output.result(&value, |_| format!("export PANDASTACK_API={url}\nexport PANDASTACK_API_KEY={token}"))?;
    context.output.note(&format!("ready; on this host, `coppice` commands find it by {}", file.display()));
    Ok(())
}

/// VMs outlive the server unless they are not to.
async fn stop(context: &Context<'_>, args: &UpArgs, host: &Host) -> Result<(), CliError> {
    let number = host.count();
    let sandboxes = words::count(number, "sandbox", "sandboxes");
    if args.stop_all {
        let left = host.delete_all().await;
        host.stop().await;
        if left > 0 {
            return Err(CliError::failed("not_deleted", format!("{left} of {sandboxes} could not be deleted")));
        }
        context.output.note(&format!("stopped; {sandboxes} deleted"));
        return Ok(());
    }
    host.stop().await;
    match number {
        0 => context.output.note("stopped"),
        _ => context.output.note(&format!(
            "stopped; {sandboxes} keep{} running: `coppice up` takes over again, `coppice up --stop-all` ends them when it stops",
            if number == 1 { "s" } else { "" }
        )),
    }
    Ok(())
}

/// Each sandbox holds several files open, and the usual soft limit is small.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, wanted) {
        tracing::debug!(%error, "the limit of open files can't be raised");
    }
}
