//! Workspaces in `control.db`: their names and quotas. What a workspace has is the host's to say, and whether something
//! more fits is [`crate::quota`]'s.

use coppice_api::Quota;
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use crate::tokens::{TokenError, TokenStore};

/// A workspace as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkspaceRow {
    pub name: String,
    pub created_at: String,
    pub quota: Quota,
    pub tokens: u64,
}

const SELECT: &str = "SELECT *, (SELECT count(*) FROM tokens WHERE tokens.workspace = workspaces.name) AS tokens \
                      FROM workspaces";

impl TokenStore {
    /// All of them, by name.
    pub(crate) async fn workspaces(&self) -> Result<Vec<WorkspaceRow>, TokenError> {
        let statement = sqlx::AssertSqlSafe(format!("{SELECT} ORDER BY name"));
        sqlx::query(statement).fetch_all(&self.pool).await?.iter().map(from_row).collect()
    }

    /// One, if there is such a one.
    pub(crate) async fn workspace(&self, name: &str) -> Result<Option<WorkspaceRow>, TokenError> {
        let statement = sqlx::AssertSqlSafe(format!("{SELECT} WHERE name = ?"));
        let row = sqlx::query(statement).bind(name).fetch_optional(&self.pool).await?;
        row.as_ref().map(from_row).transpose()
    }

    /// Replaces the quota; false when there is no such workspace.
    pub(crate) async fn set_quota(&self, name: &str, quota: &Quota) -> Result<bool, TokenError> {
        let done = sqlx::query(
            "UPDATE workspaces SET sandboxes = ?, memory_mb = ?, fan_out = ?, snapshots = ?, disk_mb = ? WHERE name = ?",
        )
        .bind(stored(quota.sandboxes))
        .bind(stored(quota.memory_mb))
        .bind(stored(quota.fan_out))
        .bind(stored(quota.snapshots))
        .bind(stored(quota.disk_mb))
        .bind(name)
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() > 0)
    }

    /// Removes a workspace and its tokens; false when there is no such one.
    pub(crate) async fn delete_workspace(&self, name: &str) -> Result<bool, TokenError> {
        let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await?;
        sqlx::query("DELETE FROM tokens WHERE workspace = ?").bind(name).execute(&mut *transaction).await?;
        let gone = sqlx::query("DELETE FROM workspaces WHERE name = ?").bind(name).execute(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(gone.rows_affected() > 0)
    }
}

/// SQLite's integers are signed; a limit beyond them is none in practice.
fn stored(limit: Option<u64>) -> Option<i64> {
    limit.map(|limit| i64::try_from(limit).unwrap_or(i64::MAX))
}

fn from_row(row: &SqliteRow) -> Result<WorkspaceRow, TokenError> {
    let limit = |column: &'static str| -> Result<Option<u64>, TokenError> {
        let stored: Option<i64> = row.try_get(column)?;
        stored.map(|limit| u64::try_from(limit).map_err(|_| TokenError::Row(column))).transpose()
    };
    Ok(WorkspaceRow {
        name: row.try_get("name")?,
        created_at: row.try_get("created_at")?,
        quota: Quota {
            sandboxes: limit("sandboxes")?,
            memory_mb: limit("memory_mb")?,
            fan_out: limit("fan_out")?,
            snapshots: limit("snapshots")?,
            disk_mb: limit("disk_mb")?,
        },
        tokens: limit("tokens")?.unwrap_or_default(),
    })
}
