//! What a request may say, before a host is asked: each refusal is a sentence that names the field and the rule.
//!
//! It knows no state: whether a template, a snapshot or a tree exists is the host's to say.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use coppice_api::{CreateSandboxRequest, ExecRequest, LifecyclePatch, MAX_FORK_COUNT, MAX_METADATA_BYTES};
use coppice_host::ExecSpec;

use crate::config::Timing;
use crate::error::ApiError;
use crate::input::uuid;

/// Longest path in a guest, bytes (PATH_MAX without its NUL).
const MAX_PATH: usize = 4095;
/// Longest single argument of a Linux program, bytes (MAX_ARG_STRLEN without its NUL).
const MAX_ARGUMENT: usize = (128 << 10) - 1;
/// About 68 years: what an `i32` of seconds holds.
const MAX_TTL_SECONDS: i64 = 0x7fff_ffff;

/// A request to create, with ids in their canonical form.
pub(crate) fn create(mut request: CreateSandboxRequest) -> Result<CreateSandboxRequest, ApiError> {
    if request.volumes.as_ref().is_some_and(|volumes| !volumes.is_empty()) {
        return Err(ApiError::invalid("volumes_unsupported", "volumes are not supported by this server"));
    }
    ttl(request.ttl_seconds)?;
    if let Some(metadata) = &request.metadata {
        self::metadata(metadata)?;
    }
    match &request.from_snapshot {
        Some(id) => {
            request.from_snapshot = Some(uuid(id).ok_or_else(|| ApiError::not_found("snapshot", id))?);
            // Clients always send their default template along.
            request.template = None;
        }
        None => template_of_create(request.template.as_deref())?,
    }
    Ok(request)
}

fn template_of_create(name: Option<&str>) -> Result<(), ApiError> {
    match name {
        Some(name) if !is_template_name(name) => {
            let shown: String = name.chars().take(80).collect();
            Err(ApiError::invalid(
                "unknown_template",
                format!("unknown template {shown:?}: that is no template's name"),
            ))
        }
        _ => Ok(()),
    }
}

/// Whether it can be the name of a template: `[A-Za-z0-9._-]{1,64}`, not `.` or `..`.
pub(crate) fn is_template_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name != "."
        && name != ".."
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// A change of the lifecycle.
pub(crate) fn lifecycle(patch: LifecyclePatch) -> Result<LifecyclePatch, ApiError> {
    ttl(patch.ttl_seconds)?;
    Ok(patch)
}

fn ttl(seconds: Option<i64>) -> Result<(), ApiError> {
    match seconds {
        Some(seconds) if !(1..=MAX_TTL_SECONDS).contains(&seconds) => {
            let message = format!("ttl_seconds must be 1 to {MAX_TTL_SECONDS}, and is {seconds}");
            Err(ApiError::invalid("invalid_ttl", message)
                .hint("`persistent: true` keeps a sandbox for ever; DELETE ends it at once"))
        }
        _ => Ok(()),
    }
}

/// Metadata of a sandbox or of the children of a fork.
pub(crate) fn metadata(metadata: &BTreeMap<String, String>) -> Result<(), ApiError> {
    let bytes: usize = metadata.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MAX_METADATA_BYTES {
        let message = format!("metadata is {bytes} bytes, and may be {MAX_METADATA_BYTES}");
        return Err(ApiError::invalid("metadata_too_large", message));
    }
    if metadata.contains_key("") {
        return Err(ApiError::invalid("invalid_metadata", "a key of metadata is empty"));
    }
    Ok(())
}

/// How many children: absent is one.
pub(crate) fn count(count: Option<i64>) -> Result<i64, ApiError> {
    match count {
        None => Ok(1),
        Some(count) if (1..=i64::from(MAX_FORK_COUNT)).contains(&count) => Ok(count),
        Some(count) => {
            let message = format!("count must be 1 to {MAX_FORK_COUNT}, and is {count}");
            Err(ApiError::invalid("invalid_count", message))
        }
    }
}

/// A path in a guest's file system.
pub(crate) fn path(path: Option<&str>) -> Result<&str, ApiError> {
    let Some(path) = path else {
        return Err(ApiError::invalid("path_required", "the query needs `path`, an absolute path in the sandbox"));
    };
    if !path.starts_with('/') {
        return Err(ApiError::invalid("path_not_absolute", "path must be absolute"));
    }
    if path.len() > MAX_PATH {
        return Err(ApiError::invalid("path_too_long", format!("path must be at most {MAX_PATH} bytes")));
    }
    if path.contains('\0') {
        return Err(ApiError::invalid("invalid_path", "path must not contain a NUL character"));
    }
    Ok(path)
}

/// A path that may be removed: not the root, however it is written.
pub(crate) fn removable(raw: Option<&str>) -> Result<&str, ApiError> {
    let path = self::path(raw)?;
    let depth = path.split('/').fold(0_i64, |depth, part| match part {
        "" | "." => depth,
        ".." => (depth - 1).max(0),
        _ => depth + 1,
    });
    if depth == 0 {
        return Err(ApiError::invalid("path_is_root", "the root directory can't be removed"));
    }
    Ok(path)
}

/// A command, with its timeout filled in.
pub(crate) fn exec(request: ExecRequest, timing: &Timing) -> Result<ExecSpec, ApiError> {
    if request.cmd.trim().is_empty() {
        return Err(ApiError::invalid("cmd_required", "cmd required"));
    }
    if request.cmd.len() > MAX_ARGUMENT {
        let message = format!("cmd must be at most {MAX_ARGUMENT} bytes, and is {}", request.cmd.len());
        return Err(ApiError::invalid("cmd_too_long", message).hint("write it to a file with PUT fs, and run that"));
    }
    for (key, value) in &request.env {
        if key.is_empty() || key.contains('=') || key.len() + value.len() >= MAX_ARGUMENT {
            let message = "a name in env is empty, contains `=`, or its value is too long";
            return Err(ApiError::invalid("invalid_env", message));
        }
    }
    let texts = request.env.iter().flat_map(|(key, value)| [key, value]);
    if texts.chain([&request.cmd]).chain(&request.cwd).chain(&request.user).any(|text| text.contains('\0')) {
        return Err(ApiError::invalid("nul_character", "cmd, env, cwd and user must not contain a NUL character"));
    }
    let cwd = request.cwd.map(|cwd| path(Some(&cwd)).map(str::to_owned)).transpose();
    let cwd = cwd.map_err(|_| ApiError::invalid("invalid_cwd", "cwd must be an absolute path"))?;
    Ok(ExecSpec {
        argv: vec!["/bin/sh".into(), "-c".into(), request.cmd],
        env: request.env,
        cwd,
        user: request.user.filter(|user| !user.is_empty()),
        stdin: request.stdin.map(Bytes::from),
        timeout: Some(timeout(request.timeout_seconds, timing)?),
    })
}

fn timeout(seconds: Option<f64>, timing: &Timing) -> Result<Duration, ApiError> {
    let Some(seconds) = seconds else {
        return Ok(timing.exec_default);
    };
    match Duration::try_from_secs_f64(seconds) {
        Ok(timeout) if !timeout.is_zero() && timeout <= timing.exec_max => Ok(timeout),
        _ => {
            let message = format!(
                "timeout_seconds must be more than 0 and at most {}, and is {seconds}",
                timing.exec_max.as_secs()
            );
            Err(ApiError::invalid("invalid_timeout", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_can_not_be_removed() {
        for root in ["/", "//", "/.", "/a/..", "/../..", "/a/../../"] {
            assert!(removable(Some(root)).is_err(), "{root}");
        }
        for fine in ["/a", "/a/b/..", "/../a", "/..."] {
            assert!(removable(Some(fine)).is_ok(), "{fine}");
        }
    }

    #[test]
    fn names_of_templates() {
        for good in ["base", "ubuntu-24.04", "a_b"] {
            assert!(is_template_name(good));
        }
        for bad in ["", ".", "..", "a/b", "a b", "é", &"x".repeat(65)] {
            assert!(!is_template_name(bad));
        }
    }

    #[test]
    fn timeouts() {
        let timing = Timing::default();
        assert_eq!(timeout(None, &timing).unwrap(), timing.exec_default);
        assert_eq!(timeout(Some(2.5), &timing).unwrap(), Duration::from_millis(2500));
        for bad in [0.0, -1.0, 1e300, 86_401.0, f64::NAN, 1e-300] {
            assert!(timeout(Some(bad), &timing).is_err(), "{bad}");
        }
    }
}
