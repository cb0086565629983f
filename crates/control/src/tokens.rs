//! API tokens: `pds_` and 32 hex digits from the OS generator, kept as SHA-256 in SQLite.
//!
//! It stores and looks up. Which requests need a token is [`crate::auth`]; the operator's file is
//! [`crate::credentials`].

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use sha2::{Digest, Sha256};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use subtle::ConstantTimeEq;

/// The workspace of a single-tenant server.
pub const DEFAULT_WORKSPACE: &str = "default";

/// What every token starts with.
const TOKEN_START: &str = "pds_";
/// `pds_` + 32 hex digits.
const TOKEN_LENGTH: usize = 36;
/// `pds_` + 8 hex digits: what lists and logs show.
const PREFIX_LENGTH: usize = 12;

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("./migrations");

/// Why the token store failed.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The database could not be opened, read or written.
    #[error("the token database failed")]
    Database(#[from] sqlx::Error),
    /// The tables could not be brought to this version.
    #[error("the token database could not be migrated")]
    Migrate(#[from] sqlx::migrate::MigrateError),
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
    /// The first 12 characters of the token.
    pub prefix: String,
}

/// Tokens in a SQLite database. Cheap to clone.
#[derive(Debug, Clone)]
pub struct TokenStore {
    pool: SqlitePool,
}

impl TokenStore {
    /// Opens `control.db` (makes it when absent) and brings its `tokens` table up to date.
    ///
    /// # Errors
    /// When the database cannot be opened or migrated.
    pub async fn open(path: &Path) -> Result<Self, TokenError> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(10));
        let pool = SqlitePoolOptions::new().max_connections(4).connect_with(options).await?;
        MIGRATIONS.run(&pool).await?;
        Ok(Self { pool })
    }

    /// Makes a token. This is the only time that it can be seen.
    ///
    /// # Errors
    /// When there are no random bytes, or the database cannot be written.
    pub async fn create(&self, workspace: &str, label: &str) -> Result<String, TokenError> {
        let token = random_token()?;
        sqlx::query("INSERT INTO tokens (hash, prefix, workspace, label, created_at) VALUES (?, ?, ?, ?, ?)")
            .bind(&hash(&token)[..])
            .bind(prefix(&token))
            .bind(workspace)
            .bind(label)
            .bind(jiff::Timestamp::now().to_string())
            .execute(&self.pool)
            .await?;
        Ok(token)
    }

    /// Whom the token stands for; `None` for a token that is not one of ours.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn authenticate(&self, token: &str) -> Result<Option<Identity>, TokenError> {
        if !is_well_formed(token) {
            return Ok(None);
        }
        let wanted = hash(token);
        let row: Option<(Vec<u8>, String, String)> =
            sqlx::query_as("SELECT hash, workspace, prefix FROM tokens WHERE hash = ?")
                .bind(&wanted[..])
                .fetch_optional(&self.pool)
                .await?;
        Ok(row.and_then(|(stored, workspace, prefix)| {
            let same = bool::from(stored.ct_eq(&wanted[..]));
            same.then_some(Identity { workspace, prefix })
        }))
    }

    /// Closes the database. Calls after it fail.
    pub async fn close(&self) {
        self.pool.close().await;
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
