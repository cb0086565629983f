//! `coppice sandbox network`

use clap::Args;
use coppice_client::api::{EgressPolicy, NetworkRequest};

use crate::commands::Context;
use crate::error::CliError;
use crate::{resolve, words};

/// Arguments of `coppice sandbox network`.
#[derive(Debug, Args)]
pub struct NetworkArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
    /// What it may reach from now on: `open` (the internet), `none`, or a list of addresses, CIDRs and names, each with
    /// an optional port, e.g. `203.0.113.0/24,example.org:443,*.example.org`
    #[arg(long, value_name = "open|none|ENTRY,…", value_parser = egress)]
    egress: Option<EgressPolicy>,
}

pub(crate) async fn run(context: &Context<'_>, args: NetworkArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let network = match args.egress {
        Some(egress) => client.set_network(&id, &NetworkRequest { egress: Some(egress) }).await?,
        None => client.network(&id).await?,
    };
    context.output.result(&network, |_| format!("egress: {}", words::egress(&network.egress)))
}

/// A policy on the command line. What an entry may be is the server's to say.
pub(super) fn egress(text: &str) -> Result<EgressPolicy, String> {
    match text.trim() {
        "open" => return Ok(EgressPolicy::Open),
        "none" => return Ok(EgressPolicy::None),
        _ => {}
    }
    let entries: Vec<String> = text.split(',').map(|entry| entry.trim().to_owned()).collect();
    if let Some(word) = entries.iter().find(|entry| ["open", "none"].contains(&entry.as_str())) {
        return Err(format!("{word} stands alone"));
    }
    if entries.iter().any(String::is_empty) {
        return Err("an entry is empty".into());
    }
    Ok(EgressPolicy::Allow(entries))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_on_the_command_line() {
        assert_eq!(egress("open"), Ok(EgressPolicy::Open));
        assert_eq!(egress(" none "), Ok(EgressPolicy::None));
        let list = EgressPolicy::Allow(vec!["a.b:1".into(), "*.c".into()]);
        assert_eq!(egress("a.b:1, *.c").as_ref(), Ok(&list));
        assert_eq!(egress(&words::egress(&list)), Ok(list));
        for bad in ["", ",", "a,,b", "a,none", "open,a"] {
            assert!(egress(bad).is_err(), "{bad}");
        }
    }
}
