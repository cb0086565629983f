//! What a sandbox has changed since its fork point.

use coppice_api::Changes;
use reqwest::Method;

use crate::transport::QUICK;
use crate::{Client, ClientError};

/// What is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangesQuery {
    /// Most entries in each list; the server's default when absent.
    pub limit: Option<usize>,
    /// Only this absolute path and what is in it.
    pub path: Option<String>,
    /// A guest that runs writes what it has to its disk first. Otherwise it is looked at as it is, and nothing changes.
    pub flush: bool,
}

impl Client {
    /// Files that a sandbox has added, modified and deleted since its fork point. Wakes nothing.
    pub async fn changes(&self, id: &str, query: &ChangesQuery) -> Result<Changes, ClientError> {
        let method = if query.flush { Method::POST } else { Method::GET };
        let mut request = self.v1(method, &["sandboxes", id, "changes"]).timeout(QUICK);
        if let Some(limit) = query.limit {
            request = request.query(&[("limit", limit)]);
        }
        if let Some(path) = &query.path {
            request = request.query(&[("path", path)]);
        }
        self.json("look for changed files", request).await
    }
}
