//! What a sandbox may reach: reading a client's policy, showing it, changing it.
//!
//! What a policy may say is [`coppice_net`]'s to know, and so is putting it in force. A change goes through the sandbox's
//! actor, so that it never meets a slot that was given back.

use std::sync::Arc;

use coppice_api::{EgressPolicy, ErrorClass, Network, NetworkRequest};
use coppice_net::{Egress, EgressError};

use crate::Coded;
use crate::actor::{Op, OpError};
use crate::entry::AccessError;
use crate::host::Shared;

/// Why a policy was not changed. The one before is still in force.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// It is none.
    #[error(transparent)]
    Policy(#[from] EgressError),
    /// No such sandbox, or it can't be done.
    #[error(transparent)]
    Op(#[from] OpError),
}

impl From<AccessError> for NetworkError {
    fn from(error: AccessError) -> Self {
        Self::Op(error.into())
    }
}

impl Coded for EgressError {
    fn code(&self) -> &'static str {
        match self {
            Self::Invalid { .. } | Self::TooMany { .. } => "bad_network",
            Self::Private { .. } => "private_network",
        }
    }

    fn class(&self) -> ErrorClass {
        ErrorClass::Caller
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Invalid { .. } => "e.g. 203.0.113.0/24, 203.0.113.7:443, example.org, *.example.org:443".into(),
            Self::TooMany { .. } => "one CIDR or `*.` name may stand for many".into(),
            Self::Private { .. } => "sandboxes reach the internet only, never the networks of their host".into(),
        })
    }
}

impl Coded for NetworkError {
    fn code(&self) -> &'static str {
        match self {
            Self::Policy(e) => e.code(),
            Self::Op(e) => e.code(),
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Policy(e) => e.class(),
            Self::Op(e) => e.class(),
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Policy(e) => e.hint(),
            Self::Op(e) => e.hint(),
        }
    }
}

/// A client's policy; none where it says nothing.
pub(crate) fn parse(request: Option<&NetworkRequest>) -> Result<Option<Egress>, EgressError> {
    let Some(policy) = request.and_then(|request| request.egress.as_ref()) else { return Ok(None) };
    Ok(Some(match policy {
        EgressPolicy::Open => Egress::Open,
        EgressPolicy::None => Egress::None,
        EgressPolicy::Allow(entries) => Egress::allow(entries)?,
    }))
}

/// What clients see: entries in their canonical form.
pub(crate) fn show(egress: &Egress) -> Network {
    let egress = match egress {
        Egress::Open => EgressPolicy::Open,
        Egress::None => EgressPolicy::None,
        Egress::Allow(entries) => EgressPolicy::Allow(entries.iter().map(ToString::to_string).collect()),
    };
    Network { egress }
}

pub(crate) fn get(shared: &Shared, workspace: &str, id: &str) -> Result<Network, AccessError> {
    Ok(show(&shared.entry(workspace, id)?.record().egress))
}

/// The new policy is recorded and in force when this answers, or the one before still is.
pub(crate) async fn set(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    request: NetworkRequest,
) -> Result<Network, NetworkError> {
    let entry = shared.entry(workspace, id)?;
    let egress = parse(Some(&request))?;
    entry.touch();
    if let Some(egress) = egress {
        entry.ask(|reply| Op::SetEgress(egress, reply)).await?;
    }
    Ok(show(&entry.record().egress))
}

#[cfg(test)]
mod tests {
    use coppice_api::MAX_EGRESS_ENTRIES;
    use proptest::prelude::*;

    use super::*;

    fn read(policy: EgressPolicy) -> Result<Egress, EgressError> {
        parse(Some(&NetworkRequest { egress: Some(policy) })).map(Option::unwrap)
    }

    fn list(entries: &[&str]) -> Result<Egress, EgressError> {
        read(EgressPolicy::Allow(entries.iter().map(|entry| (*entry).to_owned()).collect()))
    }

    #[test]
    fn what_is_wrong_with_a_policy_has_a_code_and_is_the_caller_s() {
        for (entries, code) in [
            (vec!["1.2.3.4/33"], "bad_network"),
            (vec!["1.2.3.4/24"], "bad_network"),
            (vec!["example.org", "exa mple.org"], "bad_network"),
            (vec!["bücher.example"], "bad_network"),
            (vec!["example.org:0"], "bad_network"),
            (vec!["example.org:65536"], "bad_network"),
            (vec!["2001:db8::/32"], "bad_network"),
            (vec![""], "bad_network"),
            (vec!["192.168.0.0/16"], "private_network"),
            (vec!["203.0.113.1", "10.203.0.1:53"], "private_network"),
            (vec!["169.254.169.254"], "private_network"),
            (vec!["203.0.113.1"; 65], "bad_network"),
        ] {
            let error = list(&entries).unwrap_err();
            assert_eq!((error.code(), error.class()), (code, ErrorClass::Caller), "{error}");
            assert!(error.hint().is_some());
        }
        assert_eq!(coppice_net::MAX_ALLOWED, MAX_EGRESS_ENTRIES);
        assert!(list(&["203.0.113.1"; MAX_EGRESS_ENTRIES]).is_ok());
        assert_eq!((parse(None), parse(Some(&NetworkRequest::default()))), (Ok(None), Ok(None)));
    }

    fn entry() -> impl Strategy<Value = String> {
        let net = (any::<u32>(), 0u8..=32).prop_map(|(bits, prefix)| {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            format!("{}/{prefix}", std::net::Ipv4Addr::from_bits(bits & mask))
        });
        let name = proptest::collection::vec("[a-z][a-z0-9]{0,8}", 2..5).prop_map(|labels| labels.join("."));
        let below = name.clone().prop_map(|name| format!("*.{name}"));
        let port = proptest::option::of(1u16..).prop_map(|port| port.map(|p| format!(":{p}")).unwrap_or_default());
        (prop_oneof![net, name, below], port).prop_map(|(host, port)| host + &port)
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_shown_so_that_it_means_the_same(entries in proptest::collection::vec(entry(), 0..8)) {
            match read(EgressPolicy::Allow(entries)) {
                Ok(egress) => prop_assert_eq!(read(show(&egress).egress).unwrap(), egress),
                Err(error) => prop_assert!(matches!(error, EgressError::Private { .. }), "{}", error),
            }
        }
    }
}
