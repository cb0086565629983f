//! Set-up of a data directory: guest kernel, initramfs, root file systems, baked templates, each only when it is missing,
//! damaged, or made of something that changed.
//!
//! What `coppice setup`, `coppice up` and `coppice template build` call. It does not make the volume under the data
//! directory ([`coppice_disk::ensure_volume`]) and removes no old generations: only the host knows which are in use.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use coppice_disk::{DataDir, Event, Progress};
use coppice_engine::{Capabilities, Engine};

use crate::bake::{self, BakeError, Ingredients};
use crate::cache::Cache;
use crate::catalog::{Catalog, CatalogError, Template};
use crate::initramfs::{Initramfs, InitramfsError, prepare_initramfs};
use crate::kernel::{Kernel, KernelError, prepare_kernel};
use crate::recipe::{Recipe, RecipeError, Recipes};
use crate::rootfs::{Rootfs, RootfsError, prepare_rootfs};

/// Version of how machines are baked: raised when the same ingredients would give another machine.
const BAKE_FORMAT: u32 = 2;

/// What to make.
#[derive(Debug, Clone)]
pub struct PrepareOptions {
    /// Names of recipes; none means all that are known.
    pub templates: Vec<String>,
    /// Recipes.
    pub recipes: Recipes,
    /// The static guest agent.
    pub agent: PathBuf,
    /// Take the newest kernel and packages that the mirrors have.
    pub refresh: bool,
    /// Bake even what is up to date.
    pub rebake: bool,
}

/// Set-up did not finish; what it had finished stays, and the next one goes on from there.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// No guest kernel.
    #[error("there is no guest kernel")]
    Kernel(#[from] KernelError),
    /// No initramfs.
    #[error("there is no initramfs")]
    Initramfs(#[from] InitramfsError),
    /// A recipe cannot be used.
    #[error("a recipe cannot be used")]
    Recipe(#[from] RecipeError),
    /// A root file system was not built.
    #[error("template {name:?} was not built")]
    Rootfs {
        /// The template.
        name: String,
        /// Why.
        #[source]
        source: Box<RootfsError>,
    },
    /// A template was not baked.
    #[error("template {name:?} was not baked")]
    Bake {
        /// The template.
        name: String,
        /// Why.
        #[source]
        source: Box<BakeError>,
    },
    /// A template that was baked cannot be used.
    #[error("a template cannot be used")]
    Catalog(#[from] CatalogError),
    /// The worker thread ended early (runtime shutdown or a bug).
    #[error("set-up was interrupted")]
    Interrupted,
}

/// Makes sure of everything that sandboxes need, and returns the templates. Cancelling it leaves nothing half-made; a
/// program that runs (mmdebstrap) is then left to finish.
///
/// # Errors
/// [`PrepareError`].
pub async fn prepare(
    data: &DataDir,
    cache: &Cache,
    engine: &dyn Engine,
    options: &PrepareOptions,
    progress: Arc<dyn Progress>,
) -> Result<Vec<Template>, PrepareError> {
    let bake_error = |name: &str| {
        let name = name.to_owned();
        move |source: BakeError| PrepareError::Bake { name, source: source.into() }
    };
    bake::reclaim(data, engine).await.map_err(bake_error("(earlier)"))?;
    let recipes = options.resolve()?;
    let (kernel, initramfs) = machine_files(data, cache, options, &progress).await?;
    let catalog = Catalog::new(data.clone());
    let mut templates = Vec::new();
    for recipe in recipes {
        let recipe_id = recipe_id(&recipe, &kernel, &initramfs, engine.capabilities());
        if !options.rebake
            && !options.refresh
            && let Some(template) = up_to_date(&catalog, &recipe, &recipe_id, progress.as_ref()).await?
        {
            progress.report(Event::Kept { what: &format!("template {}", recipe.name) });
            templates.push(template);
            continue;
        }
        let rootfs = rootfs(cache, &recipe, options.refresh, &progress).await?;
        let what = format!("template {}", recipe.name);
        progress.report(Event::Step { what: &format!("baking {what}") });
        let begin = Instant::now();
        let from = Ingredients {
            recipe: &recipe,
            recipe_id: &recipe_id,
            kernel: &kernel,
            initramfs: &initramfs,
            rootfs: &rootfs,
        };
        let generation = bake::bake(data, engine, from, progress.as_ref()).await.map_err(bake_error(&recipe.name))?;
        catalog.set_current(&recipe.name, &generation)?;
        let template = current(&catalog, &recipe.name).await?;
        let took = begin.elapsed().as_secs_f64();
        let size = template.size_bytes >> 20;
        progress.report(Event::Done { what: &format!("{what} baked in {took:.1} s ({size} MiB on disk)") });
        templates.push(template);
    }
    Ok(templates)
}

impl PrepareOptions {
    fn resolve(&self) -> Result<Vec<Recipe>, RecipeError> {
        if self.templates.is_empty() {
            self.recipes.names().map(|name| self.recipes.resolve(name)).collect()
        } else {
            self.templates.iter().map(|name| self.recipes.resolve(name)).collect()
        }
    }
}

/// Names everything that a baked machine depends on.
fn recipe_id(recipe: &Recipe, kernel: &Kernel, initramfs: &Initramfs, engine: &Capabilities) -> String {
    let machine = (&kernel.info.id, &initramfs.id);
    let engine = (engine.engine, &engine.version, engine.accel);
    crate::short_hash("coppice template v1", &(BAKE_FORMAT, recipe, recipe.rootfs_key(), machine, engine))
}

async fn machine_files(
    data: &DataDir,
    cache: &Cache,
    options: &PrepareOptions,
    progress: &Arc<dyn Progress>,
) -> Result<(Kernel, Initramfs), PrepareError> {
    let (data, cache, progress) = (data.clone(), cache.clone(), Arc::clone(progress));
    let (agent, refresh) = (options.agent.clone(), options.refresh);
    blocking(move || {
        let kernel = prepare_kernel(&data, &cache, refresh, progress.as_ref())?;
        let initramfs = prepare_initramfs(&kernel, &agent, progress.as_ref())?;
        Ok((kernel, initramfs))
    })
    .await
}

async fn rootfs(
    cache: &Cache,
    recipe: &Recipe,
    refresh: bool,
    progress: &Arc<dyn Progress>,
) -> Result<Rootfs, PrepareError> {
    let (cache, recipe, progress) = (cache.clone(), recipe.clone(), Arc::clone(progress));
    blocking(move || {
        prepare_rootfs(&cache, &recipe, refresh, progress.as_ref())
            .map_err(|source| PrepareError::Rootfs { name: recipe.name.clone(), source: source.into() })
    })
    .await
}

async fn current(catalog: &Catalog, name: &str) -> Result<Template, PrepareError> {
    let (catalog, name) = (catalog.clone(), name.to_owned());
    blocking(move || Ok(catalog.current(&name)?)).await
}

/// The current generation, when it is made of just this and is not damaged.
async fn up_to_date(
    catalog: &Catalog,
    recipe: &Recipe,
    recipe_id: &str,
    progress: &dyn Progress,
) -> Result<Option<Template>, PrepareError> {
    match current(catalog, &recipe.name).await {
        Ok(template) => {
            Ok((template.info.name == recipe.name && template.info.recipe_id == recipe_id).then_some(template))
        }
        Err(PrepareError::Catalog(CatalogError::NotFound { .. })) => Ok(None),
        Err(PrepareError::Catalog(error)) => {
            progress.report(Event::Notice { what: &format!("making it anew: {error}") });
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

async fn blocking<T, F>(work: F) -> Result<T, PrepareError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, PrepareError> + Send + 'static,
{
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(PrepareError::Interrupted))
}
