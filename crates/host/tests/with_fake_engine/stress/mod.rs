//! Random operations, several at once, on a few sandboxes and their forks, compared with a model: see [`model`]. In between,
//! machines fail and the daemon is killed.
//!
//! What is written has a number. A line that was acknowledged is in its sandbox from then on and in every later fork; none
//! that was refused is anywhere; nothing is there twice, and nothing of a sibling's. After each round, what exists on the host
//! is what is listed.
//!
//! `STRESS_SEED` and `STRESS_ROUNDS` choose another run than CI's.

mod model;

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use coppice_host::ExecSpec;
use tokio::runtime::Runtime;

use super::hibernate::{end, runtime};
use super::*;
use model::{Id, One, Op, Outcome, Round, State, Status};

/// Sandboxes above which more are deleted than made.
const CROWD: usize = 8;
/// How long an operation may take, and a host to settle.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a command is waited for that a pause may have caught.
const COMMAND: Duration = Duration::from_millis(400);
const FILES: [&str; 2] = ["/root/log", "/dev/shm/log"];

/// SplitMix64: the same numbers everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        let n = u64::try_from(of.len()).unwrap();
        (n > 0).then(|| of[usize::try_from(self.below(n)).unwrap()].clone())
    }
}

/// What is known of a file of lines.
#[derive(Debug, Clone, Default)]
struct Log {
    must: BTreeSet<u64>,
    may: BTreeSet<u64>,
}

impl Log {
    fn allowed(&self) -> BTreeSet<u64> {
        &self.must | &self.may
    }

    /// What a copy of it may have that was made while these were written.
    fn copy(&self, meanwhile: &BTreeSet<u64>) -> Self {
        Self { must: self.must.clone(), may: &self.may | meanwhile }
    }
}

/// On the disk, and in memory.
type Logs = [Log; 2];

/// An answer: what the model compares, and what was made.
#[derive(Debug, Clone)]
struct Answer {
    outcome: Outcome,
    made: Vec<Sandbox>,
    snapshot: Option<Id>,
}

impl Answer {
    fn of<T>(result: Result<T, HostError>, made: impl FnOnce(T) -> Vec<Sandbox>) -> Self {
        match result {
            Ok(done) => Self { outcome: Outcome::Done, made: made(done), snapshot: None },
            Err(e) => Self::refused(&e),
        }
    }

    fn refused(e: &HostError) -> Self {
        Self { outcome: Outcome::Refused(e.class(), e.chain()), made: Vec::new(), snapshot: None }
    }

    fn unknown() -> Self {
        Self { outcome: Outcome::Unknown, made: Vec::new(), snapshot: None }
    }
}

async fn perform(host: &Host, engine: &FakeEngine, op: &Op) -> Answer {
    let one = |sandbox| vec![sandbox];
    let children = |fork: Fork| {
        assert!(fork.children.iter().all(|c| c.status == SandboxStatus::Running), "{fork:?}");
        fork.children
    };
    match op {
        Op::Create => Answer::of(host.create(W, CreateSandboxRequest::default()).await, one),
        Op::CreateFrom(snapshot) => {
            let request = CreateSandboxRequest { from_snapshot: Some(snapshot.clone()), ..Default::default() };
            Answer::of(host.create(W, request).await, one)
        }
        Op::Exec(id, line) => match tokio::time::timeout(COMMAND, add_line(host, id, *line)).await {
            Ok(done) => Answer::of(done, |()| Vec::new()),
            Err(_) => Answer::unknown(),
        },
        Op::Pause(id) => Answer::of(host.pause(W, id).await, |()| Vec::new()),
        Op::Resume(id) => Answer::of(host.resume(W, id).await, |()| Vec::new()),
        Op::Hibernate(id) => Answer::of(host.hibernate(W, id).await, |()| Vec::new()),
        Op::Wake(id) => Answer::of(host.wake(W, id).await, |()| Vec::new()),
        Op::Delete(id) => Answer::of(host.delete(W, id).await, |()| Vec::new()),
        Op::DeleteSnapshot(id) => Answer::of(host.delete_snapshot(W, id).await, |()| Vec::new()),
        Op::ForkTree(id, count) => Answer::of(host.fork_tree(W, id, spec(*count)).await, children),
        Op::ForkDisk(id, count) => Answer::of(host.fork_disk(W, id, spec(*count)).await, children),
        Op::ForkWarm(id) => Answer::of(host.fork_warm(W, id, spec(1)).await, children),
        Op::Ttl(id, ttl) => {
            let patch =
                LifecyclePatch { ttl_seconds: Some(i64::try_from(*ttl).unwrap()), persistent: None, on_ttl: None };
            Answer::of(host.set_lifecycle(W, id, patch).await, |_| Vec::new())
        }
        Op::Snapshot(id) => match host.snapshot(W, id).await {
            Ok(made) => Answer { outcome: Outcome::Done, made: Vec::new(), snapshot: Some(made.id) },
            Err(e) => Answer::refused(&e),
        },
        Op::Promote(id) => {
            let request = PromoteRequest { cleanup_siblings: true, tree_id: None };
            match host.promote(W, id, request).await {
                Ok(reply) => {
                    assert!(reply.failures.is_empty(), "{reply:?}");
                    let deleted = reply.deleted.into_iter().collect();
                    Answer { outcome: Outcome::Promoted(deleted), made: Vec::new(), snapshot: None }
                }
                Err(e) => Answer::refused(&e),
            }
        }
        Op::Crash(id) => match engine.pid_of(id.parse().unwrap()) {
            Some(pid) => {
                engine.crash(pid);
                Answer { outcome: Outcome::Done, made: Vec::new(), snapshot: None }
            }
            None => Answer::unknown(),
        },
    }
}

async fn add_line(host: &Host, id: &str, line: u64) -> Result<(), HostError> {
    let [disk, memory] = FILES;
    let script = format!("echo {line} >> {memory}; echo {line} >> {disk}");
    let spec = ExecSpec { argv: vec!["sh".into(), "-c".into(), script], ..ExecSpec::default() };
    let mut run = host.exec(W, id, spec).await?;
    while let Some(event) = run.next().await {
        event?;
    }
    Ok(())
}

struct Stress {
    random: Random,
    world: World,
    daemon: Runtime,
    /// Every state that may be.
    states: BTreeSet<State>,
    logs: BTreeMap<Id, Logs>,
    kept: BTreeMap<Id, Logs>,
    lines: u64,
    tally: BTreeMap<String, u32>,
}

impl Stress {
    fn new(seed: u64) -> Self {
        let daemon = runtime();
        let world = daemon.block_on(world());
        Self {
            random: Random(seed),
            world,
            daemon,
            states: [State::default()].into(),
            logs: BTreeMap::new(),
            kept: BTreeMap::new(),
            lines: 0,
            tally: BTreeMap::new(),
        }
    }

    /// Mostly about one sandbox, and those that it has to do with.
    fn choose(&mut self) -> Vec<Op> {
        let alive: Vec<Id> = self.logs.keys().cloned().collect();
        let kept: Vec<Id> = self.kept.keys().cloned().collect();
        let focus = self.random.pick(&alive);
        let count = 1 + self.random.below(4);
        let mut ops = Vec::new();
        for _ in 0..count {
            let other = if self.random.one_in(4) { self.random.pick(&alive) } else { focus.clone() };
            let Some(id) = other else {
                ops.push(Op::Create);
                continue;
            };
            if alive.len() > CROWD && self.random.one_in(2) {
                ops.push(Op::Delete(self.random.pick(&alive).unwrap()));
                continue;
            }
            self.lines += 1;
            let (children, ttl) = (1 + i64::from(self.random.one_in(2)), 300 + self.random.below(200));
            ops.push(match self.random.below(23) {
                0 => Op::Create,
                1 | 2 => self.random.pick(&kept).map_or(Op::Snapshot(id), Op::CreateFrom),
                3 => self.random.pick(&kept).map_or(Op::Wake(id), Op::DeleteSnapshot),
                4..=6 => Op::Exec(id, self.lines),
                7 => Op::Pause(id),
                8 | 9 => Op::Resume(id),
                10 | 11 => Op::Hibernate(id),
                12 => Op::Wake(id),
                13 => Op::Snapshot(id),
                14 | 15 => Op::ForkTree(id, children),
                16 => Op::ForkDisk(id, children),
                17 => Op::Ttl(id, ttl),
                18 => Op::Promote(id),
                19 => Op::Delete(id),
                20 | 21 => Op::ForkWarm(id),
                _ if self.random.one_in(3) => Op::Crash(id),
                _ => Op::Exec(id, self.lines),
            });
        }
        if ops.iter().any(|op| matches!(op, Op::ForkWarm(_))) {
            // Whose place is taken while a sibling is promoted loses with its successor, which the model can't name yet.
            ops.retain(|op| !matches!(op, Op::Promote(_)));
        }
        ops
    }

    /// What machines do wrong in this round; whether they do anything wrong at all.
    fn script(&mut self) -> bool {
        let (start, capture) = (self.random.below(3), self.random.below(3));
        let injected = self.random.one_in(8);
        let kind = self.random.below(5);
        self.world.engine.script(|s| {
            *s = coppice_testkit::fake_engine::Script::default();
            (s.start_delay, s.capture_delay) = (Duration::from_millis(start), Duration::from_millis(capture));
            if injected {
                match kind {
                    0 => s.fail_restores = 1,
                    1 => s.fail_captures = 1,
                    2 => s.no_space = 1,
                    3 => s.refuse_resume = 1,
                    _ => s.fail_boots = 1,
                }
            }
        });
        injected
    }

    /// Asks for all at once, each a moment after the other. The daemon is killed after `kill`, if that is given.
    fn run(mut self, ops: &[Op], kill: Option<Duration>) -> (Self, Vec<Answer>) {
        let answers = Arc::new(Mutex::new(vec![Answer::unknown(); ops.len()]));
        let all: Vec<_> = (0..)
            .zip(ops)
            .map(|(index, op)| {
                let (host, engine) = (Arc::clone(&self.world.host), Arc::clone(&self.world.engine));
                let (answers, op) = (Arc::clone(&answers), op.clone());
                let delay = Duration::from_micros(self.random.below(4) * 700);
                async move {
                    tokio::time::sleep(delay).await;
                    let answer = perform(&host, &engine, &op).await;
                    answers.lock().unwrap_or_else(PoisonError::into_inner)[index] = answer;
                }
            })
            .collect();
        match kill {
            None => {
                let all = async { tokio::time::timeout(PATIENCE, futures::future::join_all(all)).await };
                assert!(self.daemon.block_on(all).is_ok(), "{ops:?} did not end: {answers:?}");
            }
            Some(after) => {
                let World { engine, slots, data, host, dir } = self.world;
                drop(self.daemon.block_on(async {
                    let all = async move { drop(futures::future::join_all(all).await) };
                    tokio::time::timeout(after, tokio::spawn(all)).await
                }));
                // What is answered while the runtime ends is no answer: a kill has no such moment.
                let answered = answers.lock().unwrap_or_else(PoisonError::into_inner).clone();
                drop(host);
                end(self.daemon, &data);
                *answers.lock().unwrap_or_else(PoisonError::into_inner) = answered;
                self.daemon = runtime();
                // As a server does.
                let data = DataDir::open(data.root()).unwrap();
                let host = self.daemon.block_on(start(&data, &engine, &slots));
                self.world = World { engine, slots, data, host, dir };
            }
        }
        let answers = std::mem::take(&mut *answers.lock().unwrap_or_else(PoisonError::into_inner));
        (self, answers)
    }

    fn round(mut self, kill: Option<Duration>) -> Self {
        let ops = self.choose();
        let injected = self.script();
        let (mut stress, answers) = self.run(&ops, kill);
        for (op, answer) in ops.iter().zip(&answers) {
            let word = format!("{op:?}").split('(').next().unwrap_or_default().to_owned();
            let outcome = match &answer.outcome {
                Outcome::Done | Outcome::Promoted(_) => "done".to_owned(),
                Outcome::Refused(class, _) => format!("{class:?}"),
                Outcome::Unknown => "unknown".to_owned(),
            };
            *stress.tally.entry(format!("{word}: {outcome}")).or_default() += 1;
        }
        stress.world.engine.script(|s| *s = coppice_testkit::fake_engine::Script::default());
        let outcomes = answers.iter().map(|answer| answer.outcome.clone());
        let round = Round { ops: ops.into_iter().zip(outcomes).collect(), injected };
        stress.settle(&round, &answers, kill.is_some());
        stress
    }

    /// What is there now is what some order of the operations leads to.
    fn settle(&mut self, round: &Round, answers: &[Answer], killed: bool) {
        let mut results = round.results(&self.states);
        assert!(!results.is_empty(), "no order gives these answers: {round:?}\nfrom {:?}", self.states);
        for (answer, (op, _)) in answers.iter().zip(&round.ops) {
            self.learn(round, op, answer, &mut results);
        }
        if killed {
            self.remove_unanswered(&results);
        }
        let deadline = Instant::now() + Duration::from_secs(4);
        loop {
            let seen = self.daemon.block_on(self.observe());
            let fits = |state: &State| seen.as_ref().is_some_and(|seen| self.is(state, seen));
            let fitting: BTreeSet<State> = results.iter().filter(|state| fits(state)).cloned().collect();
            if !fitting.is_empty() {
                self.states = fitting;
                break;
            }
            let host = (names(&self.world.data.snapshots_dir()), self.world.engine.alive().len());
            assert!(
                Instant::now() < deadline,
                "{round:?}\nfrom {:?}\nleads to {results:?}\nnot to {seen:?}, {host:?}",
                self.states
            );
            self.daemon.block_on(async { tokio::time::sleep(Duration::from_millis(5)).await });
        }
        let alive = self.states.first().unwrap().clone();
        self.logs.retain(|id, _| alive.sandboxes.contains_key(id));
        self.kept.retain(|id, _| alive.snapshots.contains(id));
        self.read_back(round, &alive);
    }

    /// What was made, and what was written.
    fn learn(&mut self, round: &Round, op: &Op, answer: &Answer, results: &mut BTreeSet<State>) {
        let written = |id: &Id| {
            let lines = round.ops.iter().filter_map(|(op, _)| match op {
                Op::Exec(target, line) if target == id => Some(*line),
                _ => None,
            });
            lines.collect::<BTreeSet<u64>>()
        };
        let copies = |logs: &Logs, id: &Id| logs.clone().map(|log| log.copy(&written(id)));
        if let Op::Exec(id, line) = op
            && let Some(logs) = self.logs.get_mut(id)
        {
            for log in logs {
                match &answer.outcome {
                    Outcome::Done => log.must.extend([*line]),
                    Outcome::Unknown | Outcome::Refused(ErrorClass::Internal, _) => log.may.extend([*line]),
                    _ => {}
                }
            }
        }
        if let (Op::Snapshot(id), Some(snapshot)) = (op, &answer.snapshot) {
            // Taken while the round's lines were written: of those, none must be in it.
            let logs = self.before(id, round);
            self.kept.insert(snapshot.clone(), copies(&logs, id));
            add(results, |state| state.snapshots.extend([snapshot.clone()]));
        }
        for sandbox in &answer.made {
            let logs = match op {
                Op::CreateFrom(snapshot) => self.kept.get(snapshot).cloned().unwrap_or_default(),
                Op::ForkTree(id, _) | Op::ForkWarm(id) => copies(&self.before(id, round), id),
                Op::ForkDisk(id, _) => [copies(&self.before(id, round), id)[0].clone(), Log::default()],
                _ => Logs::default(),
            };
            self.logs.insert(sandbox.id.clone(), logs);
            let live = matches!(op, Op::ForkTree(..) | Op::ForkWarm(_));
            let image = live.then(|| sandbox.metadata["fork_tree_id"].clone());
            let one = One {
                status: Status::Running,
                ttl: sandbox.ttl_seconds,
                settled_ttl: sandbox.ttl_seconds,
                tree: sandbox.metadata.get("fork_tree_id").cloned(),
                promoted: false,
                successor: None,
                fork_image: image,
            };
            add(results, |state| {
                if let Op::ForkWarm(id) = op
                    && let Some(parent) = state.sandboxes.get_mut(id)
                {
                    parent.successor = Some(sandbox.id.clone());
                }
                drop(state.sandboxes.insert(sandbox.id.clone(), one.clone()));
            });
        }
    }

    /// What is known of a sandbox without the lines of this round.
    fn before(&self, id: &Id, round: &Round) -> Logs {
        let mut logs = self.logs.get(id).cloned().unwrap_or_default();
        for (op, _) in &round.ops {
            if let Op::Exec(target, line) = op
                && target == id
            {
                logs.iter_mut().for_each(|log| log.must.retain(|one| one != line));
            }
        }
        logs
    }

    /// What was made for those who were never told is whole, or not there.
    fn remove_unanswered(&mut self, results: &BTreeSet<State>) {
        let known: BTreeSet<&Id> = results.iter().flat_map(|state| state.sandboxes.keys()).collect();
        let snapshots: BTreeSet<&Id> = results.iter().flat_map(|state| &state.snapshots).collect();
        self.daemon.block_on(async {
            let w = &self.world;
            for kept in w.host.list_snapshots(W, None).await.unwrap() {
                if !snapshots.contains(&kept.id) {
                    let made = perform(&w.host, &w.engine, &Op::CreateFrom(kept.id.clone())).await;
                    assert_eq!(made.outcome, Outcome::Done, "of a snapshot that nobody was told of");
                    w.host.delete_snapshot(W, &kept.id).await.unwrap();
                }
            }
            for sandbox in w.host.list(W).await.unwrap() {
                if !known.contains(&sandbox.id) {
                    add_line(&w.host, &sandbox.id, 0).await.unwrap();
                    w.host.delete(W, &sandbox.id).await.unwrap();
                }
            }
        });
    }

    /// What the host says; None while something is on its way.
    async fn observe(&self) -> Option<BTreeMap<Id, (Status, u64, bool)>> {
        let list = self.world.host.list(W).await.unwrap();
        let one = |s: &Sandbox| {
            let promoted = s.metadata.get("fork_tree_role").is_some_and(|role| role == "promoted");
            Some((s.id.clone(), (Status::of(s.status)?, s.ttl_seconds, promoted)))
        };
        list.iter().map(one).collect()
    }

    /// Whether a state is what the host says, and what is on it.
    fn is(&self, state: &State, seen: &BTreeMap<Id, (Status, u64, bool)>) -> bool {
        let w = &self.world;
        let all = |status| seen.values().filter(|one| one.0 == status).count();
        let machines = all(Status::Running) + all(Status::Paused);
        let (asleep, failed) = (all(Status::Asleep), all(Status::Failed));
        let forks: BTreeSet<&Id> = state.sandboxes.values().filter_map(|one| one.fork_image.as_ref()).collect();
        let ids: BTreeSet<String> = seen.keys().cloned().collect();
        let run: BTreeSet<String> = names(&w.data.run_dir());
        let slots = w.slots.taken().len();
        let says = |(id, one): (&Id, &One)| seen.get(id) == Some(&(one.status, one.ttl, one.promoted));
        state.sandboxes.len() == seen.len()
            && state.sandboxes.iter().all(says)
            && names(&w.data.sandboxes_dir()) == ids
            && run.is_subset(&ids)
            && (machines..=machines + failed).contains(&run.len())
            && w.engine.alive().len() == machines
            && (machines..=machines + failed).contains(&slots)
            && names(&w.data.staging_dir()).is_empty()
            && names(&w.data.snapshots_dir()).len() == state.snapshots.len() + forks.len() + asleep
    }

    /// Files of those that run: what was acknowledged is there, and nothing that can't be.
    fn read_back(&mut self, round: &Round, state: &State) {
        let running = state.sandboxes.iter().filter(|(_, one)| one.status == Status::Running);
        let running: Vec<Id> = running.map(|(id, _)| id.clone()).collect();
        for id in running {
            let logs = self.logs.get_mut(&id).unwrap();
            for (path, log) in FILES.iter().zip(logs) {
                let text = match self.daemon.block_on(self.world.read(&id, path)) {
                    Ok(text) => text,
                    Err(e) => {
                        assert_eq!(e.code(), "file_not_found", "{path} of {id}: {}\n{round:?}", e.chain());
                        String::new()
                    }
                };
                let lines: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
                let set: BTreeSet<u64> = lines.iter().copied().collect();
                assert_eq!(set.len(), lines.len(), "{path} of {id} has a line twice: {lines:?}\n{round:?}");
                let (lost, foreign) = (&log.must - &set, &set - &log.allowed());
                assert!(lost.is_empty() && foreign.is_empty(), "{path} of {id}: {lost:?}, {foreign:?}\n{round:?}");
                // A copy has only what it had; of the rest, some may still come where a pause has caught a command.
                log.may = &log.may - &set;
                log.must = set;
            }
        }
    }

    /// Everything goes, and nothing is left.
    fn finish(self) {
        let w = &self.world;
        self.daemon.block_on(async {
            for sandbox in w.host.list(W).await.unwrap() {
                w.host.delete(W, &sandbox.id).await.unwrap();
            }
            for snapshot in w.host.list_snapshots(W, None).await.unwrap() {
                w.host.delete_snapshot(W, &snapshot.id).await.unwrap();
            }
            w.exactly([]).await;
        });
        assert!(w.snapshots().is_empty() && names(&w.data.staging_dir()).is_empty(), "{:?}", w.snapshots());
    }
}

fn add(states: &mut BTreeSet<State>, change: impl Fn(&mut State)) {
    let changed = std::mem::take(states).into_iter().map(|mut state| {
        change(&mut state);
        state
    });
    *states = changed.collect();
}

fn number(name: &str, default: u64) -> u64 {
    #[expect(clippy::disallowed_methods, reason = "a test has no command line of its own")]
    let given = std::env::var(name).ok();
    given.map_or(default, |text| text.parse().unwrap())
}

fn stress(seed: u64, rounds: u64) {
    println!("STRESS_SEED={seed} STRESS_ROUNDS={rounds}");
    let mut stress = Stress::new(seed);
    for round in 0..rounds {
        let kill = stress.random.one_in(12).then(|| Duration::from_micros(stress.random.below(12_000)));
        println!("round {round}, killed after {kill:?}");
        stress = stress.round(kill);
    }
    println!("{:#?}", stress.tally);
    stress.finish();
}

#[test]
fn random_operations_at_once_end_as_in_some_order() {
    stress(number("STRESS_SEED", 1), number("STRESS_ROUNDS", 120));
}
