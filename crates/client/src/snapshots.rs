//! Snapshots.

use coppice_api::Snapshot;
use reqwest::Method;
use serde::Deserialize;

use crate::transport::{QUICK, SLOW};
use crate::{Client, ClientError};

/// The list, bare or wrapped: both are on the wire of servers of this contract.
#[derive(Deserialize)]
#[serde(untagged)]
enum Listing {
    Wrapped { snapshots: Vec<Snapshot> },
    Bare(Vec<Snapshot>),
}

impl Client {
    /// Captures memory, device state and disk of a sandbox at one instant; it runs on.
    pub async fn snapshot(&self, sandbox_id: &str) -> Result<Snapshot, ClientError> {
        let request = self.v1(Method::POST, &["sandboxes", sandbox_id, "snapshots"]).timeout(SLOW);
        self.json("snapshot the sandbox", request).await
    }

    /// Snapshots, newest first; of one sandbox when given.
    pub async fn snapshots(&self, sandbox_id: Option<&str>) -> Result<Vec<Snapshot>, ClientError> {
        let mut request = self.v1(Method::GET, &["snapshots"]).timeout(QUICK);
        if let Some(id) = sandbox_id {
            request = request.query(&[("sandbox_id", id)]);
        }
        match self.json("list the snapshots", request).await? {
            Listing::Wrapped { snapshots } | Listing::Bare(snapshots) => Ok(snapshots),
        }
    }

    /// One snapshot.
    pub async fn get_snapshot(&self, id: &str) -> Result<Snapshot, ClientError> {
        self.json("get the snapshot", self.v1(Method::GET, &["snapshots", id]).timeout(QUICK)).await
    }

    /// Removes a snapshot; sandboxes made from it go on.
    pub async fn delete_snapshot(&self, id: &str) -> Result<(), ClientError> {
        self.done("delete the snapshot", self.v1(Method::DELETE, &["snapshots", id]).timeout(QUICK)).await
    }
}
