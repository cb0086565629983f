-- Workspaces with their quotas; NULL: no limit but the host's.
CREATE TABLE workspaces (
    name       TEXT PRIMARY KEY NOT NULL,
    created_at TEXT NOT NULL,
    sandboxes  INTEGER CHECK (sandboxes >= 0),
    memory_mb  INTEGER CHECK (memory_mb >= 0),
    fan_out    INTEGER CHECK (fan_out >= 0),
    snapshots  INTEGER CHECK (snapshots >= 0),
    disk_mb    INTEGER CHECK (disk_mb >= 0)
) STRICT;

INSERT INTO workspaces (name, created_at)
SELECT workspace, min(created_at) FROM tokens GROUP BY workspace;
INSERT OR IGNORE INTO workspaces (name, created_at) VALUES ('default', strftime('%Y-%m-%dT%H:%M:%SZ', 'now'));

-- Times are Unix milliseconds: they are compared.
ALTER TABLE tokens ADD COLUMN role TEXT NOT NULL DEFAULT 'member' CHECK (role IN ('member', 'admin'));
ALTER TABLE tokens ADD COLUMN expires_ms INTEGER;
ALTER TABLE tokens ADD COLUMN last_used_ms INTEGER;
-- Until now every token of `default` was the operator's.
UPDATE tokens SET role = 'admin' WHERE workspace = 'default';
-- A prefix names one token, in lists and in the audit log.
CREATE UNIQUE INDEX tokens_prefix ON tokens (prefix);
CREATE INDEX tokens_workspace ON tokens (workspace);

-- What was asked for by whom, and how it ended. Bounded per workspace, and by age.
CREATE TABLE audit (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms      INTEGER NOT NULL,
    workspace  TEXT NOT NULL,
    token      TEXT NOT NULL,
    method     TEXT NOT NULL,
    route      TEXT NOT NULL,
    resource   TEXT NOT NULL,
    status     INTEGER NOT NULL,
    request_id TEXT NOT NULL
) STRICT;
CREATE INDEX audit_workspace ON audit (workspace, id);
CREATE INDEX audit_time ON audit (at_ms);
