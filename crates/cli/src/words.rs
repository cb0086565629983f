//! Durations, sizes, ages and names as people read them. Pure.

use std::time::Duration;

use coppice_client::api::{ChangeCounts, EgressPolicy, OnTtl, Sandbox, SandboxStatus};
use jiff::Timestamp;

use crate::table::Tone;

/// `8 ms`, `1.25 s`, `3 m 20 s`, `2 h 5 m`, `3 d 4 h`.
#[must_use]
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    let two = |first: u64, one: &str, second: u64, other: &str| match second {
        0 => format!("{first} {one}"),
        _ => format!("{first} {one} {second} {other}"),
    };
    match seconds {
        0 if time.as_millis() == 0 && !time.is_zero() => format!("{:.1} ms", time.as_secs_f64() * 1000.0),
        0 => format!("{} ms", time.as_millis()),
        1..10 => format!("{:.2} s", time.as_secs_f64()),
        10..100 => format!("{seconds} s"),
        100..6000 => two(seconds / 60, "m", seconds % 60, "s"),
        6000..172_800 => two(seconds / 3600, "h", seconds % 3600 / 60, "m"),
        _ => two(seconds / 86_400, "d", seconds % 86_400 / 3600, "h"),
    }
}

/// From milliseconds.
#[must_use]
pub fn millis(ms: u64) -> String {
    duration(Duration::from_millis(ms))
}

/// From fractional milliseconds, as the API gives pauses.
#[must_use]
pub fn fine_millis(ms: f64) -> String {
    if ms < 10.0 {
        format!("{ms:.1} ms")
    } else {
        duration(Duration::try_from_secs_f64(ms / 1000.0).unwrap_or_default())
    }
}

/// Time since an RFC 3339 instant; `?` when it is none.
#[must_use]
pub fn age(created_at: &str, now: Timestamp) -> String {
    let Ok(then) = created_at.parse::<Timestamp>() else { return "?".into() };
    let seconds = u64::try_from(now.as_second() - then.as_second()).unwrap_or(0);
    match seconds {
        0..100 => format!("{seconds} s"),
        100..6000 => format!("{} m", seconds / 60),
        6000..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// `512 B`, `3.4 MiB`.
#[must_use]
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut whole, mut rest, mut unit) = (bytes, 0, "B");
    for name in UNITS {
        if whole < 1024 {
            break;
        }
        (rest, whole, unit) = (whole % 1024, whole / 1024, name);
    }
    let tenth = rest * 10 / 1024;
    if whole < 100 { format!("{whole}.{tenth} {unit}") } else { format!("{whole} {unit}") }
}

/// The part of an id that tables show.
#[must_use]
pub fn short(id: &str) -> &str {
    id.split('-').next().filter(|part| part.len() >= 8).unwrap_or(id)
}

/// As the API spells it.
#[must_use]
pub fn status(status: SandboxStatus) -> &'static str {
    match status {
        SandboxStatus::Creating => "creating",
        SandboxStatus::Running => "running",
        SandboxStatus::Paused => "paused",
        SandboxStatus::Stopping => "stopping",
        SandboxStatus::Stopped => "stopped",
        SandboxStatus::Hibernated => "hibernated",
        SandboxStatus::Failed => "failed",
    }
}

/// Its colour.
#[must_use]
pub fn status_tone(status: SandboxStatus) -> Tone {
    match status {
        SandboxStatus::Running => Tone::Good,
        SandboxStatus::Failed => Tone::Bad,
        SandboxStatus::Paused | SandboxStatus::Hibernated => Tone::Note,
        _ => Tone::Dim,
    }
}

/// The TTL of a sandbox.
#[must_use]
pub fn ttl(sandbox: &Sandbox) -> String {
    if sandbox.persistent {
        "never".into()
    } else {
        let idle = duration(Duration::from_secs(sandbox.ttl_seconds));
        match sandbox.on_ttl {
            OnTtl::Delete => format!("{idle} idle"),
            OnTtl::Hibernate => format!("{idle} idle, hibernates"),
        }
    }
}

/// What a sandbox may reach, as `--egress` takes it.
#[must_use]
pub fn egress(policy: &EgressPolicy) -> String {
    match policy {
        EgressPolicy::Open => "open".into(),
        EgressPolicy::None => "none".into(),
        EgressPolicy::Allow(entries) => entries.join(","),
    }
}

/// `1 sandbox`, `2 sandboxes`.
#[must_use]
pub fn count(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// `2 added, 1 modified`; `none`.
#[must_use]
pub fn changes(counts: &ChangeCounts) -> String {
    let parts = [(counts.added, "added"), (counts.modified, "modified"), (counts.deleted, "deleted")];
    let parts: Vec<_> = parts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
    if parts.is_empty() { "none".into() } else { parts.join(", ") }
}

/// A name that a guest gave, so that it can't move the cursor, break a line, or be read as another: what is not to be seen
/// is written out.
#[must_use]
pub fn name(text: &str) -> String {
    let hidden = |c: char| {
        let zero_width_or_order = matches!(
            c,
            '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        );
        c.is_control() || zero_width_or_order
    };
    text.chars().map(|c| if hidden(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// A word for `/bin/sh`: quoted only where it must be.
#[must_use]
pub fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,+@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// The last line that has something on it, cut to `width` characters.
#[must_use]
pub fn last_line(text: &str, width: usize) -> String {
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    if line.chars().count() <= width {
        return line.to_owned();
    }
    line.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let cases = [(0, "0 ms"), (8, "8 ms"), (1250, "1.25 s"), (12_345, "12 s"), (200_000, "3 m 20 s")];
        for (ms, text) in cases {
            assert_eq!(millis(ms), text);
        }
        assert_eq!(duration(Duration::from_secs(7500)), "2 h 5 m");
        assert_eq!(duration(Duration::from_secs(273_600)), "3 d 4 h");
        assert_eq!(duration(Duration::from_secs(900)), "15 m");
        assert_eq!(duration(Duration::from_micros(600)), "0.6 ms");
        assert_eq!((fine_millis(0.62), fine_millis(412.3)), ("0.6 ms".into(), "412 ms".into()));
        assert_eq!(fine_millis(f64::NAN), "0 ms");
    }

    #[test]
    fn sizes_and_ages() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2 << 30, "2.0 GiB"), (150 << 20, "150 MiB")]
        {
            assert_eq!(size(bytes), text);
        }
        assert!(size(u64::MAX).ends_with("PiB"));
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        assert_eq!(age("2026-01-01T23:59:30Z", now), "30 s");
        assert_eq!(age("2026-01-02T00:00:30Z", now), "0 s");
        assert_eq!(age("2026-01-01T01:00:00.123Z", now), "23 h");
        assert_eq!(age("soon", now), "?");
    }

    #[test]
    fn words_for_the_shell() {
        for (word, quoted) in [("ls", "ls"), ("a b", "'a b'"), ("", "''"), ("it's", r"'it'\''s'"), ("$HOME", "'$HOME'")]
        {
            assert_eq!(shell_word(word), quoted);
        }
    }

    #[test]
    fn lines_and_names() {
        assert_eq!(last_line("a\nbcd\n\n", 10), "bcd");
        assert_eq!(last_line("abcdef", 4), "abc…");
        assert_eq!(short("6f0c1a2b-0000-4000-8000-000000000000"), "6f0c1a2b");
        assert_eq!(short("K0"), "K0");
        assert_eq!(name("é\u{1b}[2J\n\u{202e}x"), r"é\u{1b}[2J\n\u{202e}x");
    }
}
