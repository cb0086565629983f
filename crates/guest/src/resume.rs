//! The resume handshake: what makes a restored or freshly booted machine this machine, now.
//!
//! In this order: the clock is stepped (so that nothing later carries an old time), entropy is added and the CRNG
//! reseeded (so that nothing later draws numbers that a sibling draws), host name, machine-id and boot id are set, the network
//! interface gets its MAC and address and connections from an earlier address are ended, the identity is written to
//! `/run/coppice/identity.json`, and the hooks in `/etc/coppice/resume.d` run, which may rely on all of it.
//! Then processes are told to reseed, and last of all those that were held when the machine was captured go on ([`crate::hold`]).
//! Files are written without fsync: a machine that crashes gets another handshake.
//!
//! What fails before the hooks fails the handshake: a machine with another's address is not let loose.
//!
//! An unpause steps the clock only; a bake sets clock and entropy, and the network if it has one, since what it makes is not a
//! machine yet.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use coppice_guest_proto::{
    limits::{MAX_ENTROPY, MAX_HOOK_MS, MAX_HOOKS, MAX_HOSTNAME, MIN_ENTROPY},
    v1::{HookResult, ResumeReason, ResumeReply, ResumeRequest},
};
use serde::Serialize;
use tonic::Status;

use crate::{
    mounts::BOOT_ID, network::NetworkConfig, processes::Group, service::Agent, spawn::SpawnError, system::System,
};

/// Bytes of a generation.
const GENERATION: usize = 16;
/// Longest of the names that are only handed on (ids), bytes.
const MAX_NAME: usize = 256;
/// Most DNS servers.
const MAX_DNS: usize = 16;
/// When the line about a handshake goes to the console.
const LOG_LATER: Duration = Duration::from_millis(250);
/// Longest that a message is taken to have been on its way.
const MAX_LATE_NS: i64 = 1_000_000_000;
/// Directory entries of `resume.d` that are looked at.
const MAX_HOOK_ENTRIES: usize = 1024;

/// Who this machine is, since the last successful handshake.
pub(crate) struct Identity {
    pub generation: Vec<u8>,
    /// `COPPICE_*`, for commands and hooks.
    pub env: BTreeMap<String, String>,
    /// What the network interface was set to, if it was.
    network: Option<NetworkConfig>,
    reply: ResumeReply,
}

/// The last successful handshake, and the lock that handshakes take turns with.
#[derive(Default)]
pub(crate) struct ResumeState {
    identity: Mutex<Option<Arc<Identity>>>,
    turn: tokio::sync::Mutex<()>,
}

impl ResumeState {
    pub(crate) fn identity(&self) -> Option<Arc<Identity>> {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, identity: Identity) {
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(identity));
    }
}

/// Serves the call. The handshake goes to its end even if the call is dropped.
pub(crate) async fn resume(agent: Arc<Agent>, request: ResumeRequest) -> Result<ResumeReply, Status> {
    let begun = Instant::now();
    let (reason, network) = validate(&request)?;
    tokio::spawn(async move {
        let _turn = agent.resume.turn.lock().await;
        let last = agent.resume.identity();
        if let Some(last) = last.as_deref().filter(|last| last.generation == request.generation) {
            agent.hold.release().await?;
            return Ok(last.reply.clone());
        }
        handshake(&agent, reason, request, network, last.as_deref(), begun).await
    })
    .await
    .map_err(|e| Status::internal(format!("the handshake failed: {e}")))?
}

async fn handshake(
    agent: &Arc<Agent>,
    reason: ResumeReason,
    request: ResumeRequest,
    network: Option<NetworkConfig>,
    last: Option<&Identity>,
    begun: Instant,
) -> Result<ResumeReply, Status> {
    let identifies = identifies(reason);
    let env = match last {
        // The same machine goes on.
        Some(last) if !identifies => last.env.clone(),
        _ => env(&request, reason),
    };
    let generation = request.generation.clone();
    // Not on a worker thread: nothing in it waits for a disk, and in a machine that was just restored every piece of code
    // that runs for the first time costs.
    let before = last.and_then(|last| last.network.as_ref());
    let change = network.as_ref().map(|network| (before, network));
    let clock_error_ns = apply(&*agent.system, reason, &request, change, begun)?;
    let network = network.or_else(|| before.cloned());
    let hooks = if identifies { run_hooks(agent, &env).await } else { Vec::new() };
    if is_copy(reason) {
        // Before they go on, so that no number is drawn from the state that a sibling has.
        let failed = |e| Status::internal(format!("telling processes to reseed: {e}"));
        agent.system.reseed_processes().map_err(failed)?;
    }
    let took_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    let reply = ResumeReply { generation: generation.clone(), clock_error_ns, hooks, took_us };
    let id = hex(&generation);
    agent.resume.set(Identity { generation, env, network, reply: reply.clone() });
    let line = format!(
        "resumed: {} generation={id} clock_error_ms={} hooks={} took_us={took_us}",
        reason.as_str_name(),
        clock_error_ns / 1_000_000,
        reply.hooks.len(),
    );
    tokio::spawn(async move {
        // The serial console is slow, and nobody waits for the line; the host and its first command wait for the reply.
        tokio::time::sleep(LOG_LATER).await;
        tracing::info!("{line}");
    });
    // Last of all: what is released sees the machine as it is from now on. After a failure everything stays held.
    agent.hold.release().await?;
    Ok(reply)
}

/// Whether the handshake makes the machine a sandbox of its own.
fn identifies(reason: ResumeReason) -> bool {
    !matches!(reason, ResumeReason::Unpause | ResumeReason::Bake)
}

/// Whether another machine may have the same memory. One that wakes is the only one that goes on with its own, and a program
/// that chose its seed keeps it.
fn is_copy(reason: ResumeReason) -> bool {
    matches!(reason, ResumeReason::Create | ResumeReason::Fork | ResumeReason::Restore)
}

/// Steps the clock, adds entropy, sets names and the network. Returns how far the clock was off.
fn apply(
    system: &dyn System,
    reason: ResumeReason,
    request: &ResumeRequest,
    network: Option<(Option<&NetworkConfig>, &NetworkConfig)>,
    begun: Instant,
) -> Result<i64, Status> {
    let failed = |what: &str, error: io::Error| Status::internal(format!("{what}: {error}"));
    let elapsed = i64::try_from(begun.elapsed().as_nanos()).unwrap_or(0);
    let now = request.wall_clock_unix_ns.saturating_add(elapsed);
    let clock_error_ns = system.realtime_ns().saturating_sub(now);
    // Standing still puts no clock ahead. One that is seems so because the message was on its way for as long: it is right
    // already, or not as wrong as it would be then.
    let is_late = reason == ResumeReason::Unpause && (0..MAX_LATE_NS).contains(&clock_error_ns);
    if !is_late {
        system.step_clock(now).map_err(|e| failed("stepping the clock", e))?;
    }
    if reason == ResumeReason::Unpause {
        return Ok(clock_error_ns);
    }
    system.add_entropy(&request.entropy).map_err(|e| failed("reseeding the random number generator", e))?;
    let set_network = || network.map_or(Ok(()), |(old, new)| apply_network(system, old, new));
    if reason == ResumeReason::Bake {
        return set_network().map(|()| clock_error_ns);
    }
    system.set_hostname(&request.hostname).map_err(|e| failed("setting the host name", e))?;
    let root = system.root();
    let write = |path: &str, mode, text: &str| {
        replace(&root.join(path), mode, text.as_bytes()).map_err(|e| failed(&format!("writing /{path}"), e))
    };
    for (path, line) in [("etc/hostname", &request.hostname), ("etc/machine-id", &request.machine_id)] {
        overwrite(&root.join(path), &format!("{line}\n")).map_err(|e| failed(&format!("writing /{path}"), e))?;
    }
    if is_copy(reason) {
        let boot_id = format!("{}\n", hex(&request.generation));
        overwrite(&root.join(BOOT_ID), &boot_id).map_err(|e| failed(&format!("writing /{BOOT_ID}"), e))?;
    }
    set_network()?;
    write("run/coppice/identity.json", 0o644, &identity_json(reason, request)?)?;
    Ok(clock_error_ns)
}

/// Only what differs from the last handshake: a machine that wakes is what it was, a copy has its original's route and DNS.
fn apply_network(system: &dyn System, old: Option<&NetworkConfig>, new: &NetworkConfig) -> Result<(), Status> {
    let failed = |what: &str, error: io::Error| Status::internal(format!("{what}: {error}"));
    if old == Some(new) {
        return Ok(());
    }
    system.set_network(old, new).map_err(|e| failed("setting the network", e))?;
    // After the address is gone: see `connections`.
    if let Some(old) = old.filter(|old| old.address != new.address) {
        let what = |e| failed(&format!("ending the connections from {}", old.address), e);
        system.end_connections(old.address).map_err(what)?;
    }
    if old.is_none_or(|old| old.dns != new.dns) {
        let servers: String = new.dns.iter().map(|server| format!("nameserver {server}\n")).collect();
        overwrite(&system.root().join("etc/resolv.conf"), &servers)
            .map_err(|e| failed("writing /etc/resolv.conf", e))?;
    }
    Ok(())
}

/// Writes a line into a file that may be a mount point, as those of [`crate::mounts`] are.
fn overwrite(path: &Path, line: &str) -> io::Result<()> {
    let open = || fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(path);
    let mut file = match (open(), path.parent()) {
        (Err(error), Some(dir)) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(dir)?;
            open()?
        }
        (opened, _) => opened?,
    };
    file.write_all(line.as_bytes())
}

/// Replaces a small file in one step. Not durable: see the module.
fn replace(path: &Path, mode: u32, content: &[u8]) -> io::Result<()> {
    let dir = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let temp = dir.join(format!(".coppice-{}", uuid::Uuid::new_v4()));
    let create = || fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&temp);
    let file = match create() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(dir)?;
            create()
        }
        other => other,
    };
    let result = file.and_then(|mut file| file.write_all(content)).and_then(|()| fs::rename(&temp, path));
    if result.is_err() {
        // Nothing to remove if it could not be created.
        fs::remove_file(&temp).ok();
    }
    result
}

/// The content of `/run/coppice/identity.json`.
#[derive(Serialize)]
struct IdentityFile<'a> {
    generation: String,
    sandbox_id: &'a str,
    reason: &'static str,
    hostname: &'a str,
    machine_id: &'a str,
    fork: Option<ForkFile<'a>>,
    net: Option<NetFile<'a>>,
}

#[derive(Serialize)]
struct ForkFile<'a> {
    parent: &'a str,
    tree: &'a str,
    index: u32,
    count: u32,
    mode: &'a str,
}

#[derive(Serialize)]
struct NetFile<'a> {
    mac: &'a str,
    ip: &'a str,
    prefix: u32,
    gateway: &'a str,
    dns: &'a [String],
}

fn identity_json(reason: ResumeReason, request: &ResumeRequest) -> Result<String, Status> {
    let file = IdentityFile {
        generation: hex(&request.generation),
        sandbox_id: &request.sandbox_id,
        reason: reason_name(reason),
        hostname: &request.hostname,
        machine_id: &request.machine_id,
        fork: request.fork.as_ref().map(|fork| ForkFile {
            parent: &fork.parent,
            tree: &fork.tree,
            index: fork.index,
            count: fork.count,
            mode: &fork.mode,
        }),
        net: request.net.as_ref().map(|net| NetFile {
            mac: &net.mac,
            ip: &net.ip,
            prefix: net.prefix,
            gateway: &net.gateway,
            dns: &net.dns,
        }),
    };
    let mut json = serde_json::to_string_pretty(&file).map_err(|e| Status::internal(e.to_string()))?;
    json.push('\n');
    Ok(json)
}

fn reason_name(reason: ResumeReason) -> &'static str {
    match reason {
        ResumeReason::Unspecified => "unspecified",
        ResumeReason::Create => "create",
        ResumeReason::Fork => "fork",
        ResumeReason::Wake => "wake",
        ResumeReason::Restore => "restore",
        ResumeReason::Unpause => "unpause",
        ResumeReason::Bake => "bake",
    }
}

fn hex(bytes: &[u8]) -> String {
    uuid::Uuid::from_slice(bytes).map(|id| id.to_string()).unwrap_or_default()
}

fn env(request: &ResumeRequest, reason: ResumeReason) -> BTreeMap<String, String> {
    let mut env = BTreeMap::from([
        ("COPPICE_GENERATION".to_owned(), hex(&request.generation)),
        ("COPPICE_REASON".to_owned(), reason_name(reason).to_owned()),
    ]);
    if identifies(reason) {
        env.insert("COPPICE_SANDBOX_ID".to_owned(), request.sandbox_id.clone());
        env.insert("COPPICE_HOSTNAME".to_owned(), request.hostname.clone());
        env.insert("COPPICE_MACHINE_ID".to_owned(), request.machine_id.clone());
    }
    if let Some(fork) = request.fork.as_ref().filter(|_| identifies(reason)) {
        env.insert("COPPICE_FORK_PARENT".to_owned(), fork.parent.clone());
        env.insert("COPPICE_FORK_TREE".to_owned(), fork.tree.clone());
        env.insert("COPPICE_FORK_INDEX".to_owned(), fork.index.to_string());
        env.insert("COPPICE_FORK_COUNT".to_owned(), fork.count.to_string());
        env.insert("COPPICE_FORK_MODE".to_owned(), fork.mode.clone());
    }
    env
}

fn validate(request: &ResumeRequest) -> Result<(ResumeReason, Option<NetworkConfig>), Status> {
    let bad = |what: String| Err(Status::invalid_argument(what));
    let reason = request.reason();
    if reason == ResumeReason::Unspecified {
        return bad(format!("reason {} is unknown", request.reason));
    }
    if request.generation.len() != GENERATION {
        return bad(format!("the generation has {} bytes and not {GENERATION}", request.generation.len()));
    }
    if request.wall_clock_unix_ns <= 0 {
        return bad("the wall clock is before 1970".to_owned());
    }
    let entropy = request.entropy.len();
    if entropy > MAX_ENTROPY || (entropy < MIN_ENTROPY && reason != ResumeReason::Unpause) {
        return bad(format!("{entropy} bytes of entropy are not between {MIN_ENTROPY} and {MAX_ENTROPY}"));
    }
    if reason == ResumeReason::Unpause {
        return Ok((reason, None));
    }
    if request.net.as_ref().is_some_and(|net| net.dns.len() > MAX_DNS) {
        return bad(format!("there are more than {MAX_DNS} DNS servers"));
    }
    let network = match request.net.as_ref().map(NetworkConfig::try_from).transpose() {
        Ok(network) => network,
        Err(what) => return bad(what),
    };
    if reason == ResumeReason::Bake {
        return Ok((reason, network));
    }
    if !is_hostname(&request.hostname) {
        return bad(format!("{:?} is not a host name", request.hostname));
    }
    let hex_digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
    if request.machine_id.len() != 32 || !request.machine_id.bytes().all(hex_digit) {
        return bad(format!("{:?} is not a machine id (32 lowercase hex digits)", request.machine_id));
    }
    let fork = request.fork.as_ref().map(|fork| [&fork.parent, &fork.tree, &fork.mode]);
    let names = fork.into_iter().flatten().chain([&request.sandbox_id]);
    if names.into_iter().any(|n| n.len() > MAX_NAME || n.chars().any(char::is_control)) {
        return bad("an id is too long, or has control characters".to_owned());
    }
    Ok((reason, network))
}

/// RFC 1123: labels of letters, digits and inner hyphens.
fn is_hostname(name: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= MAX_HOSTNAME && name.split('.').all(label)
}

/// Runs the hooks one after another. What goes wrong is reported, and stops nothing.
async fn run_hooks(agent: &Arc<Agent>, env: &BTreeMap<String, String>) -> Vec<HookResult> {
    let dir = agent.system.root().join("etc/coppice/resume.d");
    let mut results = Vec::new();
    for path in hooks(&dir) {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let (exit_code, timed_out) = run_hook(agent, &path, env).await;
        if exit_code != 0 {
            tracing::warn!("resume hook {name} failed: exit_code={exit_code} timed_out={timed_out}");
        }
        results.push(HookResult { name, exit_code, timed_out });
    }
    if !results.is_empty()
        && let Err(error) = agent.system.adopt_hooks()
    {
        tracing::warn!("what resume hooks left running is not part of the commands: {error}");
    }
    results
}

/// The hooks: regular files that are executable, sorted by name.
fn hooks(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut hooks: Vec<_> = entries
        .take(MAX_HOOK_ENTRIES)
        .filter_map(Result::ok)
        .filter(|entry| entry.metadata().is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0))
        .map(|entry| entry.path())
        .collect();
    hooks.sort();
    if hooks.len() > MAX_HOOKS {
        tracing::warn!("only {MAX_HOOKS} of {} resume hooks are run", hooks.len());
        hooks.truncate(MAX_HOOKS);
    }
    hooks
}

async fn run_hook(agent: &Arc<Agent>, path: &Path, env: &BTreeMap<String, String>) -> (i32, bool) {
    let (spawning, path, mut env) = (agent.clone(), path.to_owned(), env.clone());
    env.insert("PATH".to_owned(), crate::exec::DEFAULT_PATH.to_owned());
    env.insert("HOME".to_owned(), "/root".to_owned());
    let spawned = tokio::task::spawn_blocking(move || {
        let root = spawning.system.root().to_owned();
        let mut command = crate::spawn::command(
            [path.to_string_lossy().as_ref()],
            env,
            &root,
            None,
            spawning.system.door(Group::Hooks)?,
        )?;
        // What a hook says goes to the console, with the agent's own log.
        command.stdout(Stdio::inherit()).stderr(Stdio::inherit());
        spawning.reaper.spawn(&mut command).map_err(SpawnError::from)
    })
    .await;
    let mut spawned = match spawned {
        Ok(Ok(spawned)) => spawned,
        Ok(Err(error)) => {
            tracing::warn!("can't run a resume hook: {error:?}");
            return (126, false);
        }
        Err(error) => {
            tracing::warn!("can't run a resume hook: {error}");
            return (126, false);
        }
    };
    let limit = Duration::from_millis(MAX_HOOK_MS);
    if let Ok(exit) = tokio::time::timeout(limit, &mut spawned.exit).await {
        return (exit.map_or(126, |exit| exit.code), false);
    }
    agent.reaper.kill_group(spawned.pid);
    (spawned.exit.await.map_or(137, |exit| exit.code), true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_names() {
        for good in ["a", "sbx-1", "A.b-c.d9", &"a".repeat(63)] {
            assert!(is_hostname(good), "{good}");
        }
        for bad in ["", "-a", "a-", "a..b", ".", "a_b", "a b", "ä", "a\n", &"a".repeat(64), &"a.".repeat(33)] {
            assert!(!is_hostname(bad), "{bad}");
        }
    }
}
