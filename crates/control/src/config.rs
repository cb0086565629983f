//! Everything about the API that an operator or a test may want to set. No reading of files or environment: the command
//! line does that.

use std::time::Duration;

use crate::{IngressConfig, TokenStore};

/// Who may call.
#[derive(Debug, Clone)]
pub enum Auth {
    /// Holders of a token from the store.
    Tokens(TokenStore),
    /// Anybody who reaches the port, as workspace `default`. Only when the operator said so.
    Off,
}

/// Who may read `/metrics`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MetricsAccess {
    /// Connections from a loopback address without a `Forwarded`, `X-Forwarded-For` or `Via` header; everybody else
    /// needs a token. Behind a proxy on the same machine that adds none of these headers, choose
    /// [`MetricsAccess::Token`].
    #[default]
    Loopback,
    /// Holders of a token.
    Token,
}

/// How the API behaves. [`ControlConfig::new`] gives the defaults that the docs state.
#[derive(Debug, Clone)]
pub struct ControlConfig {
    /// Who may call.
    pub auth: Auth,
    /// Who may read `/metrics`.
    pub metrics: MetricsAccess,
    /// How sandboxes' ports are reached.
    pub ingress: IngressConfig,
    /// Sizes.
    pub limits: Limits,
    /// Times.
    pub timing: Timing,
}

impl ControlConfig {
    /// The defaults, with who may call said explicitly.
    #[must_use]
    pub fn new(auth: Auth) -> Self {
        Self {
            auth,
            metrics: MetricsAccess::default(),
            ingress: IngressConfig::default(),
            limits: Limits::default(),
            timing: Timing::default(),
        }
    }
}

/// Sizes. Bytes where nothing else is said.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Of a JSON body. Default 1 MiB.
    pub json_body: u64,
    /// Of a file written by `PUT …/fs`. Default 1 GiB.
    pub upload: u64,
    /// Of each of standard output and standard error of one `exec`. Default 16 MiB. `exec/stream` has no limit.
    pub exec_output: usize,
    /// Of the output that all running `exec` calls hold together, in KiB. Default 256 MiB.
    pub exec_output_total_kib: u32,
    /// Creates and forks of a workspace a second; twice as many may come at once. 0: any number. Default 32.
    pub create_rate: u32,
    /// Connections served at once; more wait in the kernel's queue. Default 1024.
    pub connections: usize,
    /// Connections into sandboxes at once. Default 1024.
    pub guest_connections: usize,
    /// Of them to one sandbox. Default 256.
    pub connections_per_sandbox: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            json_body: 1 << 20,
            upload: 1 << 30,
            exec_output: 16 << 20,
            exec_output_total_kib: 256 << 10,
            create_rate: 32,
            connections: 1024,
            guest_connections: 1024,
            connections_per_sandbox: 256,
        }
    }
}

/// Times.
#[derive(Debug, Clone)]
pub struct Timing {
    /// A command's timeout when the request names none. Default 1 hour.
    pub exec_default: Duration,
    /// The longest timeout that a request may name. Default 24 hours.
    pub exec_max: Duration,
    /// How long after a command's timeout the guest may take to say so before the server stops waiting. Default 15 s.
    pub exec_grace: Duration,
    /// When an `exec` that still runs gets its response headers and the first space of padding: clients give up after
    /// 30 s without a byte. Default 20 s.
    pub pad_after: Duration,
    /// Between spaces of padding. Default 10 s.
    pub pad_every: Duration,
    /// Longest silence on a stream of events before a comment is sent. Default 15 s.
    pub keepalive: Duration,
    /// For a JSON body to arrive completely. Default 30 s.
    pub body_read: Duration,
    /// Longest silence in an upload. Default 60 s.
    pub upload_idle: Duration,
    /// From the first byte of a request to the end of its headers. Default 10 s.
    pub head_read: Duration,
    /// How long an idle connection is kept. Clients' pools need at least 75 s. Default 90 s.
    pub idle: Duration,
    /// Longest silence on a connection into a sandbox. Default 1 hour.
    pub port_idle: Duration,
    /// How long running requests may take after the shutdown signal before streams are ended. Default 10 s.
    pub shutdown_grace: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            exec_default: Duration::from_secs(3600),
            exec_max: Duration::from_secs(24 * 3600),
            exec_grace: Duration::from_secs(15),
            pad_after: Duration::from_secs(20),
            pad_every: Duration::from_secs(10),
            keepalive: Duration::from_secs(15),
            body_read: Duration::from_secs(30),
            upload_idle: Duration::from_secs(60),
            head_read: Duration::from_secs(10),
            idle: Duration::from_secs(90),
            port_idle: Duration::from_secs(3600),
            shutdown_grace: Duration::from_secs(10),
        }
    }
}
