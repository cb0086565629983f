//! Root file systems: Debian by mmdebstrap into a staging tree, the recipe's files and commands, then an ext4 image.
//!
//! Built in the cache, named by [`Recipe::rootfs_key`], shared by every template and data directory that needs the same
//! one. Everything that is done inside the tree is done by programs that are confined to it (`chroot`, mmdebstrap's own
//! hooks): no path inside it is followed by us. It does not boot the result ([`mod@crate::bake`]).

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use coppice_disk::command::{Command, CommandError};
use coppice_disk::{Event, Ext4Error, Progress, StagingError, build_ext4};
use coppice_snapshot::{Digest, digest_sparse_file};
use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::mirror;
use crate::recipe::Recipe;

/// Version of what this module makes of a recipe: raised when the same recipe would give another root file system.
pub const FORMAT: u32 = 1;
/// Label of the file system.
const LABEL: &str = "coppice-root";
/// Time that a whole build may take.
const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
/// What packages bring and no sandbox reads.
const EXCLUDED: [&str; 5] = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
];

/// A root file system was not built; nothing is left of it but the log.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// Not root.
    #[error("building a root file system needs root: run it with sudo")]
    NotRoot,
    /// apt could not be asked for mirrors.
    #[error("cannot read this machine's apt configuration")]
    Mirror(#[source] CommandError),
    /// mmdebstrap or a build command of the recipe failed.
    #[error(
        "building the root file system of {template:?} failed: are the mirrors reachable? is a package name wrong?"
    )]
    Build {
        /// The template.
        template: String,
        /// What failed, with the tail of its output.
        #[source]
        source: CommandError,
    },
    /// The disk under the cache is full.
    #[error(
        "no space left on the disk of the cache for the root file system of {template:?}: free some, or give \
             another --cache-dir"
    )]
    NoSpace {
        /// The template.
        template: String,
        /// What failed.
        #[source]
        source: CommandError,
    },
    /// No ext4 image could be made of it.
    #[error("cannot make the disk image of {template:?}")]
    Image {
        /// The template.
        template: String,
        /// Why.
        #[source]
        source: Box<Ext4Error>,
    },
    /// A staging directory could not be made or published.
    #[error("cannot store the root file system")]
    Staging(#[from] StagingError),
    /// A file cannot be read or written.
    #[error("cannot use {path}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl RootfsError {
    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}

/// A built root file system in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rootfs {
    /// Its key.
    pub key: String,
    /// The image; immutable.
    pub path: PathBuf,
    /// Of its contents.
    pub digest: Digest,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    digest: Digest,
    built_at: jiff::Timestamp,
    packages: Vec<String>,
}

/// Makes sure that the cache has the recipe's root file system; `refresh` builds it anew with today's packages. Blocking.
///
/// # Errors
/// [`RootfsError`]; nothing is left but the build log.
pub fn prepare_rootfs(
    cache: &Cache,
    recipe: &Recipe,
    refresh: bool,
    progress: &dyn Progress,
) -> Result<Rootfs, RootfsError> {
    let key = recipe.rootfs_key();
    let dir = cache.rootfs_dir(&key);
    if !refresh && let Some(rootfs) = cached(&dir, &key)? {
        progress.report(Event::Kept { what: &format!("root file system of {}", recipe.name) });
        return Ok(rootfs);
    }
    if !rustix::process::geteuid().is_root() {
        return Err(RootfsError::NotRoot);
    }
    let what = format!("root file system of {}", recipe.name);
    progress.report(Event::Step { what: &what });
    let staged = cache.stage("rootfs")?;
    build(cache, recipe, &key, staged.path(), progress)?;
    // What is there is damaged or to be refreshed. Machines use their own clones, so it is nobody's.
    remove_tree(&dir)?;
    match staged.publish(&dir) {
        // Another build of the same recipe was faster.
        Ok(()) | Err(StagingError::Exists { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let rootfs = cached(&dir, &key)?.ok_or_else(|| {
        let reason = "it changed right after it was written: is the disk damaged?";
        RootfsError::at(&dir)(io::Error::other(reason))
    })?;
    progress.report(Event::Done { what: &what });
    Ok(rootfs)
}

/// What the cache has under a key, when it is complete and unchanged.
fn cached(dir: &Path, key: &str) -> Result<Option<Rootfs>, RootfsError> {
    let path = dir.join("rootfs.ext4");
    let Ok(text) = fs::read(dir.join("rootfs.json")) else { return Ok(None) };
    let Ok(record) = serde_json::from_slice::<Record>(&text) else { return Ok(None) };
    let Ok(file) = fs::File::open(&path) else { return Ok(None) };
    let digest = digest_sparse_file(&file).map_err(RootfsError::at(&path))?;
    Ok((digest == record.digest).then(|| Rootfs { key: key.into(), path, digest }))
}

fn remove_tree(dir: &Path) -> Result<(), RootfsError> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(RootfsError::at(dir)(error)),
        _ => Ok(()),
    }
}

/// Fills `staged` with `rootfs.ext4` and `rootfs.json`.
fn build(cache: &Cache, recipe: &Recipe, key: &str, staged: &Path, progress: &dyn Progress) -> Result<(), RootfsError> {
    let log = cache.log(&format!("rootfs-{}-{key}", recipe.name));
    fs::write(&log, "").map_err(RootfsError::at(&log))?;
    // A scratch directory of its own: what is in `staged` is published.
    let scratch = cache.stage("rootfs-tree")?;
    let sources = mirror::sources(&recipe.suite).map_err(RootfsError::Mirror)?;
    let hooks = Hooks::write(scratch.path(), recipe, &sources)?;
    let tree = scratch.path().join("tree");
    let built =
        mmdebstrap(cache, recipe, &sources, &hooks, &tree)?.log(&log).limit(BUILD_LIMIT).run(&Filtered { progress });
    built.map_err(|source| build_error(&recipe.name, source))?;
    let image = staged.join("rootfs.ext4");
    build_ext4(&tree, &image, u64::from(recipe.disk_mib) << 20, LABEL, progress)
        .map_err(|source| RootfsError::Image { template: recipe.name.clone(), source: source.into() })?;
    let file = fs::File::open(&image).map_err(RootfsError::at(&image))?;
    let record = Record {
        digest: digest_sparse_file(&file).map_err(RootfsError::at(&image))?,
        built_at: jiff::Timestamp::now(),
        packages: installed(&scratch.path().join("packages")),
    };
    let path = staged.join("rootfs.json");
    let text = serde_json::to_vec_pretty(&record).map_err(|error| RootfsError::at(&path)(error.into()))?;
    fs::write(&path, text).map_err(RootfsError::at(&path))
}

/// mmdebstrap has one exit status for everything; only the words of what it ran tell a full disk from the rest.
fn build_error(template: &str, source: CommandError) -> RootfsError {
    let template = template.to_owned();
    match &source {
        CommandError::Failed { tail, .. } if tail.iter().any(|line| line.contains("No space left on device")) => {
            RootfsError::NoSpace { template, source }
        }
        _ => RootfsError::Build { template, source },
    }
}

/// The list that the last hook wrote: for people, so a missing one is no error.
fn installed(list: &Path) -> Vec<String> {
    fs::read_to_string(list).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn mmdebstrap(
    cache: &Cache,
    recipe: &Recipe,
    sources: &[String],
    hooks: &Hooks,
    tree: &Path,
) -> Result<Command, RootfsError> {
    let packages: Vec<&str> = recipe.packages.iter().map(String::as_str).collect();
    let debs = quote(&cache.debs_dir().to_string_lossy());
    let mut command = Command::new("mmdebstrap")
        .args(["--mode=root", "--variant=minbase", "--format=directory"])
        .arg(format!("--include={}", packages.join(",")))
        .args(EXCLUDED.map(|option| format!("--dpkgopt={option}")))
        .args(recipe.exclude.iter().map(|pattern| format!("--dpkgopt=path-exclude={pattern}")))
        .arg("--aptopt=APT::Install-Recommends \"false\"");
    for option in mirror::apt_options().map_err(RootfsError::Mirror)? {
        command = command.arg(format!("--aptopt={option}"));
    }
    // Downloaded packages go through the cache, so that the next template downloads only what is new to it.
    command = command
        .args(["--skip=download/empty,essential/unlink"])
        .arg("--setup-hook=mkdir -p \"$1\"/var/cache/apt/archives")
        .arg(format!("--setup-hook=sync-in {debs} /var/cache/apt/archives"))
        .arg(format!("--customize-hook=sync-out /var/cache/apt/archives {debs}"))
        .arg(format!("--customize-hook=sync-in {} /", quote(&hooks.files.to_string_lossy())));
    for script in &hooks.build {
        command = command.arg(run_hook(script));
    }
    command = command
        .arg(format!("--customize-hook=sync-in {} /", quote(&hooks.system.to_string_lossy())))
        .arg(run_hook(&hooks.finish))
        .arg(&recipe.suite)
        .arg(tree);
    Ok(command.args(sources))
}

/// Runs a script of ours with the tree as its argument.
fn run_hook(script: &Path) -> String {
    format!("--customize-hook={} \"$1\"", quote(&script.to_string_lossy()))
}

/// What mmdebstrap is given to run and to copy, in a directory of ours.
struct Hooks {
    files: PathBuf,
    build: Vec<PathBuf>,
    system: PathBuf,
    finish: PathBuf,
}

impl Hooks {
    fn write(scratch: &Path, recipe: &Recipe, sources: &[String]) -> Result<Self, RootfsError> {
        let (files, system) = (scratch.join("files"), scratch.join("system"));
        make_dir(&files)?;
        for (path, file) in &recipe.files {
            write_file(&files, path, &file.contents, file.mode)?;
        }
        let mut build = Vec::new();
        for (number, command) in recipe.build.iter().enumerate() {
            let script = format!("#!/bin/sh\nexec chroot \"$1\" /bin/sh -euc {}\n", quote(command));
            build.push(write_file(scratch, &format!("build-{number}"), script.as_bytes(), 0o755)?);
        }
        make_dir(&system)?;
        let list: String = sources.iter().map(|line| mirror::without_credentials(line) + "\n").collect();
        write_file(&system, "etc/apt/sources.list", list.as_bytes(), 0o644)?;
        for (path, contents) in SYSTEM_FILES {
            write_file(&system, path, contents.as_bytes(), 0o644)?;
        }
        let packages = quote(&scratch.join("packages").to_string_lossy());
        let finish = format!("#!/bin/sh\nset -eu\n{FINISH}chroot \"$1\" dpkg-query -W > {packages}\n");
        let finish = write_file(scratch, "finish", finish.as_bytes(), 0o755)?;
        Ok(Self { files, build, system, finish })
    }
}

/// What every template has, whatever its recipe says. Names and network are set by the agent when a machine starts.
const SYSTEM_FILES: [(&str, &str); 6] = [
    ("etc/hostname", "coppice\n"),
    ("etc/hosts", "127.0.0.1 localhost coppice\n::1 localhost ip6-localhost ip6-loopback\n"),
    ("etc/machine-id", ""),
    ("etc/resolv.conf", "# Written by the agent when the machine gets its network.\n"),
    ("etc/default/locale", "LANG=C.UTF-8\n"),
    ("etc/coppice/resume.d/README", "Executable files here run, in order, after every fork, wake and restore.\n"),
];

/// Run at the end, with the tree as `$1`. The options of the build (proxies!) must not stay in the image.
const FINISH: &str = "\
chroot \"$1\" rm -f /etc/apt/apt.conf.d/99mmdebstrap /usr/sbin/policy-rc.d
chroot \"$1\" mkdir -p /workspace /etc/coppice/resume.d
chroot \"$1\" sh -c 'echo \"APT::Install-Recommends \\\"false\\\";\" > /etc/apt/apt.conf.d/90coppice'
";

fn make_dir(path: &Path) -> Result<(), RootfsError> {
    fs::DirBuilder::new().mode(0o755).recursive(true).create(path).map_err(RootfsError::at(path))
}

/// Writes one file below `root`, with its parents. `path` comes from a recipe's tree and has only plain components.
fn write_file(root: &Path, path: &str, contents: &[u8], mode: u32) -> Result<PathBuf, RootfsError> {
    let target = root.join(path);
    if let Some(parent) = target.parent() {
        make_dir(parent)?;
    }
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&target)
        .and_then(|mut file| file.write_all(contents))
        .map_err(RootfsError::at(&target))?;
    Ok(target)
}

/// One word for a shell.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Passes on what a person wants to see of mmdebstrap's chatter.
struct Filtered<'a> {
    progress: &'a dyn Progress,
}

impl Progress for Filtered<'_> {
    fn report(&self, event: Event<'_>) {
        match event {
            Event::Detail { line } => {
                let shown = line.strip_prefix("I: ").or_else(|| line.starts_with("Setting up ").then_some(line));
                if let Some(line) = shown {
                    self.progress.report(Event::Detail { line });
                }
            }
            other => self.progress.report(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_for_a_shell_survive_it() {
        for text in ["plain", "it's", "a b; $(rm) \"x\" \\", "'"] {
            let lines = Command::new("sh")
                .args(["-c", &format!("printf %s {}", quote(text))])
                .run(&coppice_disk::Quiet)
                .unwrap();
            assert_eq!(lines, [text]);
        }
    }

    #[test]
    fn hooks_hold_the_recipe_and_no_credentials() {
        let dir = tempfile::tempdir().unwrap();
        let mut recipe = crate::recipe::Recipes::builtin().resolve("code-interpreter").unwrap();
        recipe.build.push("echo 'hi'".into());
        let sources = ["deb http://user:secret@m.example/debian bookworm main".to_owned()];
        let hooks = Hooks::write(dir.path(), &recipe, &sources).unwrap();
        assert!(hooks.files.join("etc/environment").is_file());
        let list = fs::read_to_string(hooks.system.join("etc/apt/sources.list")).unwrap();
        assert_eq!(list, "deb http://m.example/debian bookworm main\n");
        assert!(fs::read_to_string(&hooks.build[0]).unwrap().contains(r"'echo '\''hi'\'''"));
    }

    #[test]
    fn a_damaged_or_incomplete_cache_entry_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        assert!(cached(dir.path(), "k").unwrap().is_none());
        let image = dir.path().join("rootfs.ext4");
        fs::write(&image, "contents").unwrap();
        let digest = digest_sparse_file(&fs::File::open(&image).unwrap()).unwrap();
        let record = Record { digest, built_at: jiff::Timestamp::now(), packages: vec![] };
        fs::write(dir.path().join("rootfs.json"), serde_json::to_vec(&record).unwrap()).unwrap();
        assert!(cached(dir.path(), "k").unwrap().is_some());
        fs::write(&image, "Contents").unwrap();
        assert!(cached(dir.path(), "k").unwrap().is_none());
    }
}
