//! `coppice doctor`: what this host can do. It changes nothing but a file that it removes again, to try reflinks.

mod host;
mod storage;
mod vms;

use clap::ValueEnum;
use serde::Serialize;

use crate::commands::Context;
use crate::error::CliError;
use crate::output::Style;
use crate::server::EngineArgs;
use crate::words;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
enum Level {
    /// As it should be.
    Ok,
    /// It works without, but worse; or a later feature wants it.
    Warn,
    /// Nothing works without.
    Fail,
}

/// One thing that was looked at.
#[derive(Debug, Clone, Serialize)]
struct Check {
    name: &'static str,
    level: Level,
    finding: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

impl Check {
    fn ok(name: &'static str, finding: impl Into<String>) -> Self {
        Self { name, level: Level::Ok, finding: finding.into(), hint: None }
    }

    fn warn(name: &'static str, finding: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { name, level: Level::Warn, finding: finding.into(), hint: Some(hint.into()) }
    }

    fn fail(name: &'static str, finding: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { name, level: Level::Fail, finding: finding.into(), hint: Some(hint.into()) }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    healthy: bool,
    data_dir: std::path::PathBuf,
    checks: Vec<Check>,
}

/// Arguments of `coppice doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) async fn run(context: &Context<'_>, args: DoctorArgs) -> Result<(), CliError> {
    let dir = &context.global.data_dir;
    let mut checks = vec![host::root(), host::system(), host::memory()];
    checks.extend(vms::engine(&args.engine).await);
    checks.extend([vms::jail(&args.engine).await, vms::user(), vms::agent()]);
    checks.extend(storage::all(dir));
    checks.extend(host::tools());
    checks.extend([host::pagemap(), host::userfaultfd()]);
    checks.extend(host::network().await);
    checks.push(host::dns());
    checks.push(vms::server(dir));
    let failed = checks.iter().filter(|check| check.level == Level::Fail).count();
    let report = Report { healthy: failed == 0, data_dir: dir.clone(), checks };
    context.output.result(&report, |style| text(style, &report.checks))?;
    if failed == 0 {
        return Ok(());
    }
    let what = words::count(failed, "thing that is needed is", "things that are needed are");
    Err(CliError::failed("not_ready", format!("{what} missing")))
}

fn text(style: Style, checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or_default();
    let mut lines = Vec::new();
    for check in checks {
        let mark = match check.level {
            Level::Ok => style.good("ok  "),
            Level::Warn => style.note("warn"),
            Level::Fail => style.bad("FAIL"),
        };
        lines.push(format!("{mark}  {:<width$}  {}", check.name, check.finding));
        if let Some(hint) = &check.hint {
            lines.push(format!("      {:<width$}  {}", "", style.dim(&format!("→ {hint}"))));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_that_is_not_good_says_what_to_do() {
        let checks = [Check::ok("a", "fine"), Check::fail("long name", "missing", "do this")];
        let text = text(Style { color: false }, &checks);
        assert_eq!(text, "ok    a          fine\nFAIL  long name  missing\n                 → do this");
    }
}
