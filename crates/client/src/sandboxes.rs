//! Sandboxes: create, list, get, delete, pause, resume, hibernate, wake, lifecycle, network; and what the server says of itself.

use coppice_api::{
    CreateSandboxRequest, Lifecycle, LifecyclePatch, Me, Network, NetworkRequest, Sandbox, StatusReply, Version,
};
use reqwest::Method;

use crate::transport::{QUICK, SLOW};
use crate::{Client, ClientError};

impl Client {
    /// Creates a sandbox; it is usable when this answers. Waits for room as the retry policy says.
    pub async fn create(&self, request: &CreateSandboxRequest) -> Result<Sandbox, ClientError> {
        self.json_retrying("create the sandbox", || self.v1(Method::POST, &["sandboxes"]).timeout(SLOW).json(request))
            .await
    }

    /// All sandboxes of the token's workspace, oldest first.
    pub async fn list(&self) -> Result<Vec<Sandbox>, ClientError> {
        self.json("list the sandboxes", self.v1(Method::GET, &["sandboxes"]).timeout(QUICK)).await
    }

    /// One sandbox.
    pub async fn get(&self, id: &str) -> Result<Sandbox, ClientError> {
        self.json("get the sandbox", self.v1(Method::GET, &["sandboxes", id]).timeout(QUICK)).await
    }

    /// Ends and removes it.
    pub async fn delete(&self, id: &str) -> Result<(), ClientError> {
        self.done("delete the sandbox", self.v1(Method::DELETE, &["sandboxes", id]).timeout(QUICK)).await
    }

    /// Stops its virtual CPUs.
    pub async fn pause(&self, id: &str) -> Result<(), ClientError> {
        self.done("pause the sandbox", self.v1(Method::POST, &["sandboxes", id, "pause"]).timeout(QUICK)).await
    }

    /// Lets them run on.
    pub async fn resume(&self, id: &str) -> Result<(), ClientError> {
        self.done("resume the sandbox", self.v1(Method::POST, &["sandboxes", id, "resume"]).timeout(QUICK)).await
    }

    /// Keeps it on the server's disk and ends its machine; any use wakes it.
    pub async fn hibernate(&self, id: &str) -> Result<StatusReply, ClientError> {
        self.json("hibernate the sandbox", self.v1(Method::POST, &["sandboxes", id, "hibernate"]).timeout(SLOW)).await
    }

    /// Brings it back; it is usable when this answers.
    pub async fn wake(&self, id: &str) -> Result<StatusReply, ClientError> {
        self.json("wake the sandbox", self.v1(Method::POST, &["sandboxes", id, "wake"]).timeout(SLOW)).await
    }

    /// TTL and idleness.
    pub async fn lifecycle(&self, id: &str) -> Result<Lifecycle, ClientError> {
        self.json("get the lifecycle", self.v1(Method::GET, &["sandboxes", id, "lifecycle"]).timeout(QUICK)).await
    }

    /// Changes the TTL.
    pub async fn set_lifecycle(&self, id: &str, patch: &LifecyclePatch) -> Result<Lifecycle, ClientError> {
        let request = self.v1(Method::PATCH, &["sandboxes", id, "lifecycle"]).timeout(QUICK).json(patch);
        self.json("change the lifecycle", request).await
    }

    /// What it may reach.
    pub async fn network(&self, id: &str) -> Result<Network, ClientError> {
        self.json("get the network policy", self.v1(Method::GET, &["sandboxes", id, "network"]).timeout(QUICK)).await
    }

    /// Changes what it may reach; the new policy holds when this answers.
    pub async fn set_network(&self, id: &str, request: &NetworkRequest) -> Result<Network, ClientError> {
        let request = self.v1(Method::PATCH, &["sandboxes", id, "network"]).timeout(QUICK).json(request);
        self.json("change the network policy", request).await
    }

    /// Whom the token belongs to.
    pub async fn me(&self) -> Result<Me, ClientError> {
        self.json("ask whose token it is", self.v1(Method::GET, &["me"]).timeout(QUICK)).await
    }

    /// The server's version and engine. Needs no token.
    pub async fn version(&self) -> Result<Version, ClientError> {
        self.json("ask for the version", self.request(Method::GET, &["version"]).timeout(QUICK)).await
    }
}
