//! What the host gives to sandboxes, on the command line.

use clap::Args;
use coppice_host::{Overcommit, RoomConfig};

/// What of the host sandboxes may have. `coppice host show` says what became of it.
#[derive(Debug, Clone, Args)]
pub struct RoomArgs {
    /// Most memory that all sandboxes together may use. Default: what the host has
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    memory_limit: Option<u64>,
    /// Memory that is kept free
    #[arg(long, default_value_t = 512, value_name = "MIB", value_parser = clap::value_parser!(u64).range(0..=1 << 30))]
    memory_reserve: u64,
    /// What sandboxes may still write counts for one part in so many; what they have written counts in full
    #[arg(long, default_value = "4", value_name = "FACTOR")]
    memory_overcommit: Overcommit,
    /// Disk that is kept free
    #[arg(long, default_value_t = 1024, value_name = "MIB", value_parser = clap::value_parser!(u64).range(0..=1 << 30))]
    disk_reserve: u64,
    /// The same for what their disks may grow to
    #[arg(long, default_value = "16", value_name = "FACTOR")]
    disk_overcommit: Overcommit,
}

impl From<&RoomArgs> for RoomConfig {
    fn from(args: &RoomArgs) -> Self {
        Self {
            memory_limit: args.memory_limit.map(|mib| mib << 20),
            memory_reserve: args.memory_reserve << 20,
            memory_overcommit: args.memory_overcommit,
            disk_reserve: args.disk_reserve << 20,
            disk_overcommit: args.disk_overcommit,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        room: RoomArgs,
    }

    #[test]
    fn what_the_help_says_is_what_a_host_has_by_itself() {
        let line = Line::try_parse_from(["x"]).unwrap();
        assert_eq!(RoomConfig::from(&line.room), RoomConfig::default());
        let given = ["x", "--memory-limit", "2048", "--memory-overcommit", "1.5"];
        let room = RoomConfig::from(&Line::try_parse_from(given).unwrap().room);
        assert_eq!((room.memory_limit, room.memory_overcommit.as_f64()), (Some(2 << 30), 1.5));
        for wrong in [["x", "--memory-overcommit", "0.5"], ["x", "--memory-limit", "0"]] {
            Line::try_parse_from(wrong).unwrap_err();
        }
    }
}
