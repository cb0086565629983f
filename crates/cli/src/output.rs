//! Where results and remarks go: results to standard output, as text or JSON; everything else to standard error.

use std::io::{self, IsTerminal as _, Write as _};

use serde::Serialize;

use crate::args::{ColorChoice, Global};
use crate::error::{CliError, Report};

/// How this process prints.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    json: bool,
    stdout_color: bool,
    stderr_color: bool,
    stderr_tty: bool,
}

impl Output {
    /// As the options and the terminal say.
    #[must_use]
    pub fn new(global: &Global) -> Self {
        let allowed = match global.color {
            ColorChoice::Always => Some(true),
            ColorChoice::Never => Some(false),
            ColorChoice::Auto if global.no_color.as_deref().is_some_and(|value| !value.is_empty()) => Some(false),
            ColorChoice::Auto => None,
        };
        let stderr_tty = io::stderr().is_terminal();
        Self {
            json: global.json,
            stdout_color: allowed.unwrap_or_else(|| io::stdout().is_terminal()),
            stderr_color: allowed.unwrap_or(stderr_tty),
            stderr_tty,
        }
    }

    /// Results are JSON.
    #[must_use]
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Whether standard error is a terminal.
    #[must_use]
    pub fn stderr_is_tty(&self) -> bool {
        self.stderr_tty
    }

    /// For what goes to standard output.
    #[must_use]
    pub fn style(&self) -> Style {
        Style { color: self.stdout_color }
    }

    /// For what goes to standard error.
    #[must_use]
    pub fn error_style(&self) -> Style {
        Style { color: self.stderr_color }
    }

    /// A result: JSON if that was asked for, else what `human` says.
    pub fn result<T: Serialize>(&self, value: &T, human: impl FnOnce(Style) -> String) -> Result<(), CliError> {
        if !self.json {
            return self.text(&human(self.style()));
        }
        let text = serde_json::to_string_pretty(value)
            .map_err(|error| CliError::failed("output", "the result can't be written as JSON").because(error))?;
        self.text(&text)
    }

    /// A result whose only text is a remark: JSON if that was asked for.
    pub fn done<T: Serialize>(&self, value: &T, remark: &str) -> Result<(), CliError> {
        if self.json { self.result(value, |_| String::new()) } else { self.text(remark) }
    }

    /// Lines to standard output; nothing for an empty text.
    pub fn text(&self, text: &str) -> Result<(), CliError> {
        if text.is_empty() {
            return Ok(());
        }
        let mut out = io::stdout().lock();
        let end = if text.ends_with('\n') { "" } else { "\n" };
        write!(out, "{text}{end}").and_then(|()| out.flush()).map_err(closed)
    }

    /// Bytes to standard output, as they are.
    pub fn raw(&self, bytes: &[u8]) -> Result<(), CliError> {
        let mut out = io::stdout().lock();
        out.write_all(bytes).and_then(|()| out.flush()).map_err(closed)
    }

    /// Bytes to standard error, as they are.
    pub fn raw_error(&self, bytes: &[u8]) -> Result<(), CliError> {
        io::stderr().lock().write_all(bytes).map_err(closed)
    }

    /// A line for the person who waits, to standard error; nothing with `--json`.
    pub fn note(&self, text: &str) {
        if !self.json {
            self.say(text);
        }
    }

    pub(crate) fn failure(&self, report: &Report<'_>) {
        if self.json {
            return self.say(&serde_json::to_string(report).unwrap_or_default());
        }
        let style = self.error_style();
        self.say(&format!("{} {}", style.bad("error:"), report.error));
        if let Some(hint) = &report.hint {
            self.say(&format!("{} {hint}", style.note("hint:")));
        }
    }

    /// Nothing can be said of a failure to write to standard error.
    fn say(&self, text: &str) {
        writeln!(io::stderr().lock(), "{text}").unwrap_or_default();
    }
}

fn closed(error: io::Error) -> CliError {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return CliError::BrokenPipe;
    }
    CliError::failed("output", "could not write to standard output").because(error)
}

/// Colours, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Use them.
    pub color: bool,
}

impl Style {
    fn paint(self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Success.
    #[must_use]
    pub fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// Failure.
    #[must_use]
    pub fn bad(self, text: &str) -> String {
        self.paint("31", text)
    }

    /// Something to look at.
    #[must_use]
    pub fn note(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// Less important.
    #[must_use]
    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// More important.
    #[must_use]
    pub fn strong(self, text: &str) -> String {
        self.paint("1", text)
    }
}
