//! API tokens: `pds_` and 32 hex digits from the OS generator, kept as SHA-256 in SQLite.
//!
//! A token is looked up by its hash, which tells nobody by its timing how much of a guess was right, and the hashes are
//! then compared in constant time. Which requests need a token is [`crate::authorize`]; the operator's file is
//! [`crate::credentials`]; workspaces are in [`crate::workspaces`].

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use coppice_api::{CreatedToken, Role, Token};
use jiff::Timestamp;
use sha2::{Digest, Sha256};
use sqlx::Row as _;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteRow, SqliteSynchronous,
};
use subtle::ConstantTimeEq;

use crate::audit::{AuditBounds, Journal};

/// The workspace of a single-tenant server.
pub const DEFAULT_WORKSPACE: &str = "default";

/// What every token starts with.
const TOKEN_START: &str = "pds_";
/// `pds_` + 32 hex digits.
const TOKEN_LENGTH: usize = 36;
/// `pds_` + 8 hex digits: what lists and logs show.
const PREFIX_LENGTH: usize = 12;
/// How often a token is drawn anew whose first characters are another's already.
const DRAWS: usize = 8;
/// The use of a token is written down at most so often.
const LAST_USED_EVERY: Duration = Duration::from_secs(60);

pub(crate) static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("./migrations");

/// Why the token store failed.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The database could not be opened, read or written.
    #[error("the token database failed")]
    Database(#[from] sqlx::Error),
    /// The tables could not be brought to this version.
    #[error("the token database could not be migrated")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    /// A row holds what this build doesn't understand.
    #[error("the token database has an unusable {0}")]
    Row(&'static str),
    /// The operating system gave no random bytes.
    #[error("no random bytes from the operating system: {0}")]
    Random(getrandom::Error),
    /// The credentials file could not be read or written.
    #[error("the credentials file {path} failed")]
    Credentials {
        /// Which file.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Who a token stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Everything that a request sees and makes belongs to it.
    pub workspace: String,
    /// What it may do.
    pub role: Role,
    /// The first 12 characters of the token.
    pub prefix: String,
}

/// A token to be made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewToken {
    /// What it is for.
    pub label: String,
    /// What it may do.
    pub role: Role,
    /// How long it lasts; `None`: until it is revoked.
    pub lifetime: Option<Duration>,
}

/// `control.db`: tokens, workspaces and the audit log in SQLite. Cheap to clone.
#[derive(Debug, Clone)]
pub struct TokenStore {
    pub(crate) pool: SqlitePool,
    pub(crate) journal: Journal,
}

impl TokenStore {
    /// Opens `control.db` (makes it when absent) and brings its tables up to date.
    ///
    /// # Errors
    /// When the database cannot be opened or migrated.
    pub async fn open(path: &Path) -> Result<Self, TokenError> {
        Self::open_with(path, AuditBounds::default()).await
    }

    /// The same, with other bounds of the audit log.
    ///
    /// # Errors
    /// When the database cannot be opened or migrated.
    pub async fn open_with(path: &Path, bounds: AuditBounds) -> Result<Self, TokenError> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(10));
        let pool = SqlitePoolOptions::new().max_connections(4).connect_with(options).await?;
        MIGRATIONS.run(&pool).await?;
        let journal = Journal::start(pool.clone(), bounds);
        Ok(Self { pool, journal })
    }

    /// Makes a token of a member that lasts; see [`Self::create_token`].
    ///
    /// # Errors
    /// When there are no random bytes, or the database cannot be written.
    pub async fn create(&self, workspace: &str, label: &str) -> Result<String, TokenError> {
        let new = NewToken { label: label.to_owned(), ..NewToken::default() };
        Ok(self.create_token(workspace, &new).await?.token)
    }

    /// Makes a token, and its workspace with it if there is none yet. This is the only time that it can be seen.
    ///
    /// # Errors
    /// When there are no random bytes, or the database cannot be written.
    pub async fn create_token(&self, workspace: &str, new: &NewToken) -> Result<CreatedToken, TokenError> {
        let mut draws = 0;
        loop {
            draws += 1;
            match self.insert(workspace, new, &random_token()?).await {
                Err(TokenError::Database(sqlx::Error::Database(error)))
                    if error.is_unique_violation() && draws < DRAWS => {}
                done => return done,
            }
        }
    }

    async fn insert(&self, workspace: &str, new: &NewToken, token: &str) -> Result<CreatedToken, TokenError> {
        let now = Timestamp::now();
        // A lifetime beyond the end of time is one without an end.
        let expires = new.lifetime.and_then(|lifetime| now.checked_add(lifetime).ok());
        let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await?;
        sqlx::query("INSERT OR IGNORE INTO workspaces (name, created_at) VALUES (?, ?)")
            .bind(workspace)
            .bind(now.to_string())
            .execute(&mut *transaction)
            .await?;
        sqlx::query(
            "INSERT INTO tokens (hash, prefix, workspace, label, created_at, role, expires_ms) VALUES (?,?,?,?,?,?,?)",
        )
        .bind(&hash(token)[..])
        .bind(prefix(token))
        .bind(workspace)
        .bind(&new.label)
        .bind(now.to_string())
        .bind(new.role.as_str())
        .bind(expires.map(Timestamp::as_millisecond))
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(CreatedToken {
            token: token.to_owned(),
            info: Token {
                prefix: prefix(token).to_owned(),
                label: new.label.clone(),
                role: new.role,
                workspace: workspace.to_owned(),
                created_at: now.to_string(),
                expires_at: expires.map(|at| at.to_string()),
                last_used_at: None,
            },
        })
    }

    /// Whom the token stands for; `None` for a token that is not one of ours, was revoked or has expired.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn authenticate(&self, token: &str) -> Result<Option<Identity>, TokenError> {
        if !is_well_formed(token) {
            return Ok(None);
        }
        let wanted = hash(token);
        let row =
            sqlx::query("SELECT hash, workspace, prefix, role, expires_ms, last_used_ms FROM tokens WHERE hash = ?")
                .bind(&wanted[..])
                .fetch_optional(&self.pool)
                .await?;
        let Some(row) = row else { return Ok(None) };
        let stored: Vec<u8> = row.try_get("hash")?;
        let now = Timestamp::now().as_millisecond();
        let expires: Option<i64> = row.try_get("expires_ms")?;
        if !bool::from(stored.ct_eq(&wanted[..])) || expires.is_some_and(|at| at <= now) {
            return Ok(None);
        }
        let used: Option<i64> = row.try_get("last_used_ms")?;
        let every = i64::try_from(LAST_USED_EVERY.as_millis()).unwrap_or(i64::MAX);
        if used.is_none_or(|used| used <= now.saturating_sub(every)) {
            self.journal.used(wanted, now, now.saturating_sub(every));
        }
        Ok(Some(Identity { workspace: row.try_get("workspace")?, role: role(&row)?, prefix: row.try_get("prefix")? }))
    }

    /// The tokens of a workspace, oldest first.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn list(&self, workspace: &str) -> Result<Vec<Token>, TokenError> {
        self.journal.flush().await;
        let rows = sqlx::query("SELECT * FROM tokens WHERE workspace = ? ORDER BY id")
            .bind(workspace)
            .fetch_all(&self.pool)
            .await?;
        rows.iter().map(from_row).collect()
    }

    /// Whether the workspace has a token with this prefix.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn has(&self, workspace: &str, prefix: &str) -> Result<bool, TokenError> {
        let found = sqlx::query("SELECT 1 FROM tokens WHERE workspace = ? AND prefix = ?")
            .bind(workspace)
            .bind(prefix)
            .fetch_optional(&self.pool)
            .await?;
        Ok(found.is_some())
    }

    /// Ends a token of the workspace at once; false when it has none with this prefix.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn revoke(&self, workspace: &str, prefix: &str) -> Result<bool, TokenError> {
        let gone = sqlx::query("DELETE FROM tokens WHERE workspace = ? AND prefix = ?")
            .bind(workspace)
            .bind(prefix)
            .execute(&self.pool)
            .await?;
        Ok(gone.rows_affected() > 0)
    }

    /// Writes down what is still to be written, and closes the database. Calls after it fail.
    pub async fn close(&self) {
        self.journal.flush().await;
        self.pool.close().await;
    }
}

fn from_row(row: &SqliteRow) -> Result<Token, TokenError> {
    Ok(Token {
        prefix: row.try_get("prefix")?,
        label: row.try_get("label")?,
        role: role(row)?,
        workspace: row.try_get("workspace")?,
        created_at: row.try_get("created_at")?,
        expires_at: row.try_get::<Option<i64>, _>("expires_ms")?.map(instant).transpose()?,
        last_used_at: row.try_get::<Option<i64>, _>("last_used_ms")?.map(instant).transpose()?,
    })
}

/// RFC 3339, of Unix milliseconds.
pub(crate) fn instant(ms: i64) -> Result<String, TokenError> {
    Ok(Timestamp::from_millisecond(ms).map_err(|_| TokenError::Row("time"))?.to_string())
}

fn role(row: &SqliteRow) -> Result<Role, TokenError> {
    match row.try_get::<String, _>("role")?.as_str() {
        "member" => Ok(Role::Member),
        "admin" => Ok(Role::Admin),
        _ => Err(TokenError::Row("role")),
    }
}

fn random_token() -> Result<String, TokenError> {
    let mut bytes = [0; (TOKEN_LENGTH - TOKEN_START.len()) / 2];
    getrandom::fill(&mut bytes).map_err(TokenError::Random)?;
    let mut token = String::with_capacity(TOKEN_LENGTH);
    token.push_str(TOKEN_START);
    for byte in bytes {
        // Writing to a String cannot fail.
        write!(token, "{byte:02x}").unwrap_or_default();
    }
    Ok(token)
}

/// Whether this can be a token of ours at all.
pub(crate) fn is_well_formed(token: &str) -> bool {
    token.len() == TOKEN_LENGTH
        && token
            .strip_prefix(TOKEN_START)
            .is_some_and(|hex| hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)))
}

fn prefix(token: &str) -> &str {
    token.get(..PREFIX_LENGTH).unwrap_or(token)
}

fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn store() -> (tempfile::TempDir, TokenStore) {
        let folder = tempfile::tempdir().unwrap();
        let store = TokenStore::open(&folder.path().join("control.db")).await.unwrap();
        (folder, store)
    }

    #[tokio::test]
    async fn clear_tokens_are_not_in_the_database() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.db");
        let store = TokenStore::open(&path).await.unwrap();
        let token = store.create("default", "x").await.unwrap();
        store.close().await;
        let bytes = std::fs::read(&path).unwrap();
        assert!(!bytes.windows(token.len()).any(|window| window == token.as_bytes()));
    }

    #[tokio::test]
    async fn a_token_lets_in_until_it_expires_or_is_revoked() {
        let (_folder, store) = store().await;
        let short = NewToken { lifetime: Some(Duration::from_millis(1)), ..NewToken::default() };
        let short = store.create_token("w", &short).await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert_eq!(store.authenticate(&short.token).await.unwrap(), None);
        assert!(short.info.expires_at.is_some());

        let long = NewToken { lifetime: Some(Duration::MAX), role: Role::Admin, label: "l".into() };
        let long = store.create_token("w", &long).await.unwrap();
        let identity = store.authenticate(&long.token).await.unwrap().unwrap();
        assert_eq!((identity.workspace.as_str(), identity.role), ("w", Role::Admin));
        assert!(!store.revoke("other", &identity.prefix).await.unwrap());
        assert!(store.authenticate(&long.token).await.unwrap().is_some());
        assert!(store.revoke("w", &identity.prefix).await.unwrap());
        assert_eq!(store.authenticate(&long.token).await.unwrap(), None);
    }

    #[tokio::test]
    async fn the_use_of_a_token_is_written_once_a_minute() {
        let (_folder, store) = store().await;
        let token = store.create("w", "x").await.unwrap();
        assert_eq!(store.list("w").await.unwrap()[0].last_used_at, None);
        for _ in 0..3 {
            store.authenticate(&token).await.unwrap();
        }
        let first = store.list("w").await.unwrap()[0].last_used_at.clone();
        assert!(first.is_some());
        store.authenticate(&token).await.unwrap();
        assert_eq!(store.list("w").await.unwrap()[0].last_used_at, first);
        // As if the minute were over.
        sqlx::query("UPDATE tokens SET last_used_ms = last_used_ms - 60000").execute(&store.pool).await.unwrap();
        store.authenticate(&token).await.unwrap();
        // As times, not as texts: those of whole hundredths are shorter.
        let time = |text: &Option<String>| text.as_deref().unwrap().parse::<jiff::Timestamp>().unwrap();
        assert!(time(&store.list("w").await.unwrap()[0].last_used_at) >= time(&first));
    }

    #[tokio::test]
    async fn a_database_of_the_first_version_keeps_its_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.db");
        let options = SqliteConnectOptions::new().filename(&path).create_if_missing(true);
        let pool = SqlitePoolOptions::new().connect_with(options).await.unwrap();
        let first = sqlx::migrate::Migrator::with_migrations(MIGRATIONS.iter().take(1).cloned().collect());
        first.run(&pool).await.unwrap();
        for (number, workspace) in ["default", "other"].iter().enumerate() {
            let token = format!("pds_{number:032}");
            sqlx::query("INSERT INTO tokens (hash, prefix, workspace, label, created_at) VALUES (?,?,?,'l','t')")
                .bind(&hash(&token)[..])
                .bind(format!("pds_{number}"))
                .bind(*workspace)
                .execute(&pool)
                .await
                .unwrap();
        }
        pool.close().await;
        let store = TokenStore::open(&path).await.unwrap();
        for (number, workspace, role) in [(0, "default", Role::Admin), (1, "other", Role::Member)] {
            let identity = store.authenticate(&format!("pds_{number:032}")).await.unwrap().unwrap();
            assert_eq!((identity.workspace.as_str(), identity.role), (workspace, role));
        }
    }
}
