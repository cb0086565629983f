//! The error that crosses [`crate::HostApi`], and what turns an operation's own error into it.

use std::error::Error;
use std::fmt;

use coppice_api::ErrorClass;

/// What every operation's error enum says of itself.
pub trait Coded: Error + Send + Sync + 'static {
    /// Stable, snake_case.
    fn code(&self) -> &'static str;
    /// Decides the HTTP status.
    fn class(&self) -> ErrorClass;
    /// What to do about it.
    fn hint(&self) -> Option<String> {
        None
    }
}

/// Any failure of a host, as the control plane sees it.
#[derive(Debug)]
pub struct HostError {
    code: &'static str,
    class: ErrorClass,
    hint: Option<String>,
    source: Box<dyn Error + Send + Sync>,
}

impl HostError {
    /// Stable, snake_case.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Decides the HTTP status.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        self.class
    }

    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// The message and those of all its causes, joined by ": ".
    #[must_use]
    pub fn chain(&self) -> String {
        let mut text = self.source.to_string();
        let mut cause = self.source.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }
}

impl<E: Coded> From<E> for HostError {
    fn from(error: E) -> Self {
        Self { code: error.code(), class: error.class(), hint: error.hint(), source: Box::new(error) }
    }
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.chain())
    }
}
