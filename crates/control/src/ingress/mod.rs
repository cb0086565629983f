//! The way in: from a client's request to a TCP port of a sandbox.
//!
//! | module | does |
//! |---|---|
//! | `reach` | a bounded connection to a port, or the right refusal |
//! | `forward` | one HTTP exchange with what listens there, streamed; upgrades |
//! | `head` | what of a request's and a response's head goes through |
//! | `pipe` | bytes both ways after an upgrade |
//! | `hosts` | preview hosts, `{port}-{sandbox}.SUFFIX` |
//! | `link`, `paths` | signed links: the token, and which paths it opens |
//! | `store`, `sweep` | what is remembered of ports and links, and forgotten with their sandbox |
//!
//! Guests are hostile: whatever listens there may answer anything, or nothing. It ends no TLS, and caches nothing.

pub(crate) mod forward;
pub(crate) mod head;
pub(crate) mod hosts;
pub(crate) mod link;
pub(crate) mod paths;
pub(crate) mod pipe;
pub(crate) mod reach;
pub(crate) mod store;
pub(crate) mod sweep;

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use coppice_api::ErrorClass;
use http::header::HOST;
use http::{HeaderMap, Uri};

pub use store::{IngressError, IngressStore};

use crate::Control;
use crate::error::ApiError;

/// The port of a guest's SSH server, which is reached by tunnels only.
const SSH: u16 = 22;

/// How sandboxes' ports are reached.
#[derive(Debug, Clone)]
pub struct IngressConfig {
    /// What is remembered of ports and links.
    pub store: IngressStore,
    /// Requests to hosts below it go to sandboxes.
    pub suffix: Option<PreviewSuffix>,
    /// Every port of every sandbox can be reached by its preview host without a token.
    pub public_previews: bool,
    /// Where clients reach the API, when that is not what their requests say (behind a proxy).
    pub public_url: Option<PublicUrl>,
}

impl Default for IngressConfig {
    fn default() -> Self {
        Self { store: IngressStore::in_memory(), suffix: None, public_previews: false, public_url: None }
    }
}

/// The domain below which each port of each sandbox has a host, with the port that browsers need, if they do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreviewSuffix {
    domain: String,
    port: Option<u16>,
}

impl PreviewSuffix {
    /// The same with this port in URLs, unless it has one.
    #[must_use]
    pub fn or_port(self, port: u16) -> Self {
        Self { port: self.port.or(Some(port).filter(|port| *port != 80)), ..self }
    }

    /// As in a URL.
    fn authority(&self) -> String {
        match self.port {
            Some(port) => format!("{}:{port}", self.domain),
            None => self.domain.clone(),
        }
    }
}

impl FromStr for PreviewSuffix {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (domain, port) = match text.split_once(':') {
            Some((domain, port)) => (domain, Some(port.parse().map_err(|_| "what follows the colon is no port")?)),
            None => (text, None),
        };
        let domain = domain.trim_start_matches("*.").trim_matches('.').to_ascii_lowercase();
        let label = |label: &str| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        if domain.len() > 200 || !domain.split('.').all(label) {
            return Err("it must be a domain name, like preview.example.org");
        }
        Ok(Self { domain, port })
    }
}

/// Scheme and authority of the API as its clients see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicUrl {
    scheme: &'static str,
    base: String,
}

impl FromStr for PublicUrl {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let base = text.trim_end_matches('/').to_owned();
        let uri: Uri = base.parse().map_err(|_| "it is no URL")?;
        let scheme = match uri.scheme_str() {
            Some("http") => "http",
            Some("https") => "https",
            _ => return Err("it must begin with http:// or https://"),
        };
        if uri.authority().is_none_or(|authority| authority.as_str().contains('@')) || uri.query().is_some() {
            return Err("it must be a scheme and a host, like https://api.example.org");
        }
        Ok(Self { scheme, base })
    }
}

/// A port of a sandbox, and the workspace in whose name it is used.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) workspace: String,
    pub(crate) sandbox: String,
    pub(crate) port: u16,
}

/// A port that a client may name.
pub(crate) fn port(number: Option<i64>) -> Result<u16, ApiError> {
    let Some(number) = number else {
        return Err(ApiError::invalid("port_required", "port required"));
    };
    match u16::try_from(number) {
        Ok(SSH) => Err(ApiError::invalid("port_reserved", "port 22 is not served by HTTP")
            .hint("`coppice port-forward` leads to any port")),
        Ok(port) if port != 0 => Ok(port),
        _ => Err(ApiError::invalid("invalid_port", format!("port must be 1 to 65535, and is {number}"))),
    }
}

/// Scheme of the API as clients see it.
pub(crate) fn scheme(control: &Control) -> &'static str {
    control.config().ingress.public_url.as_ref().map_or("http", |url| url.scheme)
}

/// What URLs of the API begin with, for whoever sent this request.
pub(crate) fn base(control: &Control, uri: &Uri, headers: &HeaderMap) -> String {
    match &control.config().ingress.public_url {
        Some(url) => url.base.clone(),
        None => format!("http://{}", authority(uri, headers).unwrap_or("localhost")),
    }
}

/// Host, and port if one is said, that the client meant.
pub(crate) fn authority<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    match uri.authority() {
        Some(authority) => Some(authority.as_str()),
        None => headers.get(HOST)?.to_str().ok(),
    }
}

/// How many connections into guests there are.
#[derive(Debug)]
pub(crate) struct Gate {
    total: usize,
    each: usize,
    open: Mutex<HashMap<String, usize>>,
}

impl Gate {
    pub(crate) fn new(total: usize, each: usize) -> Arc<Self> {
        Arc::new(Self { total, each, open: Mutex::default() })
    }

    /// Room for one more connection to a sandbox.
    pub(crate) fn enter(self: &Arc<Self>, sandbox: &str) -> Result<Passed, ApiError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |what: String| Err(ApiError::new(ErrorClass::Transient, "too_many_connections", what));
        if open.values().sum::<usize>() >= self.total {
            return full(format!("there are {} connections to sandboxes, which is the most", self.total));
        }
        let count = open.entry(sandbox.to_owned()).or_default();
        if *count >= self.each {
            return full(format!("there are {} connections to this sandbox, which is the most", self.each));
        }
        *count += 1;
        Ok(Passed { gate: Arc::clone(self), sandbox: sandbox.to_owned() })
    }
}

/// One connection's place.
#[derive(Debug)]
pub(crate) struct Passed {
    gate: Arc<Gate>,
    sandbox: String,
}

impl Drop for Passed {
    fn drop(&mut self) {
        let mut open = self.gate.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.sandbox) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.sandbox);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_and_urls_of_operators() {
        let suffix = |text: &str| PreviewSuffix::from_str(text);
        assert_eq!(suffix("*.Preview.Example.org.").unwrap().authority(), "preview.example.org");
        assert_eq!(suffix("localhost:8080").unwrap().authority(), "localhost:8080");
        for bad in ["", "a b", "a..b", "-a", "a:b", "http://a", "a/b", &"x".repeat(64)] {
            assert!(suffix(bad).is_err(), "{bad}");
        }
        assert_eq!(PublicUrl::from_str("https://a.example/").unwrap().base, "https://a.example");
        for bad in ["", "a.example", "ftp://a", "https://", "https://u@a", "https://a?x"] {
            assert!(PublicUrl::from_str(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn places_are_given_back() {
        let gate = Gate::new(3, 2);
        let first = [gate.enter("a").unwrap(), gate.enter("a").unwrap()];
        assert_eq!(gate.enter("a").unwrap_err().code(), "too_many_connections");
        let other = gate.enter("b").unwrap();
        assert!(gate.enter("c").is_err());
        drop(other);
        drop(first);
        assert!(gate.open.lock().unwrap().is_empty());
        gate.enter("a").unwrap();
    }
}
