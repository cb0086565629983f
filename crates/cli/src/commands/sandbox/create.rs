//! `coppice sandbox create`

use clap::Args;
use coppice_client::api::{CreateSandboxRequest, EgressPolicy, NetworkRequest, OnTtl};

use super::network::egress;
use crate::commands::{Context, OnTtlArg, pair};
use crate::error::CliError;
use crate::interrupt::or_undo;
use crate::{resolve, words};

/// Arguments of `coppice sandbox create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// What to create it from
    #[arg(default_value = "base")]
    template: String,
    /// A snapshot instead of a template: its id, or a unique beginning of it
    #[arg(long, value_name = "ID", conflicts_with = "template")]
    from_snapshot: Option<String>,
    /// Idle seconds after which it is deleted, or hibernated (see --on-ttl). Default: the server's
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(i64).range(1..))]
    ttl: Option<i64>,
    /// What becomes of it then. Default: delete
    #[arg(long, value_enum, value_name = "WHAT")]
    on_ttl: Option<OnTtlArg>,
    /// Never delete or hibernate it for being idle
    #[arg(long)]
    persistent: bool,
    /// What it may reach: `open` (the internet), `none`, or a list of addresses, CIDRs and names, each with an optional
    /// port. Default: open
    #[arg(long, value_name = "open|none|ENTRY,…", value_parser = egress)]
    egress: Option<EgressPolicy>,
    /// Your own words about it
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
    /// Print nothing but the id, also not to standard error
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) async fn run(context: &Context<'_>, args: CreateArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let from_snapshot = match &args.from_snapshot {
        Some(given) => Some(resolve::snapshot(&client, given).await?),
        None => None,
    };
    let request = CreateSandboxRequest {
        template: from_snapshot.is_none().then_some(args.template),
        from_snapshot,
        ttl_seconds: args.ttl,
        on_ttl: args.on_ttl.map(OnTtl::from),
        persistent: args.persistent.then_some(true),
        metadata: (!args.metadata.is_empty()).then(|| args.metadata.into_iter().collect()),
        network: args.egress.map(|egress| NetworkRequest { egress: Some(egress) }),
        volumes: None,
    };
    let undo = |sandbox: coppice_client::api::Sandbox| {
        let client = &client;
        async move { client.delete(&sandbox.id).await.map(|()| format!("{} was deleted again", sandbox.id)) }
    };
    let sandbox = or_undo(client.create(&request), undo).await?;
    // The id alone on standard output: `ID=$(coppice sandbox create)`.
    context.output.result(&sandbox, |_| sandbox.id.clone())?;
    if !args.quiet {
        let (ready, ttl) = (words::millis(sandbox.boot_ms), words::ttl(&sandbox));
        let size = format!("{} CPU, {} MiB", sandbox.cpu, sandbox.memory_mb);
        context.output.note(&format!("{} ({size}) ready after {ready}; ends after: {ttl}", sandbox.template));
    }
    Ok(())
}
