-- What clients said of ports of sandboxes, and links that lead to them. Rows go with their sandbox.
CREATE TABLE ports (
    sandbox    TEXT NOT NULL,
    port       INTEGER NOT NULL CHECK (port BETWEEN 1 AND 65535),
    workspace  TEXT NOT NULL,
    label      TEXT NOT NULL,
    public     INTEGER NOT NULL CHECK (public IN (0, 1)),
    PRIMARY KEY (sandbox, port)
) STRICT;

CREATE TABLE preview_links (
    id         TEXT PRIMARY KEY,
    workspace  TEXT NOT NULL,
    sandbox    TEXT NOT NULL,
    port       INTEGER NOT NULL CHECK (port BETWEEN 1 AND 65535),
    -- A JSON list of paths; empty: all.
    paths      TEXT NOT NULL,
    -- Seconds since the Unix epoch.
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT;
CREATE INDEX preview_links_by_sandbox ON preview_links (sandbox);

-- The key that links are signed with: one, made when the first link is.
CREATE TABLE preview_key (
    id  INTEGER PRIMARY KEY CHECK (id = 1),
    key BLOB NOT NULL CHECK (length(key) = 32)
) STRICT;
