//! The guest kernel: unpacked from Debian's `linux-image-cloud-amd64`, never installed on the host.
//!
//! `kernels/ID/{vmlinuz,modules/*.ko,modules.order,kernel.json}`, where ID is the package's version and a hash of the
//! contents. Only the modules that the guest needs are kept, uncompressed. A kernel that was unpacked once is used until the
//! operator asks for a newer one: a new kernel means new templates. It does not boot anything and does not build the
//! initramfs ([`crate::initramfs`]).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coppice_disk::command::{Command, CommandError};
use coppice_disk::fsync::replace_file;
use coppice_disk::{DataDir, Event, NameError, Progress, Quiet, StagingError};
use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::modules::{self, ModulesError};

/// The package that depends on the current kernel.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
/// Time that a download may take.
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(600);

/// There is no guest kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// apt does not know the package.
    #[error(
        "apt does not know {META_PACKAGE}: run `apt-get update`; on a host that is not Debian, add a Debian mirror"
    )]
    Unknown,
    /// A program failed.
    #[error("cannot get the guest kernel")]
    Tool(#[from] CommandError),
    /// The package does not hold what is expected.
    #[error("the kernel package {package} holds no {what}")]
    Unexpected {
        /// The package.
        package: String,
        /// What is missing.
        what: &'static str,
    },
    /// Its modules cannot be used.
    #[error("the modules of {package} cannot be used")]
    Modules {
        /// The package.
        package: String,
        /// Why.
        #[source]
        source: ModulesError,
    },
    /// A file cannot be read or written.
    #[error("cannot use {path}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its directory could not be made.
    #[error("cannot store the guest kernel")]
    Staging(#[from] StagingError),
    /// The package's version cannot be made into an id.
    #[error("cannot name the guest kernel")]
    Name(#[from] NameError),
}

impl KernelError {
    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}

/// What `kernel.json` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelInfo {
    /// Id, and name of the directory.
    pub id: String,
    /// Debian package it is from.
    pub package: String,
    /// Version of the package.
    pub version: String,
    /// `uname -r` in the guest.
    pub release: String,
    /// Modules that were asked for. Another build may want others, and then takes them from the package again.
    #[serde(default)]
    pub wanted: Vec<String>,
}

/// A guest kernel in the data directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// What it is.
    pub info: KernelInfo,
    /// Its directory.
    pub dir: PathBuf,
}

impl Kernel {
    /// The bzImage.
    #[must_use]
    pub fn vmlinuz(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// File names under `modules/`, in the order in which they are loaded.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn module_order(&self) -> Result<Vec<String>, KernelError> {
        let path = self.dir.join("modules.order");
        let text = fs::read_to_string(&path).map_err(KernelError::at(&path))?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// A kernel by its id.
    ///
    /// # Errors
    /// [`KernelError`] when it is not there or not complete.
    pub fn open(data: &DataDir, id: &str) -> Result<Self, KernelError> {
        let dir = data.kernel_dir(id)?;
        let path = dir.join("kernel.json");
        let text = fs::read(&path).map_err(KernelError::at(&path))?;
        let info = serde_json::from_slice(&text).map_err(|error| KernelError::at(&path)(error.into()))?;
        let kernel = Self { info, dir };
        fs::metadata(kernel.vmlinuz()).map_err(KernelError::at(&kernel.vmlinuz()))?;
        Ok(kernel)
    }
}

/// A downloaded package, as `current.json` in the cache remembers it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Package {
    package: String,
    version: String,
    file: String,
}

/// Makes sure that the data directory has a guest kernel: the current one, or with `refresh` the newest that apt knows.
/// Blocking.
///
/// # Errors
/// [`KernelError`]; the current kernel is then what it was.
pub fn prepare_kernel(
    data: &DataDir,
    cache: &Cache,
    refresh: bool,
    progress: &dyn Progress,
) -> Result<Kernel, KernelError> {
    let current = data.kernels_dir().join("current");
    if !refresh
        && let Ok(id) = fs::read_to_string(&current)
        && let Ok(kernel) = Kernel::open(data, id.trim())
        && modules::wanted().eq(kernel.info.wanted.iter().map(String::as_str))
    {
        progress.report(Event::Kept { what: &format!("guest kernel {}", kernel.info.release) });
        return Ok(kernel);
    }
    progress.report(Event::Step { what: "guest kernel" });
    let package = download(cache, refresh, progress)?;
    let kernel = unpack(data, cache, &package, progress)?;
    replace_file(&current, format!("{}\n", kernel.info.id).as_bytes(), 0o644).map_err(KernelError::at(&current))?;
    progress.report(Event::Done { what: &format!("guest kernel {}", kernel.info.release) });
    Ok(kernel)
}

fn download(cache: &Cache, refresh: bool, progress: &dyn Progress) -> Result<Package, KernelError> {
    let dir = cache.kernels_dir();
    let record = dir.join("current.json");
    if !refresh
        && let Ok(text) = fs::read(&record)
        && let Ok(package) = serde_json::from_slice::<Package>(&text)
        && dir.join(&package.file).is_file()
    {
        return Ok(package);
    }
    let (package, version) = concrete_package()?;
    // A directory of its own, since apt chooses the file's name.
    let staged = cache.stage("kernel-download")?;
    Command::new("apt-get")
        .args(["download", &format!("{package}={version}"), "-o", "APT::Sandbox::User=root"])
        .dir(staged.path())
        .limit(DOWNLOAD_LIMIT)
        .run(progress)?;
    let file = format!("{package}_{}.deb", version.replace(['~', '+', ':'], "-"));
    let downloaded = fs::read_dir(staged.path())
        .map_err(KernelError::at(staged.path()))?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .ok_or(KernelError::Unexpected { package: package.clone(), what: "file that apt-get downloaded" })?;
    let target = dir.join(&file);
    fs::rename(&downloaded, &target).map_err(KernelError::at(&target))?;
    let package = Package { package, version, file };
    let text = serde_json::to_vec_pretty(&package).map_err(|error| KernelError::at(&record)(error.into()))?;
    replace_file(&record, &text, 0o644).map_err(KernelError::at(&record))?;
    Ok(package)
}

/// The kernel package that the meta package depends on, and its version.
fn concrete_package() -> Result<(String, String), KernelError> {
    let shown = Command::new("apt-cache").args(["show", "--no-all-versions", META_PACKAGE]).run(&Quiet);
    let lines = match shown {
        Ok(lines) => lines,
        Err(CommandError::Failed { .. }) => return Err(KernelError::Unknown),
        Err(error) => return Err(error.into()),
    };
    let depends = lines.iter().find_map(|line| line.strip_prefix("Depends:"));
    parse_dependency(depends.unwrap_or_default()).ok_or(KernelError::Unknown)
}

/// `linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3), …`.
fn parse_dependency(depends: &str) -> Option<(String, String)> {
    let first = depends.split(',').map(str::trim).find(|item| item.starts_with("linux-image-"))?;
    let (package, version) = first.split_once(" (= ")?;
    Some((package.to_owned(), version.strip_suffix(')')?.to_owned()))
}

fn unpack(data: &DataDir, cache: &Cache, package: &Package, progress: &dyn Progress) -> Result<Kernel, KernelError> {
    let scratch = cache.stage("kernel-unpack")?;
    let deb = cache.kernels_dir().join(&package.file);
    let tree = scratch.path();
    Command::new("dpkg-deb").arg("-x").arg(&deb).arg(tree).limit(Duration::from_secs(300)).run(progress)?;
    let unexpected = |what| KernelError::Unexpected { package: package.package.clone(), what };
    let release = package.package.strip_prefix("linux-image-").ok_or(unexpected("release in its name"))?;
    // /lib may be /usr/lib in newer packages.
    let base = [tree.to_path_buf(), tree.join("usr")]
        .into_iter()
        .find(|base| base.join("lib/modules").join(release).is_dir())
        .ok_or(unexpected("modules"))?;
    // The package has no modules.dep: its installation would make it.
    Command::new("depmod").arg("-b").arg(&base).arg(release).limit(Duration::from_secs(120)).run(progress)?;

    let staged = data.stage("kernel")?;
    let vmlinuz = tree.join("boot").join(format!("vmlinuz-{release}"));
    if !vmlinuz.is_file() {
        return Err(unexpected("vmlinuz"));
    }
    fs::copy(&vmlinuz, staged.path().join("vmlinuz")).map_err(KernelError::at(&vmlinuz))?;
    take_modules(&base.join("lib/modules").join(release), staged.path(), &package.package, progress)?;

    let hash = hash_contents(staged.path()).map_err(KernelError::at(staged.path()))?;
    let version: String = package.version.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.' && c != '-', "-");
    let id = format!("{version}-{hash}");
    let info = KernelInfo {
        id: id.clone(),
        package: package.package.clone(),
        version: package.version.clone(),
        release: release.to_owned(),
        wanted: modules::wanted().map(str::to_owned).collect(),
    };
    let path = staged.path().join("kernel.json");
    let text = serde_json::to_vec_pretty(&info).map_err(|error| KernelError::at(&path)(error.into()))?;
    fs::write(&path, text).map_err(KernelError::at(&path))?;
    match staged.publish(&data.kernel_dir(&id)?) {
        // The same content: as good as ours.
        Ok(()) | Err(StagingError::Exists { .. }) => Kernel::open(data, &id),
        Err(error) => Err(error.into()),
    }
}

/// Copies the needed modules to `DEST/modules/`, uncompressed, and their order to `DEST/modules.order`.
fn take_modules(from: &Path, dest: &Path, package: &str, progress: &dyn Progress) -> Result<(), KernelError> {
    let read = |name: &str| {
        let path = from.join(name);
        fs::read_to_string(&path).map_err(KernelError::at(&path))
    };
    let order = modules::load_order(&read("modules.dep")?, &read("modules.builtin")?)
        .map_err(|source| KernelError::Modules { package: package.into(), source })?;
    let target = dest.join("modules");
    fs::create_dir(&target).map_err(KernelError::at(&target))?;
    let mut names = String::new();
    for module in &order {
        let file = module.rsplit('/').next().unwrap_or(module);
        let copy = target.join(file);
        fs::copy(from.join(module), &copy).map_err(KernelError::at(&copy))?;
        let (plain, tool) = if let Some(plain) = file.strip_suffix(".xz") {
            (plain, Some(("xz", ["-d", "-q"])))
        } else if let Some(plain) = file.strip_suffix(".zst") {
            (plain, Some(("zstd", ["-dq", "--rm"])))
        } else {
            (file, None)
        };
        if let Some((tool, flags)) = tool {
            Command::new(tool).args(flags).arg(&copy).run(progress)?;
        }
        names.push_str(plain);
        names.push('\n');
    }
    let path = dest.join("modules.order");
    fs::write(&path, names).map_err(KernelError::at(&path))
}

/// Over vmlinuz, the modules in their order, and what was asked for, which `kernel.json` says: 12 hex digits.
fn hash_contents(dir: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let order = fs::read_to_string(dir.join("modules.order"))?;
    hasher.update(order.as_bytes());
    for name in modules::wanted() {
        hasher.update(name.as_bytes()).update(b"\n");
    }
    let modules = order.lines().map(|name| dir.join("modules").join(name));
    for path in std::iter::once(dir.join("vmlinuz")).chain(modules) {
        let contents = fs::read(path)?;
        hasher.update(blake3::hash(&contents).as_bytes());
    }
    Ok(hasher.finalize().to_hex().chars().take(12).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_of_an_older_build_is_readable_and_lacks_what_is_wanted_now() {
        let old = r#"{"id": "6.1-a", "package": "linux-image-6.1", "version": "6.1", "release": "6.1"}"#;
        let old: KernelInfo = serde_json::from_str(old).unwrap();
        assert!(!modules::wanted().eq(old.wanted.iter().map(String::as_str)));
        assert!(modules::wanted().any(|name| name == "inet_diag"));
    }

    #[test]
    fn the_dependency_of_the_meta_package_is_understood() {
        assert_eq!(
            parse_dependency(" linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)"),
            Some(("linux-image-6.1.0-57-cloud-amd64".into(), "6.1.192-3".into()))
        );
        assert_eq!(
            parse_dependency("foo, linux-image-7 (= 1~b+2), bar"),
            Some(("linux-image-7".into(), "1~b+2".into()))
        );
        for text in ["", "linux-image-7", "linux-image-7 (>= 1)", "other (= 1)"] {
            assert_eq!(parse_dependency(text), None, "{text}");
        }
    }
}
