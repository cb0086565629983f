//! `coppice template build`: makes templates on this host, also while its server runs; that uses them from then on.

use std::sync::Arc;

use clap::Args;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::progress::Shown;
use crate::server::{self, EngineArgs, PrepareArgs, VolumeArgs};
use crate::words;

/// Arguments of `coppice template build`.
#[derive(Debug, Args)]
pub struct BuildArgs {
    /// Names of recipes. Default: all that are known
    names: Vec<String>,
    /// Take the newest kernel and packages that the mirrors have
    #[arg(long)]
    refresh: bool,
    /// Bake even what is up to date
    #[arg(long)]
    rebake: bool,
    #[command(flatten)]
    volume: VolumeArgs,
    #[command(flatten)]
    prepare: PrepareArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) async fn run(context: &Context<'_>, args: BuildArgs) -> Result<(), CliError> {
    server::need_root("template build")?;
    let shown = Arc::new(Shown::new(context.output));
    let data = server::open_data_dir(&context.global.data_dir, &args.volume, &shown).await?;
    let engine = args.engine.start(&data).await?;
    let what = (args.names, args.refresh, args.rebake);
    let templates = server::prepare_templates(&data, engine.as_ref(), &args.prepare, what, context.output).await?;
    let value: Vec<_> = templates
        .iter()
        .map(|template| json!({"template": template.info, "size_bytes": template.size_bytes}))
        .collect();
    context.output.result(&value, |_| {
        let line = |template: &coppice_image::catalog::Template| {
            let info = &template.info;
            format!("{}  generation {}  {}", info.name, info.generation, words::size(template.size_bytes))
        };
        templates.iter().map(line).collect::<Vec<_>>().join("\n")
    })
}
