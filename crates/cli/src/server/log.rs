//! The server's own log, on standard error.

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::time::SystemTime;

use crate::error::CliError;
use crate::output::Output;

/// Options of the log.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// What to log: error, warn, info, debug, trace, or directives like `info,coppice_host=debug`
    #[arg(long, env = "COPPICE_LOG", default_value = "info", value_name = "LEVEL")]
    log_level: String,
    /// How
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

impl LogArgs {
    /// Starts logging.
    pub fn start(&self, output: &Output) -> Result<(), CliError> {
        let filter = EnvFilter::builder().parse(&self.log_level).map_err(|error| {
            CliError::usage(format!("--log-level {:?} can't be understood: {error}", self.log_level))
        })?;
        let base = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
        let started = match self.log_format {
            LogFormat::Json => base.json().with_timer(SystemTime).try_init(),
            LogFormat::Text => base.compact().with_ansi(output.error_style().color).try_init(),
        };
        started.map_err(|error| CliError::failed("log", format!("could not start the log: {error}")))
    }
}
