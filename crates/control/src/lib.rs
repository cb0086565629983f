//! The HTTP API: routing, tenants, OpenAPI.
//!
//! [`Control`] is the API over one [`coppice_host::HostApi`]: [`Control::router`] for a test or an embedding,
//! [`Control::serve`] for a listener. Every handler parses, calls one function of the host, and maps its error. What
//! the published clients need on the wire, and can't say in a type, lives here: text that is never cut inside a
//! character (`utf8`), ASCII server-sent events (`sse`), padding for slow commands (`pad`), bodies that may be empty
//! (`input`).
//!
//! It does not know what a sandbox is made of, keeps no record of any, and never acts on a read: all of that is the
//! host's.
#![forbid(unsafe_code)]

mod audit;
mod auth;
mod authorize;
mod check;
mod config;
mod control;
mod credentials;
mod error;
mod exec;
mod ingress;
mod input;
mod json;
mod observe;
mod openapi;
mod pad;
mod quota;
mod rate;
mod routes;
mod server;
mod sse;
mod tokens;
mod utf8;
mod workspaces;

pub use audit::AuditBounds;
pub use authorize::{Access, Of, RouteRule, Who, route_rules};
pub use config::{Auth, ControlConfig, Limits, MetricsAccess, Timing};
pub use control::{Control, ControlError};
pub use credentials::{AdminToken, api_url};
pub use ingress::{IngressConfig, IngressError, IngressStore, PreviewSuffix, PublicUrl};
pub use openapi::openapi_json;
pub use server::Peer;
pub use tokens::{DEFAULT_WORKSPACE, Identity, NewToken, TokenError, TokenStore};
