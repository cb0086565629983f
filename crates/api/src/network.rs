//! What a sandbox may reach.

use serde::{Deserialize, Serialize};

/// Most entries of an allow-list.
pub const MAX_EGRESS_ENTRIES: usize = 64;

/// Where connections of a sandbox may go. Whatever it says, never to the host, to other sandboxes, to the metadata
/// address 169.254.169.254 or to private ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EgressPolicy {
    /// Anywhere on the internet.
    #[default]
    Open,
    /// Nowhere.
    None,
    /// To these only, at most 64: an IPv4 address or CIDR (`203.0.113.0/24`), a name (`example.org`), or all names below
    /// one (`*.example.org`); each with an optional `:port`.
    Allow(Vec<String>),
}

/// `network` of a sandbox; answer of `GET` and `PATCH …/network`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Network {
    /// Where its connections may go.
    #[serde(default)]
    pub egress: EgressPolicy,
}

/// `network` of a request to create; body of `PATCH …/network`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct NetworkRequest {
    /// Absent in a create: `open`. Absent in a change: as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<EgressPolicy>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_policy_is_a_word_or_a_list() {
        for (policy, wire) in [
            (EgressPolicy::Open, json!("open")),
            (EgressPolicy::None, json!("none")),
            (EgressPolicy::Allow(vec!["a.b:1".into()]), json!({"allow": ["a.b:1"]})),
            (EgressPolicy::Allow(vec![]), json!({"allow": []})),
        ] {
            assert_eq!(serde_json::to_value(&policy).unwrap(), wire);
            assert_eq!(serde_json::from_value::<EgressPolicy>(wire).unwrap(), policy);
        }
        for bad in [json!("Open"), json!(true), json!({"allow": "x"}), json!({"deny": []}), json!([]), json!({})] {
            assert!(serde_json::from_value::<EgressPolicy>(bad.clone()).is_err(), "{bad}");
        }
        assert_eq!(serde_json::from_value::<Network>(json!({})).unwrap(), Network::default());
    }
}
