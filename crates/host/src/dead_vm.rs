//! The VM of a sandbox whose process is gone: everything fails with the reason, only [`Vm::kill`] succeeds.
//!
//! It keeps such a sandbox an ordinary one: it is listed as failed, says why, and can be deleted.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use coppice_engine::{
    CaptureError, CapturePlan, Captured, DiskClone, GuestSession, SessionError, Vm, VmError, VmRecord, VmState, VmStats,
};
use tokio::sync::{broadcast, watch};

/// See the module.
#[derive(Debug)]
pub(crate) struct DeadVm {
    record: VmRecord,
    reason: String,
    state: watch::Sender<VmState>,
}

impl DeadVm {
    pub(crate) fn vm(record: VmRecord, reason: String) -> Arc<dyn Vm> {
        Arc::new(Self { record, state: watch::Sender::new(VmState::Dead(reason.clone())), reason })
    }

    fn dead(&self) -> VmError {
        VmError::Dead { reason: self.reason.clone() }
    }
}

#[async_trait]
impl Vm for DeadVm {
    async fn open_session(&self, _deadline: Instant) -> Result<GuestSession, SessionError> {
        Err(SessionError::Dead { reason: self.reason.clone() })
    }

    async fn pause(&self) -> Result<(), VmError> {
        Err(self.dead())
    }

    async fn resume(&self) -> Result<(), VmError> {
        Err(self.dead())
    }

    async fn capture(&self, _plan: CapturePlan) -> Result<Captured, CaptureError> {
        Err(self.dead().into())
    }

    async fn clone_disk(&self, _dest: &Path) -> Result<DiskClone, CaptureError> {
        Err(self.dead().into())
    }

    async fn stats(&self) -> Result<VmStats, VmError> {
        Err(self.dead())
    }

    async fn kill(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn record(&self) -> VmRecord {
        self.record.clone()
    }

    fn state(&self) -> watch::Receiver<VmState> {
        self.state.subscribe()
    }

    fn console(&self) -> broadcast::Receiver<Bytes> {
        // Its sender is dropped: the receiver sees the end at once.
        broadcast::channel(1).1
    }
}
