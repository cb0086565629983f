-- A sandbox whose status is `hibernated` has no machine: `image` is the snapshot (of kind `hibernation`) that holds it.
-- How many children the fork had that a child is of: its guest is told again when it wakes.
ALTER TABLE sandboxes ADD COLUMN fork_count INTEGER;
