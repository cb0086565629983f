-- API tokens. Only the SHA-256 of a token is kept; `prefix` is what lists show.
CREATE TABLE tokens (
    id         INTEGER PRIMARY KEY,
    hash       BLOB NOT NULL UNIQUE CHECK (length(hash) = 32),
    prefix     TEXT NOT NULL,
    workspace  TEXT NOT NULL,
    label      TEXT NOT NULL,
    created_at TEXT NOT NULL
) STRICT;
