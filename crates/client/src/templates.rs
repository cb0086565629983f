//! Templates, as the server offers them. Building one is the host's work, not this client's.

use coppice_api::Template;
use reqwest::Method;

use crate::transport::QUICK;
use crate::{Client, ClientError};

impl Client {
    /// Templates that the workspace may use.
    pub async fn templates(&self) -> Result<Vec<Template>, ClientError> {
        self.json("list the templates", self.v1(Method::GET, &["templates"]).timeout(QUICK)).await
    }

    /// One template, by name or alias.
    pub async fn template(&self, name: &str) -> Result<Template, ClientError> {
        self.json("get the template", self.v1(Method::GET, &["templates", name]).timeout(QUICK)).await
    }

    /// Removes a template.
    pub async fn delete_template(&self, name: &str) -> Result<(), ClientError> {
        self.done("delete the template", self.v1(Method::DELETE, &["templates", name]).timeout(QUICK)).await
    }
}
