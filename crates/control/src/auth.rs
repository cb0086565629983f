//! Who is calling: the token of a request, and what it stands for. What it may do is [`crate::authorize`].
//!
//! Handlers take a [`Caller`], which only this module makes, so a route that forgot to ask cannot know a workspace.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Request};
use coppice_api::Role;
use http::HeaderMap;
use http::header::{AUTHORIZATION, FORWARDED, VIA};
use http::request::Parts;

use crate::DEFAULT_WORKSPACE;
use crate::config::{Auth, MetricsAccess};
use crate::error::ApiError;
use crate::server::Peer;

/// The holder of the token that came with the request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    workspace: Arc<str>,
    role: Role,
    token_prefix: Option<Arc<str>>,
}

impl Caller {
    /// What it may see and make things in.
    pub(crate) fn workspace(&self) -> &str {
        &self.workspace
    }

    /// What it may do.
    pub(crate) fn role(&self) -> Role {
        self.role
    }

    /// The first characters of its token; `None` when auth is off.
    pub(crate) fn token_prefix(&self) -> Option<&str> {
        self.token_prefix.as_deref()
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| ApiError::unauthorized("a token is required"))
    }
}

/// Whom the request's token stands for.
pub(crate) async fn identify(auth: &Auth, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let store = match auth {
        Auth::Off => {
            return Ok(Caller { workspace: DEFAULT_WORKSPACE.into(), role: Role::Admin, token_prefix: None });
        }
        Auth::Tokens(store) => store,
    };
    let Some(header) = headers.get(AUTHORIZATION) else {
        return Err(ApiError::unauthorized("a token is required"));
    };
    let token = header.to_str().ok().and_then(|text| text.split_once(' '));
    let Some((_, token)) = token.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")) else {
        return Err(ApiError::unauthorized("the Authorization header is not `Bearer` and a token"));
    };
    match store.authenticate(token.trim()).await? {
        Some(identity) => Ok(Caller {
            workspace: identity.workspace.into(),
            role: identity.role,
            token_prefix: Some(identity.prefix.into()),
        }),
        None => Err(ApiError::unauthorized("the token is not valid: unknown, revoked or expired")),
    }
}

/// Whether metrics may be read without a token.
pub(crate) fn may_read_metrics(access: MetricsAccess, request: &Request) -> bool {
    let forwarded =
        [FORWARDED.as_str(), VIA.as_str(), "x-forwarded-for"].iter().any(|name| request.headers().contains_key(*name));
    let loopback = request.extensions().get::<Peer>().is_some_and(|peer| is_loopback(peer.0.ip()));
    access == MetricsAccess::Loopback && loopback && !forwarded
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}
