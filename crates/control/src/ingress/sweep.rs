//! Sandboxes end without a word to the control plane (their TTL passes, their host removes them): what was remembered of
//! their ports and links is looked through now and then.

use std::time::Duration;

use coppice_api::ErrorClass;

use super::reach::forget;
use crate::Control;

/// Between two looks. Links to a sandbox that is gone lead nowhere meanwhile: its host says so.
const EVERY: Duration = Duration::from_secs(600);

/// Looks until the server stops.
pub(crate) async fn run(control: Control) {
    let stop = control.stop().soon.clone();
    let looking = async {
        let mut clock = tokio::time::interval(EVERY);
        loop {
            clock.tick().await;
            look(&control).await;
        }
    };
    tokio::select! {
        () = looking => {}
        () = stop.cancelled() => {}
    }
}

async fn look(control: &Control) {
    let known = match control.config().ingress.store.sandboxes().await {
        Ok(known) => known,
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "ports and links can't be looked through");
            return;
        }
    };
    for (workspace, sandbox) in known {
        // Any other failure says nothing about whether it exists.
        let gone =
            matches!(control.host().get(&workspace, &sandbox).await, Err(e) if e.class() == ErrorClass::NotFound);
        if gone {
            forget(control, &sandbox).await;
        }
    }
}
