//! `coppice template delete`: on this host, also while its server runs. Through the API nobody may: templates are for all.

use std::sync::Arc;

use clap::Args;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::progress::Shown;
use crate::server::{self, VolumeArgs};

/// Arguments of `coppice template delete`.
#[derive(Debug, Args)]
pub struct DeleteArgs {
    /// Its name
    name: String,
    #[command(flatten)]
    volume: VolumeArgs,
}

pub(crate) async fn run(context: &Context<'_>, args: DeleteArgs) -> Result<(), CliError> {
    server::need_root("template delete")?;
    let shown = Arc::new(Shown::new(context.output));
    let data = server::open_data_dir(&context.global.data_dir, &args.volume, &shown).await?;
    coppice_host::delete_template(&data, &args.name).await.map_err(|error| {
        let failed = CliError::failed(error.code(), error.chain());
        match error.hint() {
            Some(hint) => failed.hint(hint),
            None => failed,
        }
    })?;
    context.output.done(&json!({"deleted": [args.name]}), &format!("deleted {}", args.name))
}
