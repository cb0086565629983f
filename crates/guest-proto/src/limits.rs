//! Limits that both sides enforce. A peer that exceeds one gets RESOURCE_EXHAUSTED; it is never trusted to keep to it.

/// Largest gRPC message in either direction, bytes. Bulk data is streamed in [`CHUNK`]s, far below it.
pub const MAX_MESSAGE: usize = 4 << 20;
/// Size of the pieces that file contents and command output are streamed in, bytes.
pub const CHUNK: usize = 64 << 10;
/// Longest path, bytes (`PATH_MAX`, include/uapi/linux/limits.h).
pub const MAX_PATH: usize = 4096;
/// Total of a command's argv and env, bytes. Below the kernel's default ARG_MAX of 2 MiB with 8 MiB stacks.
pub const MAX_ARGS: usize = 1 << 20;
/// Concurrent commands in one guest.
pub const MAX_COMMANDS: usize = 512;
/// Concurrent HTTP/2 streams of one session.
pub const MAX_STREAMS: u32 = 1024;
/// HTTP/2 flow-control window of one stream, bytes. Large enough for 100 MB/s at 1.3 ms round trip.
pub const STREAM_WINDOW: u32 = 1 << 20;
/// HTTP/2 flow-control window of the connection, bytes. Bounds what one side buffers for the other.
pub const CONNECTION_WINDOW: u32 = 8 << 20;
/// Least entropy in a resume handshake, bytes.
pub const MIN_ENTROPY: usize = 64;
/// Most entropy in a resume handshake, bytes.
pub const MAX_ENTROPY: usize = 4096;
/// Longest freeze of the root file system before the guest thaws it by itself, milliseconds.
pub const MAX_FREEZE_MS: u32 = 10_000;
/// The signal that tells a process of a copied machine to draw its random numbers anew: SIGRTMAX - 4. Sent only to processes
/// that have a handler for it.
pub const RESEED_SIGNAL: i32 = 60;
/// Longest that a hold waits for processes to stand still, milliseconds.
pub const MAX_HOLD_WAIT_MS: u32 = 2_000;
/// Longest that one hook in `/etc/coppice/resume.d` may run, milliseconds.
pub const MAX_HOOK_MS: u64 = 5_000;
/// Most hooks that are run.
pub const MAX_HOOKS: usize = 32;
/// Longest host name, bytes (`HOST_NAME_MAX`, include/uapi/linux/utsname.h).
pub const MAX_HOSTNAME: usize = 64;
/// Most ports in one list of those that are listened on.
pub const MAX_PORTS: usize = 1024;
