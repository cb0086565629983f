//! Which resolvers the host uses.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

/// Where a host says which resolvers it uses.
pub const RESOLV_CONF: &str = "/etc/resolv.conf";
/// As many as the C library looks at.
const MAX_SERVERS: usize = 3;
/// Of DNS.
const PORT: u16 = 53;

/// The resolvers of this host; none if it names none. A stub on a loopback address is as good as any: the proxy asks from
/// the host's own network namespace.
#[must_use]
pub fn system_upstreams() -> Vec<SocketAddr> {
    std::fs::read_to_string(Path::new(RESOLV_CONF)).map(|text| parse_resolv_conf(&text)).unwrap_or_default()
}

/// The `nameserver` lines of a resolv.conf.
#[must_use]
pub fn parse_resolv_conf(text: &str) -> Vec<SocketAddr> {
    let server = |line: &str| {
        let mut words = line.split_whitespace();
        (words.next()? == "nameserver").then_some(())?;
        // One with a zone (`fe80::1%eth0`) is left out: it needs an interface, not only an address.
        words.next()?.parse::<IpAddr>().ok().map(|address| SocketAddr::new(address, PORT))
    };
    text.lines().filter_map(server).take(MAX_SERVERS).collect()
}

/// A resolver on a command line: an address with an optional port.
///
/// # Errors
/// A sentence for people, when it is none.
pub fn parse_server(text: &str) -> Result<SocketAddr, String> {
    let address = text.parse::<IpAddr>().map(|address| SocketAddr::new(address, PORT));
    let server = address.or_else(|_| text.parse::<SocketAddr>());
    match server {
        Ok(server) if server.port() != 0 && !server.ip().is_unspecified() => Ok(server),
        _ => Err("it must be an address, or an address and a port".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nameservers_are_found() {
        let text = "# comment\nsearch lan\nnameserver 127.0.0.53\n  nameserver\t9.9.9.9 \nnameserver fe80::1%eth0\n\
                    nameserver 2001:db8::1\nnameserver x\nnameservers 1.1.1.1\noptions edns0\nnameserver 8.8.8.8\n";
        let found: Vec<String> = parse_resolv_conf(text).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["127.0.0.53:53", "9.9.9.9:53", "[2001:db8::1]:53"]);
        assert_eq!(parse_resolv_conf(""), []);
    }

    #[test]
    fn a_server_on_the_command_line() {
        for (text, server) in
            [("9.9.9.9", "9.9.9.9:53"), ("9.9.9.9:5353", "9.9.9.9:5353"), ("::1", "[::1]:53"), ("[::1]:5", "[::1]:5")]
        {
            assert_eq!(parse_server(text).unwrap().to_string(), server);
        }
        for bad in ["", "dns.example", "1.2.3.4:0", "1.2.3", "0.0.0.0", "1.2.3.4:99999"] {
            assert!(parse_server(bad).is_err(), "{bad}");
        }
    }
}
