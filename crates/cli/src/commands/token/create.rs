//! `coppice token create`

use std::time::Duration;

use clap::{Args, ValueEnum};
use coppice_client::api::{CreateTokenRequest, Role};

use super::workspace_name;
use crate::commands::Context;
use crate::error::CliError;
use crate::words;

/// What a token may do, on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleArg {
    /// Everything in its workspace.
    Member,
    /// That, and manage workspaces, tokens, quotas; read the audit log.
    Admin,
}

/// Arguments of `coppice token create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// What it is for
    label: String,
    /// Its workspace, made when it is new. Default: your token's own
    #[arg(long, value_name = "NAME", value_parser = workspace_name)]
    workspace: Option<String>,
    /// What it may do
    #[arg(long, value_enum, default_value_t = RoleArg::Member)]
    role: RoleArg,
    /// When it ends, e.g. 30d, 12h, 15m. Default: when it is revoked
    #[arg(long, value_name = "TIME", value_parser = lifetime)]
    expires: Option<Duration>,
}

pub(crate) async fn run(context: &Context<'_>, args: CreateArgs) -> Result<(), CliError> {
    let request = CreateTokenRequest {
        label: Some(args.label),
        role: match args.role {
            RoleArg::Member => Role::Member,
            RoleArg::Admin => Role::Admin,
        },
        expires_in_seconds: args.expires.map(|time| i64::try_from(time.as_secs()).unwrap_or(i64::MAX)),
        ..CreateTokenRequest::default()
    };
    let made = context.client()?.create_token(args.workspace.as_deref(), &request).await?;
    context.output.result(&made, |_| made.token.clone())?;
    let end = match args.expires {
        Some(time) => format!("it ends in {}", words::duration(time)),
        None => format!("`coppice token revoke {}` ends it", made.info.prefix),
    };
    context.output.note(&format!("a {} of workspace {}; {end}", made.info.role.as_str(), made.info.workspace));
    Ok(())
}

/// `30d`, `12h`, `15m`, `90s`, `2w`.
fn lifetime(text: &str) -> Result<Duration, String> {
    let wrong = || "it must be a whole number and one of s, m, h, d, w, e.g. 30d".to_owned();
    let unit = text.chars().last().ok_or_else(wrong)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 24 * 3600,
        'w' => 7 * 24 * 3600,
        _ => return Err(wrong()),
    };
    let number: u64 = text.strip_suffix(unit).unwrap_or_default().parse().map_err(|_| wrong())?;
    match number.checked_mul(seconds) {
        Some(0) => Err("it would have ended already".into()),
        Some(seconds) => Ok(Duration::from_secs(seconds)),
        None => Err("it is too long".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetimes() {
        for (text, seconds) in [("30d", 2_592_000), ("12h", 43_200), ("15m", 900), ("90s", 90), ("2w", 1_209_600)] {
            assert_eq!(lifetime(text), Ok(Duration::from_secs(seconds)));
        }
        for bad in ["", "d", "30", "0d", "-1d", "1.5h", "1y", "30 d", "99999999999999999999d", "é"] {
            assert!(lifetime(bad).is_err(), "{bad}");
        }
    }
}
