//! Which server to talk to, and with which token: options, environment, then the credentials file of a server on this host.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use coppice_client::{Client, RetryPolicy};

use crate::args::Global;
use crate::error::CliError;
use crate::output::Output;
use crate::words;

/// Where `coppice up` listens when nothing else is said.
const DEFAULT_API: &str = "http://127.0.0.1:8080";

/// What a credentials file says.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Credentials {
    api: Option<String>,
    key: Option<String>,
}

/// A client of the server that the options name.
pub fn client(global: &Global, output: Output) -> Result<Client, CliError> {
    let retry = RetryPolicy {
        budget: Duration::from_secs(global.wait_for_room),
        on_wait: Some(Arc::new(move |refusal| {
            let wait = words::duration(refusal.wait);
            output.note(&format!("the server has no room ({}); asking again in {wait}", refusal.error.message));
        })),
    };
    let (api, key) = choose(global)?;
    Ok(Client::new(&api, &key)?.with_retry(retry))
}

/// An address even without a token: `version` needs none.
pub fn client_without_key(global: &Global) -> Option<Client> {
    let (api, _) = choose(global).unwrap_or((given_api(global).unwrap_or(DEFAULT_API.into()), String::new()));
    Client::new(&api, "none").ok()
}

fn given_api(global: &Global) -> Option<String> {
    let given = global.api.clone().or_else(|| global.coppice_api.clone());
    given.filter(|text| !text.trim().is_empty())
}

fn choose(global: &Global) -> Result<(String, String), CliError> {
    let key = global.api_key.clone().or_else(|| global.coppice_api_key.clone()).filter(|text| !text.trim().is_empty());
    let api = given_api(global);
    if let (Some(api), Some(key)) = (&api, &key) {
        return Ok((api.clone(), key.clone()));
    }
    let path = global.data_dir.join("credentials.env");
    let (file, trouble) = match std::fs::read_to_string(&path) {
        Ok(text) => (parse(&text), None),
        Err(error) if error.kind() == ErrorKind::NotFound => (Credentials::default(), None),
        Err(error) => (Credentials::default(), Some(format!("{} can't be read: {error}", path.display()))),
    };
    // The file's key is for the file's server only.
    let same =
        |api: &str| file.api.as_deref().is_some_and(|known| known.trim_end_matches('/') == api.trim_end_matches('/'));
    match (api, key) {
        (None, Some(key)) => Ok((file.api.unwrap_or(DEFAULT_API.into()), key)),
        (Some(api), None) if same(&api) && file.key.is_some() => Ok((api, file.key.unwrap_or_default())),
        (None, None) if file.api.is_some() && file.key.is_some() => {
            Ok((file.api.unwrap_or_default(), file.key.unwrap_or_default()))
        }
        (api, _) => Err(missing(api.as_deref(), trouble)),
    }
}

fn missing(api: Option<&str>, trouble: Option<String>) -> CliError {
    let message = match api {
        Some(api) => format!("no API key for {api}"),
        None => "no server is known".to_owned(),
    };
    let message = trouble.map_or(message.clone(), |trouble| format!("{message}: {trouble}"));
    CliError::failed("no_credentials", message).hint(
        "start one with `coppice up` on this host (its credentials are then found by themselves), or give --api and \
         --api-key, or set PANDASTACK_API and PANDASTACK_API_KEY",
    )
}

/// Lines `export NAME=value`, with or without `export` and quotes.
fn parse(text: &str) -> Credentials {
    let mut credentials = Credentials::default();
    for line in text.lines() {
        let line = line.trim();
        let Some((name, value)) = line.strip_prefix("export ").unwrap_or(line).split_once('=') else { continue };
        let value = value.trim().trim_matches(['"', '\'']).to_owned();
        match name.trim() {
            "PANDASTACK_API" if !value.is_empty() => credentials.api = Some(value),
            "PANDASTACK_API_KEY" if !value.is_empty() => credentials.key = Some(value),
            _ => {}
        }
    }
    credentials
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::args::ColorChoice;

    fn global(dir: &Path, api: Option<&str>, key: Option<&str>) -> Global {
        Global {
            json: false,
            api: api.map(Into::into),
            coppice_api: None,
            api_key: key.map(Into::into),
            coppice_api_key: None,
            data_dir: dir.to_owned(),
            wait_for_room: 0,
            color: ColorChoice::Auto,
            no_color: None,
        }
    }

    #[test]
    fn options_win_and_the_file_fills_in() {
        let dir = tempfile::tempdir().unwrap();
        let chosen = |api, key| choose(&global(dir.path(), api, key));
        assert!(matches!(chosen(None, None), Err(CliError::Failed { code: "no_credentials", .. })));
        assert_eq!(chosen(None, Some("k")).unwrap(), (DEFAULT_API.into(), "k".into()));
        let text = "export PANDASTACK_API=http://h:1\nexport PANDASTACK_API_KEY=\"pds_1\"\n";
        std::fs::write(dir.path().join("credentials.env"), text).unwrap();
        assert_eq!(chosen(None, None).unwrap(), ("http://h:1".into(), "pds_1".into()));
        assert_eq!(chosen(Some("http://h:1/"), None).unwrap().1, "pds_1");
        assert_eq!(chosen(Some("http://x"), Some("k")).unwrap(), ("http://x".into(), "k".into()));
        assert_eq!(chosen(None, Some("k")).unwrap(), ("http://h:1".into(), "k".into()));
        // Another server never gets this one's key.
        assert!(chosen(Some("http://other"), None).is_err());
        assert!(chosen(Some("http://other"), Some("")).is_err());
    }

    #[test]
    fn anything_else_in_the_file_is_ignored() {
        assert_eq!(parse("# x\n\nPANDASTACK_API=\nFOO=bar\nnonsense"), Credentials::default());
        assert_eq!(parse("PANDASTACK_API='http://h'").api.as_deref(), Some("http://h"));
    }
}
