//! `coppice fork-tree`: memory and disk of a running sandbox, N times.

use clap::Args;
use coppice_client::api::{ForkTreeRequest, OnTtl};

use crate::commands::{Context, OnTtlArg, fork, pair};
use crate::error::CliError;
use crate::interrupt::or_undo;
use crate::resolve;

/// Arguments of `coppice fork-tree`.
#[derive(Debug, Args)]
pub struct ForkTreeArgs {
    /// What to fork: its id, or a unique beginning of it
    sandbox: String,
    /// Number of children, 1 to 16
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    count: u32,
    /// Idle seconds after which each child is deleted, or hibernated (see --on-ttl). Default: the parent's
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    ttl: Option<u64>,
    /// What becomes of a child then. Default: the same as of the parent; with --ttl, delete
    #[arg(long, value_enum, value_name = "WHAT")]
    on_ttl: Option<OnTtlArg>,
    /// For every child
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
}

pub(crate) async fn run(context: &Context<'_>, args: ForkTreeArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let mut metadata: std::collections::BTreeMap<_, _> = args.metadata.into_iter().collect();
    if let Some(ttl) = args.ttl {
        metadata.insert("explore_ttl".into(), ttl.to_string());
    }
    let request = ForkTreeRequest {
        count: Some(i64::from(args.count)),
        metadata: (!metadata.is_empty()).then_some(metadata),
        on_ttl: args.on_ttl.map(OnTtl::from),
    };
    let call = client.fork_tree_with(&id, &request);
    let made = or_undo(call, |made| fork::undo(&client, made)).await?;
    fork::show(context, &made)
}
