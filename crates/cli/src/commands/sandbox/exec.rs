//! `coppice sandbox exec`: output as it comes, and the command's exit code.

use std::io::{IsTerminal as _, Read as _};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use coppice_client::api::ExecRequest;
use coppice_client::{ClientError, ExecEvent};

use crate::commands::{Context, pair};
use crate::error::CliError;
use crate::output::Output;
use crate::{resolve, words};

/// Largest standard input: it is sent as one JSON string.
const MAX_STDIN: u64 = 512 << 10;

/// Arguments of `coppice sandbox exec`.
///
/// Exit codes: the command's own; 124 when it ran into its deadline; 1 when it could not be run or its end is unknown.
#[derive(Debug, Args)]
pub struct ExecArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
    /// One word: a line for /bin/sh. Several: a program and its arguments, which no shell looks at
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<String>,
    /// Seconds after which it is killed
    #[arg(short, long, value_name = "SECONDS")]
    timeout: Option<f64>,
    /// Directory to run it in
    #[arg(short = 'w', long, value_name = "DIR")]
    cwd: Option<String>,
    /// Environment variable for it
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair)]
    env: Vec<(String, String)>,
    /// User to run it as
    #[arg(short, long, value_name = "NAME")]
    user: Option<String>,
    /// Give it this standard input even from a terminal (end with Ctrl-D). Input that is no terminal is always given
    #[arg(short, long, conflicts_with = "no_stdin")]
    interactive: bool,
    /// Don't read standard input
    #[arg(short, long)]
    no_stdin: bool,
}

pub(crate) async fn run(context: &Context<'_>, args: ExecArgs) -> Result<ExitCode, CliError> {
    let client = context.client()?;
    let id = resolve::sandbox(&client, &args.sandbox).await?;
    let read = !args.no_stdin && (args.interactive || !std::io::stdin().is_terminal());
    let request = ExecRequest {
        cmd: line(&args.command),
        timeout_seconds: args.timeout,
        env: args.env.into_iter().collect(),
        cwd: args.cwd,
        user: args.user,
        stdin: if read { stdin(context.output).await? } else { None },
    };
    let output = context.output;
    if output.is_json() {
        let reply = client.exec(&id, &request).await.map_err(deadline)?;
        output.result(&reply, |_| String::new())?;
        return Ok(code(reply.exit_code));
    }
    let mut stream = client.exec_stream(&id, &request).await.map_err(deadline)?;
    while let Some(event) = stream.next().await {
        match event.map_err(deadline)? {
            ExecEvent::Stdout(text) => output.raw(text.as_bytes())?,
            ExecEvent::Stderr(text) => output.raw_error(text.as_bytes())?,
            ExecEvent::Exit(exit) => return Ok(code(exit.exit_code)),
        }
    }
    Err(ClientError::Interrupted.into())
}

/// One word is a line for the shell; of several, each is one argument.
fn line(words: &[String]) -> String {
    match words {
        [line] => line.clone(),
        words => words.iter().map(|word| words::shell_word(word)).collect::<Vec<_>>().join(" "),
    }
}

fn deadline(error: ClientError) -> CliError {
    if error.is_timeout() && !matches!(error, ClientError::Transport { .. }) {
        return CliError::TimedOut(error.to_string());
    }
    error.into()
}

fn code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// All of standard input; `None` when it is empty. A pipe that nobody closes is waited for, and that is said.
async fn stdin(output: &Output) -> Result<Option<String>, CliError> {
    let failed = |message: String| CliError::failed("stdin", message);
    let reading = tokio::task::spawn_blocking(|| {
        let mut bytes = Vec::new();
        std::io::stdin().lock().take(MAX_STDIN + 1).read_to_end(&mut bytes).map(|_| bytes)
    });
    tokio::pin!(reading);
    let read = match tokio::time::timeout(Duration::from_secs(2), &mut reading).await {
        Ok(read) => read,
        Err(_) => {
            output.note("waiting for the end of standard input; -n runs the command without it");
            reading.await
        }
    };
    let read = read.map_err(|error| failed("could not read standard input".into()).because(error))?;
    let bytes = read.map_err(|error| failed("could not read standard input".into()).because(error))?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length > MAX_STDIN) {
        return Err(failed(format!("standard input is larger than {}", words::size(MAX_STDIN)))
            .hint("copy it into the sandbox with `coppice sandbox cp - ID:/path`, and read it from there"));
    }
    let text = String::from_utf8(bytes).map_err(|_| {
        failed("standard input is not UTF-8 text".into())
            .hint("copy it into the sandbox with `coppice sandbox cp - ID:/path`, and read it from there")
    })?;
    Ok((!text.is_empty()).then_some(text))
}

#[cfg(test)]
mod tests {
    use super::line;

    #[test]
    fn one_word_is_a_line_and_several_are_arguments() {
        let words = |words: &[&str]| line(&words.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(words(&["echo $HOME | wc"]), "echo $HOME | wc");
        assert_eq!(words(&["python3", "-c", "print('a b')"]), r"python3 -c 'print('\''a b'\'')'");
    }
}
