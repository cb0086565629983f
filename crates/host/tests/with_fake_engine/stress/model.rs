//! What may be true after some operations that ran at once: every order of them, from every state that was possible before.
//!
//! An operation counts as one step, a promotion as one for the winner and one per sibling. An answer must be the one that the
//! order gives; an operation that was not answered was done or not.

use std::collections::{BTreeMap, BTreeSet};

use coppice_api::{ErrorClass, SandboxStatus};

/// Ids of sandboxes and snapshots are strings, as the API has them.
pub(super) type Id = String;

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Status {
    Running,
    Paused,
    Asleep,
    Failed,
    /// Another one has taken its place.
    Stopped,
}

impl Status {
    pub fn of(status: SandboxStatus) -> Option<Self> {
        match status {
            SandboxStatus::Running => Some(Self::Running),
            SandboxStatus::Paused => Some(Self::Paused),
            SandboxStatus::Hibernated => Some(Self::Asleep),
            SandboxStatus::Failed => Some(Self::Failed),
            SandboxStatus::Stopped => Some(Self::Stopped),
            SandboxStatus::Creating | SandboxStatus::Stopping => None,
        }
    }
}

/// What is known of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct One {
    pub status: Status,
    pub ttl: u64,
    pub settled_ttl: u64,
    pub tree: Option<String>,
    pub promoted: bool,
    /// Who took its place.
    pub successor: Option<Id>,
    /// The snapshot of a fork that it keeps.
    pub fork_image: Option<Id>,
}

/// One possible state of everything: what is not in it is gone.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct State {
    pub sandboxes: BTreeMap<Id, One>,
    pub snapshots: BTreeSet<Id>,
}

/// What is asked of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Op {
    Create,
    CreateFrom(Id),
    /// Adds a line with this number to a file on the disk and to one in memory.
    Exec(Id, u64),
    Pause(Id),
    Resume(Id),
    Hibernate(Id),
    Wake(Id),
    Snapshot(Id),
    ForkTree(Id, i64),
    ForkDisk(Id, i64),
    ForkWarm(Id),
    Ttl(Id, u64),
    Promote(Id),
    Delete(Id),
    DeleteSnapshot(Id),
    /// Its machine dies.
    Crash(Id),
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// Siblings that were deleted.
    Promoted(BTreeSet<Id>),
    Refused(ErrorClass, String),
    /// Nobody knows.
    Unknown,
}

/// What happened at once.
#[derive(Debug)]
pub(super) struct Round {
    pub ops: Vec<(Op, Outcome)>,
    /// Machines were made to fail: operations may have.
    pub injected: bool,
}

impl Op {
    /// The sandbox that it is about.
    pub fn target(&self) -> Option<&Id> {
        match self {
            Self::Create | Self::CreateFrom(_) | Self::DeleteSnapshot(_) => None,
            Self::Exec(id, _)
            | Self::Pause(id)
            | Self::Resume(id)
            | Self::Hibernate(id)
            | Self::Wake(id)
            | Self::Snapshot(id)
            | Self::ForkTree(id, _)
            | Self::ForkDisk(id, _)
            | Self::ForkWarm(id)
            | Self::Ttl(id, _)
            | Self::Promote(id)
            | Self::Delete(id)
            | Self::Crash(id) => Some(id),
        }
    }

    fn wakes(&self) -> bool {
        use Op::{Exec, ForkDisk, ForkTree, ForkWarm, Resume, Snapshot, Wake};
        matches!(self, Exec(..) | Resume(_) | Wake(_) | Snapshot(_) | ForkTree(..) | ForkDisk(..) | ForkWarm(_))
    }

    /// Where it leaves a sandbox of this status; None when it is refused.
    fn leads_to(&self, status: Status) -> Option<Status> {
        use Status::{Asleep, Failed, Paused, Running, Stopped};
        match (self, status) {
            (Self::Promote(_), Stopped) => None,
            (Self::Ttl(..) | Self::Promote(_), status) => Some(status),
            (_, Failed | Stopped) => None,
            (Self::ForkWarm(_), Running | Asleep) => Some(Stopped),
            (Self::Exec(..) | Self::ForkTree(..) | Self::ForkDisk(..) | Self::Wake(_), Running | Asleep) => {
                Some(Running)
            }
            (Self::Resume(_), _) => Some(Running),
            (Self::Pause(_), Running | Paused) => Some(Paused),
            (Self::Hibernate(_), _) => Some(Asleep),
            (Self::Snapshot(_), Paused) => Some(Paused),
            (Self::Snapshot(_), _) => Some(Running),
            _ => None,
        }
    }
}

/// A part of a round that takes effect at once.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Whole(usize),
    /// Of a promotion, whose winner is settled: this sibling goes, if it is a loser.
    Lose(usize, Id),
}

impl Round {
    /// Every state that the round may have led to.
    pub fn results(&self, before: &BTreeSet<State>) -> BTreeSet<State> {
        let mut seen = BTreeSet::new();
        let mut results = BTreeSet::new();
        for state in before {
            let steps = (0..self.ops.len()).map(Step::Whole).collect();
            self.explore(state, state.clone(), steps, &mut seen, &mut results);
        }
        results
    }

    fn explore(
        &self,
        begin: &State,
        state: State,
        left: BTreeSet<Step>,
        seen: &mut BTreeSet<(State, BTreeSet<Step>)>,
        results: &mut BTreeSet<State>,
    ) {
        if left.is_empty() {
            results.insert(state);
            return;
        }
        if !seen.insert((state.clone(), left.clone())) {
            return;
        }
        for step in &left {
            let mut rest = left.clone();
            rest.remove(step);
            for (next, more) in self.apply(begin, &state, step) {
                let mut rest = rest.clone();
                rest.extend(more);
                self.explore(begin, next, rest, seen, results);
            }
        }
    }

    /// What a step may lead to, each with steps that follow; nothing when its answer is impossible here.
    fn apply(&self, begin: &State, state: &State, step: &Step) -> Vec<(State, Vec<Step>)> {
        match step {
            Step::Lose(op, sibling) => self.lose(*op, sibling, state).into_iter().map(|s| (s, Vec::new())).collect(),
            Step::Whole(index) => {
                let (op, outcome) = &self.ops[*index];
                let mut all = Vec::new();
                if *outcome == Outcome::Unknown {
                    all.push((state.clone(), Vec::new()));
                }
                match op {
                    Op::Create => all.push((state.clone(), Vec::new())),
                    Op::CreateFrom(id) | Op::DeleteSnapshot(id) => {
                        all.extend(self.with_snapshot(op, id, outcome, state).map(|s| (s, Vec::new())));
                    }
                    Op::Crash(id) => {
                        let mut next = state.clone();
                        if let Some(one) = next.sandboxes.get_mut(id)
                            && !matches!(one.status, Status::Asleep | Status::Stopped)
                        {
                            one.status = Status::Failed;
                        }
                        all.push((next, Vec::new()));
                    }
                    op => all.extend(self.on_sandbox(*index, op, outcome, begin, state)),
                }
                all
            }
        }
    }

    fn with_snapshot(&self, op: &Op, id: &Id, outcome: &Outcome, state: &State) -> Option<State> {
        let mut next = state.clone();
        let there =
            if *op == Op::DeleteSnapshot(id.clone()) { next.snapshots.remove(id) } else { next.snapshots.contains(id) };
        let fits = match outcome {
            Outcome::Refused(ErrorClass::NotFound, _) => !there,
            Outcome::Refused(class, _) => self.injected && may_break(*class),
            _ => there,
        };
        fits.then_some(next)
    }

    fn on_sandbox(
        &self,
        index: usize,
        op: &Op,
        outcome: &Outcome,
        begin: &State,
        state: &State,
    ) -> Vec<(State, Vec<Step>)> {
        let Some(id) = op.target() else { return Vec::new() };
        let same = || vec![(state.clone(), Vec::new())];
        let Some(one) = state.sandboxes.get(id) else {
            // While it is being deleted, some say so rather than that it is gone.
            let leaving = begin.sandboxes.contains_key(id);
            return match outcome {
                Outcome::Refused(ErrorClass::NotFound, _) | Outcome::Unknown => same(),
                Outcome::Refused(ErrorClass::Conflict, _) if leaving => same(),
                Outcome::Refused(ErrorClass::Internal, _) if leaving && matches!(op, Op::Exec(..)) => same(),
                _ => Vec::new(),
            };
        };
        let crashed = self.ops.iter().any(|(other, _)| *other == Op::Crash(id.clone()));
        let mut all = Vec::new();
        if let Outcome::Refused(class, _) = outcome {
            let refused = op.leads_to(one.status).is_none() && *op != Op::Delete(id.clone());
            // One that has just been made may be seen to fail before its status says so.
            let broke = (self.injected || crashed) && may_break(*class) || crashed && *class == ErrorClass::Conflict;
            // A command whose machine goes under it breaks off, and was done or not.
            let cut = matches!(op, Op::Exec(..)) && *class == ErrorClass::Internal && self.takes_machine(id, one);
            let no_child = matches!(op, Op::Promote(_)) && one.tree.is_none() && *class == ErrorClass::Caller;
            if refused && *class == ErrorClass::Conflict || broke || no_child || cut {
                all.extend(same());
            }
            if broke || cut {
                all.extend(woken(op, id, state));
            }
            return all;
        }
        if *outcome == Outcome::Unknown {
            all.extend(woken(op, id, state));
        }
        let mut next = state.clone();
        match op {
            Op::Delete(_) => {
                next.sandboxes.remove(id);
                all.push((next, Vec::new()));
            }
            Op::Promote(_) => all.extend(self.promoted(index, id, one, next)),
            op => {
                if let (Some(status), Some(one)) = (op.leads_to(one.status), next.sandboxes.get_mut(id)) {
                    if one.status == Status::Asleep || matches!(status, Status::Asleep | Status::Stopped) {
                        one.fork_image = None;
                    }
                    one.status = status;
                    if let Op::Ttl(_, ttl) = op {
                        (one.ttl, one.settled_ttl) = (*ttl, *ttl);
                    }
                    all.push((next, Vec::new()));
                }
            }
        }
        all
    }

    /// Whether something in this round ends its machine, or makes it stand still.
    fn takes_machine(&self, id: &Id, one: &One) -> bool {
        self.ops.iter().any(|(op, _)| match op {
            Op::Pause(other) | Op::Hibernate(other) | Op::Delete(other) | Op::ForkWarm(other) | Op::Crash(other) => {
                other == id
            }
            Op::Promote(other) => other != id && one.tree.is_some(),
            _ => false,
        })
    }

    /// The winner is settled; then its siblings go, and whoever took the place of one.
    fn promoted(&self, index: usize, id: &Id, one: &One, mut next: State) -> Option<(State, Vec<Step>)> {
        let tree = one.tree.clone()?;
        let siblings = next.sandboxes.iter().filter(|(other, it)| *other != id && it.tree.as_ref() == Some(&tree));
        let mut losers: Vec<Id> = siblings.map(|(other, _)| other.clone()).collect();
        let mut at = 0;
        while let Some(loser) = losers.get(at) {
            let it = next.sandboxes.get(loser).filter(|it| !it.promoted);
            losers.extend(it.and_then(|it| it.successor.clone()).filter(|id| next.sandboxes.contains_key(id)));
            at += 1;
        }
        let steps = losers.into_iter().map(|loser| Step::Lose(index, loser)).collect();
        let winner = next.sandboxes.get_mut(id)?;
        (winner.promoted, winner.ttl) = (true, winner.settled_ttl);
        Some((next, steps))
    }

    fn lose(&self, op: usize, sibling: &Id, state: &State) -> Vec<State> {
        let loser = state.sandboxes.get(sibling).is_some_and(|one| !one.promoted);
        let mut without = state.clone();
        without.sandboxes.remove(sibling);
        match &self.ops[op].1 {
            Outcome::Promoted(deleted) if deleted.contains(sibling) && loser => vec![without],
            Outcome::Promoted(deleted) if !deleted.contains(sibling) && !loser => vec![state.clone()],
            Outcome::Unknown if loser => vec![state.clone(), without],
            Outcome::Unknown => vec![state.clone()],
            _ => Vec::new(),
        }
    }
}

fn may_break(class: ErrorClass) -> bool {
    matches!(class, ErrorClass::Internal | ErrorClass::Capacity | ErrorClass::Unavailable)
}

/// What fails after it has woken a sandbox leaves it awake.
fn woken(op: &Op, id: &Id, state: &State) -> Option<(State, Vec<Step>)> {
    let mut next = state.clone();
    let one = next.sandboxes.get_mut(id).filter(|one| one.status == Status::Asleep && op.wakes())?;
    (one.status, one.fork_image) = (Status::Running, None);
    Some((next, Vec::new()))
}
