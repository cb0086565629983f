//! `coppice sandbox logs`

use clap::Args;
use serde_json::json;

use crate::commands::Context;
use crate::error::CliError;
use crate::resolve;

/// Arguments of `coppice sandbox logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
    /// Go on with what comes, until the sandbox ends. With --json: one object per line
    #[arg(short, long)]
    follow: bool,
    /// Only the last lines
    #[arg(short = 'n', long, value_name = "LINES", conflicts_with = "follow")]
    tail: Option<usize>,
}

pub(crate) async fn run(context: &Context<'_>, args: LogsArgs) -> Result<(), CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let output = context.output;
    if args.follow {
        let mut lines = client.follow_logs(&id).await?;
        while let Some(line) = lines.next().await? {
            if output.is_json() {
                output.text(&json!({"line": line}).to_string())?;
            } else {
                output.raw(line.as_bytes())?;
                if !line.ends_with('\n') {
                    output.raw(b"\n")?;
                }
            }
        }
        return Ok(());
    }
    let bytes = client.logs(&id).await?;
    let bytes = args.tail.map_or(&bytes[..], |lines| last_lines(&bytes, lines));
    if output.is_json() {
        return output.result(&json!({"id": id, "log": String::from_utf8_lossy(bytes)}), |_| String::new());
    }
    output.raw(bytes)
}

fn last_lines(bytes: &[u8], lines: usize) -> &[u8] {
    let body = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let mut ends = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
    let start = match lines.checked_sub(1) {
        None => bytes.len(),
        Some(skip) => ends.nth(skip).unwrap_or(0),
    };
    bytes.get(start..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::last_lines;

    #[test]
    fn the_last_lines() {
        for (lines, expected) in [(0, ""), (1, "c\n"), (2, "b\nc\n"), (3, "a\nb\nc\n"), (9, "a\nb\nc\n")] {
            assert_eq!(last_lines(b"a\nb\nc\n", lines), expected.as_bytes(), "{lines}");
        }
        assert_eq!(last_lines(b"a\nb", 1), b"b");
        assert_eq!(last_lines(b"", 5), b"");
    }
}
