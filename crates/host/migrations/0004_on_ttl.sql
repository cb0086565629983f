-- What becomes of a sandbox that was idle for its TTL (delete | hibernate): now, and once an explored child is promoted.
ALTER TABLE sandboxes ADD COLUMN on_ttl TEXT NOT NULL DEFAULT 'delete';
ALTER TABLE sandboxes ADD COLUMN settled_on_ttl TEXT NOT NULL DEFAULT 'delete';
