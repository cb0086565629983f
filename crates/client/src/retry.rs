//! Asking again when the server had no room: only for calls whose refusal means that nothing was made.
//!
//! The rules are those of the published SDKs: 503 with `Retry-After` and a JSON sentence, 507, and 429 with `Retry-After`
//! are asked again; everything else is final. Waits are jittered, and bounded by one budget.

use std::fmt;
use std::time::Duration;

use crate::{ApiError, Hook};

/// Least wait after a 507.
const FULL_FLOOR: Duration = Duration::from_millis(500);
/// A last wait that the budget cuts short is no shorter than this.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// Most seconds of jitter by attempt; the last one goes on.
const JITTER_SECONDS: [f64; 5] = [1.0, 2.0, 4.0, 8.0, 15.0];

/// How long a create, fork or fork-tree may wait for room.
#[derive(Clone)]
pub struct RetryPolicy {
    /// All waits together; zero: never ask again.
    pub budget: Duration,
    /// Told before each wait.
    pub on_wait: Option<Hook<Refusal>>,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { budget: Duration::from_secs(60), on_wait: None }
    }
}

impl fmt::Debug for RetryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryPolicy").field("budget", &self.budget).finish_non_exhaustive()
    }
}

/// The server had no room, and will be asked again.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// What was asked for.
    pub action: &'static str,
    /// How often it was asked for so far.
    pub attempt: u32,
    /// What it said.
    pub error: ApiError,
    /// How long until it is asked again.
    pub wait: Duration,
}

/// The least wait after this refusal; `None`: asking again is no use, or could make something twice.
fn floor(error: &ApiError) -> Option<Duration> {
    match error.status {
        503 if error.well_formed => error.retry_after,
        429 => error.retry_after,
        507 => Some(error.retry_after.unwrap_or(FULL_FLOOR).max(FULL_FLOOR)),
        _ => None,
    }
}

/// How long to wait after the `attempt`th refusal (from 0), of which `elapsed` of the budget is used; `None`: give up.
/// `jitter` is in [0, 1).
pub(crate) fn wait(
    error: &ApiError,
    attempt: usize,
    budget: Duration,
    elapsed: Duration,
    jitter: f64,
) -> Option<Duration> {
    let floor = floor(error)?;
    let remaining = budget.checked_sub(elapsed)?;
    if remaining.is_zero() || floor > remaining {
        return None;
    }
    let cap = JITTER_SECONDS.get(attempt).or(JITTER_SECONDS.last()).copied().unwrap_or_default();
    let wait = floor + Duration::from_secs_f64(cap * jitter.clamp(0.0, 1.0));
    Some(if wait > remaining { remaining.max(floor.max(LAST_WAIT)) } else { wait })
}

/// A `Retry-After` header: seconds, or an HTTP date.
pub(crate) fn parse_retry_after(value: &str) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let when = jiff::fmt::rfc2822::parse(value).ok()?.timestamp();
    Some(Duration::try_from(when - jiff::Timestamp::now()).unwrap_or(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(status: u16, retry_after: Option<u64>) -> ApiError {
        ApiError {
            status,
            code: "x".into(),
            message: "no".into(),
            hint: None,
            retry_after: retry_after.map(Duration::from_secs),
            well_formed: true,
        }
    }

    /// The waits with the largest jitter and a budget of a minute, in seconds.
    fn waits(error: &ApiError) -> Vec<f64> {
        let budget = Duration::from_secs(60);
        let (mut elapsed, mut list) = (Duration::ZERO, Vec::new());
        while let Some(next) = wait(error, list.len(), budget, elapsed, 1.0) {
            list.push(next.as_secs_f64());
            elapsed += next;
        }
        list
    }

    #[test]
    fn waits_are_those_of_the_published_sdks() {
        assert_eq!(waits(&refusal(503, Some(5))), [6.0, 7.0, 9.0, 13.0, 20.0, 5.0]);
        assert_eq!(waits(&refusal(507, None)), [1.5, 2.5, 4.5, 8.5, 15.5, 15.5, 12.0]);
        assert_eq!(waits(&refusal(429, Some(1))), [2.0, 3.0, 5.0, 9.0, 16.0, 16.0, 9.0]);
        assert!(waits(&refusal(503, Some(61))).is_empty());
    }

    #[test]
    fn only_refusals_that_mean_nothing_was_made_are_asked_again() {
        for (status, after) in
            [(503, None), (429, None), (500, Some(1)), (502, Some(1)), (504, Some(1)), (409, Some(1))]
        {
            assert!(waits(&refusal(status, after)).is_empty(), "{status} {after:?}");
        }
        let from_a_proxy = ApiError { well_formed: false, ..refusal(503, Some(1)) };
        assert!(waits(&from_a_proxy).is_empty());
    }

    #[test]
    fn a_budget_of_zero_never_asks_again() {
        assert_eq!(wait(&refusal(507, None), 0, Duration::ZERO, Duration::ZERO, 0.5), None);
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        assert_eq!(parse_retry_after("5"), Some(Duration::from_secs(5)));
        assert_eq!(parse_retry_after(" 0.5 "), Some(Duration::from_millis(500)));
        assert_eq!(parse_retry_after("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        for nonsense in ["", "soon", "-1", "NaN", "inf", "1e400"] {
            assert_eq!(parse_retry_after(nonsense), None, "{nonsense}");
        }
    }
}
