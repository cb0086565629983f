//! Ports of a sandbox: the list, preview links, and raw TCP.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use coppice_api::{OpenPortRequest, Port, Preview, PreviewLink, PreviewRequest};
use reqwest::header::{CONNECTION, UPGRADE};
use reqwest::{Method, StatusCode, Upgraded};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::transport::QUICK;
use crate::{Client, ClientError};

/// How long a tunnel may take to open: the server gives the guest 5 s.
const OPEN: Duration = Duration::from_secs(30);

impl Client {
    /// Ports on which something in the sandbox listens, and those that were named.
    pub async fn ports(&self, id: &str) -> Result<Vec<Port>, ClientError> {
        self.json("list the ports", self.v1(Method::GET, &["sandboxes", id, "ports"]).timeout(QUICK)).await
    }

    /// Names a port, and says whether its preview host needs a token.
    pub async fn open_port(&self, id: &str, request: &OpenPortRequest) -> Result<Port, ClientError> {
        let call = self.v1(Method::POST, &["sandboxes", id, "ports"]).timeout(QUICK).json(request);
        self.json("name the port", call).await
    }

    /// Forgets a port's name.
    pub async fn close_port(&self, id: &str, port: u16) -> Result<(), ClientError> {
        let call = self.v1(Method::DELETE, &["sandboxes", id, "ports", &port.to_string()]).timeout(QUICK);
        self.done("forget the port", call).await
    }

    /// Makes a link that leads to a port without another token.
    pub async fn preview(&self, id: &str, request: &PreviewRequest) -> Result<Preview, ClientError> {
        let call = self.v1(Method::POST, &["sandboxes", id, "preview"]).timeout(QUICK).json(request);
        self.json("make the link", call).await
    }

    /// Valid links to a sandbox, oldest first.
    pub async fn previews(&self, id: &str) -> Result<Vec<PreviewLink>, ClientError> {
        self.json("list the links", self.v1(Method::GET, &["sandboxes", id, "previews"]).timeout(QUICK)).await
    }

    /// Ends a link.
    pub async fn revoke_preview(&self, id: &str, link: &str) -> Result<(), ClientError> {
        let call = self.v1(Method::DELETE, &["sandboxes", id, "previews", link]).timeout(QUICK);
        self.done("revoke the link", call).await
    }

    /// Opens a TCP connection to any port of the sandbox. When this answers, something there has accepted it.
    pub async fn tunnel(&self, id: &str, port: u16) -> Result<Tunnel, ClientError> {
        const ACTION: &str = "open the tunnel";
        let call = self.v1(Method::GET, &["sandboxes", id, "tunnel", &port.to_string()]);
        let call = call.header(CONNECTION, "upgrade").header(UPGRADE, "tcp");
        let opening = async {
            let response = call.send().await.map_err(|error| self.transport(ACTION, error))?;
            match response.status() {
                StatusCode::SWITCHING_PROTOCOLS => {}
                status if status.is_success() => {
                    let reason = "it did not switch to TCP; is there a proxy in between?".to_owned();
                    return Err(ClientError::Decode { action: ACTION, reason });
                }
                _ => return Err(self.refusal(response).await.into()),
            }
            response.upgrade().await.map_err(|error| self.transport(ACTION, error))
        };
        match tokio::time::timeout(OPEN, opening).await {
            Ok(opened) => Ok(Tunnel { stream: opened? }),
            Err(_) => Err(ClientError::Decode { action: ACTION, reason: format!("none came within {OPEN:?}") }),
        }
    }
}

/// A TCP connection to a port of a sandbox. Shutting down one way leaves the other open.
pub struct Tunnel {
    stream: Upgraded,
}

impl fmt::Debug for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tunnel").finish_non_exhaustive()
    }
}

impl AsyncRead for Tunnel {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl AsyncWrite for Tunnel {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
