//! `coppice workspace set-quota`

use clap::Args;

use crate::commands::{Context, token::workspace_name};
use crate::error::CliError;

/// Arguments of `coppice workspace set-quota`. What is not given stays as it is.
#[derive(Debug, Args)]
pub struct SetQuotaArgs {
    /// Its name
    #[arg(value_parser = workspace_name)]
    name: String,
    /// Sandboxes, whatever they do
    #[arg(long, value_name = "N|unlimited", value_parser = limit)]
    sandboxes: Option<Limit>,
    /// Guest memory of its sandboxes together, MiB
    #[arg(long, value_name = "MIB|unlimited", value_parser = limit)]
    memory_mb: Option<Limit>,
    /// Children of one fork
    #[arg(long, value_name = "N|unlimited", value_parser = limit)]
    fan_out: Option<Limit>,
    /// Snapshots that it keeps
    #[arg(long, value_name = "N|unlimited", value_parser = limit)]
    snapshots: Option<Limit>,
    /// What its sandboxes and snapshots may come to fill on disk, MiB
    #[arg(long, value_name = "MIB|unlimited", value_parser = limit)]
    disk_mb: Option<Limit>,
}

/// A limit, or that there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit(Option<u64>);

pub(crate) async fn run(context: &Context<'_>, args: SetQuotaArgs) -> Result<(), CliError> {
    let given = [args.sandboxes, args.memory_mb, args.fan_out, args.snapshots, args.disk_mb];
    if given.iter().all(Option::is_none) {
        return Err(CliError::usage("no limit is given")
            .hint("e.g. --sandboxes 20 --memory-mb 16384; `unlimited` takes a limit away"));
    }
    let client = context.client()?;
    let mut quota = client.workspace(&args.name).await?.quota;
    let limits =
        [&mut quota.sandboxes, &mut quota.memory_mb, &mut quota.fan_out, &mut quota.snapshots, &mut quota.disk_mb];
    for (limit, given) in limits.into_iter().zip(given) {
        if let Some(Limit(given)) = given {
            *limit = given;
        }
    }
    let workspace = client.set_quota(&args.name, &quota).await?;
    context.output.result(&workspace, |style| super::rows(style, std::slice::from_ref(&workspace)))
}

fn limit(text: &str) -> Result<Limit, String> {
    if text == "unlimited" {
        return Ok(Limit(None));
    }
    text.parse().map(|limit| Limit(Some(limit))).map_err(|_| "it must be a whole number or `unlimited`".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits() {
        assert_eq!((limit("0"), limit("unlimited")), (Ok(Limit(Some(0))), Ok(Limit(None))));
        for bad in ["", "-1", "1.5", "none", "1g"] {
            assert!(limit(bad).is_err(), "{bad}");
        }
    }
}
