//! Forking, and promoting one of the children.

use std::collections::BTreeMap;

use coppice_api::{Fork, ForkRequest, ForkTreeRequest, PromoteReply, PromoteRequest};
use reqwest::Method;

use crate::transport::SLOW;
use crate::{Client, ClientError};

impl Client {
    /// Forks the disk (or, `warm`, moves the machine to one child). Waits for room as the retry policy says.
    pub async fn fork(&self, id: &str, request: &ForkRequest) -> Result<Fork, ClientError> {
        let call = || self.v1(Method::POST, &["sandboxes", id, "fork"]).timeout(SLOW).json(request);
        self.json_retrying("fork the sandbox", call).await
    }

    /// Forks memory and disk of the running machine. The server answers when every child is usable. Waits for room as the
    /// retry policy says.
    pub async fn fork_tree(
        &self,
        id: &str,
        count: u32,
        metadata: BTreeMap<String, String>,
    ) -> Result<Fork, ClientError> {
        let metadata = if metadata.is_empty() { None } else { Some(metadata) };
        let request = ForkTreeRequest { count: Some(i64::from(count)), metadata, on_ttl: None };
        self.fork_tree_with(id, &request).await
    }

    /// The same with everything that can be asked for.
    pub async fn fork_tree_with(&self, id: &str, request: &ForkTreeRequest) -> Result<Fork, ClientError> {
        let call = || self.v1(Method::POST, &["sandboxes", id, "fork-tree"]).timeout(SLOW).json(request);
        self.json_retrying("fork the sandbox", call).await
    }

    /// Makes a child independent; deletes its siblings when asked.
    pub async fn promote(&self, id: &str, request: &PromoteRequest) -> Result<PromoteReply, ClientError> {
        let call = self.v1(Method::POST, &["sandboxes", id, "promote"]).timeout(SLOW).json(request);
        self.json("promote the sandbox", call).await
    }
}
