//! The HTTP API's wire types, its errors, and the source of its OpenAPI document. No I/O.
//!
//! The shapes are those that published PandaStack clients send and parse; where a field has a quirk, it says which client
//! needs it. The control plane serves these types, the client crate parses the same ones.
#![forbid(unsafe_code)]

mod changes;
mod error;
mod exec;
mod fork;
mod fs;
mod host;
mod network;
mod port;
mod sandbox;
mod snapshot;
mod template;
mod tenant;

pub use changes::{
    ChangeBytes, ChangeCounts, ChangedAspect, ChangedKind, ChangedPath, Changes, DEFAULT_CHANGES_LISTED, ForkPoint,
    ForkPointKind, MAX_CHANGES_LISTED,
};
pub use error::{ErrorBody, ErrorClass};
pub use exec::{ExecReply, ExecRequest, StreamChunk, StreamError, StreamExit};
pub use fork::{
    CaptureBreakdown, Fork, ForkError, ForkMode, ForkRequest, ForkTreeRequest, MAX_FORK_COUNT, PromoteReply,
    PromoteRequest,
};
pub use fs::{DirEntry, DirListing, WriteReply};
pub use host::{HostDisk, HostMemory, HostReport, HostRoom, HostSandboxes, HostSlots};
pub use network::{EgressPolicy, MAX_EGRESS_ENTRIES, Network, NetworkRequest};
pub use port::{MAX_PREVIEW_TTL_SECONDS, OpenPortRequest, Port, PortSource, Preview, PreviewLink, PreviewRequest};
pub use sandbox::{
    BootBreakdown, BootMode, CreateSandboxRequest, Lifecycle, LifecyclePatch, MAX_METADATA_BYTES, Me, OnTtl,
    RESERVED_METADATA, Sandbox, SandboxStatus, StatusReply, Version, is_reserved_metadata,
};
pub use snapshot::{CreatedSnapshot, Snapshot};
pub use template::Template;
pub use tenant::{
    AuditEntry, CreateTokenRequest, CreatedToken, Quota, Role, Token, Usage, Workspace, is_workspace_name,
};
