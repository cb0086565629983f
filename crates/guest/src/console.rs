//! The agent's log: one line per event on standard error, which is the console when the agent is PID 1.
//!
//! Only this crate's own events are written, without colours or time (the kernel and the host add theirs). Spans are
//! not recorded. It never writes to the disk, which may be frozen.

use std::{
    fmt::Write as _,
    io::Write as _,
    sync::atomic::{AtomicU64, Ordering},
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

/// Writes events to standard error.
#[derive(Debug)]
pub struct Console {
    level: Level,
    spans: AtomicU64,
}

/// Makes the console the log of this process. Later calls do nothing.
pub fn install(level: Level) {
    // An error means that the process has a log already.
    tracing::subscriber::set_global_default(Console { level, spans: AtomicU64::new(1) }).ok();
}

/// Writes one line, in one write.
pub fn line(text: &str) {
    let one: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // There is nowhere to report a broken console to.
    std::io::stderr().lock().write_all(format!("coppice-guest: {one}\n").as_bytes()).ok();
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let separator = if self.0.is_empty() { "" } else { " " };
        // Writing to a string can't fail.
        match field.name() {
            "message" => write!(self.0, "{separator}{value:?}"),
            name => write!(self.0, "{separator}{name}={value:?}"),
        }
        .ok();
    }
}

impl Subscriber for Console {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level && metadata.target().starts_with("coppice")
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(self.spans.fetch_add(1, Ordering::Relaxed).max(1))
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        match *event.metadata().level() {
            Level::ERROR => line(&format!("error: {}", text.0)),
            Level::WARN => line(&format!("warning: {}", text.0)),
            _ => line(&text.0),
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
