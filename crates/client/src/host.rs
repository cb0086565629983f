//! The host, for admins.

use coppice_api::HostReport;
use reqwest::Method;

use crate::transport::QUICK;
use crate::{Client, ClientError};

impl Client {
    /// What the host has, what of it is used and promised, and what fits still. Needs an admin's token.
    pub async fn host(&self) -> Result<HostReport, ClientError> {
        self.json("ask for the host's room", self.v1(Method::GET, &["host"]).timeout(QUICK)).await
    }
}
