//! The data directory with its volume, and the templates in it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use coppice_disk::{DataDir, VolumeSpec, ensure_volume};
use coppice_engine::Engine;
use coppice_image::catalog::Template;
use coppice_image::prepare::{PrepareOptions, prepare};
use coppice_image::{Cache, DEFAULT_CACHE, Recipes};

use crate::error::CliError;
use crate::output::Output;
use crate::progress::Shown;

/// The volume under the data directory, for a disk without reflinks.
#[derive(Debug, Clone, Args)]
pub struct VolumeArgs {
    /// Size of the XFS image that is made when the disk has no reflinks, GiB. Sparse: only what is written takes space
    #[arg(long, default_value_t = 64, value_name = "GIB", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    volume_size: u64,
    /// Where that image is. Default: the data directory's name with .xfs
    #[arg(long, value_name = "FILE")]
    volume_image: Option<PathBuf>,
}

/// How templates are made.
#[derive(Debug, Clone, Args)]
pub struct PrepareArgs {
    /// Where downloads and built root file systems are kept
    #[arg(long, env = "COPPICE_CACHE_DIR", default_value = DEFAULT_CACHE, value_name = "DIR")]
    pub cache_dir: PathBuf,
    /// Your own recipes (DIR/NAME/recipe.toml), beside the built-in ones
    #[arg(long, value_name = "DIR")]
    pub recipes: Option<PathBuf>,
    /// The static guest agent. Default: coppice-guest next to this program
    #[arg(long, env = "COPPICE_GUEST_AGENT", value_name = "FILE")]
    pub agent: Option<PathBuf>,
}

impl PrepareArgs {
    /// The guest agent's binary.
    pub fn agent(&self) -> Result<PathBuf, CliError> {
        if let Some(agent) = &self.agent {
            return Ok(agent.clone());
        }
        let own = std::env::current_exe().map_err(|error| {
            CliError::failed("no_agent", "can't tell where this program is; give --agent").because(error)
        })?;
        Ok(own.with_file_name("coppice-guest"))
    }

    fn recipes(&self) -> Result<Recipes, CliError> {
        let mut recipes = Recipes::builtin();
        if let Some(dir) = &self.recipes {
            if !dir.is_dir() {
                return Err(CliError::usage(format!("--recipes {} is no directory", dir.display())));
            }
            recipes
                .add_dir(dir)
                .map_err(|error| CliError::failed("recipe", "a recipe can't be used").because(error))?;
        }
        Ok(recipes)
    }
}

/// Makes sure of the volume, and opens the data directory on it.
pub async fn open_data_dir(dir: &Path, volume: &VolumeArgs, shown: &Arc<Shown>) -> Result<DataDir, CliError> {
    let spec = VolumeSpec { image: volume.volume_image.clone(), size: volume.volume_size << 30 };
    if dir.exists() && !dir.is_dir() {
        let message = format!("the data directory {} is not a directory", dir.display());
        return Err(CliError::failed("data_dir", message).hint("give another --data-dir"));
    }
    let (dir, shown) = (dir.to_owned(), Arc::clone(shown));
    let opened = tokio::task::spawn_blocking(move || {
        ensure_volume(&dir, &spec, shown.as_ref())
            .map_err(|error| CliError::failed("volume", "the data directory can't be set up").because(error))?;
        DataDir::open(&dir)
            .map_err(|error| CliError::failed("data_dir", "the data directory can't be opened").because(error))
    });
    opened.await.map_err(|error| CliError::failed("data_dir", "opening the data directory broke").because(error))?
}

/// Makes the templates that are missing or out of date; none named: all that are known.
pub async fn prepare_templates(
    data: &DataDir,
    engine: &dyn Engine,
    args: &PrepareArgs,
    (templates, refresh, rebake): (Vec<String>, bool, bool),
    output: &Output,
) -> Result<Vec<Template>, CliError> {
    let cache = Cache::open(&args.cache_dir)
        .map_err(|error| CliError::failed("cache", "the cache can't be used").because(error))?;
    let options = PrepareOptions { templates, recipes: args.recipes()?, agent: args.agent()?, refresh, rebake };
    prepare(data, &cache, engine, &options, Arc::new(Shown::new(output)))
        .await
        .map_err(|error| CliError::failed("prepare", "set-up did not finish").because(error))
}
