//! What a VM is doing: monitor events and the end of the process become one [`VmState`].
//!
//! Events are applied in the order in which QEMU sent them and before any later reply is delivered, so that the state is
//! up to date when a command has been answered. Nothing here sends commands.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;

use super::console::Console;
use super::qmp::Event;
use crate::process::Process;
use crate::{VmError, VmState};

/// Most bytes that QEMU's log may have; then it is emptied. QEMU prints next to nothing, but a guest may make it.
const MAX_LOG: u64 = 1 << 20;
/// How often the length of that log is looked at.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes of the log that an error message quotes.
const LOG_TAIL: u64 = 600;

/// The state of one VM and what is known about its end.
#[derive(Debug, Clone)]
pub(crate) struct Watch {
    state: Arc<watch::Sender<VmState>>,
    notes: Arc<Mutex<Notes>>,
}

#[derive(Debug, Default)]
struct Notes {
    /// The latest I/O error that stopped the machine.
    io_error: Option<String>,
    /// Why the machine shut down.
    shutdown: Option<String>,
    /// Whether an event has said that it runs or has stopped.
    told: bool,
}

impl Watch {
    /// Of a VM that does not run yet.
    pub fn new() -> Self {
        Self { state: Arc::new(watch::Sender::new(VmState::Paused)), notes: Arc::default() }
    }

    /// Follows the state.
    pub fn subscribe(&self) -> watch::Receiver<VmState> {
        self.state.subscribe()
    }

    /// The state now.
    pub fn get(&self) -> VmState {
        self.state.borrow().clone()
    }

    /// Sets the state, but never back from the dead.
    fn set(&self, new: VmState) {
        self.state.send_if_modified(|state| {
            let change = *state != new && !matches!(state, VmState::Dead(_));
            if change {
                *state = new;
            }
            change
        });
    }

    /// Notes why the machine is about to end; the first reason counts.
    pub fn note_end(&self, reason: &str) {
        if let Ok(mut notes) = self.notes.lock() {
            notes.shutdown.get_or_insert_with(|| reason.to_owned());
        }
    }

    /// Applies the answer of `query-status`, for what happened before events were received. Any event since then knows
    /// better: it may have been applied while the answer was on its way to who asked.
    pub fn apply_status(&self, status: &Value) {
        let Ok(notes) = self.notes.lock() else { return };
        if notes.told {
            return;
        }
        match status.get("status").and_then(Value::as_str) {
            Some("running") => self.set(VmState::Running),
            Some("io-error") => self.set(VmState::IoError("an I/O error of the host's disk".to_owned())),
            _ => self.set(VmState::Paused),
        }
    }

    /// Applies an event.
    pub fn apply_event(&self, event: &Event) {
        let text = |key: &str| event.data.get(key).and_then(Value::as_str).unwrap_or("unknown").to_owned();
        let Ok(mut notes) = self.notes.lock() else { return };
        notes.told |= matches!(event.name.as_str(), "RESUME" | "STOP");
        match event.name.as_str() {
            "RESUME" => {
                notes.io_error = None;
                self.set(VmState::Running);
            }
            "STOP" => self.set(notes.io_error.clone().map_or(VmState::Paused, VmState::IoError)),
            "BLOCK_IO_ERROR" if text("action") == "stop" => {
                notes.io_error = Some(format!("{} failed: {}", text("operation"), text("reason")));
            }
            "SHUTDOWN" => {
                let reason = match text("reason").as_str() {
                    "guest-shutdown" => "the guest powered off".to_owned(),
                    "guest-reset" => "the guest rebooted or panicked".to_owned(),
                    "guest-panic" => "the guest panicked".to_owned(),
                    other => format!("shut down ({other})"),
                };
                notes.shutdown.get_or_insert(reason);
            }
            "GUEST_PANICKED" => notes.shutdown = Some("the guest panicked".to_owned()),
            name => tracing::trace!(name, "monitor event"),
        }
    }

    /// Watches the process to its end. Runs on when the VM's handle is dropped, so that no zombie is left.
    pub async fn run(self, process: Arc<Process>, log: PathBuf, console: Console) {
        let how = loop {
            tokio::select! {
                how = process.ended() => break how,
                () = tokio::time::sleep(LOG_INTERVAL) => bound_log(&log),
            }
        };
        let noted = self.notes.lock().ok().and_then(|notes| notes.shutdown.clone());
        let reason = match noted {
            Some(reason) if reason.contains("panicked") => {
                format!("{reason}; last line of its console: {:?}", console.last_line())
            }
            Some(reason) => reason,
            None => format!("{how}{}", log_tail(&log)),
        };
        self.set(VmState::Dead(reason));
    }

    /// Waits until the machine runs, or fails with the reason of its end.
    pub async fn running(&self) -> Result<(), VmError> {
        let mut state = self.subscribe();
        match state.wait_for(|s| matches!(s, VmState::Running | VmState::Dead(_))).await.as_deref() {
            Ok(VmState::Running) => Ok(()),
            Ok(VmState::Dead(reason)) => Err(VmError::Dead { reason: reason.clone() }),
            _ => Err(VmError::Dead { reason: "it is not watched any more".to_owned() }),
        }
    }

    /// Waits until the machine is dead, and says why.
    pub async fn dead(&self) -> String {
        let mut state = self.subscribe();
        match state.wait_for(|s| matches!(s, VmState::Dead(_))).await.as_deref() {
            Ok(VmState::Dead(reason)) => reason.clone(),
            _ => "it is not watched any more".to_owned(),
        }
    }
}

fn bound_log(path: &Path) {
    let too_long = std::fs::metadata(path).is_ok_and(|meta| meta.len() > MAX_LOG);
    // QEMU appends, so what it prints next is at the new end.
    if too_long && let Err(error) = std::fs::OpenOptions::new().write(true).truncate(true).open(path) {
        tracing::warn!(path = %path.display(), %error, "QEMU's log can't be emptied");
    }
}

/// The end of what QEMU printed, for error messages.
fn log_tail(path: &Path) -> String {
    let read = || {
        let file = std::fs::File::open(path)?;
        let len = file.metadata()?.len();
        let mut tail = vec![0; usize::try_from(len.min(LOG_TAIL)).unwrap_or(0)];
        file.read_exact_at(&mut tail, len.saturating_sub(LOG_TAIL))?;
        std::io::Result::Ok(tail)
    };
    let tail = read().unwrap_or_default();
    let text: String = String::from_utf8_lossy(&tail).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.trim().is_empty() { String::new() } else { format!("; it printed: {}", text.trim()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_newer_than_the_status_that_was_asked_for_before_it() {
        let watch = Watch::new();
        watch.apply_status(&json!({"status": "running"}));
        assert_eq!(watch.get(), VmState::Running);
        let watch = Watch::new();
        watch.apply_event(&event("RESUME", Value::Null));
        watch.apply_status(&json!({"status": "inmigrate"}));
        assert_eq!(watch.get(), VmState::Running);
    }

    /// A process that the test started, and reaps.
    fn adopted(pid: u32) -> Arc<Process> {
        use crate::privileged::{Local, Privileged, ProcessId, Spawned};
        let pid = i32::try_from(pid).unwrap();
        let id = ProcessId { pid, start_time: crate::process::start_time(pid).unwrap() };
        let local = Local::unjailed().unwrap();
        let pidfd = local.adopt(id).unwrap().unwrap();
        Arc::new(Process::watch(Arc::new(local), Spawned { id, pidfd }).unwrap())
    }

    fn event(name: &str, data: Value) -> Event {
        Event { name: name.to_owned(), data }
    }

    #[test]
    fn a_stop_after_an_io_error_is_told_apart_from_a_pause() {
        let watch = Watch::new();
        watch.apply_event(&event("RESUME", Value::Null));
        assert_eq!(watch.get(), VmState::Running);
        watch.apply_event(&event("STOP", Value::Null));
        assert_eq!(watch.get(), VmState::Paused);
        watch.apply_event(&event("RESUME", Value::Null));
        let full =
            json!({"action": "stop", "operation": "write", "nospace": true, "reason": "No space left on device"});
        watch.apply_event(&event("BLOCK_IO_ERROR", full));
        assert_eq!(watch.get(), VmState::Running);
        watch.apply_event(&event("STOP", Value::Null));
        assert_eq!(watch.get(), VmState::IoError("write failed: No space left on device".into()));
        watch.apply_event(&event("RESUME", Value::Null));
        watch.apply_event(&event("STOP", Value::Null));
        assert_eq!(watch.get(), VmState::Paused);
    }

    #[tokio::test]
    async fn the_reason_of_an_end_is_the_guests_own_when_it_gave_one() {
        for (noted, expected) in [(true, "the guest powered off"), (false, "it ended; it printed: qemu: no")] {
            let dir = tempfile::tempdir().unwrap();
            let log = dir.path().join("log");
            std::fs::write(&log, "qemu:\nno\n").unwrap();
            let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
            let process = adopted(child.id());
            drop(child.stdin.take());
            let watch = Watch::new();
            if noted {
                watch.apply_event(&event("SHUTDOWN", json!({"guest": true, "reason": "guest-shutdown"})));
            }
            watch.clone().run(process, log, Console::new()).await;
            child.wait().unwrap();
            assert_eq!(watch.get(), VmState::Dead(expected.into()));
            watch.apply_event(&event("RESUME", Value::Null));
            assert_eq!(watch.dead().await, expected);
        }
    }

    #[test]
    fn a_log_that_grew_too_long_is_emptied() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        std::fs::write(&log, vec![b'x'; 100]).unwrap();
        bound_log(&log);
        assert_eq!(std::fs::metadata(&log).unwrap().len(), 100);
        std::fs::write(&log, vec![b'x'; (MAX_LOG + 1).try_into().unwrap()]).unwrap();
        bound_log(&log);
        assert_eq!(std::fs::metadata(&log).unwrap().len(), 0);
    }
}
