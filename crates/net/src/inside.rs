//! Threads that live inside a network namespace.
//!
//! A thread that enters a namespace can't be lent to anybody else, and libnftables opens its sockets anew when it sees
//! fit: what must happen in a namespace happens on a thread that never leaves it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::NetError;

type Job<S> = Box<dyn FnOnce(&mut S) + Send>;

/// A thread inside a namespace, with a state that never leaves the thread, which does one job after the other.
#[derive(Debug)]
pub(crate) struct Inside<S> {
    jobs: Mutex<Option<mpsc::Sender<Job<S>>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<S: 'static> Inside<S> {
    /// Starts the thread, lets it enter the namespace (or stay in the caller's) and make its state there.
    pub(crate) fn start(
        name: &str,
        netns: Option<BorrowedFd<'_>>,
        make: impl FnOnce() -> Result<S, NetError> + Send + 'static,
    ) -> Result<Self, NetError> {
        let netns = netns
            .map(|fd| fd.try_clone_to_owned())
            .transpose()
            .map_err(NetError::system("duplicating the descriptor of a network namespace"))?;
        let (jobs, queue) = mpsc::channel::<Job<S>>();
        let (ready, made) = mpsc::channel();
        let body = move || {
            let state = netns.map_or(Ok(()), |netns| enter(netns.as_fd())).and_then(|()| make());
            let mut state = match state {
                Ok(state) => {
                    // Whoever started this thread waits for it; if not, the queue is closed as well.
                    drop(ready.send(Ok(())));
                    state
                }
                Err(error) => return drop(ready.send(Err(error))),
            };
            while let Ok(job) = queue.recv() {
                // A job that panics fails for its caller, who misses the answer; the next one must find the thread alive.
                drop(catch_unwind(AssertUnwindSafe(|| job(&mut state))));
            }
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(body)
            .map_err(NetError::system("starting a thread"))?;
        let inside = Self { jobs: Mutex::new(Some(jobs)), thread: Mutex::new(Some(thread)) };
        made.recv().unwrap_or(Err(NetError::Closed))?;
        Ok(inside)
    }

    /// Runs a job on the thread and waits for what it returns.
    pub(crate) fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut S) -> Result<R, NetError> + Send + 'static,
    ) -> Result<R, NetError> {
        let (answer, answered) = mpsc::channel();
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(NetError::Closed)?;
        jobs.send(Box::new(move |state| drop(answer.send(job(state))))).map_err(|_| NetError::Closed)?;
        drop(jobs);
        answered.recv().map_err(|_| NetError::Closed)?
    }

    /// Ends the thread after the jobs that it has.
    pub(crate) fn stop(&self) {
        drop(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It catches what its jobs panic with.
            drop(thread.join());
        }
    }
}

impl<S> Drop for Inside<S> {
    fn drop(&mut self) {
        drop(self.jobs.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(thread) = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            drop(thread.join());
        }
    }
}

/// Moves the calling thread into a network namespace, for good.
fn enter(netns: BorrowedFd<'_>) -> Result<(), NetError> {
    move_into_link_name_space(netns, Some(LinkNameSpaceType::Network))
        .map_err(NetError::system("entering a network namespace"))
}

/// Runs something on a thread of its own in a new network namespace, which lives for as long as something holds it.
pub(crate) fn in_new_namespace<R: Send>(run: impl FnOnce(&File) -> Result<R, NetError> + Send) -> Result<R, NetError> {
    std::thread::scope(|scope| {
        let body = || {
            // SAFETY: a network namespace has no part in the descriptors, the memory or the file system of a thread, so that nothing
            // that other threads rely on changes.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
                .map_err(NetError::system("making a network namespace"))?;
            let own =
                File::open("/proc/thread-self/ns/net").map_err(NetError::system("opening a network namespace"))?;
            run(&own)
        };
        scope.spawn(body).join().unwrap_or(Err(NetError::Closed))
    })
}

/// A network namespace without a name, in which no link is up.
pub(crate) fn empty_namespace() -> Result<OwnedFd, NetError> {
    in_new_namespace(|own| own.try_clone().map(OwnedFd::from).map_err(NetError::system("holding a network namespace")))
}
