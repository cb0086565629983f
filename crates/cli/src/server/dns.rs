//! Whom the sandboxes' DNS proxy asks.

use std::net::SocketAddr;

use clap::Args;
use coppice_net::dns::{parse_server, system_upstreams};

/// Names of the internet, for sandboxes.
#[derive(Debug, Clone, Args)]
pub struct DnsArgs {
    /// Resolvers that names are asked of for sandboxes. Default: those of /etc/resolv.conf
    #[arg(long, env = "COPPICE_DNS", value_delimiter = ',', value_name = "ADDRESS[:PORT],…", value_parser = parse_server)]
    dns: Vec<SocketAddr>,
}

impl DnsArgs {
    /// The resolvers, in the order in which they are asked. None: sandboxes can't resolve names.
    pub fn upstreams(&self) -> Vec<SocketAddr> {
        if self.dns.is_empty() { system_upstreams() } else { self.dns.clone() }
    }
}
