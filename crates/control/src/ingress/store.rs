//! What is remembered of ports and links: in `control.db`, or for an API without a database in memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coppice_api::{ErrorClass, PreviewLink};
use jiff::Timestamp;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use tokio::sync::OnceCell;
use uuid::Uuid;

use super::Target;
use super::link::Key;
use crate::error::ApiError;
use crate::tokens::MIGRATIONS;

/// Most ports of one sandbox that a client names.
const MAX_PORTS: i64 = 64;
/// Most valid links to one sandbox.
const MAX_LINKS: i64 = 256;

/// Why ports and links can't be looked up.
#[derive(Debug, thiserror::Error)]
pub enum IngressError {
    /// The database could not be opened, read or written.
    #[error("the database of ports and links failed")]
    Database(#[from] sqlx::Error),
    /// The tables could not be brought to this version.
    #[error("the database of ports and links could not be migrated")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    /// The operating system gave no random bytes.
    #[error("no random bytes from the operating system: {0}")]
    Random(getrandom::Error),
    /// A row is not what this server wrote.
    #[error("the database of ports and links is damaged: {0}")]
    Damaged(&'static str),
    /// A limit was reached.
    #[error("this sandbox has {0}, which is the most; remove one first")]
    Full(&'static str),
}

impl From<IngressError> for ApiError {
    fn from(error: IngressError) -> Self {
        match error {
            IngressError::Full(_) => Self::new(ErrorClass::Quota, "too_many_ports_or_links", error.to_string()),
            _ => {
                tracing::error!(error = &error as &dyn std::error::Error, "ports and links can't be looked up");
                Self::new(ErrorClass::Internal, "ingress_database", "the database of ports and links failed")
            }
        }
    }
}

/// Ports and links. Cheap to clone.
#[derive(Debug, Clone)]
pub struct IngressStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: Option<PathBuf>,
    pool: OnceCell<SqlitePool>,
    key: OnceCell<Key>,
}

/// A port that a client named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedPort {
    pub(crate) port: u16,
    pub(crate) label: String,
    pub(crate) public: bool,
}

/// A link, and in whose name it is used.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    pub(crate) target: Target,
    pub(crate) paths: Vec<String>,
}

type LinkRow = (String, String, i64, String, i64, i64);

impl IngressStore {
    /// Those of `control.db`, which is made when absent and brought up to date.
    ///
    /// # Errors
    /// When the database cannot be opened or migrated.
    pub async fn open(path: &Path) -> Result<Self, IngressError> {
        let store = Self::at(Some(path.to_owned()));
        store.pool().await?;
        Ok(store)
    }

    /// None yet; they are forgotten with this process.
    #[must_use]
    pub fn in_memory() -> Self {
        Self::at(None)
    }

    fn at(path: Option<PathBuf>) -> Self {
        Self { inner: Arc::new(Inner { path, pool: OnceCell::new(), key: OnceCell::new() }) }
    }

    async fn pool(&self) -> Result<&SqlitePool, IngressError> {
        self.inner.pool.get_or_try_init(|| connect(self.inner.path.as_deref())).await
    }

    /// The key that links are signed with. The first call of all makes it.
    pub(crate) async fn key(&self) -> Result<&Key, IngressError> {
        let make = || async {
            let mut fresh = [0; 32];
            getrandom::fill(&mut fresh).map_err(IngressError::Random)?;
            let pool = self.pool().await?;
            sqlx::query("INSERT INTO preview_key (id, key) VALUES (1, ?) ON CONFLICT DO NOTHING")
                .bind(&fresh[..])
                .execute(pool)
                .await?;
            let (stored,): (Vec<u8>,) =
                sqlx::query_as("SELECT key FROM preview_key WHERE id = 1").fetch_one(pool).await?;
            let bytes: [u8; 32] = stored.try_into().map_err(|_| IngressError::Damaged("the key of links"))?;
            Ok(Key::from(bytes))
        };
        self.inner.key.get_or_try_init(make).await
    }

    /// Ports of a sandbox that clients named, by number.
    pub(crate) async fn ports(&self, sandbox: &str) -> Result<Vec<NamedPort>, IngressError> {
        let rows: Vec<(i64, String, bool)> =
            sqlx::query_as("SELECT port, label, public FROM ports WHERE sandbox = ? ORDER BY port")
                .bind(sandbox)
                .fetch_all(self.pool().await?)
                .await?;
        rows.into_iter().map(|(port, label, public)| Ok(NamedPort { port: number(port)?, label, public })).collect()
    }

    /// Names a port, or names it again.
    pub(crate) async fn name(&self, target: &Target, label: &str, public: bool) -> Result<(), IngressError> {
        let done = sqlx::query(
            "INSERT INTO ports (sandbox, port, workspace, label, public) SELECT ?1, ?2, ?3, ?4, ?5
             WHERE (SELECT count(*) FROM ports WHERE sandbox = ?1 AND port != ?2) < ?6
             ON CONFLICT (sandbox, port) DO UPDATE SET label = excluded.label, public = excluded.public",
        )
        .bind(&target.sandbox)
        .bind(i64::from(target.port))
        .bind(&target.workspace)
        .bind(label)
        .bind(public)
        .bind(MAX_PORTS)
        .execute(self.pool().await?)
        .await?;
        if done.rows_affected() == 0 { Err(IngressError::Full("64 named ports")) } else { Ok(()) }
    }

    /// Forgets a port's name.
    pub(crate) async fn unname(&self, sandbox: &str, port: u16) -> Result<(), IngressError> {
        sqlx::query("DELETE FROM ports WHERE sandbox = ? AND port = ?")
            .bind(sandbox)
            .bind(i64::from(port))
            .execute(self.pool().await?)
            .await?;
        Ok(())
    }

    /// In which workspace's name everybody may use a port; `None` when nobody said so.
    pub(crate) async fn public(&self, sandbox: &str, port: u16) -> Result<Option<String>, IngressError> {
        let row: Option<(String,)> =
            sqlx::query_as("SELECT workspace FROM ports WHERE sandbox = ? AND port = ? AND public = 1")
                .bind(sandbox)
                .bind(i64::from(port))
                .fetch_optional(self.pool().await?)
                .await?;
        Ok(row.map(|(workspace,)| workspace))
    }

    /// Remembers a new link.
    pub(crate) async fn add_link(&self, id: Uuid, link: &Link, expires_at: i64) -> Result<(), IngressError> {
        let (pool, now) = (self.pool().await?, now());
        sqlx::query("DELETE FROM preview_links WHERE expires_at <= ?").bind(now).execute(pool).await?;
        let paths = serde_json::to_string(&link.paths).map_err(|_| IngressError::Damaged("paths"))?;
        let done = sqlx::query(
            "INSERT INTO preview_links (id, workspace, sandbox, port, paths, created_at, expires_at)
             SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7 WHERE (SELECT count(*) FROM preview_links WHERE sandbox = ?3) < ?8",
        )
        .bind(id.to_string())
        .bind(&link.target.workspace)
        .bind(&link.target.sandbox)
        .bind(i64::from(link.target.port))
        .bind(paths)
        .bind(now)
        .bind(expires_at)
        .bind(MAX_LINKS)
        .execute(pool)
        .await?;
        if done.rows_affected() == 0 { Err(IngressError::Full("256 valid preview links")) } else { Ok(()) }
    }

    /// A link that was not revoked.
    pub(crate) async fn link(&self, id: Uuid) -> Result<Option<Link>, IngressError> {
        let row: Option<(String, String, i64, String)> =
            sqlx::query_as("SELECT workspace, sandbox, port, paths FROM preview_links WHERE id = ?")
                .bind(id.to_string())
                .fetch_optional(self.pool().await?)
                .await?;
        let link = |(workspace, sandbox, port, paths): (_, _, _, String)| {
            Ok(Link { target: Target { workspace, sandbox, port: number(port)? }, paths: list(&paths)? })
        };
        row.map(link).transpose()
    }

    /// Valid links to a sandbox, oldest first.
    pub(crate) async fn links(&self, sandbox: &str) -> Result<Vec<PreviewLink>, IngressError> {
        let rows: Vec<LinkRow> = sqlx::query_as(
            "SELECT id, sandbox, port, paths, created_at, expires_at FROM preview_links
             WHERE sandbox = ? AND expires_at > ? ORDER BY created_at, id",
        )
        .bind(sandbox)
        .bind(now())
        .fetch_all(self.pool().await?)
        .await?;
        let link = |(id, sandbox_id, port, paths, created_at, expires_at): LinkRow| {
            let (created_at, expires_at) = (time(created_at), time(expires_at));
            Ok(PreviewLink { id, sandbox_id, port: number(port)?, paths: list(&paths)?, created_at, expires_at })
        };
        rows.into_iter().map(link).collect()
    }

    /// Revokes a link; false when there is none.
    pub(crate) async fn revoke(&self, sandbox: &str, id: Uuid) -> Result<bool, IngressError> {
        let done = sqlx::query("DELETE FROM preview_links WHERE sandbox = ? AND id = ?")
            .bind(sandbox)
            .bind(id.to_string())
            .execute(self.pool().await?)
            .await?;
        Ok(done.rows_affected() > 0)
    }

    /// Forgets a sandbox that is gone. Its id never comes again.
    pub(crate) async fn forget(&self, sandbox: &str) -> Result<(), IngressError> {
        let pool = self.pool().await?;
        sqlx::query("DELETE FROM ports WHERE sandbox = ?").bind(sandbox).execute(pool).await?;
        sqlx::query("DELETE FROM preview_links WHERE sandbox = ?").bind(sandbox).execute(pool).await?;
        Ok(())
    }

    /// Sandboxes of which something is remembered, with their workspaces.
    pub(crate) async fn sandboxes(&self) -> Result<Vec<(String, String)>, IngressError> {
        let all = "SELECT workspace, sandbox FROM ports UNION SELECT workspace, sandbox FROM preview_links";
        Ok(sqlx::query_as(all).fetch_all(self.pool().await?).await?)
    }
}

async fn connect(path: Option<&Path>) -> Result<SqlitePool, IngressError> {
    let options = SqliteConnectOptions::new().busy_timeout(Duration::from_secs(10));
    let pool = match path {
        Some(path) => {
            let options = options
                .filename(path)
                .create_if_missing(true)
                .journal_mode(SqliteJournalMode::Wal)
                .synchronous(SqliteSynchronous::Full);
            SqlitePoolOptions::new().max_connections(4).connect_with(options).await?
        }
        // Each connection would have a memory of its own, and lose it when it is closed.
        None => {
            let one = SqlitePoolOptions::new().min_connections(1).max_connections(1);
            one.idle_timeout(None).max_lifetime(None).connect_with(options.in_memory(true)).await?
        }
    };
    MIGRATIONS.run(&pool).await?;
    Ok(pool)
}

fn number(port: i64) -> Result<u16, IngressError> {
    u16::try_from(port).map_err(|_| IngressError::Damaged("a port's number"))
}

fn list(paths: &str) -> Result<Vec<String>, IngressError> {
    serde_json::from_str(paths).map_err(|_| IngressError::Damaged("a link's paths"))
}

/// Seconds since the Unix epoch.
pub(crate) fn now() -> i64 {
    Timestamp::now().as_second()
}

/// A time of ours in RFC 3339.
pub(crate) fn time(seconds: i64) -> String {
    Timestamp::from_second(seconds).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(sandbox: &str, port: u16) -> Target {
        Target { workspace: "w".into(), sandbox: sandbox.into(), port }
    }

    #[tokio::test]
    async fn the_key_is_made_once_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.db");
        let claim = super::super::link::Claim { id: Uuid::nil(), expires_at: i64::MAX };
        let (first, second) = (IngressStore::open(&path).await.unwrap(), IngressStore::open(&path).await.unwrap());
        let (one, two) = tokio::join!(first.key(), second.key());
        let token = one.unwrap().sign(claim);
        assert_eq!(two.unwrap().sign(claim), token);
        assert_ne!(IngressStore::in_memory().key().await.unwrap().sign(claim), token);
    }

    #[tokio::test]
    async fn what_is_named_is_bounded_and_goes_with_its_sandbox() {
        let store = IngressStore::in_memory();
        for port in 1..=64 {
            store.name(&target("a", port), "x", false).await.unwrap();
        }
        assert!(matches!(store.name(&target("a", 65), "x", false).await, Err(IngressError::Full(_))));
        store.name(&target("a", 64), "again", true).await.unwrap();
        store.name(&target("b", 64), "x", false).await.unwrap();
        let last = NamedPort { port: 64, label: "again".into(), public: true };
        assert_eq!(store.ports("a").await.unwrap().pop(), Some(last));
        assert_eq!(store.public("a", 64).await.unwrap().as_deref(), Some("w"));
        assert_eq!(store.public("b", 64).await.unwrap(), None);
        let link = Link { target: target("a", 1), paths: vec!["/x".into()] };
        let id = Uuid::new_v4();
        store.add_link(id, &link, now() + 100).await.unwrap();
        store.add_link(Uuid::new_v4(), &link, now() - 1).await.unwrap();
        assert_eq!(store.links("a").await.unwrap().len(), 1);
        assert_eq!(store.sandboxes().await.unwrap().len(), 2);
        assert!(!store.revoke("b", id).await.unwrap());
        store.forget("a").await.unwrap();
        assert!(store.link(id).await.unwrap().is_none());
        assert_eq!(store.sandboxes().await.unwrap(), [("w".to_owned(), "b".to_owned())]);
    }

    #[tokio::test]
    async fn links_of_one_sandbox_are_bounded() {
        let store = IngressStore::in_memory();
        let link = Link { target: target("a", 1), paths: Vec::new() };
        for _ in 0..256 {
            store.add_link(Uuid::new_v4(), &link, now() + 100).await.unwrap();
        }
        assert!(matches!(store.add_link(Uuid::new_v4(), &link, now() + 100).await, Err(IngressError::Full(_))));
    }
}
