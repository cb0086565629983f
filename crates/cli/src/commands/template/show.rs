//! `coppice template show`

use clap::Args;

use crate::commands::Context;
use crate::error::CliError;
use crate::words;

/// Arguments of `coppice template show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Its name, or another name of it
    name: String,
}

pub(crate) async fn run(context: &Context<'_>, args: ShowArgs) -> Result<(), CliError> {
    let template = context.client()?.template(&args.name).await?;
    context.output.result(&template, |style| {
        let mut lines = vec![
            format!("{}  {}", style.strong(&template.name), template.label),
            template.description.trim().to_owned(),
            format!(
                "{} CPU, {} MiB memory, {} on disk",
                template.cpu,
                template.memory_mb,
                words::size(template.size_bytes)
            ),
            format!("root disk {}", template.rootfs_path),
        ];
        if !template.base.is_empty() {
            lines.push(format!("built on {}", template.base));
        }
        if !template.tools.is_empty() {
            lines.push(format!("tools: {}", template.tools.join(", ")));
        }
        lines.extend(template.meta.iter().map(|(name, value)| format!("{name}: {value}")));
        lines.retain(|line| !line.is_empty());
        lines.join("\n")
    })
}
