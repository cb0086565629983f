//! Named points in the course of operations, at which a test ends the process as `kill -9` would.
//!
//! `COPPICE_FAULTS=FILE` in the environment of a server, and `hibernate.recorded` in that file, kill the half of it that comes
//! by [`point!`]`("hibernate.recorded")`; `launch.recorded:2` is the second time. Only in builds with debug assertions: a release
//! build has neither the points nor the variable. The first word of a name is the operation, the second what has just been done.
//! `tests/vm/test_crash_points.py` finds all points in the sources and kills at each.
//!
//! It does not make anything fail: that is what the fakes of `testkit` are for.
#![forbid(unsafe_code)]

/// Here the process ends if a test says so.
#[macro_export]
macro_rules! point {
    ($name:literal) => {{
        #[cfg(debug_assertions)]
        $crate::pass($name);
    }};
}

/// What [`point!`] calls.
#[cfg(debug_assertions)]
pub fn pass(name: &str) {
    if armed::ends_at(name) {
        let pid = rustix::process::getpid();
        // There is nobody to tell that it failed, and no way for it to: a process may kill itself.
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
        loop {
            std::thread::park();
        }
    }
}

#[cfg(debug_assertions)]
mod armed {
    use std::path::PathBuf;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Read anew each time: which point it is changes while the server runs.
    pub(crate) fn ends_at(name: &str) -> bool {
        static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
        static PASSED: AtomicU32 = AtomicU32::new(0);
        let file = FILE.get_or_init(|| std::env::var_os("COPPICE_FAULTS").map(PathBuf::from));
        let armed = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
        armed.is_some_and(|armed| is_the_one(&armed, name, &PASSED))
    }

    pub(crate) fn is_the_one(armed: &str, name: &str, passed: &AtomicU32) -> bool {
        let (point, nth) = armed.trim().split_once(':').unwrap_or((armed.trim(), "1"));
        point == name && nth.parse() == Ok(passed.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::armed::is_the_one;

    #[test]
    fn the_nth_passing_of_one_point_is_the_one() {
        let passed = AtomicU32::new(0);
        let at = |name| is_the_one("a.b:2\n", name, &passed);
        assert_eq!(["a.b", "a.c", "a.b", "a.b"].map(at), [false, false, true, false]);
        assert!(is_the_one("a.b", "a.b", &AtomicU32::new(0)));
        assert!(!is_the_one("", "a.b", &AtomicU32::new(0)) && !is_the_one("a.b:x", "a.b", &AtomicU32::new(0)));
    }
}
