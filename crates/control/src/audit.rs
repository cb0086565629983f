//! The audit log: who changed what, and how that ended.
//!
//! One task writes it, in batches, so that no request waits for a disk; what is in its queue is bounded, and while it is
//! full nothing that would have to be logged is begun. Rows are bounded per workspace, so that one tenant can't push
//! another's history out, and by age. Entries of the last moments before a `kill -9` may be lost; a polite stop writes
//! them.
//!
//! The use of tokens is written by the same task. Requests without a valid token are no entries: the server's log has
//! them, and anybody can send any number.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use coppice_api::AuditEntry;
use jiff::Timestamp;
use sqlx::Row as _;
use sqlx::sqlite::SqlitePool;
use tokio::sync::{mpsc, oneshot};

use crate::tokens::{TokenError, TokenStore, instant};

/// Entries that may wait for the disk.
const QUEUE: usize = 10_000;
/// Written in one transaction at most.
const BATCH: usize = 256;
/// How many entries are written between two prunings.
const PRUNE_EVERY: usize = 1000;
/// How often writing is tried.
const TRIES: u32 = 3;
/// Between tries.
const PAUSE: Duration = Duration::from_millis(200);

/// How much of the audit log is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuditBounds {
    /// Newest entries of each workspace. Default 20,000.
    pub entries: u32,
    /// For how long. Default 90 days.
    pub age: Duration,
}

impl Default for AuditBounds {
    fn default() -> Self {
        Self { entries: 20_000, age: Duration::from_secs(90 * 24 * 3600) }
    }
}

/// An entry that has no number and time yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NewEntry {
    pub workspace: String,
    pub token: String,
    pub method: String,
    pub route: String,
    pub resource: String,
    pub status: u16,
    pub request_id: String,
}

/// Which entries are asked for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AuditQuery<'a> {
    pub workspace: Option<&'a str>,
    pub before: Option<i64>,
    pub limit: u32,
}

#[derive(Debug)]
enum Note {
    Entry(i64, NewEntry),
    Used { hash: [u8; 32], at_ms: i64, older_than_ms: i64 },
    Flush(oneshot::Sender<()>),
}

/// The queue to the task that writes. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Journal {
    notes: mpsc::UnboundedSender<Note>,
    waiting: Arc<AtomicUsize>,
}

impl Journal {
    /// Starts the task. It ends with the last clone.
    pub(crate) fn start(pool: SqlitePool, bounds: AuditBounds) -> Self {
        let (notes, receiver) = mpsc::unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        drop(tokio::spawn(write_all(pool, bounds, receiver, Arc::clone(&waiting))));
        Self { notes, waiting }
    }

    /// Whether another entry may be begun.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < QUEUE && !self.notes.is_closed()
    }

    pub(crate) fn record(&self, entry: NewEntry) {
        self.send(Note::Entry(Timestamp::now().as_millisecond(), entry));
    }

    pub(crate) fn used(&self, hash: [u8; 32], at_ms: i64, older_than_ms: i64) {
        // Lossy where it matters least: the next use is as good.
        if self.has_room() {
            self.send(Note::Used { hash, at_ms, older_than_ms });
        }
    }

    /// Waits until what was given so far is written.
    pub(crate) async fn flush(&self) {
        let (done, written) = oneshot::channel();
        self.send(Note::Flush(done));
        // An error means that the task has ended, and then there is nothing to wait for.
        written.await.unwrap_or_default();
    }

    fn send(&self, note: Note) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if self.notes.send(note).is_err() {
            tracing::error!("the audit log's writer has ended: an entry is lost");
        }
    }
}

async fn write_all(
    pool: SqlitePool,
    bounds: AuditBounds,
    mut notes: mpsc::UnboundedReceiver<Note>,
    waiting: Arc<AtomicUsize>,
) {
    let mut batch = Vec::with_capacity(BATCH);
    // So that the first entry of a run prunes what grew old meanwhile.
    let mut unpruned = PRUNE_EVERY;
    loop {
        let count = notes.recv_many(&mut batch, BATCH).await;
        if count == 0 {
            return;
        }
        write_batch(&pool, &batch).await;
        let entries = batch.iter().filter(|note| matches!(note, Note::Entry(..))).count();
        unpruned += entries;
        if unpruned > PRUNE_EVERY {
            unpruned = 0;
            if let Err(error) = prune(&pool, bounds).await {
                tracing::warn!(error = &error as &dyn std::error::Error, "the audit log can't be pruned");
            }
        }
        waiting.fetch_sub(count, Ordering::Relaxed);
        for note in batch.drain(..) {
            if let Note::Flush(done) = note {
                // Whoever waited may have gone.
                done.send(()).unwrap_or_default();
            }
        }
    }
}

async fn write_batch(pool: &SqlitePool, batch: &[Note]) {
    if batch.iter().all(|note| matches!(note, Note::Flush(_))) {
        return;
    }
    for _ in 0..TRIES {
        match try_write(pool, batch).await {
            Ok(()) => return,
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "the audit log can't be written");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    let lost = u64::try_from(batch.len()).unwrap_or(u64::MAX);
    tracing::error!(lost, "entries of the audit log are lost");
    metrics::counter!("coppice_audit_lost_total").increment(lost);
}

async fn try_write(pool: &SqlitePool, batch: &[Note]) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
    for note in batch {
        match note {
            Note::Entry(at_ms, entry) => {
                sqlx::query(
                    "INSERT INTO audit (at_ms, workspace, token, method, route, resource, status, request_id) \
                     VALUES (?,?,?,?,?,?,?,?)",
                )
                .bind(at_ms)
                .bind(&entry.workspace)
                .bind(&entry.token)
                .bind(&entry.method)
                .bind(&entry.route)
                .bind(&entry.resource)
                .bind(entry.status)
                .bind(&entry.request_id)
                .execute(&mut *transaction)
                .await?;
            }
            Note::Used { hash, at_ms, older_than_ms } => {
                sqlx::query(
                    "UPDATE tokens SET last_used_ms = ? WHERE hash = ? AND (last_used_ms IS NULL OR last_used_ms <= ?)",
                )
                .bind(at_ms)
                .bind(&hash[..])
                .bind(older_than_ms)
                .execute(&mut *transaction)
                .await?;
            }
            Note::Flush(_) => {}
        }
    }
    transaction.commit().await
}

/// Removes what is too old, and of each workspace what is beyond its number of entries.
async fn prune(pool: &SqlitePool, bounds: AuditBounds) -> Result<(), sqlx::Error> {
    let age = i64::try_from(bounds.age.as_millis()).unwrap_or(i64::MAX);
    let oldest = Timestamp::now().as_millisecond().saturating_sub(age);
    sqlx::query("DELETE FROM audit WHERE at_ms < ?").bind(oldest).execute(pool).await?;
    let workspaces: Vec<String> = sqlx::query_scalar("SELECT DISTINCT workspace FROM audit").fetch_all(pool).await?;
    for workspace in workspaces {
        sqlx::query(
            "DELETE FROM audit WHERE workspace = ?1 AND id <= \
             (SELECT id FROM audit WHERE workspace = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
        )
        .bind(workspace)
        .bind(bounds.entries)
        .execute(pool)
        .await?;
    }
    Ok(())
}

impl TokenStore {
    /// Entries, newest first.
    pub(crate) async fn audit(&self, query: AuditQuery<'_>) -> Result<Vec<AuditEntry>, TokenError> {
        self.journal.flush().await;
        let rows = sqlx::query(
            "SELECT * FROM audit WHERE (?1 IS NULL OR workspace = ?1) AND (?2 IS NULL OR id < ?2) \
             ORDER BY id DESC LIMIT ?3",
        )
        .bind(query.workspace)
        .bind(query.before)
        .bind(query.limit)
        .fetch_all(&self.pool)
        .await?;
        rows.iter()
            .map(|row| {
                Ok(AuditEntry {
                    id: row.try_get("id")?,
                    at: instant(row.try_get("at_ms")?)?,
                    workspace: row.try_get("workspace")?,
                    token: row.try_get("token")?,
                    method: row.try_get("method")?,
                    route: row.try_get("route")?,
                    resource: row.try_get("resource")?,
                    status: row.try_get("status")?,
                    request_id: row.try_get("request_id")?,
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(workspace: &str, resource: usize) -> NewEntry {
        NewEntry { workspace: workspace.into(), resource: resource.to_string(), status: 204, ..NewEntry::default() }
    }

    #[tokio::test]
    async fn a_workspace_that_writes_much_pushes_out_its_own_entries_only() {
        let folder = tempfile::tempdir().unwrap();
        let bounds = AuditBounds { entries: 3, ..AuditBounds::default() };
        let store = TokenStore::open_with(&folder.path().join("control.db"), bounds).await.unwrap();
        store.journal.record(entry("quiet", 0));
        for number in 0..10 {
            store.journal.record(entry("loud", number));
        }
        store.journal.flush().await;
        prune(&store.pool, bounds).await.unwrap();
        let of = |workspace| AuditQuery { workspace: Some(workspace), before: None, limit: 100 };
        let loud = store.audit(of("loud")).await.unwrap();
        assert_eq!(loud.iter().map(|e| e.resource.as_str()).collect::<Vec<_>>(), ["9", "8", "7"]);
        assert_eq!(store.audit(of("quiet")).await.unwrap().len(), 1);
        let before = AuditQuery { workspace: None, before: Some(loud[1].id), limit: 1 };
        assert_eq!(store.audit(before).await.unwrap()[0].resource, "7");

        prune(&store.pool, AuditBounds { entries: 100, age: Duration::ZERO }).await.unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        prune(&store.pool, AuditBounds { entries: 100, age: Duration::ZERO }).await.unwrap();
        assert_eq!(store.audit(AuditQuery { limit: 100, ..AuditQuery::default() }).await.unwrap(), []);
    }

    #[tokio::test]
    async fn closing_writes_what_waits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.db");
        let store = TokenStore::open(&path).await.unwrap();
        for number in 0..1000 {
            store.journal.record(entry("w", number));
        }
        store.close().await;
        let store = TokenStore::open(&path).await.unwrap();
        let all = store.audit(AuditQuery { limit: 2000, ..AuditQuery::default() }).await.unwrap();
        assert_eq!(all.len(), 1000);
        assert_eq!((all[0].resource.as_str(), all[0].status), ("999", 204));
    }
}
