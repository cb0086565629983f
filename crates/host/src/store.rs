//! The host's records in SQLite (`coppice.db`): what it has and what it intends.
//!
//! WAL, `synchronous=NORMAL`: a crash of the process loses nothing; a crash of the machine may lose the last moments, and
//! the machine's VMs with them. The numbered migrations are the only owner of the schema.

use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use coppice_api::{BootMode, OnTtl, SandboxStatus};
use jiff::Timestamp;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteExecutor, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteRow,
    SqliteSynchronous,
};
use sqlx::{Connection as _, Row, query};
use uuid::Uuid;

use crate::record::{ForkKind, ForkRole, Lineage, SandboxRecord, SnapshotKind, SnapshotRecord};

/// Longest that one statement may take, waiting for its turn included. Statements take well under a millisecond.
const TIMEOUT: Duration = Duration::from_secs(15);

/// The records can't be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database said no.
    #[error("the host's records can't be read or written")]
    Database(#[from] sqlx::Error),
    /// The schema can't be brought up to date.
    #[error("the host's records have a schema that this build can't use")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    /// A row holds what this build doesn't understand.
    #[error("record {id} has an unusable {column}: {value:?}")]
    Row {
        /// Primary key of the row.
        id: String,
        /// Which column.
        column: &'static str,
        /// What it holds.
        value: String,
    },
    /// The database did not answer: its disk is stuck.
    #[error("the host's records did not answer within {TIMEOUT:?}")]
    Timeout,
    /// A value can't be stored.
    #[error("a record can't be encoded")]
    Encode(#[from] serde_json::Error),
}

impl crate::Coded for StoreError {
    fn code(&self) -> &'static str {
        "store_failed"
    }

    fn class(&self) -> coppice_api::ErrorClass {
        coppice_api::ErrorClass::Internal
    }
}

/// The open database.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pool: SqlitePool,
}

impl Store {
    pub(crate) async fn open(path: &Path) -> Result<Self, StoreError> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(10));
        // One connection: SQLite has one writer anyway, and so no statement ever waits for another's lock.
        let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await?;
        sqlx::migrate!("./migrations").run(&pool).await?;
        Ok(Self { pool })
    }

    /// Records the intent to make a sandbox.
    pub(crate) async fn insert_sandbox(&self, r: &SandboxRecord) -> Result<(), StoreError> {
        bounded(
            query(
                "INSERT INTO sandboxes (id, workspace, template, cpus, memory_mib, status, error, metadata, \
                 from_snapshot, image, boot_mode, boot_ms, boot, created_at, persistent, ttl_seconds, \
                 settled_ttl_seconds, last_used_at, tree_id, parent_id, fork_index, fork_count, fork_role, fork_kind, vm, \
                 egress, network, on_ttl, settled_on_ttl) \
                 VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            )
            .bind(r.id.to_string())
            .bind(&r.workspace)
            .bind(&r.template)
            .bind(r.cpus)
            .bind(r.memory_mib)
            .bind(to_word(&r.status)?)
            .bind(&r.error)
            .bind(serde_json::to_string(&r.metadata)?)
            .bind(r.from_snapshot.map(|id| id.to_string()))
            .bind(r.image.map(|id| id.to_string()))
            .bind(to_word(&r.boot_mode)?)
            .bind(signed(r.boot_ms))
            .bind(r.boot.map(|b| serde_json::to_string(&b)).transpose()?)
            .bind(r.created_at.to_string())
            .bind(r.persistent)
            .bind(signed(r.ttl_seconds))
            .bind(signed(r.settled_ttl_seconds))
            .bind(r.last_used_at.to_string())
            .bind(r.lineage.as_ref().map(|l| l.tree_id.to_string()))
            .bind(r.lineage.as_ref().map(|l| l.parent_id.to_string()))
            .bind(r.lineage.as_ref().map(|l| l.index))
            .bind(r.lineage.as_ref().map(|l| l.count))
            .bind(r.lineage.as_ref().map(|l| l.role.as_str()))
            .bind(r.lineage.as_ref().map(|l| l.kind.as_str()))
            .bind(r.vm.as_ref().map(serde_json::to_string).transpose()?)
            .bind(serde_json::to_string(&r.egress)?)
            .bind(r.network.as_ref().map(serde_json::to_string).transpose()?)
            .bind(to_word(&r.on_ttl)?)
            .bind(to_word(&r.settled_on_ttl)?)
            .execute(&self.pool),
        )
        .await?;
        Ok(())
    }

    /// Writes down what its actor changes in a sandbox's life, and nothing that a client may change at the same time
    /// ([`Self::put_lifecycle`]): a TTL that was acknowledged must not be overwritten by an older copy of it. Does nothing
    /// when the row is gone: a late change never brings back a sandbox that was deleted meanwhile.
    pub(crate) async fn update_sandbox(&self, r: &SandboxRecord) -> Result<(), StoreError> {
        bounded(
            query("UPDATE sandboxes SET status=?, error=?, boot_ms=?, boot=?, last_used_at=?, vm=? WHERE id=?")
                .bind(to_word(&r.status)?)
                .bind(&r.error)
                .bind(signed(r.boot_ms))
                .bind(r.boot.map(|b| serde_json::to_string(&b)).transpose()?)
                .bind(r.last_used_at.to_string())
                .bind(r.vm.as_ref().map(serde_json::to_string).transpose()?)
                .bind(r.id.to_string())
                .execute(&self.pool),
        )
        .await?;
        Ok(())
    }

    /// Writes down what it may reach and its slot. Apart from everything else, and by its actor only: a change of something
    /// else that is written late must not bring an earlier policy back.
    pub(crate) async fn put_network(&self, r: &SandboxRecord) -> Result<(), StoreError> {
        bounded(
            query("UPDATE sandboxes SET egress=?, network=? WHERE id=?")
                .bind(serde_json::to_string(&r.egress)?)
                .bind(r.network.as_ref().map(serde_json::to_string).transpose()?)
                .bind(r.id.to_string())
                .execute(&self.pool),
        )
        .await?;
        Ok(())
    }

    /// When sandboxes were last used, in one transaction.
    pub(crate) async fn put_last_used(&self, used: &[(Uuid, Timestamp)]) -> Result<(), StoreError> {
        let all = async {
            let mut transaction = self.pool.begin().await?;
            for (id, at) in used {
                query("UPDATE sandboxes SET last_used_at = ? WHERE id = ?")
                    .bind(at.to_string())
                    .bind(id.to_string())
                    .execute(&mut *transaction)
                    .await?;
            }
            transaction.commit().await
        };
        bounded(all).await
    }

    pub(crate) async fn delete_sandbox(&self, id: Uuid) -> Result<(), StoreError> {
        bounded(query("DELETE FROM sandboxes WHERE id = ?").bind(id.to_string()).execute(&self.pool)).await?;
        Ok(())
    }

    pub(crate) async fn sandboxes(&self) -> Result<Vec<SandboxRecord>, StoreError> {
        let rows = bounded(query("SELECT * FROM sandboxes ORDER BY created_at, id").fetch_all(&self.pool)).await?;
        rows.iter().map(sandbox_from_row).collect()
    }

    pub(crate) async fn put_snapshot(&self, s: &SnapshotRecord) -> Result<(), StoreError> {
        bounded(insert_snapshot(&self.pool, s)).await
    }

    /// What a client may change of a sandbox at any time: TTL, metadata, its part in a fork. Apart from what the actor
    /// writes: a change that is written late must not bring back a machine that is gone.
    pub(crate) async fn put_lifecycle(&self, r: &SandboxRecord) -> Result<(), StoreError> {
        bounded(
            query(
                "UPDATE sandboxes SET metadata=?, persistent=?, ttl_seconds=?, settled_ttl_seconds=?, on_ttl=?, \
                 settled_on_ttl=?, last_used_at=?, fork_role=? WHERE id=?",
            )
            .bind(serde_json::to_string(&r.metadata)?)
            .bind(r.persistent)
            .bind(signed(r.ttl_seconds))
            .bind(signed(r.settled_ttl_seconds))
            .bind(to_word(&r.on_ttl)?)
            .bind(to_word(&r.settled_on_ttl)?)
            .bind(r.last_used_at.to_string())
            .bind(r.lineage.as_ref().map(|l| l.role.as_str()))
            .bind(r.id.to_string())
            .execute(&self.pool),
        )
        .await?;
        Ok(())
    }

    /// Where a sandbox is from now on: in a machine, or in an image, which is recorded with it. One transaction, and on the
    /// disk when this answers, as a crash of the host must not bring back what was before: a machine that was ended, or an
    /// image that was woken.
    pub(crate) async fn put_whereabouts(
        &self,
        r: &SandboxRecord,
        image: Option<&SnapshotRecord>,
    ) -> Result<(), StoreError> {
        self.put_places(&[r], image, None).await
    }

    /// A child of a warm fork takes its parent's place, with the snapshot that it was restored from. As
    /// [`Self::put_whereabouts`]: a crash of the host must not bring back a parent whose child has gone on.
    pub(crate) async fn put_succession(
        &self,
        parent: &SandboxRecord,
        child: &SandboxRecord,
        image: &SnapshotRecord,
    ) -> Result<(), StoreError> {
        self.put_places(&[parent, child], Some(image), None).await
    }

    /// There is no successor: the parent is what it was, the child and its snapshot are not recorded any more.
    pub(crate) async fn undo_succession(
        &self,
        parent: &SandboxRecord,
        child: Uuid,
        image: Uuid,
    ) -> Result<(), StoreError> {
        self.put_places(&[parent], None, Some((child, image))).await
    }

    async fn put_places(
        &self,
        moved: &[&SandboxRecord],
        image: Option<&SnapshotRecord>,
        gone: Option<(Uuid, Uuid)>,
    ) -> Result<(), StoreError> {
        let places: Vec<Place> = moved.iter().map(|r| place(r)).collect::<Result<_, _>>()?;
        let done = async {
            let mut connection = self.pool.acquire().await?;
            query("PRAGMA synchronous = FULL").execute(&mut *connection).await?;
            let done = async {
                let mut transaction = connection.begin().await?;
                if let Some(image) = image {
                    insert_snapshot(&mut *transaction, image).await?;
                }
                for (r, place) in moved.iter().zip(places) {
                    query(
                        "UPDATE sandboxes SET status=?, error=?, image=?, vm=?, network=?, boot=?, boot_ms=?, \
                         last_used_at=?, successor=? WHERE id=?",
                    )
                    .bind(place.status)
                    .bind(&r.error)
                    .bind(r.image.map(|id| id.to_string()))
                    .bind(place.vm)
                    .bind(place.network)
                    .bind(place.boot)
                    .bind(signed(r.boot_ms))
                    .bind(r.last_used_at.to_string())
                    .bind(r.successor.map(|id| id.to_string()))
                    .bind(r.id.to_string())
                    .execute(&mut *transaction)
                    .await?;
                }
                if let Some((sandbox, snapshot)) = gone {
                    for (statement, id) in [
                        ("DELETE FROM sandboxes WHERE id = ?", sandbox),
                        ("DELETE FROM snapshots WHERE id = ?", snapshot),
                    ] {
                        query(statement).bind(id.to_string()).execute(&mut *transaction).await?;
                    }
                }
                transaction.commit().await
            };
            let done = done.await;
            query("PRAGMA synchronous = NORMAL").execute(&mut *connection).await?;
            done
        };
        bounded(done).await
    }

    pub(crate) async fn snapshot(&self, id: Uuid) -> Result<Option<SnapshotRecord>, StoreError> {
        let row =
            bounded(query("SELECT * FROM snapshots WHERE id = ?").bind(id.to_string()).fetch_optional(&self.pool))
                .await?;
        row.as_ref().map(snapshot_from_row).transpose()
    }

    /// Newest first.
    pub(crate) async fn snapshots(&self) -> Result<Vec<SnapshotRecord>, StoreError> {
        let rows = bounded(query("SELECT * FROM snapshots ORDER BY created_at DESC, id").fetch_all(&self.pool)).await?;
        rows.iter().map(snapshot_from_row).collect()
    }

    /// Answers whether it was there.
    pub(crate) async fn delete_snapshot(&self, id: Uuid) -> Result<bool, StoreError> {
        let done =
            bounded(query("DELETE FROM snapshots WHERE id = ?").bind(id.to_string()).execute(&self.pool)).await?;
        Ok(done.rows_affected() > 0)
    }

    /// Removes the rows of snapshots that no client keeps and no sandbox refers to, and answers their ids.
    pub(crate) async fn drop_unreferenced_snapshots(&self) -> Result<Vec<Uuid>, StoreError> {
        let rows = bounded(
            query(
                "DELETE FROM snapshots WHERE kind IN ('fork', 'hibernation') AND NOT EXISTS \
             (SELECT 1 FROM sandboxes WHERE sandboxes.image = snapshots.id) RETURNING id",
            )
            .fetch_all(&self.pool),
        )
        .await?;
        rows.iter().map(|row| parse(row, "id")).collect()
    }
}

/// What of a sandbox's whereabouts is stored as text.
struct Place {
    status: String,
    vm: Option<String>,
    network: Option<String>,
    boot: Option<String>,
}

fn place(r: &SandboxRecord) -> Result<Place, StoreError> {
    Ok(Place {
        status: to_word(&r.status)?,
        vm: r.vm.as_ref().map(serde_json::to_string).transpose()?,
        network: r.network.as_ref().map(serde_json::to_string).transpose()?,
        boot: r.boot.map(|boot| serde_json::to_string(&boot)).transpose()?,
    })
}

async fn insert_snapshot(to: impl SqliteExecutor<'_>, s: &SnapshotRecord) -> Result<(), sqlx::Error> {
    // An image may be recorded again when what followed could not be.
    query(
        "INSERT OR REPLACE INTO snapshots (id, workspace, sandbox_id, template, kind, size_bytes, created_at) \
         VALUES (?,?,?,?,?,?,?)",
    )
    .bind(s.id.to_string())
    .bind(&s.workspace)
    .bind(s.sandbox_id.to_string())
    .bind(&s.template)
    .bind(s.kind.as_str())
    .bind(signed(s.size_bytes))
    .bind(s.created_at.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// A disk that is stuck must not make callers wait for ever.
async fn bounded<T>(statement: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, StoreError> {
    Ok(tokio::time::timeout(TIMEOUT, statement).await.map_err(|_| StoreError::Timeout)??)
}

/// SQLite has signed 64-bit integers; no value of ours is above 2^63.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn unsigned(row: &SqliteRow, column: &'static str) -> Result<u64, StoreError> {
    let value: i64 = row.try_get(column)?;
    u64::try_from(value).map_err(|_| unusable(row, column, value.to_string()))
}

fn unusable(row: &SqliteRow, column: &'static str, value: String) -> StoreError {
    StoreError::Row { id: row.try_get("id").unwrap_or_default(), column, value }
}

/// The word that serde gives a unit variant.
fn to_word<T: Serialize>(value: &T) -> Result<String, StoreError> {
    Ok(serde_json::to_value(value)?.as_str().unwrap_or_default().to_owned())
}

fn from_word<T: DeserializeOwned>(row: &SqliteRow, column: &'static str) -> Result<T, StoreError> {
    let word: String = row.try_get(column)?;
    serde_json::from_value(serde_json::Value::String(word.clone())).map_err(|_| unusable(row, column, word))
}

fn parse<T: FromStr>(row: &SqliteRow, column: &'static str) -> Result<T, StoreError> {
    let text: String = row.try_get(column)?;
    text.parse().map_err(|_| unusable(row, column, text))
}

fn parse_opt<T: FromStr>(row: &SqliteRow, column: &'static str) -> Result<Option<T>, StoreError> {
    let text: Option<String> = row.try_get(column)?;
    text.map(|text| text.parse().map_err(|_| unusable(row, column, text))).transpose()
}

fn json_opt<T: DeserializeOwned>(row: &SqliteRow, column: &'static str) -> Result<Option<T>, StoreError> {
    let text: Option<String> = row.try_get(column)?;
    text.map(|text| serde_json::from_str(&text).map_err(|_| unusable(row, column, text))).transpose()
}

fn lineage_from_row(row: &SqliteRow) -> Result<Option<Lineage>, StoreError> {
    let Some(tree_id) = parse_opt(row, "tree_id")? else { return Ok(None) };
    let role: String = row.try_get("fork_role")?;
    let role = match role.as_str() {
        "child" => ForkRole::Child,
        "promoted" => ForkRole::Promoted,
        _ => return Err(unusable(row, "fork_role", role)),
    };
    let index: u32 = row.try_get("fork_index")?;
    // Older rows don't say; there were so many at least.
    let count = row.try_get::<Option<u32>, _>("fork_count")?.unwrap_or(index.saturating_add(1));
    let kind = match row.try_get::<Option<String>, _>("fork_kind")?.as_deref() {
        Some("disk") => ForkKind::Disk,
        Some("fork-tree") => ForkKind::Tree,
        Some("warm") => ForkKind::Warm,
        Some(other) => return Err(unusable(row, "fork_kind", other.to_owned())),
        // Older rows don't say, and are of one of these.
        None => match from_word::<BootMode>(row, "boot_mode")? {
            BootMode::Cold => ForkKind::Disk,
            BootMode::Snapshot => ForkKind::Tree,
        },
    };
    Ok(Some(Lineage { tree_id, parent_id: parse(row, "parent_id")?, index, count, role, kind }))
}

fn sandbox_from_row(row: &SqliteRow) -> Result<SandboxRecord, StoreError> {
    Ok(SandboxRecord {
        id: parse(row, "id")?,
        workspace: row.try_get("workspace")?,
        template: row.try_get("template")?,
        cpus: row.try_get("cpus")?,
        memory_mib: row.try_get("memory_mib")?,
        status: from_word::<SandboxStatus>(row, "status")?,
        error: row.try_get("error")?,
        metadata: json_opt(row, "metadata")?.unwrap_or_default(),
        from_snapshot: parse_opt(row, "from_snapshot")?,
        image: parse_opt(row, "image")?,
        boot_mode: from_word::<BootMode>(row, "boot_mode")?,
        boot_ms: unsigned(row, "boot_ms")?,
        boot: json_opt(row, "boot")?,
        created_at: parse(row, "created_at")?,
        persistent: row.try_get("persistent")?,
        ttl_seconds: unsigned(row, "ttl_seconds")?,
        settled_ttl_seconds: unsigned(row, "settled_ttl_seconds")?,
        on_ttl: from_word::<OnTtl>(row, "on_ttl")?,
        settled_on_ttl: from_word::<OnTtl>(row, "settled_on_ttl")?,
        last_used_at: parse(row, "last_used_at")?,
        lineage: lineage_from_row(row)?,
        successor: parse_opt(row, "successor")?,
        egress: json_opt(row, "egress")?.unwrap_or_default(),
        network: json_opt(row, "network")?,
        vm: json_opt(row, "vm")?,
    })
}

fn snapshot_from_row(row: &SqliteRow) -> Result<SnapshotRecord, StoreError> {
    let kind: String = row.try_get("kind")?;
    Ok(SnapshotRecord {
        id: parse(row, "id")?,
        workspace: row.try_get("workspace")?,
        sandbox_id: parse(row, "sandbox_id")?,
        template: row.try_get("template")?,
        kind: match kind.as_str() {
            "kept" => SnapshotKind::Kept,
            "fork" => SnapshotKind::Fork,
            "hibernation" => SnapshotKind::Hibernation,
            _ => return Err(unusable(row, "kind", kind)),
        },
        size_bytes: unsigned(row, "size_bytes")?,
        created_at: parse(row, "created_at")?,
    })
}

#[cfg(test)]
mod tests {
    use coppice_net::{Egress, SlotRecord};

    use super::*;

    fn sandbox(image: Option<Uuid>) -> SandboxRecord {
        let now = Timestamp::now();
        SandboxRecord {
            id: Uuid::new_v4(),
            workspace: "w".into(),
            template: "base".into(),
            cpus: 1,
            memory_mib: 512,
            status: SandboxStatus::Creating,
            error: None,
            metadata: [("k".to_owned(), "v\u{2028}".to_owned())].into(),
            from_snapshot: None,
            image,
            boot_mode: BootMode::Snapshot,
            boot_ms: 0,
            boot: None,
            created_at: now,
            persistent: false,
            ttl_seconds: 60,
            settled_ttl_seconds: 600,
            on_ttl: OnTtl::Delete,
            settled_on_ttl: OnTtl::Hibernate,
            last_used_at: now,
            lineage: Some(Lineage {
                tree_id: Uuid::new_v4(),
                parent_id: Uuid::new_v4(),
                index: 3,
                count: 4,
                role: ForkRole::Child,
                kind: ForkKind::Warm,
            }),
            successor: None,
            egress: Egress::Open,
            network: None,
            vm: None,
        }
    }

    #[tokio::test]
    async fn a_record_survives_closing_and_opening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("coppice.db");
        let mut record = sandbox(Some(Uuid::new_v4()));
        {
            let store = Store::open(&path).await.unwrap();
            store.insert_sandbox(&record).await.unwrap();
            record.status = SandboxStatus::Running;
            record.boot_ms = 123;
            record.on_ttl = OnTtl::Hibernate;
            record.egress = Egress::Allow(vec!["example.org:443".parse().unwrap()]);
            let (address, mac) = (coppice_net::address_of(7).unwrap(), [2, 0x63, 1, 2, 3, 4]);
            let (egress, seat) = (record.egress.clone(), coppice_net::Seat::Second);
            record.network = Some(SlotRecord { index: 7, mac, address, egress, seat });
            record.lineage.as_mut().unwrap().role = ForkRole::Promoted;
            record.ttl_seconds = 61;
            store.update_sandbox(&record).await.unwrap();
            store.put_network(&record).await.unwrap();
            store.put_lifecycle(&record).await.unwrap();
        }
        let store = Store::open(&path).await.unwrap();
        let found = store.sandboxes().await.unwrap();
        assert_eq!(found.len(), 1);
        let found = &found[0];
        assert_eq!((found.id, found.status, found.boot_ms), (record.id, SandboxStatus::Running, 123));
        assert_eq!((&found.metadata, &found.lineage), (&record.metadata, &record.lineage));
        assert_eq!((&found.egress, &found.network), (&record.egress, &record.network));
        assert_eq!((found.created_at, found.image), (record.created_at, record.image));
        assert_eq!((found.on_ttl, found.settled_on_ttl), (OnTtl::Hibernate, OnTtl::Hibernate));
        // What is written with an older policy or TTL at hand, or by who has not seen a promotion, does not bring them back.
        let lineage = record.lineage.clone().map(|l| Lineage { role: ForkRole::Child, ..l });
        let stale = SandboxRecord { egress: Egress::Open, network: None, ttl_seconds: 5, lineage, ..record.clone() };
        store.update_sandbox(&stale).await.unwrap();
        let found = store.sandboxes().await.unwrap().remove(0);
        assert_eq!((found.egress, found.ttl_seconds, found.lineage), (record.egress, 61, record.lineage));
        let later = Timestamp::now();
        store.put_last_used(&[(record.id, later)]).await.unwrap();
        assert_eq!(store.sandboxes().await.unwrap()[0].last_used_at, later);
    }

    #[tokio::test]
    async fn a_fork_snapshot_lives_while_a_sandbox_refers_to_it_and_a_kept_one_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("coppice.db")).await.unwrap();
        let snapshot = |kind| SnapshotRecord {
            id: Uuid::new_v4(),
            workspace: "w".into(),
            sandbox_id: Uuid::new_v4(),
            template: "base".into(),
            kind,
            size_bytes: 1,
            created_at: Timestamp::now(),
        };
        let (fork, kept) = (snapshot(SnapshotKind::Fork), snapshot(SnapshotKind::Kept));
        let child = sandbox(Some(fork.id));
        store.put_snapshot(&fork).await.unwrap();
        store.put_snapshot(&kept).await.unwrap();
        store.insert_sandbox(&child).await.unwrap();
        assert!(store.drop_unreferenced_snapshots().await.unwrap().is_empty());
        store.delete_sandbox(child.id).await.unwrap();
        store.update_sandbox(&child).await.unwrap();
        assert!(store.sandboxes().await.unwrap().is_empty(), "a late update must not bring back a deleted sandbox");
        assert_eq!(store.drop_unreferenced_snapshots().await.unwrap(), vec![fork.id]);
        assert!(store.snapshot(fork.id).await.unwrap().is_none());
        assert!(store.snapshot(kept.id).await.unwrap().is_some());
    }
}
