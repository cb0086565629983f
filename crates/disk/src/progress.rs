//! What a long operation tells the person who waits for it.
//!
//! One method, so that nothing can be forgotten by an implementation. It draws nothing: the command line does.

/// One thing that happened in a long operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A step begins. Steps of one operation do not overlap.
    Step {
        /// What is being done, e.g. `building template base`.
        what: &'a str,
    },
    /// The latest line of the current step; replaces the one before it.
    Detail {
        /// One line without its end, possibly from another program's output.
        line: &'a str,
    },
    /// How far the current step is.
    Fraction {
        /// Units done, at most `total`.
        done: u64,
        /// Units in all.
        total: u64,
    },
    /// The current step ended well.
    Done {
        /// The outcome, in the words of the step.
        what: &'a str,
    },
    /// Nothing had to be done for this.
    Kept {
        /// What was there already.
        what: &'a str,
    },
    /// Something the operator should know, e.g. that a slower way had to be taken.
    Notice {
        /// A sentence.
        what: &'a str,
    },
}

/// Receives events. Called from worker threads; must not block for long.
pub trait Progress: Send + Sync {
    /// Takes one event.
    fn report(&self, event: Event<'_>);
}

impl<F> Progress for F
where
    F: Fn(Event<'_>) + Send + Sync,
{
    fn report(&self, event: Event<'_>) {
        self(event);
    }
}

/// Discards every event.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn report(&self, _event: Event<'_>) {}
}
