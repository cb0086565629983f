//! Which branch wins, and how outcomes are put into words. Pure.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use coppice_api::Fork;

use super::Branch;

/// The viable branch with the highest score; then the shortest; then the first by label.
pub(super) fn winner(branches: &[Branch]) -> Option<&Branch> {
    branches.iter().filter(|branch| branch.viable).max_by(|a, b| better(a, b))
}

/// `Greater` when `a` beats `b`.
fn better(a: &Branch, b: &Branch) -> Ordering {
    a.score.total_cmp(&b.score).then(b.duration_ms.cmp(&a.duration_ms)).then_with(|| b.label.cmp(&a.label))
}

/// One clause per branch, for a person.
pub(super) fn summary(branches: &[Branch]) -> String {
    let clause = |branch: &Branch| {
        let what = match (&branch.error, branch.exit_code) {
            _ if branch.timed_out => "ran into its deadline".to_owned(),
            (Some(error), _) => error.clone(),
            (None, Some(code)) => format!("exit code {code}"),
            (None, None) => "did not end".to_owned(),
        };
        format!("{}: {what}", branch.label)
    };
    branches.iter().map(clause).collect::<Vec<_>>().join("; ")
}

/// What is said of children that could not be deleted.
pub(super) fn left_over(failures: &BTreeMap<String, String>) -> String {
    if failures.is_empty() {
        return String::new();
    }
    format!(", {} could not be and end with their TTL", failures.len())
}

/// Why the child of a candidate does not exist.
pub(super) fn why_missing(fork: &Fork, index: usize) -> String {
    let error = fork.errors.iter().find(|error| usize::try_from(error.index) == Ok(index));
    match error {
        Some(error) => format!("its copy of the sandbox did not start: {}", error.err),
        None => "the server made fewer copies of the sandbox than it was asked for".into(),
    }
}

/// The last number of a score command's output.
pub(super) fn score(stdout: &str) -> Result<f64, String> {
    let last = stdout.lines().rev().map(str::trim).find(|line| !line.is_empty());
    let Some(last) = last else { return Err("the score command printed nothing".into()) };
    match last.parse::<f64>() {
        Ok(score) if score.is_finite() => Ok(score),
        _ => {
            Err(format!("the score command's last line is no number: {:?}", last.chars().take(80).collect::<String>()))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn branch(label: &str, score: f64, duration_ms: u64, viable: bool) -> Branch {
        Branch { label: label.into(), score, duration_ms, viable, ..Branch::default() }
    }

    fn wins(branches: &[Branch]) -> Option<&str> {
        winner(branches).map(|branch| branch.label.as_str())
    }

    #[test]
    fn highest_score_then_shortest_then_label() {
        assert_eq!(wins(&[branch("a", 1.0, 9, true), branch("b", 2.0, 99, true)]), Some("b"));
        assert_eq!(wins(&[branch("a", 1.0, 9, true), branch("b", 1.0, 8, true)]), Some("b"));
        assert_eq!(wins(&[branch("b", 1.0, 8, true), branch("a", 1.0, 8, true)]), Some("a"));
        assert_eq!(wins(&[branch("a", 9.0, 1, false), branch("b", -1.0, 8, true)]), Some("b"));
        assert_eq!(wins(&[branch("a", 9.0, 1, false)]), None);
    }

    #[test]
    fn a_score_is_the_last_line_and_a_finite_number() {
        assert_eq!(score("running\n 0.75 \n\n"), Ok(0.75));
        assert_eq!(score("-3e2"), Ok(-300.0));
        for bad in ["", "\n", "1\nok", "nan", "inf", "1 2"] {
            assert!(score(bad).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn the_winner_does_not_depend_on_the_order(mut list in proptest::collection::vec((0..3_u8, 0..3_u64, any::<bool>()), 0..8)) {
            let mut branches: Vec<Branch> = list.drain(..).enumerate()
                .map(|(index, (score, ms, viable))| branch(&index.to_string(), f64::from(score), ms, viable)).collect();
            let forward = wins(&branches).map(str::to_owned);
            branches.reverse();
            prop_assert_eq!(wins(&branches).map(str::to_owned), forward);
        }
    }
}
