//! `coppice sandbox ttl`

use std::time::Duration;

use clap::Args;
use coppice_client::api::{Lifecycle, LifecyclePatch, OnTtl};

use crate::commands::{Context, OnTtlArg};
use crate::error::CliError;
use crate::{resolve, words};

/// Arguments of `coppice sandbox ttl`.
#[derive(Debug, Args)]
pub struct TtlArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
    /// Idle seconds after which it ends, from now on
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(i64).range(1..))]
    ttl: Option<i64>,
    /// What becomes of it then
    #[arg(long, value_enum, value_name = "WHAT")]
    on_ttl: Option<OnTtlArg>,
    /// Whether it never ends for being idle
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    persistent: Option<bool>,
}

pub(crate) async fn run(context: &Context<'_>, args: TtlArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let patch =
        LifecyclePatch { ttl_seconds: args.ttl, on_ttl: args.on_ttl.map(OnTtl::from), persistent: args.persistent };
    // A change is use of the sandbox; a look is none.
    let lifecycle = match patch == LifecyclePatch::default() {
        true => client.lifecycle(&id).await?,
        false => client.set_lifecycle(&id, &patch).await?,
    };
    context.output.result(&lifecycle, |_| text(&lifecycle))
}

fn text(lifecycle: &Lifecycle) -> String {
    let idle = words::duration(Duration::from_secs(lifecycle.idle_seconds));
    let ttl = words::duration(Duration::from_secs(lifecycle.ttl_seconds));
    match (lifecycle.persistent, lifecycle.on_ttl) {
        (true, _) => format!("never ends for being idle; idle for {idle}"),
        (false, OnTtl::Delete) => format!("is deleted after {ttl} idle; idle for {idle}"),
        (false, OnTtl::Hibernate) => format!("hibernates after {ttl} idle; idle for {idle}"),
    }
}
