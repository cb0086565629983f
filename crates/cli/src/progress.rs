//! Long operations as a person sees them, on standard error: a spinner or bar on a terminal, lines elsewhere.

use std::io::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use coppice_disk::{Event, Progress};
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::Output;
use crate::words;

/// Characters of a step's latest line that are shown.
const DETAIL: usize = 70;
/// How often the time that a step has taken is told where there is no terminal.
const HEARTBEAT: Duration = Duration::from_secs(20);

/// Shows events.
pub struct Shown {
    output: Output,
    current: Mutex<Current>,
}

#[derive(Default)]
struct Current {
    what: String,
    bar: Option<ProgressBar>,
    begin: Option<Instant>,
    told: Option<Instant>,
}

impl Shown {
    /// For this terminal.
    #[must_use]
    pub fn new(output: &Output) -> Self {
        Self { output: *output, current: Mutex::default() }
    }

    fn line(&self, mark: &str, text: &str) {
        // Nothing can be said of a failure to write to standard error.
        writeln!(std::io::stderr().lock(), "{mark} {text}").unwrap_or_default();
    }
}

impl Progress for Shown {
    fn report(&self, event: Event<'_>) {
        let style = self.output.error_style();
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Step { what } => {
                current.clear();
                what.clone_into(&mut current.what);
                current.begin = Some(Instant::now());
                current.told = current.begin;
                if self.output.stderr_is_tty() {
                    current.bar = Some(spinner(what));
                } else {
                    self.line("…", what);
                }
            }
            Event::Detail { line } => match &current.bar {
                Some(bar) => bar.set_message(format!("{}  {}", current.what, words::last_line(line, DETAIL))),
                None => {
                    if let Some(text) = current.heartbeat() {
                        self.line("…", &text);
                    }
                }
            },
            Event::Fraction { done, total } => match &current.bar {
                Some(bar) => {
                    if bar.length() != Some(total) {
                        bar.set_style(bar_style());
                        bar.set_length(total);
                    }
                    bar.set_position(done);
                }
                None => {
                    if let Some(text) = current.heartbeat() {
                        let percent = done.saturating_mul(100).checked_div(total).unwrap_or(100);
                        self.line("…", &format!("{text}, {percent} %"));
                    }
                }
            },
            Event::Done { what } => {
                current.clear();
                self.line(&style.good("✓"), what);
            }
            Event::Kept { what } => self.line(&style.dim("="), what),
            Event::Notice { what } => match &current.bar {
                Some(bar) => bar.suspend(|| self.line(&style.note("!"), what)),
                None => self.line(&style.note("!"), what),
            },
            // Something newer than this command line.
            _ => {}
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Current {
    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        self.begin = None;
    }

    /// What to say of a step that goes on for long; now and then.
    fn heartbeat(&mut self) -> Option<String> {
        let (begin, told) = (self.begin?, self.told?);
        if told.elapsed() < HEARTBEAT {
            return None;
        }
        self.told = Some(Instant::now());
        Some(format!("{} ({})", self.what, words::duration(Duration::from_secs(begin.elapsed().as_secs()))))
    }
}

fn spinner(what: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(what.to_owned());
    if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {bar:24} {percent:>3} %  {wide_msg} {elapsed}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
