//! Tokens, workspaces and the audit log.

use coppice_api::{AuditEntry, CreateTokenRequest, CreatedToken, Quota, Token, Workspace};
use reqwest::Method;

use crate::transport::QUICK;
use crate::{Client, ClientError};

/// Which entries of the audit log are asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AuditQuery<'a> {
    /// Only of tokens of this workspace.
    pub workspace: Option<&'a str>,
    /// Only entries with a smaller id.
    pub before: Option<i64>,
    /// At most so many.
    pub limit: Option<u32>,
}

/// `me` for the token's own workspace, which any token may ask for; others are for admins.
fn of(workspace: Option<&str>) -> Vec<&str> {
    workspace.map_or_else(|| vec!["me", "tokens"], |name| vec!["workspaces", name, "tokens"])
}

impl Client {
    /// Makes a token of a workspace, or of the client's own. A workspace that there is not yet comes into being with it.
    pub async fn create_token(
        &self,
        workspace: Option<&str>,
        request: &CreateTokenRequest,
    ) -> Result<CreatedToken, ClientError> {
        self.json("create the token", self.v1(Method::POST, &of(workspace)).timeout(QUICK).json(request)).await
    }

    /// Tokens of a workspace, or of the client's own, oldest first.
    pub async fn tokens(&self, workspace: Option<&str>) -> Result<Vec<Token>, ClientError> {
        self.json("list the tokens", self.v1(Method::GET, &of(workspace)).timeout(QUICK)).await
    }

    /// Ends a token of a workspace, or of the client's own, at once.
    pub async fn revoke_token(&self, workspace: Option<&str>, prefix: &str) -> Result<(), ClientError> {
        let mut path = of(workspace);
        path.push(prefix);
        self.done("revoke the token", self.v1(Method::DELETE, &path).timeout(QUICK)).await
    }

    /// All workspaces, by name.
    pub async fn workspaces(&self) -> Result<Vec<Workspace>, ClientError> {
        self.json("list the workspaces", self.v1(Method::GET, &["workspaces"]).timeout(QUICK)).await
    }

    /// One workspace.
    pub async fn workspace(&self, name: &str) -> Result<Workspace, ClientError> {
        self.json("get the workspace", self.v1(Method::GET, &["workspaces", name]).timeout(QUICK)).await
    }

    /// Sets a workspace's quota: what it does not name has no limit.
    pub async fn set_quota(&self, name: &str, quota: &Quota) -> Result<Workspace, ClientError> {
        let request = self.v1(Method::PUT, &["workspaces", name]).timeout(QUICK).json(quota);
        self.json("set the quota", request).await
    }

    /// Removes an empty workspace and its tokens.
    pub async fn delete_workspace(&self, name: &str) -> Result<(), ClientError> {
        self.done("delete the workspace", self.v1(Method::DELETE, &["workspaces", name]).timeout(QUICK)).await
    }

    /// Who changed what, newest first.
    pub async fn audit(&self, query: AuditQuery<'_>) -> Result<Vec<AuditEntry>, ClientError> {
        let mut request = self.v1(Method::GET, &["audit"]).timeout(QUICK);
        if let Some(workspace) = query.workspace {
            request = request.query(&[("workspace", workspace)]);
        }
        if let Some(before) = query.before {
            request = request.query(&[("before", before)]);
        }
        if let Some(limit) = query.limit {
            request = request.query(&[("limit", limit)]);
        }
        self.json("read the audit log", request).await
    }
}
