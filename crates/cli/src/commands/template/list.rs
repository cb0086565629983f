//! `coppice template list`

use crate::commands::Context;
use crate::error::CliError;
use crate::table::{self, plain};
use crate::words;

pub(crate) async fn run(context: &Context<'_>) -> Result<(), CliError> {
    let list = context.client()?.templates().await?;
    context.output.result(&list, |style| {
        if list.is_empty() {
            return "no templates; `coppice template build NAME` makes one".into();
        }
        let rows = list.iter().map(|template| {
            vec![
                plain(&template.name),
                plain(template.cpu.to_string()),
                plain(format!("{} MiB", template.memory_mb)),
                plain(words::size(template.size_bytes)),
                plain(&template.label),
            ]
        });
        table::render(style, &["template", "cpu", "memory", "size", "what it is"], rows.collect())
    })
}
