//! What the network needs of a host, tried out rather than looked up.

use std::fs::OpenOptions;

use crate::error::NetError;
use crate::inside::in_new_namespace;
use crate::nft::{HINT, Nft};
use crate::rtnl::{self, Rtnl};
use crate::rules::{self, Batch, Identity};
use crate::slots::{GATEWAY, Seat, address_of};
use crate::tap::{self, TUN};

/// Something that the network needs and the host lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// What.
    pub what: String,
    /// What to do about it.
    pub hint: String,
}

impl Missing {
    fn new(what: impl Into<String>, hint: &str) -> Self {
        Self { what: what.into(), hint: hint.to_owned() }
    }
}

/// What is missing for a network to be opened; nothing, if the list is empty. It is tried out in a throw-away namespace, and
/// leaves nothing.
#[must_use]
pub fn check() -> Vec<Missing> {
    if !rustix::process::geteuid().is_root() {
        return vec![Missing::new(
            "root rights",
            "network namespaces, TAPs and rules are made by root: run this with sudo",
        )];
    }
    let mut missing = Vec::new();
    if let Err(error) = OpenOptions::new().read(true).write(true).open(TUN) {
        missing.push(Missing::new(
            format!("{TUN} ({error})"),
            "load the kernel's tun module: `modprobe tun` (CONFIG_TUN)",
        ));
    }
    if let Err(error) = std::fs::metadata("/proc/sys/net/ipv4/ip_forward") {
        missing.push(Missing::new(format!("net.ipv4.ip_forward ({error})"), "mount /proc with its sysctls"));
    }
    let tried = in_new_namespace(|own| {
        use std::os::fd::AsFd;
        if missing.is_empty() {
            missing.extend(try_links(own.as_fd()).err());
        }
        missing.extend(try_rules().err());
        Ok(())
    });
    if let Err(error) = tried {
        let hint = "the kernel needs CONFIG_NET_NS, and whoever runs this CAP_SYS_ADMIN";
        missing.push(Missing::new(format!("network namespaces ({error})"), hint));
    }
    missing
}

fn try_links(own: std::os::fd::BorrowedFd<'_>) -> Result<(), Missing> {
    let failed = |what: &str, error: &std::io::Error, hint: &str| Missing::new(format!("{what} ({error})"), hint);
    let tun_hint = "the kernel needs CONFIG_TUN, and whoever runs this CAP_NET_ADMIN";
    let _tap = tap::create("t0").map_err(|error| failed("TAP devices", &error, tun_hint))?;
    let mut links = Rtnl::new().map_err(|error| failed("rtnetlink", &error, "the kernel needs CONFIG_NET"))?;
    links
        .ask(vec![rtnl::veth("cpc0", rules::UPLINK, own)])
        .map_err(|error| failed("veth links", &error, "load the kernel's veth module: `modprobe veth` (CONFIG_VETH)"))
}

fn try_rules() -> Result<(), Missing> {
    let mut nft = Nft::new().map_err(|error| match error {
        NetError::Missing { what, hint } => Missing { what, hint },
        other => Missing::new(other.to_string(), HINT),
    })?;
    let mut batch = Batch::default();
    batch.raw(&rules::outside("coppice_check", "cpc0", GATEWAY));
    batch.raw(&rules::router(true));
    if let Some(address) = address_of(0) {
        let slot = Identity { index: 0, seat: Seat::First, mac: [2, 0x63, 0, 0, 0, 0], address, epoch: 1 };
        batch.add_slot(&slot, &crate::egress::Egress::Open, Some(1 << 20));
        batch.open(address, GATEWAY, Some(443), std::time::Duration::from_secs(1));
    }
    nft.change("trying the rules", &batch.into_commands()).map_err(|error| {
        let hint = "the kernel needs nftables with inet and arp tables, sets with intervals and timeouts, conntrack, NAT and limits \
                    (CONFIG_NF_TABLES_INET, _ARP, CONFIG_NFT_CT, _NAT, _MASQ, _LIMIT); libnftables 1.0 or later";
        Missing::new(format!("nftables features ({error})"), hint)
    })
}
