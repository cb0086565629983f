//! `coppice setup`: makes this host ready, so that `up` starts at once. Idempotent.

use std::sync::Arc;

use clap::Args;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::progress::Shown;
use crate::server::{self, EngineArgs, PrepareArgs, VolumeArgs};
use crate::words;

/// Arguments of `coppice setup`.
#[derive(Debug, Args)]
pub struct SetupArgs {
    #[command(flatten)]
    volume: VolumeArgs,
    #[command(flatten)]
    prepare: PrepareArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Templates to make. Default: all that are known
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    templates: Vec<String>,
}

pub(crate) async fn run(context: &Context<'_>, args: SetupArgs) -> Result<(), CliError> {
    server::need_root("setup")?;
    let shown = Arc::new(Shown::new(context.output));
    let data = server::open_data_dir(&context.global.data_dir, &args.volume, &shown).await?;
    server::user::ensure(server::user::SERVER, shown.as_ref())?;
    let engine = args.engine.start(&data).await?;
    let what = (args.templates, false, false);
    let templates = server::prepare_templates(&data, engine.as_ref(), &args.prepare, what, context.output).await?;
    let names: Vec<&str> = templates.iter().map(|template| template.info.name.as_str()).collect();
    server::user::give(data.clone(), server::user::find(server::user::SERVER)?).await?;
    let value = json!({"data_dir": data.root(), "reflink": data.reflink(), "engine": engine.capabilities(), "templates": names});
    context.output.result(&value, |_| {
        let number = words::count(names.len(), "template", "templates");
        let slow = if data.reflink() { "" } else { " (without reflinks: forks copy disks, which is slow)" };
        format!("{} is ready{slow}: {number} ({}). Next: coppice up", data.root().display(), names.join(", "))
    })
}
