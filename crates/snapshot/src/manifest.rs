//! The manifest: plain data in a [`crate::sealed`] file, whose fields are checked when it is written and when it is read.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::sealed::{self, SealError};
use crate::verify::Digest;

/// The name that every manifest starts with.
pub const FORMAT: &str = "coppice-machine-image";
/// The version that this build writes and reads. 2: machines have a network device.
pub const FORMAT_VERSION: u32 = 2;
/// Largest manifest that is read, bytes.
pub(crate) const MAX_MANIFEST: u64 = 1 << 20;

/// Which engine captured a machine, and so which can restore it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    /// QEMU's microvm machine.
    Qemu,
    /// The scriptable fake of the tests.
    Fake,
}

/// How guest code is executed. Device and CPU state of one can't be restored by the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accel {
    /// Hardware virtualization.
    Kvm,
    /// QEMU's translator: any host.
    Tcg,
}

/// The shape of a machine: what must be the same when it is restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSpec {
    /// Virtual CPUs, 1 to 64.
    pub cpus: u32,
    /// Guest memory in MiB, 128 to 65,536.
    pub memory_mib: u32,
    /// Id of the guest kernel (a directory name under `kernels/`).
    pub kernel: String,
    /// Id of the initramfs.
    pub initramfs: String,
    /// Kernel command line.
    pub cmdline: String,
}

/// One file of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileInfo {
    /// Length, bytes (apparent size of a sparse file).
    pub len: u64,
    /// Of the contents (see [`crate::digest_sparse_file`]); absent where hashing would have been in the way of a fork.
    pub digest: Option<Digest>,
}

/// What an image directory holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Id of the image.
    pub id: Uuid,
    /// When the machine was paused for it, RFC 3339.
    pub captured_at: jiff::Timestamp,
    /// Who can restore it.
    pub engine: EngineKind,
    /// Version of the engine that captured it, e.g. QEMU's.
    pub engine_version: String,
    /// How its guest code was executed.
    pub accel: Accel,
    /// Shape of the machine.
    pub machine: MachineSpec,
    /// The guest port that had the host's session at the capture; its next host uses the other one.
    pub channel_port: u8,
    /// The `memory` file.
    pub memory: FileInfo,
    /// The `devices` file. Its digest is always there.
    pub devices: FileInfo,
    /// The `disk.ext4` file.
    pub disk: FileInfo,
}

/// Why a manifest can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It is not a manifest of this build's version, or damaged.
    #[error("the file of the manifest")]
    Sealed(#[from] SealError),
    /// A field is out of its range.
    #[error("manifest field {field} is out of range: {value}")]
    Range {
        /// Name of the field.
        field: &'static str,
        /// What it holds.
        value: String,
    },
}

impl Manifest {
    /// The file's contents.
    ///
    /// # Errors
    /// [`ManifestError::Range`] when a field is out of its range, so that nothing is written that can't be read.
    pub fn encode(&self) -> Result<Vec<u8>, ManifestError> {
        self.validate()?;
        Ok(sealed::seal(FORMAT, FORMAT_VERSION, self)?)
    }

    /// Parses and validates a file's contents.
    ///
    /// # Errors
    /// Says what is wrong with the file, or which field is out of its range.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let manifest: Self = sealed::open(FORMAT, FORMAT_VERSION, bytes)?;
        manifest.validate()?;
        Ok(manifest)
    }

    fn validate(&self) -> Result<(), ManifestError> {
        let range = |field, value: &dyn ToString| Err(ManifestError::Range { field, value: value.to_string() });
        if !(1..=64).contains(&self.machine.cpus) {
            return range("machine.cpus", &self.machine.cpus);
        }
        if !(128..=65_536).contains(&self.machine.memory_mib) {
            return range("machine.memory_mib", &self.machine.memory_mib);
        }
        if self.memory.len != u64::from(self.machine.memory_mib) << 20 {
            return range("memory.len", &self.memory.len);
        }
        if self.devices.digest.is_none() {
            return range("devices.digest", &"none");
        }
        if self.channel_port > 1 {
            return range("channel_port", &self.channel_port);
        }
        for (field, id) in [("machine.kernel", &self.machine.kernel), ("machine.initramfs", &self.machine.initramfs)] {
            let plain = |c: char| c.is_ascii_alphanumeric() || "._+~-".contains(c);
            if id.is_empty() || id.len() > 128 || id.starts_with('.') || !id.chars().all(plain) {
                return range(field, id);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Manifest {
        let file = |len| FileInfo { len, digest: Some(Digest::of(b"x")) };
        Manifest {
            id: Uuid::new_v4(),
            captured_at: jiff::Timestamp::now(),
            engine: EngineKind::Qemu,
            engine_version: "7.2.22".into(),
            accel: Accel::Tcg,
            machine: MachineSpec {
                cpus: 1,
                memory_mib: 512,
                kernel: "6.1.0-9-cloud-amd64".into(),
                initramfs: "abc".into(),
                cmdline: "console=ttyS0".into(),
            },
            channel_port: 1,
            memory: FileInfo { len: 512 << 20, digest: None },
            devices: file(9000),
            disk: file(2 << 30),
        }
    }

    #[test]
    fn what_is_encoded_decodes() {
        let manifest = sample();
        assert_eq!(Manifest::decode(&manifest.encode().unwrap()).unwrap(), manifest);
    }

    #[test]
    fn fields_out_of_range_are_refused_before_they_are_written() {
        let spoilers: [fn(&mut Manifest); 6] = [
            |m| m.machine.cpus = 0,
            |m| m.machine.memory_mib = 127,
            |m| m.memory.len = 1,
            |m| m.channel_port = 2,
            |m| m.machine.kernel = "../etc".into(),
            |m| m.devices.digest = None,
        ];
        for spoil in spoilers {
            let mut manifest = sample();
            spoil(&mut manifest);
            assert!(matches!(manifest.encode(), Err(ManifestError::Range { .. })));
        }
    }

    proptest! {
        #[test]
        fn no_input_panics_and_no_damage_passes(cut in 0usize..400, junk in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _unused = Manifest::decode(&junk);
            let good = sample().encode().unwrap();
            let cut = cut.min(good.len() - 1);
            prop_assert!(Manifest::decode(&good[..cut]).is_err());
        }
    }
}
