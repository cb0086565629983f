//! How a command fails: what is printed, and with which code the process ends.

use std::error::Error;
use std::io::Write as _;
use std::process::ExitCode;

use coppice_client::{ClientError, ExploreError};
use serde::Serialize;

use crate::output::Output;

/// The command line is wrong.
const USAGE: u8 = 2;
/// As a shell says it of a process that an interrupt ended.
const INTERRUPTED: u8 = 130;
/// As a shell says it of a process that wrote into a closed pipe.
const BROKEN_PIPE: u8 = 141;
/// As timeout(1) says it.
const TIMED_OUT: u8 = 124;

/// Any failure of a command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CliError {
    /// A call to the server failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// An exploration found no winner.
    #[error(transparent)]
    Explore(#[from] ExploreError),
    /// What was asked for makes no sense.
    #[error("{message}")]
    Usage {
        /// A sentence.
        message: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// Anything else.
    #[error("{message}")]
    Failed {
        /// Stable, snake_case.
        code: &'static str,
        /// A sentence.
        message: String,
        /// What to do about it.
        hint: Option<String>,
        /// Why.
        #[source]
        source: Option<Box<dyn Error + Send + Sync>>,
    },
    /// The command ran into its deadline.
    #[error("{0}")]
    TimedOut(String),
    /// The person, or the system, asked it to stop.
    #[error("interrupted{}", .0.as_ref().map(|what| format!(": {what}")).unwrap_or_default())]
    Interrupted(Option<String>),
    /// Nobody reads standard output any more; nothing is said of it.
    #[error("standard output is closed")]
    BrokenPipe,
}

impl CliError {
    /// A failure with a stable code and a sentence.
    #[must_use]
    pub fn failed(code: &'static str, message: impl Into<String>) -> Self {
        Self::Failed { code, message: message.into(), hint: None, source: None }
    }

    /// A mistake on the command line.
    #[must_use]
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), hint: None }
    }

    /// The same, with what to do about it.
    #[must_use]
    pub fn hint(mut self, text: impl Into<String>) -> Self {
        if let Self::Usage { hint, .. } | Self::Failed { hint, .. } = &mut self {
            *hint = Some(text.into());
        }
        self
    }

    /// The same, with its cause.
    #[must_use]
    pub fn because(mut self, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        if let Self::Failed { source, .. } = &mut self {
            *source = Some(cause.into());
        }
        self
    }

    /// Stable, snake_case.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::Client(error) | Self::Explore(ExploreError::Fork(error)) => error.code(),
            Self::Explore(ExploreError::Invalid(_)) | Self::Usage { .. } => "usage",
            Self::Explore(ExploreError::NoViableBranch(_)) => "no_viable_branch",
            Self::Explore(_) | Self::Interrupted(_) => "interrupted",
            Self::Failed { code, .. } => code,
            Self::TimedOut(_) => "exec_timeout",
            Self::BrokenPipe => "broken_pipe",
        }
    }

    fn hint_text(&self) -> Option<String> {
        match self {
            Self::Client(error) | Self::Explore(ExploreError::Fork(error)) => error.hint(),
            Self::Usage { hint, .. } | Self::Failed { hint, .. } => hint.clone(),
            _ => None,
        }
    }

    fn exit_code(&self) -> u8 {
        match self {
            Self::Usage { .. } | Self::Explore(ExploreError::Invalid(_)) => USAGE,
            Self::Interrupted(_) | Self::Explore(ExploreError::Interrupted { .. }) => INTERRUPTED,
            Self::TimedOut(_) => TIMED_OUT,
            Self::BrokenPipe => BROKEN_PIPE,
            _ => 1,
        }
    }

    /// Prints it to standard error; gives the code to end with.
    #[must_use]
    pub fn end(&self, output: &Output) -> ExitCode {
        if !matches!(self, Self::BrokenPipe) {
            let status = match self {
                Self::Client(error) | Self::Explore(ExploreError::Fork(error)) => error.status(),
                _ => None,
            };
            output.failure(&Report { error: chain(self), code: self.code(), hint: self.hint_text(), status });
        }
        ExitCode::from(self.exit_code())
    }
}

/// A failure as it is printed; the fields of an error body of the API.
#[derive(Debug, Serialize)]
pub struct Report<'a> {
    pub(crate) error: String,
    pub(crate) code: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
}

/// The message and those of its causes that say something new. Of a transport failure only the root cause does.
fn chain(error: &CliError) -> String {
    let transport = matches!(
        error,
        CliError::Client(ClientError::Transport { .. })
            | CliError::Explore(ExploreError::Fork(ClientError::Transport { .. }))
    );
    let mut texts = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        let skip = transport && error.source().is_some() && !error.is::<ClientError>();
        if !skip && texts.iter().all(|known| !known.contains(&text)) {
            texts.push(text);
        }
        cause = error.source();
    }
    texts.join(": ")
}

/// Prints what clap says of a wrong command line, or the help or version that was asked for.
#[must_use]
pub(crate) fn usage(error: &clap::Error, json: bool) -> ExitCode {
    use clap::error::ErrorKind::{DisplayHelp, DisplayVersion};
    if matches!(error.kind(), DisplayHelp | DisplayVersion) || !json {
        // Nothing can be said of a failure to print.
        error.print().unwrap_or_default();
    } else {
        let text = error.render().to_string();
        let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        let report = Report {
            error: message.to_owned(),
            code: "usage",
            hint: Some("see `coppice --help`".into()),
            status: None,
        };
        let line = serde_json::to_string(&report).unwrap_or_default();
        writeln!(std::io::stderr(), "{line}").unwrap_or_default();
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_says_nothing_new_is_left_out() {
        let cause = std::io::Error::other("disk is full");
        let error = CliError::failed("x", "could not write a: disk is full").because(cause);
        assert_eq!(chain(&error), "could not write a: disk is full");
        let error = CliError::failed("x", "could not write a").because(std::io::Error::other("disk is full"));
        assert_eq!(chain(&error), "could not write a: disk is full");
    }

    #[test]
    fn exit_codes() {
        assert_eq!(CliError::usage("x").exit_code(), 2);
        assert_eq!(CliError::failed("x", "x").exit_code(), 1);
        assert_eq!(CliError::Interrupted(None).exit_code(), 130);
        assert_eq!(CliError::TimedOut(String::new()).exit_code(), 124);
    }
}
