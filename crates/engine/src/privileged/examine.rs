//! What there is to start VMMs with: QEMU's program and version, and whether KVM is worth it.

use std::io;
use std::path::{Path, PathBuf};

use coppice_snapshot::Accel;

use super::local::AccelChoice;
use crate::probe::{self, Verdict};
use crate::{EngineError, VmError, tsc};

/// QEMU on this host.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    /// Absolute, so that what is started later is what was examined now.
    pub path: PathBuf,
    pub version_text: String,
    /// Major and minor.
    pub version: (u32, u32),
    pub accel: Accel,
    pub tb_size_mib: u32,
    /// For guests under TCG.
    pub tsc_khz: Option<u32>,
}

/// Finds it, and asks for its version.
pub(crate) fn program(program: &Path, tb_size_mib: u32) -> Result<Program, EngineError> {
    let path = find_program(program)?;
    let text = version_text(&path)?;
    let (version_text, version) =
        parse_version(&text).ok_or_else(|| EngineError::Version(text.chars().take(200).collect()))?;
    if version < (7, 2) {
        return Err(EngineError::TooOld { found: version_text, needed: "7.2" });
    }
    let tb_size_mib = tb_size_mib.clamp(16, 2048);
    Ok(Program { path, version_text, version, accel: Accel::Tcg, tb_size_mib, tsc_khz: None })
}

pub(crate) fn choose_accel(choice: AccelChoice, cache: Option<&Path>) -> Result<(Accel, String), EngineError> {
    if choice == AccelChoice::Tcg {
        return Ok((Accel::Tcg, "the configuration asks for TCG".to_owned()));
    }
    match (probe::cached(cache), choice) {
        (Verdict::Suitable(reason), _) => Ok((Accel::Kvm, reason)),
        (Verdict::Unsuitable(reason), AccelChoice::Kvm) => Err(EngineError::NoKvm(reason)),
        (Verdict::Unsuitable(reason), _) => Ok((Accel::Tcg, reason)),
    }
}

pub(crate) fn tsc_khz(accel: Accel) -> Option<u32> {
    if accel == Accel::Tcg { tsc::khz() } else { None }
}

fn find_program(program: &Path) -> Result<PathBuf, EngineError> {
    // The usual places, not the daemon's environment: configuration is read in one place.
    let places = ["/usr/local/bin", "/usr/bin", "/bin"].map(|dir| Path::new(dir).join(program));
    let found = if program.is_absolute() { Some(program.to_owned()) } else { places.into_iter().find(|p| p.is_file()) };
    let missing = || EngineError::Vm(VmError::ProgramMissing { program: program.to_owned() });
    // A view of the file system of its own has no links to follow.
    found.and_then(|path| path.canonicalize().ok()).ok_or_else(missing)
}

fn version_text(program: &Path) -> Result<String, EngineError> {
    let output = std::process::Command::new(program).arg("--version").stdin(std::process::Stdio::null()).output();
    match output {
        Ok(output) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(EngineError::Vm(VmError::ProgramMissing { program: program.to_owned() }))
        }
        Err(source) => Err(EngineError::System { what: "asking QEMU for its version".to_owned(), source }),
    }
}

/// `QEMU emulator version 7.2.22 (Debian …)`: the version's text and its first two numbers.
fn parse_version(text: &str) -> Option<(String, (u32, u32))> {
    let full = text.split("version ").nth(1)?.split([' ', '\n']).next()?;
    Some((full.to_owned(), major_minor(full)?))
}

/// The first two numbers of a version.
pub(crate) fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c) 2003-2022";
        assert_eq!(parse_version(debian), Some(("7.2.22".to_owned(), (7, 2))));
        assert_eq!(parse_version("QEMU emulator version 10.0.2\n"), Some(("10.0.2".to_owned(), (10, 0))));
        assert_eq!(parse_version("sh: not found"), None);
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = program(Path::new("coppice-no-such-qemu"), 64).unwrap_err();
        assert!(matches!(error, EngineError::Vm(VmError::ProgramMissing { .. })), "{error}");
    }
}
