//! Template recipes: data only, `templates/NAME/recipe.toml` and the tree `templates/NAME/files/`.
//!
//! The built-in ones are part of the binary; directories of the operator add to them and replace them by name. A recipe
//! may build on another one; [`Recipes::resolve`] folds that into one flat, checked [`Recipe`]. Nothing is built here.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use coppice_disk::{NameError, check_name};
use include_dir::{Dir, include_dir};
use serde::{Deserialize, Serialize};

static BUILTIN: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../templates");

/// Recipes may build on each other this deep.
const MAX_DEPTH: usize = 8;
/// Largest file of a recipe, bytes.
const MAX_FILE: u64 = 64 << 20;

/// A recipe cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// There is none of that name.
    #[error("there is no recipe {name:?}; there are: {known}")]
    Unknown {
        /// The name.
        name: String,
        /// The known ones.
        known: String,
    },
    /// A recipe file or directory cannot be read.
    #[error("cannot read {path}", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Not the TOML that was expected.
    #[error("recipe {name:?} is not valid")]
    Syntax {
        /// The recipe.
        name: String,
        /// Line and reason.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// A name in it cannot be used.
    #[error("recipe {name:?} has a bad name")]
    Name {
        /// The recipe.
        name: String,
        /// The bad name.
        #[source]
        source: NameError,
    },
    /// A value in it cannot be used.
    #[error("recipe {name:?}: {reason}")]
    Invalid {
        /// The recipe.
        name: String,
        /// A sentence.
        reason: String,
    },
}

/// `recipe.toml` as it is written. Absent fields come from the recipe it builds on, else from the defaults.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Written {
    name: String,
    label: String,
    description: String,
    category: String,
    aliases: Vec<String>,
    base: Option<String>,
    suite: Option<String>,
    packages: Vec<String>,
    exclude: Vec<String>,
    cpus: Option<u32>,
    memory_mb: Option<u32>,
    disk_mb: Option<u32>,
    executable: Vec<String>,
    build: Vec<String>,
    warm: Vec<String>,
}

/// One file that a recipe puts into the root file system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecipeFile {
    /// Contents.
    #[serde(serialize_with = "as_hash")]
    pub contents: Vec<u8>,
    /// Permission bits, 0644 or 0755.
    pub mode: u32,
}

fn as_hash<S: serde::Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&blake3::hash(bytes).to_hex())
}

/// A recipe with everything that it builds on folded in. Serialized, it is the canonical form that is hashed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Recipe {
    /// Name of the template.
    pub name: String,
    /// A few words for a list.
    pub label: String,
    /// A sentence.
    pub description: String,
    /// For grouping in a list.
    pub category: String,
    /// Other names that mean this template. Not inherited.
    pub aliases: Vec<String>,
    /// Release of Debian, e.g. `bookworm`.
    pub suite: String,
    /// Debian packages.
    pub packages: BTreeSet<String>,
    /// dpkg path patterns of files that packages bring and the template does without, now and for later installs.
    pub exclude: BTreeSet<String>,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Size of the root disk, MiB; sparse on the host.
    pub disk_mib: u32,
    /// Files by their path in the root file system, without a leading slash.
    pub files: BTreeMap<String, RecipeFile>,
    /// Shell commands that are run in the root file system while it is built, in order.
    pub build: Vec<String>,
    /// Shell commands that are run in the guest before it is captured, in order.
    pub warm: Vec<String>,
}

impl Recipe {
    /// Names the root file system: everything that goes into it, and nothing else.
    #[must_use]
    pub fn rootfs_key(&self) -> String {
        let packages = (&self.suite, &self.packages, &self.exclude);
        crate::short_hash(
            "coppice rootfs key v1",
            &(crate::rootfs::FORMAT, packages, self.disk_mib, &self.files, &self.build),
        )
    }
}

/// Where one recipe's text and files come from.
#[derive(Debug, Clone)]
enum Source {
    Builtin(&'static Dir<'static>),
    Directory(PathBuf),
}

/// The recipes that are known.
#[derive(Debug, Clone)]
pub struct Recipes {
    sources: BTreeMap<String, Source>,
}

impl Recipes {
    /// Those that are part of this binary.
    #[must_use]
    pub fn builtin() -> Self {
        let sources = BUILTIN
            .dirs()
            .filter(|dir| dir.get_file(dir.path().join("recipe.toml")).is_some())
            .filter_map(|dir| Some((dir.path().file_name()?.to_str()?.to_owned(), Source::Builtin(dir))))
            .collect();
        Self { sources }
    }

    /// Adds the recipes of an operator's directory (`DIR/NAME/recipe.toml`), which replace others of the same name.
    /// A directory that does not exist adds nothing.
    ///
    /// # Errors
    /// [`RecipeError::Read`], or [`RecipeError::Name`] for a directory name that is no template name.
    pub fn add_dir(&mut self, dir: &Path) -> Result<(), RecipeError> {
        let read = |source| RecipeError::Read { path: dir.into(), source };
        let entries = match std::fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(read(error)),
        };
        for entry in entries {
            let entry = entry.map_err(read)?;
            if entry.path().join("recipe.toml").is_file() {
                let name = entry.file_name().to_string_lossy().into_owned();
                check_name(&name).map_err(|source| RecipeError::Name { name: name.clone(), source })?;
                self.sources.insert(name, Source::Directory(entry.path()));
            }
        }
        Ok(())
    }

    /// Their names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.keys().map(String::as_str)
    }

    /// The flat, checked recipe.
    ///
    /// # Errors
    /// [`RecipeError`].
    pub fn resolve(&self, name: &str) -> Result<Recipe, RecipeError> {
        let mut chain = Vec::new();
        let mut next = Some(name.to_owned());
        while let Some(current) = next {
            if chain.len() == MAX_DEPTH {
                let reason = format!("it builds on more than {MAX_DEPTH} others, or on itself");
                return Err(RecipeError::Invalid { name: name.into(), reason });
            }
            let (written, files) = self.read(&current)?;
            next = written.base.clone();
            chain.push((written, files));
        }
        let mut recipe = Recipe {
            name: name.into(),
            label: String::new(),
            description: String::new(),
            category: String::new(),
            aliases: Vec::new(),
            suite: "bookworm".into(),
            packages: BTreeSet::new(),
            exclude: BTreeSet::new(),
            cpus: 1,
            memory_mib: 512,
            disk_mib: 2048,
            files: BTreeMap::new(),
            build: Vec::new(),
            warm: Vec::new(),
        };
        for (written, files) in chain.into_iter().rev() {
            recipe.fold(written, files);
        }
        recipe.check()?;
        Ok(recipe)
    }

    fn read(&self, name: &str) -> Result<(Written, BTreeMap<String, RecipeFile>), RecipeError> {
        let source = self.sources.get(name).ok_or_else(|| RecipeError::Unknown {
            name: name.into(),
            known: self.names().collect::<Vec<_>>().join(", "),
        })?;
        let (text, contents) = source.load()?;
        let written: Written =
            toml::from_str(&text).map_err(|source| RecipeError::Syntax { name: name.into(), source: source.into() })?;
        let invalid = |reason: String| RecipeError::Invalid { name: name.into(), reason };
        if written.name != name {
            return Err(invalid(format!("its name is {:?}, but its directory is {name:?}", written.name)));
        }
        if let Some(missing) =
            written.executable.iter().find(|path| !contents.contains_key(path.trim_start_matches('/')))
        {
            return Err(invalid(format!("{missing:?} is listed as executable, but is not in files/")));
        }
        let executable = |path: &str| written.executable.iter().any(|listed| listed.trim_start_matches('/') == path);
        let files = contents
            .into_iter()
            .map(|(path, contents)| {
                let mode = if executable(&path) { 0o755 } else { 0o644 };
                (path, RecipeFile { contents, mode })
            })
            .collect();
        Ok((written, files))
    }
}

type Loaded = (String, BTreeMap<String, Vec<u8>>);

impl Source {
    fn load(&self) -> Result<Loaded, RecipeError> {
        match self {
            Self::Builtin(dir) => {
                let text = dir.get_file(dir.path().join("recipe.toml")).and_then(|file| file.contents_utf8());
                let mut files = BTreeMap::new();
                let root = dir.path().join("files");
                if let Some(tree) = dir.get_dir(&root) {
                    collect_builtin(tree, &root, &mut files);
                }
                Ok((text.unwrap_or_default().to_owned(), files))
            }
            Self::Directory(dir) => {
                let path = dir.join("recipe.toml");
                let text = std::fs::read_to_string(&path).map_err(|source| RecipeError::Read { path, source })?;
                let mut files = BTreeMap::new();
                let root = dir.join("files");
                if root.is_dir() {
                    collect_directory(&root, &root, &mut files)?;
                }
                Ok((text, files))
            }
        }
    }
}

fn collect_builtin(dir: &Dir<'_>, root: &Path, into: &mut BTreeMap<String, Vec<u8>>) {
    for file in dir.files() {
        if let Some(path) = file.path().strip_prefix(root).ok().and_then(Path::to_str) {
            into.insert(path.to_owned(), file.contents().to_vec());
        }
    }
    for below in dir.dirs() {
        collect_builtin(below, root, into);
    }
}

/// Regular files only: what else a recipe directory holds is refused, so that nothing outside it is read.
fn collect_directory(dir: &Path, root: &Path, into: &mut BTreeMap<String, Vec<u8>>) -> Result<(), RecipeError> {
    let read = |path: &Path| {
        let path = path.to_path_buf();
        move |source| RecipeError::Read { path, source }
    };
    for entry in std::fs::read_dir(dir).map_err(read(dir))? {
        let entry = entry.map_err(read(dir))?;
        let path = entry.path();
        let meta = entry.metadata().map_err(read(&path))?;
        if meta.is_dir() {
            collect_directory(&path, root, into)?;
            continue;
        }
        if !meta.is_file() || meta.len() > MAX_FILE {
            let reason = "a recipe's files are regular files of at most 64 MiB";
            return Err(read(&path)(io::Error::new(io::ErrorKind::InvalidInput, reason)));
        }
        let name = path.strip_prefix(root).ok().and_then(Path::to_str).map(str::to_owned);
        let name = name.ok_or_else(|| read(&path)(io::Error::other("the file name is not UTF-8")))?;
        into.insert(name, std::fs::read(&path).map_err(read(&path))?);
    }
    Ok(())
}

impl Recipe {
    /// Lays a recipe over those that it builds on.
    fn fold(&mut self, written: Written, files: BTreeMap<String, RecipeFile>) {
        self.label = written.label;
        self.description = written.description;
        self.category = written.category;
        self.aliases = written.aliases;
        self.suite = written.suite.unwrap_or_else(|| std::mem::take(&mut self.suite));
        self.packages.extend(written.packages);
        self.exclude.extend(written.exclude);
        self.cpus = written.cpus.unwrap_or(self.cpus);
        self.memory_mib = written.memory_mb.unwrap_or(self.memory_mib);
        self.disk_mib = written.disk_mb.unwrap_or(self.disk_mib);
        self.files.extend(files);
        self.build.extend(written.build);
        self.warm.extend(written.warm);
    }

    fn check(&self) -> Result<(), RecipeError> {
        for name in std::iter::once(&self.name).chain(&self.aliases) {
            check_name(name).map_err(|source| RecipeError::Name { name: self.name.clone(), source })?;
        }
        let invalid = |reason: String| Err(RecipeError::Invalid { name: self.name.clone(), reason });
        if self.label.trim().is_empty() {
            return invalid("it has no label".into());
        }
        if !(1..=64).contains(&self.cpus) {
            return invalid(format!("cpus is {}, must be 1 to 64", self.cpus));
        }
        if !(128..=65_536).contains(&self.memory_mib) {
            return invalid(format!("memory_mb is {}, must be 128 to 65536", self.memory_mib));
        }
        if !(512..=1_048_576).contains(&self.disk_mib) {
            return invalid(format!("disk_mb is {}, must be 512 to 1048576", self.disk_mib));
        }
        if self.suite.is_empty() || !self.suite.bytes().all(|b| b.is_ascii_lowercase() || b == b'-') {
            return invalid(format!("{:?} is not the name of a Debian release", self.suite));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "/*?._+-[]".contains(c);
        if let Some(pattern) = self.exclude.iter().find(|text| !text.starts_with('/') || !text.chars().all(plain)) {
            return invalid(format!("{pattern:?} in exclude is not an absolute path pattern"));
        }
        // Debian policy 5.6.1. What passes cannot be an option or an apt pattern.
        let package = |name: &str| {
            name.len() >= 2
                && name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
                && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b))
        };
        match self.packages.iter().find(|name| !package(name)) {
            Some(name) => invalid(format!("{name:?} is not the name of a Debian package")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, name: &str, text: &str) {
        std::fs::create_dir_all(dir.join(name)).unwrap();
        std::fs::write(dir.join(name).join("recipe.toml"), text).unwrap();
    }

    fn resolve(text: &str) -> Result<Recipe, RecipeError> {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "mine", text);
        let mut recipes = Recipes::builtin();
        recipes.add_dir(dir.path()).unwrap();
        recipes.resolve("mine")
    }

    #[test]
    fn the_built_in_recipes_resolve() {
        let recipes = Recipes::builtin();
        assert_eq!(recipes.names().collect::<Vec<_>>(), ["base", "code-interpreter"]);
        let base = recipes.resolve("base").unwrap();
        assert!(base.aliases.contains(&"ubuntu-24.04".to_owned()));
        let code = recipes.resolve("code-interpreter").unwrap();
        assert!(code.packages.is_superset(&base.packages) && code.packages.contains("python3-pandas"));
        assert!(code.files.contains_key("etc/environment"));
        assert!(code.aliases.is_empty(), "aliases are not inherited");
        assert_ne!(code.rootfs_key(), base.rootfs_key());
    }

    #[test]
    fn a_recipe_builds_on_another_and_replaces_what_it_says() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            "mine",
            "name='mine'\nlabel='M'\nbase='base'\nmemory_mb=1024\nexecutable=['/opt/run']\nwarm=['true']",
        );
        std::fs::create_dir_all(dir.path().join("mine/files/opt")).unwrap();
        std::fs::write(dir.path().join("mine/files/opt/run"), "#!/bin/sh\n").unwrap();
        let mut recipes = Recipes::builtin();
        recipes.add_dir(dir.path()).unwrap();
        let mine = recipes.resolve("mine").unwrap();
        assert_eq!((mine.memory_mib, mine.disk_mib), (1024, 2048));
        assert_eq!(mine.files["opt/run"].mode, 0o755);
        assert_eq!(mine.warm.last().unwrap(), "true");
        assert!(mine.packages.contains("git"));
    }

    #[test]
    fn only_what_goes_into_the_root_file_system_names_it() {
        let one = resolve("name='mine'\nlabel='M'\nbase='base'").unwrap();
        let warmer = resolve("name='mine'\nlabel='N'\nbase='base'\nmemory_mb=1024\nwarm=['true']").unwrap();
        let more = resolve("name='mine'\nlabel='M'\nbase='base'\npackages=['jq']").unwrap();
        assert_eq!(one.rootfs_key(), warmer.rootfs_key());
        assert_ne!(one.rootfs_key(), more.rootfs_key());
    }

    #[test]
    fn bad_recipes_say_what_is_wrong() {
        for (text, wanted) in [
            ("name='mine'\nlabel='M'\ncolour='red'", "colour"),
            ("name='other'\nlabel='M'", "its directory"),
            ("name='mine'", "label"),
            ("name='mine'\nlabel='M'\nmemory_mb=1", "memory_mb"),
            ("name='mine'\nlabel='M'\npackages=['--evil']", "--evil"),
            ("name='mine'\nlabel='M'\nexclude=['x y']", "pattern"),
            ("name='mine'\nlabel='M'\naliases=['../x']", "../x"),
            ("name='mine'\nlabel='M'\nbase='mine'", "on itself"),
            ("name='mine'\nlabel='M'\nbase='none'", "none"),
            ("name='mine'\nlabel='M'\nexecutable=['opt/none']", "opt/none"),
            ("name='mine'\nlabel='M'\nsuite='; rm'", "release"),
        ] {
            let error = resolve(text).unwrap_err();
            let mut chain = error.to_string();
            if let Some(source) = std::error::Error::source(&error) {
                chain.push_str(&source.to_string());
            }
            assert!(chain.contains(wanted), "{wanted:?} not in {chain:?}");
        }
    }

    #[test]
    fn a_link_among_the_files_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "mine", "name='mine'\nlabel='M'");
        std::fs::create_dir(dir.path().join("mine/files")).unwrap();
        std::os::unix::fs::symlink("/etc/shadow", dir.path().join("mine/files/x")).unwrap();
        let mut recipes = Recipes::builtin();
        recipes.add_dir(dir.path()).unwrap();
        assert!(matches!(recipes.resolve("mine"), Err(RecipeError::Read { .. })));
    }
}
