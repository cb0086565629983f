//! Everything that `coppice setup` does, without the command line: `prepare DATA CACHE AGENT [TEMPLATE]…`.
//! For working on the engine and the agent.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use coppice_disk::{DataDir, Event, VolumeSpec, ensure_volume};
use coppice_engine::{Local, LocalConfig, QemuConfig, QemuEngine};
use coppice_image::{Cache, PrepareOptions, Recipes, prepare};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [data, cache, agent, templates @ ..] = args.as_slice() else {
        return Err("usage: prepare DATA CACHE AGENT [TEMPLATE]…".into());
    };
    let begin = Instant::now();
    let progress = move |event: Event<'_>| println!("{:7.2} s  {event:?}", begin.elapsed().as_secs_f64());
    ensure_volume(Path::new(data), &VolumeSpec::default(), &progress)?;
    let data = DataDir::open(Path::new(data))?;
    let cache = Cache::open(Path::new(cache))?;
    let local = std::sync::Arc::new(Local::new(LocalConfig::default())?);
    let engine = QemuEngine::new(local, QemuConfig::default()).await?;
    let options = PrepareOptions {
        templates: templates.to_vec(),
        recipes: Recipes::builtin(),
        agent: PathBuf::from(agent),
        refresh: false,
        rebake: false,
    };
    for template in prepare(&data, &cache, &engine, &options, Arc::new(progress)).await? {
        println!("{} {} {}", template.info.name, template.info.generation, template.dir.display());
    }
    Ok(())
}
