//! Whether there is room for more sandboxes, decided before anything is made.
//!
//! Memory: what the host has available now, less the images' pages that sandboxes have in use (the kernel counts them as
//! available, the guests would stand still without them), less a reserve, less what is promised. Promised is what each machine
//! may still write, its memory less what is private to it already, divided by the overcommit factor: what a machine has written is
//! gone from what is available, so it moves from the promise, where it counts for a part, to the measurement, where it counts in
//! full. Children of one image share its pages, which are there once. Disk is the same with free blocks and the sizes of disks.
//!
//! What is being made is set aside in the book as a [`Reservation`], and moves from there to the list of sandboxes in one step
//! ([`Reservation::settle`]): at every moment a machine counts exactly once, so that two requests never get the same room,
//! and none is refused for room that is there. Measuring is [`crate::meter`]'s; a workspace's quota is control's.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coppice_api::ErrorClass;

use crate::Coded;
use crate::meter::{Facts, Sums};

/// What one more sandbox needs at once, whatever its size: a restored machine owns only the pages that it writes.
pub(crate) const MEMORY_PER_SANDBOX: u64 = 96 << 20;
/// Of a VMM besides its guest's memory: its own heap, translated code.
pub(crate) const VMM_OVERHEAD: u64 = 64 << 20;
/// What one more sandbox may write to disk at once.
const DISK_PER_SANDBOX: u64 = 64 << 20;

/// How many bytes of promises one byte stands for: at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overcommit {
    thousandths: u32,
}

impl Overcommit {
    /// A whole number of times.
    #[must_use]
    pub const fn times(factor: u16) -> Self {
        let factor = if factor == 0 { 1 } else { factor };
        Self { thousandths: factor as u32 * 1000 }
    }

    /// The bytes that a promise counts for.
    pub(crate) fn counted(self, promised: u64) -> u64 {
        let exact = u128::from(promised) * 1000 / u128::from(self.thousandths.max(1000));
        u64::try_from(exact).unwrap_or(u64::MAX)
    }

    /// As a number.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        f64::from(self.thousandths) / 1000.0
    }
}

impl std::str::FromStr for Overcommit {
    type Err = String;

    /// `1`, `4`, `1.5`: from 1 to 1000, to a thousandth.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || "it is a number from 1 (nothing is promised twice) to 1000, e.g. 1.5".to_owned();
        let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
        let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit()) && text.len() <= 4;
        if !digits(whole) || !digits(rest) || rest.len() > 3 {
            return Err(wrong());
        }
        let thousandths = format!("{whole}{rest:0<3}").parse().map_err(|_| wrong())?;
        if (1000..=1_000_000).contains(&thousandths) { Ok(Self { thousandths }) } else { Err(wrong()) }
    }
}

/// What a host gives to sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoomConfig {
    /// Most memory that all sandboxes together may use, bytes. None: what the host has.
    pub memory_limit: Option<u64>,
    /// Memory that is never given to them, bytes.
    pub memory_reserve: u64,
    /// Promises of memory. Four: a guest's processes rarely touch more than a quarter of its memory, and what they touch
    /// counts in full from then on. On a host with 24 GiB a fork-tree of sixteen machines of 2 GiB fits, a hundred don't.
    pub memory_overcommit: Overcommit,
    /// Disk that is never given to them, bytes.
    pub disk_reserve: u64,
    /// Promises of disk. Larger: disks of templates are mostly empty, and a full host stops machines, it does not lose them.
    pub disk_overcommit: Overcommit,
}

impl Default for RoomConfig {
    fn default() -> Self {
        Self {
            memory_limit: None,
            memory_reserve: 512 << 20,
            memory_overcommit: Overcommit::times(4),
            disk_reserve: 1 << 30,
            disk_overcommit: Overcommit::times(16),
        }
    }
}

/// The numbers of a refusal, MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// How many sandboxes were asked for.
    pub count: u64,
    /// To be set aside for them.
    pub need: u64,
    /// What can be set aside.
    pub room: u64,
    /// Set aside for requests that are under way.
    pub being_made: u64,
}

/// There is no room. Nothing was made.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// Not enough memory.
    #[error(
        "insufficient host memory for {} more sandbox(es): {} MiB must be set aside, and {} MiB can be", _0.count, _0.need, _0.room
    )]
    Memory(Shortage),
    /// Not enough disk.
    #[error(
        "insufficient host storage for {} more sandbox(es): {} MiB must be set aside, and {} MiB can be", _0.count, _0.need, _0.room
    )]
    Disk(Shortage),
    /// The operator's limit.
    #[error(
        "this host is configured for at most {limit} sandboxes: there are {there}, and {asked} more were asked for"
    )]
    Count {
        /// The limit.
        limit: u64,
        /// How many there are.
        there: u64,
        /// How many more were asked for.
        asked: u64,
    },
    /// There would be room but for requests that are under way, of which some may fail.
    #[error("no compute capacity available: the last room is set aside for requests that are under way ({what})")]
    Busy {
        /// `memory`, `storage` or `sandboxes`, with numbers.
        what: String,
    },
    /// The host can't be measured.
    #[error("the host's free memory or disk can't be read")]
    Measure(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Coded for AdmissionError {
    fn code(&self) -> &'static str {
        match self {
            Self::Memory(_) => "no_memory",
            Self::Disk(_) => "no_storage",
            Self::Count { .. } => "too_many_sandboxes",
            Self::Busy { .. } => "host_busy",
            Self::Measure(_) => "measure_failed",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Measure(_) => ErrorClass::Internal,
            Self::Busy { .. } => ErrorClass::Transient,
            _ => ErrorClass::Capacity,
        }
    }

    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Measure(_) => return None,
            Self::Busy { .. } => "try again in a moment; nothing was made",
            Self::Memory(_) => {
                "ask for fewer, delete or hibernate sandboxes that are no longer needed, or wait until their TTLs end them; \
                 `coppice host show` explains the numbers, `coppice up --memory-overcommit` and `--memory-limit` change them"
            }
            Self::Disk(_) => {
                "delete sandboxes or snapshots that are no longer needed, or give the data directory a larger disk; \
                 `coppice host show` explains the numbers, `coppice up --disk-overcommit` changes them"
            }
            Self::Count { .. } => {
                "delete sandboxes that are no longer needed, or wait until their TTLs end them; \
                 `coppice up --max-sandboxes` sets the limit"
            }
        };
        Some(hint.into())
    }
}

/// What is to be made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Ask {
    /// Machines.
    pub machines: u64,
    /// Whether they are sandboxes that the list doesn't have yet.
    pub listed: bool,
    /// Of each guest, MiB.
    pub memory_mib: u64,
    /// Size of each disk, bytes.
    pub disk_len: u64,
    /// Whether an image of the parent's memory is made for them, once.
    pub image: bool,
}

/// Room, as it counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Room {
    pub sandboxes: u64,
    pub memory: u64,
    pub disk: u64,
}

impl Room {
    fn plus(self, other: Self) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_add(other.sandboxes),
            memory: self.memory.saturating_add(other.memory),
            disk: self.disk.saturating_add(other.disk),
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_sub(other.sandboxes),
            memory: self.memory.saturating_sub(other.memory),
            disk: self.disk.saturating_sub(other.disk),
        }
    }
}

impl RoomConfig {
    /// What one machine counts for that was not measured yet.
    pub(crate) fn fresh(&self, memory_mib: u64, disk_len: u64) -> Room {
        let memory = (memory_mib << 20).saturating_add(VMM_OVERHEAD);
        Room {
            sandboxes: 0,
            memory: self.memory_overcommit.counted(memory).max(MEMORY_PER_SANDBOX),
            disk: self.disk_overcommit.counted(disk_len).max(DISK_PER_SANDBOX),
        }
    }

    fn each(&self, ask: &Ask) -> Room {
        Room { sandboxes: u64::from(ask.listed), ..self.fresh(ask.memory_mib, ask.disk_len) }
    }

    fn all(&self, ask: &Ask) -> Room {
        let (each, bytes) = (self.each(ask), ask.memory_mib << 20);
        let image = Room {
            sandboxes: 0,
            memory: if ask.image { self.memory_overcommit.counted(bytes) } else { 0 },
            disk: if ask.image { self.disk_overcommit.counted(bytes) } else { 0 },
        };
        let times = |one: u64| one.saturating_mul(ask.machines);
        image.plus(Room { sandboxes: times(each.sandboxes), memory: times(each.memory), disk: times(each.disk) })
    }

    /// What can be set aside when nothing is being made.
    pub(crate) fn headroom(&self, limit: u64, facts: &Facts, sums: &Sums) -> Room {
        let available = facts.memory_available.saturating_sub(sums.images);
        let allowed = self.memory_limit.map(|limit| limit.saturating_sub(sums.private).saturating_sub(sums.images));
        let memory = available.min(allowed.unwrap_or(u64::MAX));
        Room {
            sandboxes: limit.saturating_sub(sums.sandboxes),
            memory: memory.saturating_sub(self.memory_reserve).saturating_sub(sums.memory_counted),
            disk: facts.disk_free.saturating_sub(self.disk_reserve).saturating_sub(sums.disk_counted),
        }
    }

    /// The decision: pure, so that every case of it can be tried.
    fn decide(
        &self,
        limit: u64,
        (facts, sums): (&Facts, &Sums),
        pending: Room,
        ask: &Ask,
    ) -> Result<(), AdmissionError> {
        let (need, room) = (self.all(ask), self.headroom(limit, facts, sums));
        let checks = [
            ("sandboxes", need.sandboxes, room.sandboxes, pending.sandboxes, 0),
            ("MiB of memory", need.memory, room.memory, pending.memory, 20),
            ("MiB of storage", need.disk, room.disk, pending.disk, 20),
        ];
        for (what, need, room, pending, shift) in checks {
            if need == 0 || need <= room.saturating_sub(pending) {
                continue;
            }
            let fits_later = need <= room;
            let (need, left, pending) = (need >> shift, room >> shift, pending >> shift);
            if fits_later {
                let what = format!("{need} {what} asked for, {left} there, {pending} set aside");
                return Err(AdmissionError::Busy { what });
            }
            let shortage = Shortage { count: ask.machines, need, room: left, being_made: pending };
            return Err(match what {
                "sandboxes" => AdmissionError::Count { limit, there: sums.sandboxes, asked: need },
                "MiB of memory" => AdmissionError::Memory(shortage),
                _ => AdmissionError::Disk(shortage),
            });
        }
        Ok(())
    }
}

type Book = Mutex<Room>;

/// Keeps the book of what is set aside.
#[derive(Debug)]
pub(crate) struct Admission {
    data_dir: PathBuf,
    pub limit: u64,
    pub config: RoomConfig,
    pending: Arc<Book>,
}

/// Room for sandboxes that are being made; given back when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    book: Arc<Book>,
    room: Room,
    each: Room,
}

fn lock(book: &Book) -> MutexGuard<'_, Room> {
    book.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reservation {
    /// The part of it for one machine.
    pub(crate) fn one(&mut self) -> Self {
        self.room = self.room.minus(self.each);
        Self { book: Arc::clone(&self.book), room: self.each, each: self.each }
    }

    /// The machine counts by itself from now on, by what `listed` does: nobody sees it twice, or not at all.
    pub(crate) fn settle(mut self, listed: impl FnOnce()) {
        let mut pending = lock(&self.book);
        listed();
        *pending = pending.minus(self.room);
        self.room = Room::default();
        drop(pending);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut pending = lock(&self.book);
        *pending = pending.minus(self.room);
    }
}

impl Admission {
    pub(crate) fn new(data_dir: PathBuf, limit: usize, config: RoomConfig) -> Self {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX);
        Self { data_dir, limit, config, pending: Arc::default() }
    }

    /// Room for what is asked for on top of what there is, all of it or nothing.
    pub(crate) fn reserve(&self, ask: &Ask, sums: impl FnOnce() -> Sums) -> Result<Reservation, AdmissionError> {
        // Held to the end: what is counted below stays as it is until the reservation is in the book.
        let mut pending = lock(&self.pending);
        let facts = Facts::read(&self.data_dir).map_err(AdmissionError::Measure)?;
        let decided = self.config.decide(self.limit, (&facts, &sums()), *pending, ask);
        if let Err(refused) = decided {
            metrics::counter!("coppice_admission_refused_total", "code" => refused.code()).increment(1);
            return Err(refused);
        }
        let (room, each) = (self.config.all(ask), self.config.each(ask));
        *pending = pending.plus(room);
        Ok(Reservation { book: Arc::clone(&self.pending), room, each })
    }

    /// What is set aside, the host's facts and the sums: all of one moment.
    pub(crate) fn look(&self, sums: impl FnOnce() -> Sums) -> Result<(Room, Facts, Sums), AdmissionError> {
        let pending = lock(&self.pending);
        let facts = Facts::read(&self.data_dir).map_err(AdmissionError::Measure)?;
        Ok((*pending, facts, sums()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;
    const FACTS: Facts =
        Facts { memory_total: 24 * GIB, memory_available: 22 * GIB, disk_total: 64 * GIB, disk_free: 60 * GIB };

    fn decide(facts: Facts, sums: Sums, ask: &Ask) -> Result<(), AdmissionError> {
        RoomConfig::default().decide(256, (&facts, &sums), Room::default(), ask)
    }

    fn fan_out(machines: u64, memory_mib: u64) -> Ask {
        Ask { machines, listed: true, memory_mib, disk_len: 2 * GIB, image: true }
    }

    #[test]
    fn what_the_defaults_allow() {
        let parent = Sums { sandboxes: 1, memory_counted: GIB / 2, ..Sums::default() };
        decide(FACTS, parent, &fan_out(16, 2048)).unwrap();
        decide(FACTS, Sums { sandboxes: 100, memory_counted: 15 * GIB, ..parent }, &fan_out(16, 512)).unwrap();
        let crowd = Sums { sandboxes: 33, memory_counted: 33 * GIB / 2, ..parent };
        let refused = decide(FACTS, crowd, &fan_out(16, 2048)).unwrap_err();
        assert_eq!((refused.code(), refused.class()), ("no_memory", ErrorClass::Capacity));
        let text = refused.to_string();
        assert!(text.contains("16 more") && text.contains(" MiB must be set aside, and 5120 MiB can be"), "{text}");
        // The pages of images that are in use are not there for others, though the kernel says that they are available.
        let busy = Sums { images: 10 * GIB, private: 4 * GIB, ..parent };
        assert_eq!(decide(FACTS, busy, &fan_out(16, 4096)).unwrap_err().code(), "no_memory");
        let full = Facts { disk_free: GIB + 100, ..FACTS };
        assert_eq!(decide(full, parent, &fan_out(1, 512)).unwrap_err().code(), "no_storage");
        let many = Sums { sandboxes: 250, ..parent };
        let refused = decide(FACTS, many, &fan_out(16, 512)).unwrap_err();
        assert!(refused.to_string().contains("at most 256 sandboxes: there are 250, and 16 more"), "{refused}");
        // One that wakes is in the list already.
        let wake = Ask { listed: false, ..fan_out(1, 512) };
        decide(FACTS, Sums { sandboxes: 256, ..parent }, &wake).unwrap();
    }

    #[test]
    fn what_only_stands_in_the_way_for_a_moment_is_said_to() {
        let config = RoomConfig { memory_limit: Some(2 * GIB), memory_reserve: 0, ..RoomConfig::default() };
        let pending = Room { memory: 3 * GIB / 2, ..Room::default() };
        let ask = Ask { image: false, ..fan_out(4, 1024) };
        let refused = config.decide(256, (&FACTS, &Sums::default()), pending, &ask).unwrap_err();
        assert_eq!((refused.code(), refused.class()), ("host_busy", ErrorClass::Transient));
        config.decide(256, (&FACTS, &Sums::default()), Room::default(), &ask).unwrap();
        let ask = Ask { image: false, ..fan_out(16, 1024) };
        let refused = config.decide(256, (&FACTS, &Sums::default()), pending, &ask).unwrap_err();
        assert_eq!((refused.code(), refused.class()), ("no_memory", ErrorClass::Capacity));
    }

    #[test]
    fn a_factor_is_a_number_from_one() {
        for (text, factor) in [("1", 1.0), ("4", 4.0), ("1.5", 1.5), ("2.125", 2.125), ("1000", 1000.0)] {
            assert_eq!(text.parse::<Overcommit>().map(Overcommit::as_f64), Ok(factor), "{text}");
        }
        for text in ["", ".", "0", "0.999", "-1", "1000.1", "1.0001", "1e3", "NaN", "four", "١"] {
            text.parse::<Overcommit>().unwrap_err();
        }
        assert_eq!("1.5".parse::<Overcommit>().unwrap().counted(3 * GIB), 2 * GIB);
        assert_eq!(Overcommit::times(1).counted(u64::MAX), u64::MAX);
    }

    #[test]
    fn nobody_decides_while_a_machine_moves_from_the_book_to_the_list() {
        let dir = tempfile::tempdir().unwrap();
        let config = RoomConfig { disk_reserve: 0, memory_reserve: 0, ..RoomConfig::default() };
        let admission = Admission::new(dir.path().to_owned(), 4, config);
        let ask = Ask { machines: 2, listed: true, ..Ask::default() };
        let mut both = admission.reserve(&ask, Sums::default).unwrap();
        both.one().settle(|| assert!(admission.pending.try_lock().is_err()));
        assert_eq!(lock(&admission.pending).sandboxes, 1);
    }

    #[test]
    fn threads_that_reserve_at_once_hold_no_more_than_there_is() {
        use std::sync::atomic::{AtomicU64, Ordering};
        const LIMIT: u64 = 8;
        let dir = tempfile::tempdir().unwrap();
        let config = RoomConfig { disk_reserve: 0, memory_reserve: 0, ..RoomConfig::default() };
        let admission = Admission::new(dir.path().to_owned(), usize::try_from(LIMIT).unwrap(), config);
        let (held, made) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (admission, held, made) = (&admission, &held, &made);
                scope.spawn(move || {
                    for round in 0..200 {
                        let machines = 1 + (thread + round) % 4;
                        let ask = Ask { machines, listed: true, ..Ask::default() };
                        let Ok(reservation) = admission.reserve(&ask, Sums::default) else { continue };
                        assert!(held.fetch_add(machines, Ordering::SeqCst) + machines <= LIMIT);
                        std::thread::yield_now();
                        held.fetch_sub(machines, Ordering::SeqCst);
                        drop(reservation);
                        made.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(made.into_inner() > 0);
        assert_eq!(*lock(&admission.pending), Room::default());
    }

    /// What a request does with its reservation.
    #[derive(Debug, Clone)]
    enum Step {
        Reserve(u64),
        /// One child of the so-and-so-many-th request is ready.
        Settle(usize),
        /// The same, and it failed.
        Fail(usize),
        /// The request ends, with children that were not begun.
        End(usize),
        /// A sandbox is deleted.
        Delete,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1..=16_u64).prop_map(Step::Reserve),
            any::<usize>().prop_map(Step::Settle),
            any::<usize>().prop_map(Step::Fail),
            any::<usize>().prop_map(Step::End),
            Just(Step::Delete),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn the_book_is_exact_whatever_happens(steps in proptest::collection::vec(step(), 1..200)) {
            const LIMIT: u64 = 40;
            let dir = tempfile::tempdir().unwrap();
            let config = RoomConfig { disk_reserve: 0, memory_reserve: 0, ..RoomConfig::default() };
            let admission = Admission::new(dir.path().to_owned(), usize::try_from(LIMIT).unwrap(), config);
            let there = std::cell::Cell::new(0_u64);
            let sums = || Sums { sandboxes: there.get(), ..Sums::default() };
            // Reservations, and how many children of each were not begun.
            let mut open: Vec<(Reservation, u64)> = Vec::new();
            for step in steps {
                let promised: u64 = open.iter().map(|(_, left)| left).sum();
                match step {
                    Step::Reserve(machines) => {
                        let ask = Ask { machines, listed: true, ..Ask::default() };
                        let fits = there.get() + promised + machines <= LIMIT;
                        match admission.reserve(&ask, sums) {
                            Ok(reservation) => {
                                prop_assert!(fits);
                                open.push((reservation, machines));
                            }
                            // Memory and disk are this machine's own: only the number is asserted exactly.
                            Err(AdmissionError::Count { .. } | AdmissionError::Busy { .. }) => prop_assert!(!fits),
                            Err(other) => prop_assert!(matches!(other, AdmissionError::Memory(_) | AdmissionError::Disk(_))),
                        }
                    }
                    Step::Settle(index) | Step::Fail(index) if !open.is_empty() => {
                        let index = index % open.len();
                        let (reservation, left) = &mut open[index];
                        if *left == 0 {
                            continue;
                        }
                        *left -= 1;
                        let one = reservation.one();
                        match step {
                            Step::Settle(_) => one.settle(|| there.set(there.get() + 1)),
                            _ => drop(one),
                        }
                    }
                    Step::End(index) if !open.is_empty() => drop(open.swap_remove(index % open.len())),
                    Step::Delete => there.set(there.get().saturating_sub(1)),
                    _ => {}
                }
                let promised: u64 = open.iter().map(|(_, left)| left).sum();
                prop_assert_eq!(lock(&admission.pending).sandboxes, promised);
                prop_assert!(there.get() + promised <= LIMIT);
            }
            drop(open);
            prop_assert_eq!(*lock(&admission.pending), Room::default());
        }
    }
}
