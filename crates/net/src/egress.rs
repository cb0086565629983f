//! What a sandbox may reach.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};

/// How many entries an allow-list may have.
pub const MAX_ALLOWED: usize = 64;

/// What no sandbox ever reaches, whatever its policy says: private, link-local, shared, reserved and multicast ranges.
pub const PRIVATE: [Ipv4Cidr; 11] = [
    Ipv4Cidr::literal([0, 0, 0, 0], 8),
    Ipv4Cidr::literal([10, 0, 0, 0], 8),
    Ipv4Cidr::literal([100, 64, 0, 0], 10),
    Ipv4Cidr::literal([127, 0, 0, 0], 8),
    Ipv4Cidr::literal([169, 254, 0, 0], 16),
    Ipv4Cidr::literal([172, 16, 0, 0], 12),
    Ipv4Cidr::literal([192, 0, 0, 0], 24),
    Ipv4Cidr::literal([192, 168, 0, 0], 16),
    Ipv4Cidr::literal([198, 18, 0, 0], 15),
    Ipv4Cidr::literal([224, 0, 0, 0], 4),
    Ipv4Cidr::literal([240, 0, 0, 0], 4),
];

/// Whether an address is in one of the ranges that no sandbox ever reaches.
#[must_use]
pub fn is_private(address: Ipv4Addr) -> bool {
    PRIVATE.iter().any(|net| net.contains(address))
}

/// Why a policy is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EgressError {
    /// Not an address, range or name.
    #[error("`{entry}` is not a network, an address or a domain name, each with an optional port: {why}")]
    Invalid {
        /// What was given, cut if it is long.
        entry: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Inside a range that no sandbox ever reaches.
    #[error("`{entry}` is in a private or reserved range, which no sandbox can reach")]
    Private {
        /// What was given.
        entry: String,
    },
    /// Too many entries.
    #[error("an allow-list has at most {MAX_ALLOWED} entries, and this one has {count}")]
    TooMany {
        /// How many were given.
        count: usize,
    },
}

/// An IPv4 range without host bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ipv4Cidr {
    address: Ipv4Addr,
    prefix: u8,
}

impl Ipv4Cidr {
    /// A range that is known to be right when this is compiled.
    const fn literal(octets: [u8; 4], prefix: u8) -> Self {
        let address = Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3]);
        assert!(prefix <= 32 && address.to_bits() & !mask(prefix) == 0);
        Self { address, prefix }
    }

    /// A range; `None` if the prefix is too long or the address has bits outside it.
    #[must_use]
    pub fn new(address: Ipv4Addr, prefix: u8) -> Option<Self> {
        (prefix <= 32 && address.to_bits() & !mask(prefix) == 0).then_some(Self { address, prefix })
    }

    /// The range's first address.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// The length of its prefix.
    #[must_use]
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Its last address.
    #[must_use]
    pub fn last(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.address.to_bits() | !mask(self.prefix))
    }

    /// Whether an address is in it.
    #[must_use]
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        address.to_bits() & mask(self.prefix) == self.address.to_bits()
    }

    /// Whether all of another range is in it.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.prefix <= other.prefix && self.contains(other.address)
    }
}

const fn mask(prefix: u8) -> u32 {
    if prefix == 0 { 0 } else { u32::MAX << (32 - prefix) }
}

impl fmt::Display for Ipv4Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.prefix == 32 { self.address.fmt(f) } else { write!(f, "{}/{}", self.address, self.prefix) }
    }
}

/// A name, or all names below one. It is kept in lower case without the final dot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DomainPattern {
    /// This name only: `example.org`.
    Exact(String),
    /// Every name below this one, not itself: `*.example.org`.
    Below(String),
}

impl DomainPattern {
    /// Whether a name matches. The case of letters and a final dot don't matter.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        let name = name.strip_suffix('.').unwrap_or(name).as_bytes();
        match self {
            Self::Exact(own) => own.as_bytes().eq_ignore_ascii_case(name),
            Self::Below(suffix) => {
                let suffix = suffix.as_bytes();
                let Some(dot) = name.len().checked_sub(suffix.len() + 1).filter(|dot| *dot > 0) else { return false };
                name.get(dot) == Some(&b'.')
                    && name.get(dot + 1..).is_some_and(|tail| tail.eq_ignore_ascii_case(suffix))
            }
        }
    }

    /// Reads a name or `*.` and a name.
    fn read(text: &str) -> Result<Self, &'static str> {
        let (below, name) = match text.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        if !name.is_ascii() {
            return Err("write an international name in its `xn--` form");
        }
        if name.is_empty() || name.len() > 253 - if below { 2 } else { 0 } {
            return Err("a name has 1 to 253 characters");
        }
        let mut last = "";
        for label in name.split('.') {
            let bytes = label.as_bytes();
            if bytes.is_empty() || bytes.len() > 63 {
                return Err("each label of a name has 1 to 63 characters");
            }
            if !bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_')) {
                return Err("a name consists of letters, digits, `-`, `_` and dots, with at most a leading `*.`");
            }
            if label.starts_with('-') || label.ends_with('-') {
                return Err("no label of a name begins or ends with `-`");
            }
            last = label;
        }
        if last.bytes().all(|b| b.is_ascii_digit()) {
            return Err("neither a whole IPv4 address nor a name");
        }
        if !below && !name.contains('.') {
            return Err("a name has at least two labels");
        }
        Ok(if below { Self::Below(name) } else { Self::Exact(name) })
    }
}

impl fmt::Display for DomainPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => f.write_str(name),
            Self::Below(suffix) => write!(f, "*.{suffix}"),
        }
    }
}

impl FromStr for DomainPattern {
    type Err = EgressError;

    fn from_str(text: &str) -> Result<Self, EgressError> {
        Self::read(text).map_err(|why| invalid(text, why))
    }
}

/// One entry of an allow-list.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Allowed {
    /// A range or a single address.
    Net {
        /// The range.
        net: Ipv4Cidr,
        /// The only port; `None` for every port and protocol.
        port: Option<u16>,
    },
    /// A name, or the names below one.
    Name {
        /// Which names.
        pattern: DomainPattern,
        /// The only port; `None` for every port and protocol.
        port: Option<u16>,
    },
}

fn invalid(entry: &str, why: &'static str) -> EgressError {
    EgressError::Invalid { entry: entry.chars().take(80).collect(), why }
}

impl FromStr for Allowed {
    type Err = EgressError;

    fn from_str(text: &str) -> Result<Self, EgressError> {
        let bad = |why| invalid(text, why);
        let (host, port) = match text.split_once(':') {
            None => (text, None),
            Some((_, rest)) if rest.contains(':') => return Err(bad("sandboxes have no IPv6")),
            Some((host, port)) => {
                (host, Some(read_port(port).ok_or_else(|| bad("a port is a number from 1 to 65535"))?))
            }
        };
        let (address, prefix) = match host.split_once('/') {
            None => (host.parse::<Ipv4Addr>().ok(), 32),
            Some((address, prefix)) => (
                Some(address.parse().map_err(|_| bad("what is before the `/` is not an IPv4 address"))?),
                read_number(prefix).ok_or_else(|| bad("a prefix is a number from 0 to 32"))?,
            ),
        };
        let Some(address) = address else {
            return Ok(Self::Name { pattern: DomainPattern::read(host).map_err(bad)?, port });
        };
        if prefix > 32 {
            return Err(bad("a prefix is a number from 0 to 32"));
        }
        let net = Ipv4Cidr::new(address, prefix).ok_or_else(|| bad("the address has bits set past its prefix"))?;
        if PRIVATE.iter().any(|private| private.covers(&net)) {
            return Err(EgressError::Private { entry: text.to_owned() });
        }
        Ok(Self::Net { net, port })
    }
}

/// A decimal number without a sign, blanks or leading zeros: what two readers can't read differently.
fn read_number<T: FromStr>(text: &str) -> Option<T> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text.len() == 1 || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

fn read_port(text: &str) -> Option<u16> {
    read_number(text).filter(|port| *port != 0)
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = match self {
            Self::Net { net, port } => {
                net.fmt(f)?;
                port
            }
            Self::Name { pattern, port } => {
                pattern.fmt(f)?;
                port
            }
        };
        match port {
            Some(port) => write!(f, ":{port}"),
            None => Ok(()),
        }
    }
}

impl Serialize for Allowed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Allowed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// What a sandbox may reach. Private ranges are never reached, whatever it says.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Egress {
    /// Everything outside.
    #[default]
    Open,
    /// Nothing.
    None,
    /// These only.
    Allow(Vec<Allowed>),
}

impl Egress {
    /// An allow-list from the texts of its entries.
    ///
    /// # Errors
    /// If there are too many, or one of them is not valid.
    pub fn allow<S: AsRef<str>>(entries: &[S]) -> Result<Self, EgressError> {
        if entries.len() > MAX_ALLOWED {
            return Err(EgressError::TooMany { count: entries.len() });
        }
        Ok(Self::Allow(entries.iter().map(|entry| entry.as_ref().parse()).collect::<Result<_, _>>()?))
    }

    /// What a value that came from elsewhere must also satisfy.
    ///
    /// # Errors
    /// If it has too many entries.
    pub fn check(&self) -> Result<(), EgressError> {
        match self {
            Self::Allow(entries) if entries.len() > MAX_ALLOWED => Err(EgressError::TooMany { count: entries.len() }),
            _ => Ok(()),
        }
    }

    /// The ports at which the addresses of a name may be reached: `None` if the name isn't allowed at all. An entry of
    /// `None` in it is every port.
    #[must_use]
    pub fn ports_of_name(&self, name: &str) -> Option<Vec<Option<u16>>> {
        let Self::Allow(entries) = self else { return None };
        let mut ports: Vec<Option<u16>> = entries
            .iter()
            .filter_map(|entry| match entry {
                Allowed::Name { pattern, port } if pattern.matches(name) => Some(*port),
                _ => None,
            })
            .collect();
        ports.sort_unstable();
        ports.dedup();
        (!ports.is_empty()).then_some(ports)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Allowed, EgressError> {
        text.parse()
    }

    #[test]
    fn what_is_allowed_reads_and_prints_the_same() {
        for (text, printed) in [
            ("1.2.3.0/24", "1.2.3.0/24"),
            ("1.2.3.4", "1.2.3.4"),
            ("1.2.3.4/32:443", "1.2.3.4:443"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("Example.ORG.", "example.org"),
            ("*.example.org:8443", "*.example.org:8443"),
            ("_dmarc.example.org", "_dmarc.example.org"),
            ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ] {
            let allowed = parse(text).unwrap();
            assert_eq!(allowed.to_string(), printed);
            assert_eq!(parse(printed).unwrap(), allowed);
        }
    }

    #[test]
    fn what_is_not_allowed_says_why() {
        for text in [
            "",
            ":",
            ":80",
            "1.2.3.4:",
            "1.2.3.4:0",
            "1.2.3.4:65536",
            "1.2.3.4:+80",
            "1.2.3.4:080",
            "1.2.3.4/33",
            "1.2.3.4/",
            "1.2.3.4/24",
            "1.2.3.0/024",
            "1.2.3",
            "1.2.3.256",
            "01.2.3.4",
            "::1",
            "[::1]:80",
            "fe80::1/64",
            "example",
            "exa mple.org",
            "example..org",
            ".example.org",
            "*",
            "*.",
            "*.*.org",
            "a.*.org",
            "*example.org",
            "-a.org",
            "a-.org",
            "bücher.example",
            "example.org/24",
            "example.org:80:80",
            "http://example.org",
            "1.2.3.4 ",
            "a\n.org",
        ] {
            assert!(matches!(parse(text), Err(EgressError::Invalid { .. })), "{text:?}: {:?}", parse(text));
        }
        assert!(parse(&format!("{}.org", "a".repeat(64))).is_err());
        assert!(parse(&format!("{}org", "a.".repeat(126))).is_err());
    }

    #[test]
    fn private_ranges_are_refused_and_wider_ones_are_not() {
        for text in [
            "10.0.0.0/8",
            "10.203.0.1",
            "169.254.169.254:80",
            "127.0.0.1",
            "192.168.1.0/24",
            "255.255.255.255",
            "224.0.0.0/4",
        ] {
            assert!(matches!(parse(text), Err(EgressError::Private { .. })), "{text}");
        }
        for text in ["0.0.0.0/0", "8.0.0.0/5", "192.0.2.1", "172.32.0.1", "11.0.0.0/8"] {
            assert!(parse(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn patterns_match_whole_labels() {
        let below: DomainPattern = "*.example.org".parse().unwrap();
        assert!(below.matches("a.example.org") && below.matches("A.B.EXAMPLE.ORG."));
        assert!(!below.matches("example.org") && !below.matches("badexample.org") && !below.matches(".example.org"));
        assert!(!below.matches("a.example.org.evil.net"));
        let exact: DomainPattern = "example.org".parse().unwrap();
        assert!(exact.matches("EXAMPLE.org.") && !exact.matches("a.example.org"));
    }

    #[test]
    fn the_wire_form_is_the_documented_one() {
        let open: Egress = serde_json::from_str(r#""open""#).unwrap();
        assert_eq!(open, Egress::Open);
        let listed: Egress = serde_json::from_str(r#"{"allow":["1.2.3.0/24","*.example.org:443"]}"#).unwrap();
        assert_eq!(serde_json::to_string(&listed).unwrap(), r#"{"allow":["1.2.3.0/24","*.example.org:443"]}"#);
        assert!(serde_json::from_str::<Egress>(r#"{"allow":["10.0.0.1"]}"#).is_err());
        assert!(matches!(Egress::allow(&["1.1.1.1"; 65]), Err(EgressError::TooMany { count: 65 })));
        let ports = Egress::allow(&["a.org:443", "*.org", "a.org:443", "b.org:80"]).unwrap().ports_of_name("a.org");
        assert_eq!(ports, Some(vec![None, Some(443)]));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_and_what_is_read_prints_back(text in "\\PC{0,40}") {
            if let Ok(allowed) = parse(&text) {
                prop_assert_eq!(parse(&allowed.to_string()).unwrap(), allowed);
            }
        }

        #[test]
        fn near_misses_too(text in "[0-9a-c.*:/-]{0,24}") {
            if let Ok(allowed) = parse(&text) {
                prop_assert_eq!(parse(&allowed.to_string()).unwrap(), allowed);
            }
        }

        #[test]
        fn no_address_of_a_private_range_gets_through(bits in any::<u32>(), port in proptest::option::of(1u16..)) {
            let address = Ipv4Addr::from_bits(bits);
            let text = port.map_or_else(|| address.to_string(), |port| format!("{address}:{port}"));
            match parse(&text) {
                Ok(Allowed::Net { net, port: read }) => {
                    prop_assert!(!is_private(address));
                    prop_assert_eq!((net.address(), net.prefix(), read), (address, 32, port));
                }
                Err(EgressError::Private { .. }) => prop_assert!(is_private(address)),
                other => prop_assert!(false, "{:?}", other),
            }
        }

        #[test]
        fn ranges_contain_what_is_between_their_ends(bits in any::<u32>(), prefix in 0u8..=32, probe in any::<u32>()) {
            let first = bits & mask(prefix);
            let net = Ipv4Cidr::new(Ipv4Addr::from_bits(first), prefix).unwrap();
            let within = (first..=net.last().to_bits()).contains(&probe);
            prop_assert_eq!(net.contains(Ipv4Addr::from_bits(probe)), within);
        }
    }
}
