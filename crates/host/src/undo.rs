//! What was acquired so far, and how to give it back.
//!
//! Every acquired thing registers its undo at once. [`Undo::commit`] forgets them; on an error the caller awaits
//! [`Undo::unwind`], so that its answer comes after the last trace is gone; a future that is dropped in between unwinds in
//! the background.

use std::future::Future;
use std::pin::Pin;

use tracing::{Instrument, debug, debug_span};

type Step = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A stack of undo steps, run in reverse.
#[derive(Default)]
pub(crate) struct Undo {
    steps: Vec<(&'static str, Step)>,
}

impl Undo {
    /// Registers how to give back what was just acquired. The step must cope with the thing being gone.
    pub(crate) fn push(&mut self, what: &'static str, step: impl Future<Output = ()> + Send + 'static) {
        self.steps.push((what, Box::pin(step)));
    }

    /// All is well: nothing is undone.
    pub(crate) fn commit(mut self) {
        self.steps.clear();
    }

    /// Gives everything back, latest first.
    pub(crate) async fn unwind(mut self) {
        run(std::mem::take(&mut self.steps)).await;
    }
}

async fn run(mut steps: Vec<(&'static str, Step)>) {
    while let Some((what, step)) = steps.pop() {
        debug!(what, "undo");
        step.await;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let steps = std::mem::take(&mut self.steps);
        if steps.is_empty() {
            return;
        }
        // Without a runtime the process is ending: what is left is reclaimed at the next start.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            drop(runtime.spawn(run(steps).instrument(debug_span!("undo after cancellation"))));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    fn stack(log: &Arc<Mutex<Vec<u32>>>) -> Undo {
        let mut undo = Undo::default();
        for n in 1..=3 {
            let log = Arc::clone(log);
            undo.push("n", async move { log.lock().unwrap().push(n) });
        }
        undo
    }

    #[tokio::test]
    async fn steps_run_in_reverse_and_not_after_a_commit() {
        let log = Arc::default();
        stack(&log).unwind().await;
        assert_eq!(*log.lock().unwrap(), vec![3, 2, 1]);
        stack(&log).commit();
        tokio::task::yield_now().await;
        assert_eq!(log.lock().unwrap().len(), 3);
    }

    #[tokio::test]
    async fn a_dropped_stack_unwinds_in_the_background() {
        let log = Arc::default();
        drop(stack(&log));
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(*log.lock().unwrap(), vec![3, 2, 1]);
    }
}
