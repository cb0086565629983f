-- The fork that a sandbox is a child of: disk | fork-tree | warm. Its guest is told again when it wakes.
ALTER TABLE sandboxes ADD COLUMN fork_kind TEXT;
-- The child of a warm fork that took the place of a sandbox, whose status is `stopped` from then on.
ALTER TABLE sandboxes ADD COLUMN successor TEXT;
