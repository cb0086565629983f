//! The baked templates of a data directory.
//!
//! `templates/NAME/GEN/{template.json,rootfs.ext4,snapshot/}` are generations, immutable; the file `templates/NAME/current`
//! names the one that new machines start from. An image is verified (every checksum) the first time that it is asked for,
//! and again when its files changed. Blocking: callers on a runtime use a worker thread. It does not bake
//! ([`mod@crate::bake`]), and it cannot know which generations machines still use: callers say so.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use coppice_disk::fsync::{replace_file, sync_parent};
use coppice_disk::usage::tree_usage;
use coppice_disk::{DataDir, NameError, StagingError, UsageError, check_name};
use coppice_engine::GuestKernel;
use coppice_snapshot::sealed::{self, SealError};
use coppice_snapshot::{Digest, MachineImage, OpenImageError, digest_sparse_file};
use serde::{Deserialize, Serialize};

use crate::initramfs::{InitramfsError, guest_kernel};
use crate::recipe::Recipe;

/// File name of the description in a generation.
pub const TEMPLATE_FILE: &str = "template.json";
/// File name of the root file system as it was built, before the first boot.
pub const ROOTFS_FILE: &str = "rootfs.ext4";
/// Directory name of the machine image.
pub const SNAPSHOT_DIR: &str = "snapshot";
const CURRENT_FILE: &str = "current";
const FORMAT: &str = "coppice-template";
const FORMAT_VERSION: u32 = 1;

/// A template cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// There is none of that name or alias.
    #[error("there is no template {name:?}; `coppice template list` shows what there is, `coppice setup` makes it")]
    NotFound {
        /// As it was asked for.
        name: String,
    },
    /// It cannot be a template's name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A file of it is missing or cannot be read.
    #[error("template {name:?}: cannot read {path}; `coppice template build {name}` makes it anew", path = path.display())]
    Read {
        /// The template.
        name: String,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its description is not valid.
    #[error("template {name:?}: {path} {reason}; `coppice template build {name}` makes it anew", path = path.display())]
    Description {
        /// The template.
        name: String,
        /// The file.
        path: PathBuf,
        /// A clause.
        reason: String,
    },
    /// Its machine image is missing, incomplete or damaged.
    #[error("template {name:?}: its machine image cannot be used; `coppice template build {name}` makes it anew")]
    Image {
        /// The template.
        name: String,
        /// Which file, and why.
        #[source]
        source: Box<OpenImageError>,
    },
    /// Its root file system has another checksum than when it was made.
    #[error("template {name:?}: {path} is damaged (wrong checksum); `coppice template build {name}` makes it anew",
            path = path.display())]
    Checksum {
        /// The template.
        name: String,
        /// The file.
        path: PathBuf,
    },
    /// Its guest kernel or initramfs is missing.
    #[error("template {name:?}: its guest kernel is missing; `coppice template build {name}` makes it anew")]
    Kernel {
        /// The template.
        name: String,
        /// Which file.
        #[source]
        source: Box<InitramfsError>,
    },
    /// It cannot be removed.
    #[error("template {name:?} cannot be removed")]
    Remove {
        /// The template.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Space for the removal, or its measure, failed.
    #[error("cannot use the data directory")]
    Staging(#[from] StagingError),
    /// Its size cannot be measured.
    #[error("cannot measure the template")]
    Usage(#[from] UsageError),
}

/// What `template.json` says about a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateInfo {
    /// Name of the template.
    pub name: String,
    /// Name of the generation's directory.
    pub generation: String,
    /// Hash of all that it was made from: recipe, kernel, initramfs, engine.
    pub recipe_id: String,
    /// A few words for a list.
    pub label: String,
    /// A sentence.
    pub description: String,
    /// For grouping in a list.
    pub category: String,
    /// Other names that mean this template.
    pub aliases: Vec<String>,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Size of the root disk, MiB.
    pub disk_mib: u32,
    /// Release of Debian.
    pub suite: String,
    /// Debian packages that the recipe asks for.
    pub packages: Vec<String>,
    /// Id of the guest kernel.
    pub kernel: String,
    /// Id of the initramfs.
    pub initramfs: String,
    /// Checksum of `rootfs.ext4`.
    pub rootfs: Digest,
    /// When it was baked.
    pub baked_at: jiff::Timestamp,
}

impl TemplateInfo {
    /// The part that comes from the recipe.
    pub(crate) fn new(
        recipe: &Recipe,
        generation: String,
        recipe_id: String,
        machine: (String, String),
        rootfs: Digest,
    ) -> Self {
        Self {
            name: recipe.name.clone(),
            generation,
            recipe_id,
            label: recipe.label.clone(),
            description: recipe.description.clone(),
            category: recipe.category.clone(),
            aliases: recipe.aliases.clone(),
            cpus: recipe.cpus,
            memory_mib: recipe.memory_mib,
            disk_mib: recipe.disk_mib,
            suite: recipe.suite.clone(),
            packages: recipe.packages.iter().cloned().collect(),
            kernel: machine.0,
            initramfs: machine.1,
            rootfs,
            baked_at: jiff::Timestamp::now(),
        }
    }

    /// The contents of `template.json`.
    ///
    /// # Errors
    /// None that these fields can cause.
    pub fn encode(&self) -> Result<Vec<u8>, SealError> {
        sealed::seal(FORMAT, FORMAT_VERSION, self)
    }
}

/// A baked template, ready to start machines from.
#[derive(Debug, Clone)]
pub struct Template {
    /// What it is.
    pub info: TemplateInfo,
    /// The directory of its generation.
    pub dir: PathBuf,
    /// The captured machine.
    pub image: MachineImage,
    /// Kernel and initramfs that it was booted with.
    pub kernel: GuestKernel,
    /// Bytes that it occupies on disk.
    pub size_bytes: u64,
}

impl Template {
    /// The root file system before the first boot, for machines that boot cold.
    #[must_use]
    pub fn rootfs(&self) -> PathBuf {
        self.dir.join(ROOTFS_FILE)
    }
}

/// What the files of a verified generation looked like. Any write changes the mtime. Not the ctime: that changes when a file gets
/// another name, which every sandbox gives to the disk that it began with.
type Stamp = Vec<(u64, u64, i64, i64)>;

/// The templates of one data directory. Cheap to clone; clones share what was verified.
#[derive(Debug, Clone)]
pub struct Catalog {
    data: DataDir,
    verified: Arc<Mutex<HashMap<PathBuf, Stamp>>>,
}

impl Catalog {
    /// The catalog of a data directory. Reads nothing yet.
    #[must_use]
    pub fn new(data: DataDir) -> Self {
        Self { data, verified: Arc::default() }
    }

    /// Every template that has a current generation, with what is wrong with it if something is. Not verified.
    ///
    /// # Errors
    /// [`CatalogError::Read`] when the directory cannot be read.
    pub fn list(&self) -> Result<BTreeMap<String, Result<Template, CatalogError>>, CatalogError> {
        let dir = self.data.templates_dir();
        let read = |source| CatalogError::Read { name: String::new(), path: dir.clone(), source };
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(&dir).map_err(read)? {
            let name = entry.map_err(read)?.file_name().to_string_lossy().into_owned();
            if check_name(&name).is_err() {
                continue;
            }
            match self.load(&name) {
                Err(CatalogError::NotFound { .. }) => {}
                loaded => drop(found.insert(name, loaded)),
            }
        }
        Ok(found)
    }

    /// The current generation of a template by its name or alias; names win over aliases. Verified.
    ///
    /// # Errors
    /// [`CatalogError::NotFound`], or what is wrong with it.
    pub fn current(&self, name_or_alias: &str) -> Result<Template, CatalogError> {
        check_name(name_or_alias)?;
        let template = match self.load(name_or_alias) {
            Err(CatalogError::NotFound { name }) => self
                .list()?
                .into_values()
                .filter_map(Result::ok)
                .find(|template| template.info.aliases.contains(&name))
                .ok_or(CatalogError::NotFound { name })?,
            loaded => loaded?,
        };
        self.verify(&template)?;
        Ok(template)
    }

    /// Checks every checksum of a template, unless that was done since its files last changed.
    ///
    /// # Errors
    /// [`CatalogError::Image`], [`CatalogError::Checksum`], [`CatalogError::Read`].
    pub fn verify(&self, template: &Template) -> Result<(), CatalogError> {
        let name = &template.info.name;
        let before = stamp(template)?;
        let known = self.verified.lock().unwrap_or_else(PoisonError::into_inner).get(&template.dir) == Some(&before);
        if known {
            return Ok(());
        }
        let image = |source: OpenImageError| CatalogError::Image { name: name.clone(), source: source.into() };
        template.image.verify().map_err(image)?;
        let path = template.rootfs();
        let digest = fs::File::open(&path).and_then(|file| digest_sparse_file(&file));
        let digest = digest.map_err(|source| CatalogError::Read { name: name.clone(), path: path.clone(), source })?;
        if digest != template.info.rootfs {
            return Err(CatalogError::Checksum { name: name.clone(), path });
        }
        self.verified.lock().unwrap_or_else(PoisonError::into_inner).insert(template.dir.clone(), before);
        Ok(())
    }

    fn load(&self, name: &str) -> Result<Template, CatalogError> {
        let home = self.data.template_home(name)?;
        let path = home.join(CURRENT_FILE);
        let generation = match fs::read_to_string(&path) {
            Ok(text) => text.trim().to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CatalogError::NotFound { name: name.into() });
            }
            Err(source) => return Err(CatalogError::Read { name: name.into(), path, source }),
        };
        self.generation(name, &generation)
    }

    /// One generation of a template, current or not. Not verified.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn generation(&self, name: &str, generation: &str) -> Result<Template, CatalogError> {
        let dir = self.data.template_dir(name, generation)?;
        let path = dir.join(TEMPLATE_FILE);
        let bytes =
            fs::read(&path).map_err(|source| CatalogError::Read { name: name.into(), path: path.clone(), source })?;
        let describe = |reason| CatalogError::Description { name: name.into(), path: path.clone(), reason };
        let info: TemplateInfo =
            sealed::open(FORMAT, FORMAT_VERSION, &bytes).map_err(|error| describe(error.to_string()))?;
        if info.name != name || info.generation != generation {
            return Err(describe(format!("describes {} {}", info.name, info.generation)));
        }
        let image = MachineImage::open(&dir.join(SNAPSHOT_DIR))
            .map_err(|source| CatalogError::Image { name: name.into(), source: source.into() })?;
        let kernel = guest_kernel(&self.data, &info.kernel, &info.initramfs)
            .map_err(|source| CatalogError::Kernel { name: name.into(), source: source.into() })?;
        // The root file system of before the first boot shares its extents with the image's disk, where they can be shared.
        let size_bytes = tree_usage(if self.data.reflink() { image.dir() } else { &dir })?;
        Ok(Template { info, dir, image, kernel, size_bytes })
    }

    /// Makes a published generation the current one.
    ///
    /// # Errors
    /// [`CatalogError::Read`] when the file cannot be written.
    pub(crate) fn set_current(&self, name: &str, generation: &str) -> Result<(), CatalogError> {
        let path = self.data.template_home(name)?.join(CURRENT_FILE);
        replace_file(&path, format!("{}\n", check_name(generation)?).as_bytes(), 0o644)
            .map_err(|source| CatalogError::Read { name: name.into(), path, source })
    }

    /// Removes the generations of a template that are neither current nor in `in_use`; returns their names.
    ///
    /// # Errors
    /// [`CatalogError::Remove`]; those before it are gone.
    pub fn prune(&self, name: &str, in_use: &HashSet<String>) -> Result<Vec<String>, CatalogError> {
        let home = self.data.template_home(name)?;
        let failed = |source| CatalogError::Remove { name: name.into(), source };
        let current = match fs::read_to_string(home.join(CURRENT_FILE)) {
            Ok(text) => text.trim().to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(failed(error)),
        };
        let mut removed = Vec::new();
        let entries = match fs::read_dir(&home) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(removed),
            Err(error) => return Err(failed(error)),
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let generation = entry.file_name().to_string_lossy().into_owned();
            let kept = generation == current || in_use.contains(&generation);
            if !kept && entry.file_type().map_err(failed)?.is_dir() {
                self.remove_dir(name, &entry.path())?;
                removed.push(generation);
            }
        }
        Ok(removed)
    }

    /// Deletes a template: no new machine starts from it. Generations in `in_use` stay for the machines that need them,
    /// to be removed by a later [`Catalog::prune`]. Aliases are not names here.
    ///
    /// # Errors
    /// [`CatalogError::NotFound`], [`CatalogError::Remove`].
    pub fn delete(&self, name: &str, in_use: &HashSet<String>) -> Result<(), CatalogError> {
        let home = self.data.template_home(name)?;
        let failed = |source| CatalogError::Remove { name: name.into(), source };
        match fs::remove_file(home.join(CURRENT_FILE)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CatalogError::NotFound { name: name.into() });
            }
            Err(error) => return Err(failed(error)),
        }
        sync_parent(&home.join(CURRENT_FILE)).map_err(failed)?;
        self.prune(name, in_use)?;
        match fs::remove_dir(&home) {
            Err(error) if error.kind() != io::ErrorKind::DirectoryNotEmpty => Err(failed(error)),
            _ => Ok(()),
        }
    }

    /// Renames first, so that a crash in the middle leaves no half generation.
    fn remove_dir(&self, name: &str, dir: &Path) -> Result<(), CatalogError> {
        let grave = self.data.stage("removed")?;
        fs::rename(dir, grave.path().join("generation"))
            .and_then(|()| sync_parent(dir))
            .map_err(|source| CatalogError::Remove { name: name.into(), source })?;
        self.verified.lock().unwrap_or_else(PoisonError::into_inner).remove(dir);
        Ok(())
    }
}

fn stamp(template: &Template) -> Result<Stamp, CatalogError> {
    let image = &template.image;
    [image.memory_path(), image.devices_path(), image.disk_path(), template.rootfs()]
        .into_iter()
        .map(|path| match fs::metadata(&path) {
            Ok(meta) => Ok((meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec())),
            Err(source) => Err(CatalogError::Read { name: template.info.name.clone(), path, source }),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use coppice_snapshot::{Accel, EngineKind, FileInfo, MachineSpec, Manifest, PendingImage};
    use std::os::unix::fs::FileExt as _;

    struct World {
        _dir: tempfile::TempDir,
        catalog: Catalog,
    }

    /// A data directory with a kernel, and nothing baked.
    fn world() -> World {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::open(dir.path()).unwrap();
        let kernel = data.kernel_dir("k1").unwrap();
        fs::create_dir(&kernel).unwrap();
        fs::write(kernel.join("vmlinuz"), "k").unwrap();
        fs::write(kernel.join("initramfs-i1"), "i").unwrap();
        World { _dir: dir, catalog: Catalog::new(data) }
    }

    fn image(parent: &Path) {
        let pending = PendingImage::create(&parent.join(SNAPSHOT_DIR)).unwrap();
        let memory = fs::File::create(pending.memory_path()).unwrap();
        memory.set_len(128 << 20).unwrap();
        memory.write_all_at(b"memory", 4096).unwrap();
        fs::write(pending.devices_path(), "devices").unwrap();
        fs::write(pending.disk_path(), "disk").unwrap();
        let info = |path: PathBuf| FileInfo {
            len: path.metadata().unwrap().len(),
            digest: Some(PendingImage::digest(&path).unwrap()),
        };
        let manifest = Manifest {
            id: uuid::Uuid::new_v4(),
            captured_at: jiff::Timestamp::now(),
            engine: EngineKind::Fake,
            engine_version: "1".into(),
            accel: Accel::Tcg,
            machine: MachineSpec {
                cpus: 1,
                memory_mib: 128,
                kernel: "k1".into(),
                initramfs: "i1".into(),
                cmdline: String::new(),
            },
            channel_port: 0,
            memory: info(pending.memory_path()),
            devices: info(pending.devices_path()),
            disk: info(pending.disk_path()),
        };
        pending.complete(manifest, false).unwrap();
    }

    /// Publishes a generation and makes it current.
    fn publish(catalog: &Catalog, name: &str, generation: &str, aliases: &[&str]) -> PathBuf {
        let mut recipe = crate::recipe::Recipes::builtin().resolve("base").unwrap();
        recipe.name = name.into();
        recipe.aliases = aliases.iter().map(|alias| (*alias).to_owned()).collect();
        let staged = catalog.data.stage("test").unwrap();
        image(staged.path());
        let rootfs = staged.path().join(ROOTFS_FILE);
        fs::write(&rootfs, "rootfs").unwrap();
        let digest = digest_sparse_file(&fs::File::open(&rootfs).unwrap()).unwrap();
        let machine = ("k1".to_owned(), "i1".to_owned());
        let info = TemplateInfo::new(&recipe, generation.into(), "r".into(), machine, digest);
        fs::write(staged.path().join(TEMPLATE_FILE), info.encode().unwrap()).unwrap();
        let dir = catalog.data.template_dir(name, generation).unwrap();
        staged.publish(&dir).unwrap();
        catalog.set_current(name, generation).unwrap();
        dir
    }

    fn flip(path: &Path, at: u64) {
        let file = fs::File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }

    #[test]
    fn a_template_is_found_by_name_and_alias_and_names_win() {
        let world = world();
        publish(&world.catalog, "base", "g1", &["ubuntu", "other"]);
        publish(&world.catalog, "other", "g1", &[]);
        assert_eq!(world.catalog.current("base").unwrap().info.generation, "g1");
        assert_eq!(world.catalog.current("ubuntu").unwrap().info.name, "base");
        assert_eq!(world.catalog.current("other").unwrap().info.name, "other");
        assert!(matches!(world.catalog.current("none"), Err(CatalogError::NotFound { .. })));
        assert!(matches!(world.catalog.current("../base"), Err(CatalogError::Name(_))));
        assert_eq!(world.catalog.list().unwrap().len(), 2);
        assert!(world.catalog.current("base").unwrap().size_bytes > 0);
    }

    /// Each sandbox keeps the disk that it began with by another name of it: it must not cost reading all of the template.
    #[test]
    fn another_name_of_a_file_is_no_reason_to_verify_again() {
        let world = world();
        let dir = publish(&world.catalog, "base", "g1", &[]);
        let template = world.catalog.current("base").unwrap();
        world.catalog.verify(&template).unwrap();
        fs::hard_link(template.image.disk_path(), dir.join("fork-point")).unwrap();
        // Damage that can't be seen but by reading.
        let memory = template.image.memory_path();
        let written = memory.metadata().unwrap().modified().unwrap();
        flip(&memory, 4096);
        fs::File::options().write(true).open(&memory).unwrap().set_modified(written).unwrap();
        world.catalog.verify(&template).unwrap();
        Catalog::new(world.catalog.data.clone()).verify(&template).unwrap_err();
    }

    #[test]
    fn every_damaged_file_is_noticed_and_named_even_after_it_was_verified() {
        for (file, at) in [
            ("rootfs.ext4", 0),
            ("template.json", 200),
            ("snapshot/memory", 4097),
            ("snapshot/devices", 0),
            ("snapshot/disk.ext4", 0),
        ] {
            let world = world();
            let dir = publish(&world.catalog, "base", "g1", &[]);
            world.catalog.current("base").unwrap();
            flip(&dir.join(file), at);
            let error = world.catalog.current("base").unwrap_err();
            let mut text = error.to_string();
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                text = format!("{text}: {cause}");
                source = cause.source();
            }
            let name = file.rsplit('/').next().unwrap();
            assert!(text.contains(name) && text.contains("template build"), "{text}");
            flip(&dir.join(file), at);
            world.catalog.current("base").unwrap();
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        for file in ["rootfs.ext4", "template.json", "snapshot/memory", "snapshot/manifest.json"] {
            let world = world();
            let dir = publish(&world.catalog, "base", "g1", &[]);
            fs::remove_file(dir.join(file)).unwrap();
            assert!(!matches!(world.catalog.current("base").unwrap_err(), CatalogError::NotFound { .. }), "{file}");
        }
        let world = world();
        publish(&world.catalog, "base", "g1", &[]);
        fs::remove_file(world.catalog.data.kernel_dir("k1").unwrap().join("initramfs-i1")).unwrap();
        assert!(matches!(world.catalog.current("base"), Err(CatalogError::Kernel { .. })));
        assert!(world.catalog.list().unwrap()["base"].is_err());
    }

    #[test]
    fn old_generations_go_unless_they_are_in_use() {
        let world = world();
        let first = publish(&world.catalog, "base", "g1", &[]);
        publish(&world.catalog, "base", "g2", &[]);
        publish(&world.catalog, "base", "g3", &[]);
        let in_use = HashSet::from(["g1".to_owned()]);
        assert_eq!(world.catalog.prune("base", &in_use).unwrap(), ["g2"]);
        assert!(first.exists());
        assert_eq!(world.catalog.generation("base", "g1").unwrap().info.generation, "g1");

        world.catalog.delete("base", &in_use).unwrap();
        assert!(matches!(world.catalog.current("base"), Err(CatalogError::NotFound { .. })));
        assert!(first.exists(), "a machine may still need it");
        assert_eq!(world.catalog.prune("base", &HashSet::new()).unwrap(), ["g1"]);
        assert!(matches!(world.catalog.delete("base", &in_use), Err(CatalogError::NotFound { .. })));
        assert_eq!(fs::read_dir(world.catalog.data.staging_dir()).unwrap().count(), 0);
    }
}
