-- What this host has, and what it intends: a row is written before the act that it describes, and removed after the last
-- trace of it. Times are RFC 3339 in UTC.
CREATE TABLE sandboxes (
    id            TEXT PRIMARY KEY NOT NULL,
    workspace     TEXT NOT NULL,
    template      TEXT NOT NULL,
    cpus          INTEGER NOT NULL,
    memory_mib    INTEGER NOT NULL,
    status        TEXT NOT NULL,
    error         TEXT,
    metadata      TEXT NOT NULL,             -- JSON object of the client's own keys
    from_snapshot TEXT,                      -- what the client asked for, which may be gone
    image         TEXT,                      -- snapshot whose memory file this machine maps: a reference that keeps it
    boot_mode     TEXT NOT NULL,
    boot_ms       INTEGER NOT NULL,
    boot          TEXT,                      -- JSON: what boot_ms was made of
    created_at    TEXT NOT NULL,
    persistent    INTEGER NOT NULL,
    ttl_seconds   INTEGER NOT NULL,
    settled_ttl_seconds INTEGER NOT NULL,    -- the TTL once an explored child is promoted
    last_used_at  TEXT NOT NULL,
    tree_id       TEXT,
    parent_id     TEXT,
    fork_index    INTEGER,
    fork_role     TEXT,                      -- child | promoted
    vm            TEXT                       -- JSON: what the engine needs to adopt the VM
);
CREATE INDEX sandboxes_tree ON sandboxes (tree_id) WHERE tree_id IS NOT NULL;
CREATE INDEX sandboxes_image ON sandboxes (image) WHERE image IS NOT NULL;

CREATE TABLE snapshots (
    id            TEXT PRIMARY KEY NOT NULL,
    workspace     TEXT NOT NULL,
    sandbox_id    TEXT NOT NULL,
    template      TEXT NOT NULL,
    kind          TEXT NOT NULL,             -- kept: the client's, until it deletes it | fork: until no sandbox refers to it
    size_bytes    INTEGER NOT NULL,
    created_at    TEXT NOT NULL
);
