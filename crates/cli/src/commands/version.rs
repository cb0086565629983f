//! `coppice version`: this program's, and the server's if one answers.

use serde_json::json;

use crate::commands::Context;
use crate::connect;
use crate::error::CliError;

pub(crate) async fn run(context: &Context<'_>) -> Result<(), CliError> {
    let own = env!("CARGO_PKG_VERSION");
    let server = match connect::client_without_key(context.global) {
        Some(client) => client.version().await.ok().map(|version| (client.server().to_owned(), version)),
        None => None,
    };
    let value = json!({
        "version": own,
        "server": server.as_ref().map(|(url, version)| {
            json!({"url": url, "version": version.version, "engine": version.engine})
        }),
    });
    context.output.result(&value, |_| match server {
        Some((url, version)) => {
            format!("coppice {own}\nserver {} at {url}, engine {}", version.version, version.engine)
        }
        None => format!("coppice {own}\nno server answers"),
    })
}
