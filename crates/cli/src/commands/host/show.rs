//! `coppice host show`: the numbers that decide whether there is room, each with a word what it is.

use std::time::Duration;

use coppice_client::api::{HostDisk, HostMemory, HostReport, HostSandboxes};

use crate::commands::Context;
use crate::error::CliError;
use crate::output::Style;
use crate::table::{self, Field, Tone, plain};
use crate::words;

pub(crate) async fn run(context: &Context<'_>) -> Result<(), CliError> {
    let report = context.client()?.host().await?;
    context.output.result(&report, |style| text(style, &report))
}

fn text(style: Style, report: &HostReport) -> String {
    let sections = [
        section(style, "memory", memory(&report.memory)),
        section(style, "disk", disk(&report.disk)),
        section(style, "sandboxes", sandboxes(report)),
    ];
    format!("{}\n\n{}", headline(style, report), sections.join("\n\n"))
}

fn headline(style: Style, report: &HostReport) -> String {
    let room = &report.room;
    let number = usize::try_from(room.sandboxes).unwrap_or(usize::MAX);
    let more = words::count(number, "more sandbox", "more sandboxes");
    let line = format!("room for {more} of {} MiB memory and {} MiB disk", room.memory_mb, room.disk_mb);
    let line = if number == 0 { style.bad(&line) } else { style.strong(&line) };
    format!("{line}; {} end first", bound(&room.bound_by))
}

/// As the headline says it.
fn bound(what: &str) -> &str {
    match what {
        "slots" => "network slots",
        "sandboxes" => "the sandboxes of --max-sandboxes",
        other => other,
    }
}

fn section(style: Style, name: &str, rows: Vec<Vec<Field>>) -> String {
    table::render(style, &[name, "", "what it is"], rows)
}

fn row(name: &str, value: impl Into<String>, what: impl Into<String>) -> Vec<Field> {
    vec![plain(name), plain(value), (what.into(), Tone::Dim)]
}

fn total(name: &str, value: u64, what: &str) -> Vec<Field> {
    let tone = if value == 0 { Tone::Bad } else { Tone::Good };
    vec![plain(name), (words::size(value), tone), (what.into(), Tone::Dim)]
}

fn memory(memory: &HostMemory) -> Vec<Vec<Field>> {
    let size = words::size;
    let measured = match memory.measured_ms_ago {
        Some(ms) => format!("measured {} ago", words::duration(Duration::from_millis(ms))),
        None => "not measured yet".to_owned(),
    };
    let mut rows = vec![
        row("total", size(memory.total), "of the machine"),
        row("available", size(memory.available), "what the kernel could give now without swapping"),
        row("images in use", size(memory.images), "pages of images that sandboxes share: there once, and needed"),
        row("private", size(memory.private), format!("pages of one sandbox alone; with the above the PSS, {measured}")),
    ];
    if let Some(limit) = memory.limit {
        rows.push(row("limit", size(limit), "most that all sandboxes may use (--memory-limit)"));
    }
    rows.extend([
        row("reserve", size(memory.reserve), "kept free (--memory-reserve)"),
        row("promised", size(memory.promised), "what the machines may still write: their size less what is private"),
        row(
            "  counts for",
            size(memory.promised_counted),
            format!("promised / {} (--memory-overcommit)", memory.overcommit),
        ),
        row("being made", size(memory.being_made), "set aside for requests under way"),
        total("headroom", memory.headroom, headroom(memory)),
    ]);
    rows
}

/// Of what it is the rest.
fn headroom(memory: &HostMemory) -> &'static str {
    match memory.limit {
        None => "available - images - reserve - counted - being made",
        Some(limit) => {
            let allowed = limit.saturating_sub(memory.private).saturating_sub(memory.images);
            match allowed < memory.available.saturating_sub(memory.images) {
                true => "limit - private - images - reserve - counted - being made",
                false => "available - images - reserve - counted - being made",
            }
        }
    }
}

fn disk(disk: &HostDisk) -> Vec<Vec<Field>> {
    let size = words::size;
    vec![
        row("total", size(disk.total), "of the data directory's file system"),
        row("free", size(disk.free), "in it, and in what is below it"),
        row("reserve", size(disk.reserve), "kept free (--disk-reserve)"),
        row("promised", size(disk.promised), "what the disks of running sandboxes may grow to"),
        row("  counts for", size(disk.promised_counted), format!("promised / {} (--disk-overcommit)", disk.overcommit)),
        row("being made", size(disk.being_made), "set aside for requests under way"),
        total("headroom", disk.headroom, "free - reserve - counted - being made"),
    ]
}

fn sandboxes(report: &HostReport) -> Vec<Vec<Field>> {
    let HostSandboxes { total, by_status, being_made, limit } = &report.sandboxes;
    let states: Vec<String> = by_status.iter().map(|(status, number)| format!("{number} {status}")).collect();
    let states = if states.is_empty() { "none".to_owned() } else { states.join(", ") };
    vec![
        row("there", format!("{total} of {limit}"), format!("{states} (--max-sandboxes)")),
        row("being made", being_made.to_string(), "by requests under way"),
        row(
            "network slots",
            format!("{} of {}", report.slots.taken, report.slots.limit),
            "in use; one that hibernates has none",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use coppice_client::api::{HostRoom, HostSlots};

    use super::*;

    #[test]
    fn every_number_says_what_it_is() {
        let report = HostReport {
            memory: HostMemory {
                total: 24 << 30,
                available: 20 << 30,
                limit: Some(8 << 30),
                promised: 4 << 30,
                overcommit: 4.0,
                promised_counted: 1 << 30,
                headroom: 7 << 30,
                ..HostMemory::default()
            },
            sandboxes: HostSandboxes {
                total: 3,
                by_status: [("running".to_owned(), 2), ("hibernated".to_owned(), 1)].into(),
                limit: 256,
                ..HostSandboxes::default()
            },
            slots: HostSlots { taken: 2, limit: 256 },
            room: HostRoom { memory_mb: 512, disk_mb: 2048, sandboxes: 42, bound_by: "memory".into() },
            ..HostReport::default()
        };
        let shown = text(Style { color: false }, &report);
        assert!(shown.starts_with("room for 42 more sandboxes of 512 MiB memory and 2048 MiB disk; memory end first"));
        let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [
            "counts for 1.0 GiB promised / 4 (--memory-overcommit)",
            "headroom 7.0 GiB limit - private - images - reserve - counted - being made",
            "3 of 256 1 hibernated, 2 running",
        ] {
            assert!(words.contains(part), "{part} is not in\n{shown}");
        }
        assert!(shown.lines().all(|line| line.trim_end() == line));
    }
}
