//! The data directory: reflinks, room, templates.

use std::path::Path;

use coppice_disk::data_dir::supports_reflink;
use coppice_disk::free_space;

use super::Check;
use crate::words;

/// Below this templates can be built, and not much more.
const LITTLE_ROOM: u64 = 20 << 30;
/// Below this not even that.
const NO_ROOM: u64 = 5 << 30;

pub(super) fn all(dir: &Path) -> Vec<Check> {
    let mut checks = vec![reflink(dir), room(dir)];
    if dir.is_dir() {
        checks.push(templates(dir));
    }
    checks
}

fn reflink(dir: &Path) -> Check {
    let name = "reflinks";
    if !dir.is_dir() {
        let image = format!("{}.xfs", dir.display());
        return if Path::new("/dev/loop-control").exists() {
            Check::warn(
                name,
                format!("{} does not exist yet", dir.display()),
                format!("`coppice setup` makes it, with an XFS image {image} below it if the disk has no reflinks"),
            )
        } else {
            Check::warn(
                name,
                format!("{} does not exist yet, and there is no /dev/loop-control for an XFS image", dir.display()),
                "put the data directory on XFS or btrfs: without reflinks every fork copies whole disks",
            )
        };
    }
    let staging = dir.join("staging");
    let area = if staging.is_dir() { staging.as_path() } else { dir };
    match supports_reflink(area) {
        Ok(true) => Check::ok(name, format!("{} has them", dir.display())),
        Ok(false) => Check::warn(
            name,
            format!("{} has none: every fork copies whole disks", dir.display()),
            "stop the server, empty the directory and run `coppice setup`, which mounts an XFS image there",
        ),
        Err(error) => Check::warn(name, format!("can't be tried: {}", causes(&error)), "run this as root"),
    }
}

fn room(dir: &Path) -> Check {
    let existing = dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match free_space(existing) {
        Err(error) => Check::warn("disk", causes(&error), "run this as root"),
        Ok(space) => {
            let free = format!("{} free in {}", words::size(space.available), existing.display());
            match space.available {
                room if room < NO_ROOM => Check::fail("disk", free, "templates and sandboxes need some 5 GiB at least"),
                room if room < LITTLE_ROOM => Check::warn("disk", free, "enough for the templates and few sandboxes"),
                _ => Check::ok("disk", free),
            }
        }
    }
}

/// Read without the catalog, which opens (and so tidies) the directory.
fn templates(dir: &Path) -> Check {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir.join("templates")).into_iter().flatten().filter_map(Result::ok) {
        if entry.path().join("current").is_file() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    if names.is_empty() {
        return Check::warn("templates", "none yet", "`coppice setup` or `coppice up` makes them; that takes minutes");
    }
    Check::ok("templates", names.join(", "))
}

pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
