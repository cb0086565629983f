//! Where Debian packages come from: the mirrors and proxies that this machine's apt is configured with, else Debian's own.
//!
//! It asks apt and parses no configuration files. What it finds is for the build only; credentials never get into an image.

use coppice_disk::Quiet;
use coppice_disk::command::{Command, CommandError};

/// Debian's own mirror.
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";
/// Its security archive.
const DEFAULT_SECURITY: &str = "http://deb.debian.org/debian-security";
/// Settings of the host's apt that the build needs to reach the same mirrors, by prefix.
const PASSED_ON: [&str; 6] = [
    "Acquire::http::",
    "Acquire::https::",
    "Acquire::Check-Valid-Until ",
    "Acquire::Check-Date ",
    "Acquire::Retries ",
    "Acquire::ForceIPv4 ",
];
/// More lines than any machine has.
const MANY_LINES: usize = 10_000;

/// Lines of a `sources.list` for a release: those of this machine's apt for the same release, else Debian's own.
///
/// # Errors
/// [`CommandError`] when apt cannot be asked.
pub fn sources(suite: &str) -> Result<Vec<String>, CommandError> {
    let lines = Command::new("apt-get")
        .args(["indextargets", "--format", "$(ORIGIN)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)", "Created-By: Packages"])
        .keep(MANY_LINES)
        .run(&Quiet)?;
    Ok(choose(&lines, suite))
}

fn choose(lines: &[String], suite: &str) -> Vec<String> {
    let mut chosen: Vec<String> = lines
        .iter()
        .filter_map(|line| {
            let parts: Vec<&str> = line.split('|').collect();
            let [origin, release, component, uri] = *parts.as_slice() else { return None };
            let ours = release == suite
                || release.strip_prefix(suite).is_some_and(|rest| matches!(rest, "-updates" | "-security"));
            let usable = origin == "Debian" && ours && component == "main";
            usable.then(|| format!("deb {} {release} main", uri.trim_end_matches('/')))
        })
        .collect();
    chosen.dedup();
    if chosen.iter().any(|line| line.ends_with(&format!(" {suite} main"))) {
        return chosen;
    }
    let mut own = vec![format!("deb {DEFAULT_MIRROR} {suite} main")];
    // Development releases have neither.
    if !matches!(suite, "sid" | "unstable" | "experimental") {
        own.push(format!("deb {DEFAULT_MIRROR} {suite}-updates main"));
        own.push(format!("deb {DEFAULT_SECURITY} {suite}-security main"));
    }
    own
}

/// apt options of this machine that the build's apt needs too, e.g. its proxy.
///
/// # Errors
/// [`CommandError`] when apt cannot be asked.
pub fn apt_options() -> Result<Vec<String>, CommandError> {
    let lines = Command::new("apt-config").arg("dump").keep(MANY_LINES).run(&Quiet)?;
    let mut options: Vec<String> = lines
        .into_iter()
        .filter(|line| PASSED_ON.iter().any(|prefix| line.starts_with(prefix)) && !line.ends_with(" \"\";"))
        .map(|line| line.trim_end_matches(';').to_owned())
        .collect();
    options.dedup();
    Ok(options)
}

/// A `sources.list` line without a user and password in its URI.
#[must_use]
pub fn without_credentials(line: &str) -> String {
    let Some((scheme, rest)) = line.split_once("://") else { return line.to_owned() };
    let authority = rest.split(['/', ' ']).next().unwrap_or_default();
    match authority.rsplit_once('@') {
        Some((secret, _)) => format!("{scheme}://{}", rest.get(secret.len() + 1..).unwrap_or_default()),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_own_mirrors_are_used_for_its_release() {
        let lines = [
            "Debian|bookworm|main|http://mirror.example/debian/",
            "Debian|bookworm|contrib|http://mirror.example/debian/",
            "Debian|bookworm-updates|main|http://mirror.example/debian/",
            "Debian|bookworm-security|main|http://mirror.example/security/",
            "Debian|bookworm-backports|main|http://mirror.example/debian/",
            "Other|bookworm|main|http://other.example/",
            "garbage",
        ]
        .map(str::to_owned);
        assert_eq!(
            choose(&lines, "bookworm"),
            [
                "deb http://mirror.example/debian bookworm main",
                "deb http://mirror.example/debian bookworm-updates main",
                "deb http://mirror.example/security bookworm-security main",
            ]
        );
    }

    #[test]
    fn another_release_comes_from_debian() {
        let lines = ["Debian|bookworm|main|http://mirror.example/debian/".to_owned()];
        assert_eq!(choose(&lines, "trixie").len(), 3);
        assert_eq!(choose(&[], "sid"), ["deb http://deb.debian.org/debian sid main"]);
    }

    #[test]
    fn credentials_do_not_get_into_images() {
        assert_eq!(
            without_credentials("deb https://u:p@m.example/d bookworm main"),
            "deb https://m.example/d bookworm main"
        );
        let plain = "deb http://m.example/d@x bookworm main";
        assert_eq!(without_credentials(plain), plain);
    }
}
