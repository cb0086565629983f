-- What a sandbox may reach (JSON of coppice_net::Egress), and the network slot that it has (JSON of SlotRecord).
ALTER TABLE sandboxes ADD COLUMN egress TEXT;
ALTER TABLE sandboxes ADD COLUMN network TEXT;
