//! `credentials.env`: the file by which the operator of a new server gets the first token.
//!
//! Two lines to source in a shell, mode 0600, replaced in one step. It is the only place where a token is kept in
//! clear.

use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use coppice_api::Role;

use crate::tokens::{DEFAULT_WORKSPACE, Identity, NewToken, TokenError, TokenStore, is_well_formed};

const URL_KEY: &str = "PANDASTACK_API";
const TOKEN_KEY: &str = "PANDASTACK_API_KEY";

/// The operator's token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminToken {
    /// `pds_…`
    pub token: String,
    /// Made now, not found in the file.
    pub created: bool,
}

impl TokenStore {
    /// The token in `credentials`, when it is still valid; a new one otherwise. The file says `api_url` afterwards.
    ///
    /// # Errors
    /// When the database or the file cannot be read or written.
    pub async fn ensure_admin_token(&self, credentials: &Path, api_url: &str) -> Result<AdminToken, TokenError> {
        let failed = |source| TokenError::Credentials { path: credentials.to_owned(), source };
        let before = read(credentials).await.map_err(failed)?;
        let kept = match before.as_deref().and_then(|text| value(text, TOKEN_KEY)) {
            Some(token) if self.authenticate(token).await?.is_some_and(is_operators) => Some(token.to_owned()),
            _ => None,
        };
        let (token, created) = match kept {
            Some(token) => (token, false),
            None => {
                let new = NewToken { label: "operator".into(), role: Role::Admin, lifetime: None };
                (self.create_token(DEFAULT_WORKSPACE, &new).await?.token, true)
            }
        };
        let text = format!("export {URL_KEY}={api_url}\nexport {TOKEN_KEY}={token}\n");
        let path = credentials.to_owned();
        // Written again even when the text is the same: that also puts the mode right.
        tokio::task::spawn_blocking(move || replace(&path, &text))
            .await
            .map_err(io::Error::other)
            .and_then(|written| written)
            .map_err(failed)?;
        Ok(AdminToken { token, created })
    }
}

fn is_operators(identity: Identity) -> bool {
    identity.role == Role::Admin && identity.workspace == DEFAULT_WORKSPACE
}

/// The URL at which a client on this machine reaches a listener: an unspecified address becomes the loopback one.
#[must_use]
pub fn api_url(listen: SocketAddr) -> String {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    format!("http://{}", SocketAddr::new(ip, listen.port()))
}

async fn read(path: &Path) -> io::Result<Option<String>> {
    match tokio::fs::read(path).await {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The value of a variable, if it is one that we would have written.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("export ")?.split_once('='))
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value.trim().trim_matches('"'))
        .filter(|value| is_well_formed(value))
}

/// Write, fsync, rename, fsync the directory. `tempfile` makes files of mode 0600.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).map_or_else(|| PathBuf::from("."), Path::to_owned);
    let mut file = tempfile::Builder::new().prefix(".credentials-").tempfile_in(&folder)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    std::fs::File::open(&folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn the_token_lives_as_long_as_the_database_knows_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("credentials.env");
        let store = TokenStore::open(&folder.path().join("control.db")).await.unwrap();
        let first = store.ensure_admin_token(&file, "http://127.0.0.1:8080").await.unwrap();
        assert!(first.created);
        assert!(is_well_formed(&first.token));
        let identity = store.authenticate(&first.token).await.unwrap().unwrap();
        assert_eq!((identity.workspace.as_str(), identity.role), (DEFAULT_WORKSPACE, Role::Admin));
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(
            text,
            format!("export PANDASTACK_API=http://127.0.0.1:8080\nexport PANDASTACK_API_KEY={}\n", first.token)
        );
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);

        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        store.close().await;
        let store = TokenStore::open(&folder.path().join("control.db")).await.unwrap();
        let second = store.ensure_admin_token(&file, "http://127.0.0.1:9090").await.unwrap();
        assert_eq!(second, AdminToken { token: first.token.clone(), created: false });
        assert!(std::fs::read_to_string(&file).unwrap().contains(":9090\n"));
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);

        let other = TokenStore::open(&folder.path().join("other.db")).await.unwrap();
        assert_eq!(other.authenticate(&first.token).await.unwrap(), None);
        let third = other.ensure_admin_token(&file, "http://127.0.0.1:9090").await.unwrap();
        assert!(third.created && third.token != first.token);
        let identity = other.authenticate(&third.token).await.unwrap().unwrap();
        assert_eq!((identity.workspace.as_str(), identity.prefix.as_str()), ("default", &third.token[..12]));
    }

    #[test]
    fn urls_name_an_address_that_can_be_called() {
        assert_eq!(api_url("0.0.0.0:1".parse().unwrap()), "http://127.0.0.1:1");
        assert_eq!(api_url("[::]:1".parse().unwrap()), "http://[::1]:1");
        assert_eq!(api_url("10.1.2.3:80".parse().unwrap()), "http://10.1.2.3:80");
    }
}
