//! The token of a signed link: which link it is and until when it is valid, with an HMAC-SHA256 over both.
//!
//! What the link leads to is looked up by its id, so that it can be revoked; the signature and the time are checked
//! before anything is looked up.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use uuid::Uuid;

use super::store::{Link, now};
use crate::Control;
use crate::error::ApiError;

/// What is signed begins with it, so that no other signature of this key can be taken for one.
const CONTEXT: &[u8] = b"coppice preview link 1\0";
/// An id and a time.
const CLAIM: usize = 24;
/// Longest text that can be a token.
const MAX_TOKEN: usize = 128;

/// The key that links are signed with.
#[derive(Clone)]
pub(crate) struct Key([u8; 32]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

impl From<[u8; 32]> for Key {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

/// What a token says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) id: Uuid,
    /// Seconds since the Unix epoch.
    pub(crate) expires_at: i64,
}

/// Why a token opens nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LinkError {
    /// It is no token at all.
    #[error("this is no preview link")]
    Malformed,
    /// Somebody else signed it.
    #[error("this preview link was not made by this server")]
    Forged,
    /// It was valid once.
    #[error("this preview link has expired")]
    Expired,
    /// It was revoked, or its sandbox is gone.
    #[error("this preview link is not valid any more")]
    Ended,
    /// It does not lead there.
    #[error("this preview link does not lead to that path")]
    OtherPath,
    /// It leads to another sandbox or port.
    #[error("this preview link leads to another sandbox or port")]
    OtherPort,
}

impl From<LinkError> for ApiError {
    fn from(error: LinkError) -> Self {
        use coppice_api::ErrorClass::{Caller, Forbidden, Unauthorized};
        let (class, code) = match error {
            LinkError::Malformed => (Caller, "invalid_preview_link"),
            LinkError::Forged => (Unauthorized, "forged_preview_link"),
            LinkError::Expired => (Unauthorized, "preview_link_expired"),
            LinkError::Ended => (Unauthorized, "preview_link_ended"),
            LinkError::OtherPath => (Forbidden, "preview_path_forbidden"),
            LinkError::OtherPort => (Forbidden, "preview_port_forbidden"),
        };
        Self::new(class, code, error.to_string())
    }
}

impl Key {
    /// The token of a link.
    pub(crate) fn sign(&self, claim: Claim) -> String {
        let body = encode(claim);
        let tag = self.mac(&body).finalize().into_bytes();
        format!("{}.{}", URL_SAFE_NO_PAD.encode(body), URL_SAFE_NO_PAD.encode(tag))
    }

    /// What a token says, if it is one of ours and its time has not come.
    pub(crate) fn verify(&self, token: &str, now: i64) -> Result<Claim, LinkError> {
        if token.len() > MAX_TOKEN {
            return Err(LinkError::Malformed);
        }
        let (body, tag) = token.split_once('.').ok_or(LinkError::Malformed)?;
        let decoded = |text: &str| URL_SAFE_NO_PAD.decode(text).map_err(|_| LinkError::Malformed);
        let (body, tag) = (decoded(body)?, decoded(tag)?);
        let body: [u8; CLAIM] = body.try_into().map_err(|_| LinkError::Malformed)?;
        self.mac(&body).verify_slice(&tag).map_err(|_| LinkError::Forged)?;
        let claim = decode(body);
        if claim.expires_at <= now { Err(LinkError::Expired) } else { Ok(claim) }
    }

    fn mac(&self, body: &[u8]) -> Hmac<Sha256> {
        // A key is filled up with zeros to the length of a block.
        let mut block = [0; 64];
        let (key, _) = block.split_at_mut(self.0.len());
        key.copy_from_slice(&self.0);
        Hmac::new(&block.into()).chain_update(CONTEXT).chain_update(body)
    }
}

/// Where a token leads.
pub(crate) async fn resolve(control: &Control, token: &str) -> Result<Link, ApiError> {
    let store = &control.config().ingress.store;
    let claim = store.key().await?.verify(token, now())?;
    Ok(store.link(claim.id).await?.ok_or(LinkError::Ended)?)
}

fn encode(claim: Claim) -> [u8; CLAIM] {
    let mut body = [0; CLAIM];
    let (id, time) = body.split_at_mut(16);
    id.copy_from_slice(claim.id.as_bytes());
    time.copy_from_slice(&claim.expires_at.to_be_bytes());
    body
}

fn decode(body: [u8; CLAIM]) -> Claim {
    let (mut id, mut time) = ([0; 16], [0; 8]);
    let (first, rest) = body.split_at(16);
    id.copy_from_slice(first);
    time.copy_from_slice(rest);
    Claim { id: Uuid::from_bytes(id), expires_at: i64::from_be_bytes(time) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_token_is_good_for_its_time_and_key_only() {
        let (key, other) = (Key([1; 32]), Key([2; 32]));
        let claim = Claim { id: Uuid::new_v4(), expires_at: 100 };
        let token = key.sign(claim);
        assert!(token.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)), "{token}");
        assert_eq!(key.verify(&token, 99), Ok(claim));
        assert_eq!(key.verify(&token, 100), Err(LinkError::Expired));
        assert_eq!(other.verify(&token, 99), Err(LinkError::Forged));
        for bad in ["", ".", "a.b", "x", &token[1..], &token.replace('.', ""), &format!("{token}.x"), &"a".repeat(999)]
        {
            assert!(key.verify(bad, 0).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_change_is_noticed(id in any::<u128>(), expires_at in 1_i64.., at in 0_usize..78, byte in any::<u8>()) {
            let key = Key([7; 32]);
            let claim = Claim { id: Uuid::from_u128(id), expires_at };
            let token = key.sign(claim);
            prop_assert_eq!(key.verify(&token, 0), Ok(claim));
            let mut bytes = token.clone().into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(changed) = String::from_utf8(bytes) {
                prop_assert!(changed == token || key.verify(&changed, 0).is_err());
            }
        }

        #[test]
        fn nothing_panics(text in any::<String>()) {
            prop_assert!(Key([7; 32]).verify(&text, 0).is_err());
        }
    }
}
