//! The `qemu` engine: QEMU's microvm machine, with KVM where that can run a stock kernel, with TCG anywhere else.
//!
//! | module | what it is for |
//! |---|---|
//! | [`command_line`] | typed parts to arguments |
//! | [`spawn`] | sockets, descriptors, user, process |
//! | [`start`] | boot, restore, adopt |
//! | [`qmp`] | the monitor's protocol |
//! | [`watch`] | events and the end of the process become a state |
//! | [`console`] | the serial console |
//! | [`vm`] | the handle: pause, resume, sessions, stats, kill |
//! | [`capture`] | one pause: memory, devices, disk |
//! | [`memory`], [`arena`], [`memory_file`] | written pages: found and copied, staged, written out |
//! | [`tsc`] | the host's TSC frequency |
//!
//! It does not limit what a VM uses (cgroups) and gives it no network: later issues.

mod arena;
mod capture;
mod command_line;
mod console;
mod memory;
mod memory_file;
mod qmp;
mod spawn;
mod start;
mod tsc;
mod vm;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use coppice_snapshot::{Accel, EngineKind, MachineImage};

use crate::probe::{self, Verdict};
use crate::{
    AdoptError, BootError, BootSpec, Capabilities, Engine, EngineError, Rebind, RestoreError, Vm, VmError, VmRecord,
};

/// Which way to execute guest code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AccelChoice {
    /// KVM where the probe says that it can run a stock kernel, else TCG.
    #[default]
    Auto,
    /// KVM, or an error.
    Kvm,
    /// TCG.
    Tcg,
}

/// Whom VMMs run as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmmUser {
    /// A system user of its own. That it is missing is an error.
    Named(String),
    /// Whoever runs the daemon. An isolation layer less: only when the operator said so.
    Current,
}

/// Configuration of the engine.
#[derive(Debug, Clone)]
pub struct QemuConfig {
    /// The program; a bare name is searched for on `PATH`.
    pub program: PathBuf,
    /// Which way to execute guest code.
    pub accel: AccelChoice,
    /// Whom VMMs run as.
    pub user: VmmUser,
    /// Where the probe of `/dev/kvm` keeps its result for this boot of the host.
    pub probe_cache: Option<PathBuf>,
    /// Bound of TCG's translation cache for each VM, MiB. Only what is used is allocated.
    pub tb_size_mib: u32,
    /// Bound of the memory that captures in progress stage pages in, bytes, all together.
    pub staging_bytes: u64,
}

impl Default for QemuConfig {
    fn default() -> Self {
        Self {
            program: PathBuf::from("qemu-system-x86_64"),
            accel: AccelChoice::Auto,
            user: VmmUser::Named("coppice-vmm".to_owned()),
            probe_cache: None,
            tb_size_mib: 128,
            staging_bytes: 1 << 30,
        }
    }
}

/// The engine.
#[derive(Debug)]
pub struct QemuEngine {
    facts: Arc<Facts>,
}

/// What was found out once, and what all VMs share.
#[derive(Debug)]
pub(crate) struct Facts {
    program: PathBuf,
    capabilities: Capabilities,
    /// Major and minor version of QEMU.
    version: (u32, u32),
    identity: Option<spawn::Identity>,
    tb_size_mib: u32,
    /// For guests under TCG.
    tsc_khz: Option<u32>,
    boot_id: String,
    arenas: arena::ArenaPool,
}

impl QemuEngine {
    /// Examines the host: QEMU and its version, `/dev/kvm`, the VMM's user, the TSC. Takes up to a few seconds when `/dev/kvm`
    /// has to be probed.
    ///
    /// # Errors
    /// Names what is missing.
    pub async fn new(config: QemuConfig) -> Result<Self, EngineError> {
        let examined = tokio::task::spawn_blocking(move || examine(config)).await;
        let facts = examined.unwrap_or_else(|error| Err(system("examining the host", std::io::Error::other(error))))?;
        tracing::info!(
            version = facts.capabilities.version,
            accel = ?facts.capabilities.accel,
            reason = facts.capabilities.accel_reason,
            "qemu engine"
        );
        Ok(Self { facts: Arc::new(facts) })
    }
}

fn system(what: &str, source: std::io::Error) -> EngineError {
    EngineError::System { what: what.to_owned(), source }
}

fn examine(config: QemuConfig) -> Result<Facts, EngineError> {
    let program = find_program(&config.program)?;
    let text = version_text(&program)?;
    let (full, version) = parse_version(&text).ok_or_else(|| EngineError::Version(text.chars().take(200).collect()))?;
    if version < (7, 2) {
        return Err(EngineError::TooOld { found: full, needed: "7.2" });
    }
    let (accel, accel_reason) = choose_accel(&config)?;
    let identity = match &config.user {
        VmmUser::Current => None,
        VmmUser::Named(name) => Some(spawn::Identity { kvm: kvm_group(accel), ..find_user(name)? }),
    };
    let tsc_khz = if accel == Accel::Tcg { tsc::khz() } else { None };
    Ok(Facts {
        program,
        capabilities: Capabilities { engine: EngineKind::Qemu, version: full, accel, accel_reason },
        version,
        identity,
        tb_size_mib: config.tb_size_mib.clamp(16, 2048),
        tsc_khz,
        boot_id: crate::process::boot_id().map_err(|source| system("reading the boot id", source))?,
        arenas: arena::ArenaPool::new(config.staging_bytes),
    })
}

fn choose_accel(config: &QemuConfig) -> Result<(Accel, String), EngineError> {
    if config.accel == AccelChoice::Tcg {
        return Ok((Accel::Tcg, "the configuration asks for TCG".to_owned()));
    }
    match (probe::cached(config.probe_cache.as_deref()), config.accel) {
        (Verdict::Suitable(reason), _) => Ok((Accel::Kvm, reason)),
        (Verdict::Unsuitable(reason), AccelChoice::Kvm) => Err(EngineError::NoKvm(reason)),
        (Verdict::Unsuitable(reason), _) => Ok((Accel::Tcg, reason)),
    }
}

/// An absolute path, so that what is started later is what was examined now.
fn find_program(program: &Path) -> Result<PathBuf, EngineError> {
    // The usual places, not the daemon's environment: configuration is read in one place.
    let places = ["/usr/local/bin", "/usr/bin", "/bin"].map(|dir| Path::new(dir).join(program));
    let found = if program.is_absolute() { Some(program.to_owned()) } else { places.into_iter().find(|p| p.is_file()) };
    found.ok_or_else(|| EngineError::Vm(VmError::ProgramMissing { program: program.to_owned() }))
}

fn version_text(program: &Path) -> Result<String, EngineError> {
    let output = std::process::Command::new(program).arg("--version").stdin(std::process::Stdio::null()).output();
    match output {
        Ok(output) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(EngineError::Vm(VmError::ProgramMissing { program: program.to_owned() }))
        }
        Err(error) => Err(system("asking QEMU for its version", error)),
    }
}

/// `QEMU emulator version 7.2.22 (Debian …)`: the version's text and its first two numbers.
fn parse_version(text: &str) -> Option<(String, (u32, u32))> {
    let full = text.split("version ").nth(1)?.split([' ', '\n']).next()?;
    Some((full.to_owned(), major_minor(full)?))
}

/// The first two numbers of a version.
fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The group of `/dev/kvm` (Debian: `kvm`), for VMMs that use it. Root's group is never given.
fn kvm_group(accel: Accel) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    let group = (accel == Accel::Kvm).then(|| std::fs::metadata("/dev/kvm").ok()).flatten()?.gid();
    (group != 0).then_some(group)
}

/// Uid and gid from /etc/passwd: the VMM's user is a local system user.
fn find_user(name: &str) -> Result<spawn::Identity, EngineError> {
    let passwd = std::fs::read_to_string("/etc/passwd").map_err(|source| system("reading /etc/passwd", source))?;
    let user = passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let found = fields.next()? == name;
        let mut number = |skip| fields.nth(skip)?.parse().ok();
        let (uid, gid) = (number(1)?, number(0)?);
        found.then_some(spawn::Identity { uid, gid, kvm: None })
    });
    user.filter(|user| user.uid != 0).ok_or_else(|| EngineError::NoUser(name.to_owned()))
}

#[async_trait]
impl Engine for QemuEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.facts.capabilities
    }

    async fn boot(&self, spec: BootSpec) -> Result<Arc<dyn Vm>, BootError> {
        Ok(Arc::new(start::boot(&self.facts, spec).await?))
    }

    async fn restore(&self, image: &MachineImage, rebind: Rebind) -> Result<Arc<dyn Vm>, RestoreError> {
        Ok(Arc::new(start::restore(&self.facts, image, rebind).await?))
    }

    async fn adopt(&self, record: VmRecord) -> Result<Arc<dyn Vm>, AdoptError> {
        Ok(Arc::new(start::adopt(&self.facts, record).await?))
    }
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
    fn a_missing_user_and_root_are_refused() {
        assert!(matches!(find_user("coppice-nobody-has-this"), Err(EngineError::NoUser(_))));
        assert!(matches!(find_user("root"), Err(EngineError::NoUser(_))));
        assert!(find_user("daemon").is_ok());
    }
}
