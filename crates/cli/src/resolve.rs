//! Ids may be given as prefixes, as long as they are unique.

use coppice_client::Client;

use crate::error::CliError;
use crate::words;

/// Length of a whole id.
const WHOLE: usize = 36;
/// Most candidates that an error names.
const NAMED: usize = 5;

/// The id of the sandbox that begins so.
pub async fn sandbox(client: &Client, given: &str) -> Result<String, CliError> {
    if given.len() == WHOLE {
        return Ok(given.to_owned());
    }
    let ids = client.list().await?.into_iter().map(|sandbox| sandbox.id);
    unique("sandbox", "sandbox_not_found", given, ids.collect())
}

/// The id of the snapshot that begins so.
pub async fn snapshot(client: &Client, given: &str) -> Result<String, CliError> {
    if given.len() == WHOLE {
        return Ok(given.to_owned());
    }
    let ids = client.snapshots(None).await?.into_iter().map(|snapshot| snapshot.id);
    unique("snapshot", "snapshot_not_found", given, ids.collect())
}

fn unique(kind: &str, code: &'static str, given: &str, ids: Vec<String>) -> Result<String, CliError> {
    if given.is_empty() {
        return Err(CliError::usage(format!("the {kind}'s id is empty")));
    }
    let lower = given.to_ascii_lowercase();
    let mut found: Vec<String> = ids.into_iter().filter(|id| id.starts_with(&lower)).collect();
    match found.len() {
        0 => Err(CliError::failed(code, format!("no {kind} has an id that begins with {given:?}"))
            .hint(format!("`coppice {kind} list` shows them"))),
        1 => Ok(found.swap_remove(0)),
        number => {
            let names: Vec<&str> = found.iter().take(NAMED).map(String::as_str).collect();
            let more = if number > NAMED { ", …" } else { "" };
            let found = words::count(number, kind, if kind == "sandbox" { "sandboxes" } else { "snapshots" });
            let message = format!("{given:?} is the beginning of {found}: {}{more}", names.join(", "));
            Err(CliError::failed("ambiguous_id", message).hint("give more of the id"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(given: &str) -> Result<String, CliError> {
        let ids = vec!["abc1".to_owned(), "abc2".to_owned(), "b".to_owned()];
        unique("sandbox", "sandbox_not_found", given, ids)
    }

    #[test]
    fn a_prefix_must_be_unique() {
        assert_eq!(find("b").unwrap(), "b");
        assert_eq!(find("ABC2").unwrap(), "abc2");
        assert_eq!(find("x").unwrap_err().code(), "sandbox_not_found");
        let error = find("ab").unwrap_err();
        assert_eq!(error.code(), "ambiguous_id");
        assert!(error.to_string().contains("abc1, abc2"));
        assert_eq!(find("").unwrap_err().code(), "usage");
    }
}
