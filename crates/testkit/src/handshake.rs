//! Resume requests as the host makes them, for tests that use an engine without a host.

use std::time::{SystemTime, UNIX_EPOCH};

use coppice_guest_proto::v1::{ResumeReason, ResumeRequest};
use uuid::Uuid;

/// A valid request with a new generation, entropy, machine id and sandbox id.
#[must_use]
pub fn request(reason: ResumeReason) -> ResumeRequest {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    ResumeRequest {
        generation: Uuid::new_v4().as_bytes().to_vec(),
        reason: reason.into(),
        wall_clock_unix_ns: i64::try_from(now.as_nanos()).unwrap_or(i64::MAX),
        entropy: std::iter::repeat_with(|| *Uuid::new_v4().as_bytes()).take(8).flatten().collect(),
        hostname: "sandbox".to_owned(),
        machine_id: Uuid::new_v4().simple().to_string(),
        net: None,
        fork: None,
        sandbox_id: Uuid::new_v4().to_string(),
    }
}
