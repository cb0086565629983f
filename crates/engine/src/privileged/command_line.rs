//! QEMU's command line, built from typed parts. Pure: opens nothing.
//!
//! Everything QEMU needs is handed over as an open file descriptor, named here by its number: it resolves no path of ours,
//! so its unprivileged user needs no access to any directory. A restore has the same devices in the same order as the
//! boot did, which is what makes device state load; kernel and initramfs are left out then (measured: nothing refers to
//! them any more, and the start is 25 ms faster).

use std::ffi::OsString;
use std::os::fd::RawFd;

use coppice_guest_proto::session::PORTS;
use coppice_snapshot::{Accel, MachineSpec};

/// Descriptors that QEMU inherits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fds {
    /// Listening socket of the monitor.
    pub monitor: RawFd,
    /// Listening socket of the serial console.
    pub console: RawFd,
    /// Listening sockets of the guest ports.
    pub ports: [RawFd; 2],
    /// Guest memory.
    pub memory: RawFd,
    /// Root disk, opened for reading and writing.
    pub disk: RawFd,
    /// TAP device.
    pub tap: RawFd,
    /// What the machine starts from.
    pub start: Start,
}

/// What a machine starts from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start {
    /// A kernel.
    Boot {
        /// Compressed kernel.
        vmlinuz: RawFd,
        /// Initramfs.
        initramfs: RawFd,
        /// TSC frequency for the guest, under TCG.
        tsc_khz: Option<u32>,
    },
    /// Captured device state.
    Restore {
        /// The device state, at its beginning.
        devices: RawFd,
    },
}

/// What of the command line depends on QEMU and the host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flavour {
    /// How guest code is executed.
    pub accel: Accel,
    /// Bound of TCG's translation cache, MiB.
    pub tb_size_mib: u32,
    /// Whether the memory file may be opened for reading only (QEMU 8.2 and newer).
    pub readonly_memory: bool,
}

/// Under TCG, `rep movsb` and `rep stosb` are loops over single bytes: a guest that is told that they are fast (ERMS, FSRM)
/// clears and copies memory at a third of the speed (measured: 80 MB through /dev/zero, 120 ms against 45 ms). Five-level page
/// tables only make every TLB miss longer.
const TCG_CPU: &str = "max,erms=off,fsrm=off,la57=off";

/// The engine's part of the kernel command line. `tsc_early_khz`: without it a kernel under TCG calibrates the TSC against
/// the emulated PIT, which fails on a busy host and then hangs for ever. `panic`/`reboot`: a panic becomes the end of the
/// process at once (with `-no-reboot`), instead of a machine that spins.
fn kernel_command_line(machine: &MachineSpec, tsc_khz: Option<u32>) -> String {
    let mut line = String::from("console=ttyS0 quiet loglevel=4 panic=-1 reboot=t random.trust_cpu=on");
    if let Some(khz) = tsc_khz {
        line.push_str(&format!(" tsc_early_khz={khz} tsc=reliable"));
    }
    if !machine.cmdline.is_empty() {
        line.push(' ');
        line.push_str(&machine.cmdline);
    }
    line
}

/// The name of a file that is handed over as a descriptor, or that the system call filter's supervisor answers with one.
pub(crate) fn fd_path(fd: RawFd) -> String {
    format!("/proc/self/fd/{fd}")
}

/// All arguments.
pub(crate) fn arguments(machine: &MachineSpec, flavour: Flavour, fds: Fds, mac: [u8; 6]) -> Vec<OsString> {
    let mut args = Args::default();
    let memory = machine.memory_mib;
    args.flag("-no-user-config").flag("-nodefaults").flag("-nographic").flag("-no-reboot");
    // No fork, no exec, no change of user, no change of priority: nothing a VMM needs after its start.
    args.pair("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
    // A stock kernel under TCG needs PIC, PIT and RTC; finds virtio-mmio devices by ACPI only.
    args.pair("-M", "microvm,acpi=on,rtc=on,pit=on,pic=on,memory-backend=mem0");
    match flavour.accel {
        Accel::Kvm => args.pair("-accel", "kvm"),
        Accel::Tcg => args.pair("-accel", format!("tcg,thread=multi,tb-size={}", flavour.tb_size_mib)),
    };
    args.pair("-cpu", if flavour.accel == Accel::Tcg { TCG_CPU } else { "max" });
    args.pair("-smp", machine.cpus.to_string()).pair("-m", format!("{memory}M"));
    // MAP_PRIVATE of the image's memory: all machines of one image share its page cache, each owns what it writes.
    let access = if flavour.readonly_memory { ",readonly=on,rom=off" } else { "" };
    let file = fd_path(fds.memory);
    args.pair("-object", format!("memory-backend-file,id=mem0,mem-path={file},share=off,size={memory}M{access}"));
    args.pair("-chardev", format!("socket,id=monitor,fd={},server=on,wait=off", fds.monitor));
    args.pair("-mon", "chardev=monitor,mode=control");
    args.pair("-chardev", format!("socket,id=console,fd={},server=on,wait=off", fds.console));
    args.pair("-serial", "chardev:console");
    args.pair("-add-fd", format!("fd={},set=0", fds.disk));
    args.pair(
        "-drive",
        "if=none,id=disk0,format=raw,file=/dev/fdset/0,auto-read-only=off,file.locking=off,cache=writeback,aio=threads,\
         discard=unmap",
    );
    // Every failed write or read of the host's disk stops the machine and is retried when it is resumed: the guest never
    // sees an error of the host's disk, and never silently hangs, since the stop is reported as VmState::IoError.
    args.pair("-device", "virtio-blk-device,drive=disk0,werror=stop,rerror=stop");
    args.pair("-device", "virtio-serial-device,max_ports=4");
    for (nr, fd) in fds.ports.iter().enumerate() {
        let name = PORTS.get(nr).copied().unwrap_or_default();
        args.pair("-chardev", format!("socket,id=port{nr},fd={fd},server=on,wait=off"));
        args.pair("-device", format!("virtserialport,id=vport{nr},nr={},chardev=port{nr},name={name}", nr + 1));
    }
    network(&mut args, fds.tap, mac);
    match fds.start {
        Start::Boot { vmlinuz, initramfs, tsc_khz } => {
            args.pair("-kernel", fd_path(vmlinuz));
            args.pair("-initrd", fd_path(initramfs));
            args.pair("-append", kernel_command_line(machine, tsc_khz));
        }
        Start::Restore { devices } => {
            // The stream of xen-save-devices-state has no configuration section.
            args.pair("-global", "migration.send-configuration=off").pair("-incoming", format!("fd:{devices}"));
        }
    }
    args.0
}

/// The last device. No vhost: that is the host kernel's code working on guest memory for a jailed process. What the device
/// offers to the guest is the same for every machine, since a driver that was captured goes on with it.
fn network(args: &mut Args, tap: RawFd, mac: [u8; 6]) {
    let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
    args.pair("-netdev", format!("tap,id=net0,fd={tap},vhost=off"));
    args.pair("-device", format!("virtio-net-device,netdev=net0,mac={mac}"));
}

#[derive(Default)]
struct Args(Vec<OsString>);

impl Args {
    fn flag(&mut self, name: &str) -> &mut Self {
        self.0.push(name.into());
        self
    }

    fn pair(&mut self, name: &str, value: impl Into<OsString>) -> &mut Self {
        self.0.push(name.into());
        self.0.push(value.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> MachineSpec {
        let id = || "k".to_owned();
        MachineSpec { cpus: 2, memory_mib: 256, kernel: id(), initramfs: id(), cmdline: "root=/dev/vda".into() }
    }

    fn line(start: Start, flavour: Flavour) -> Vec<String> {
        let fds = Fds { monitor: 10, console: 11, ports: [12, 13], memory: 14, disk: 15, tap: 16, start };
        arguments(&machine(), flavour, fds, [2, 0x63, 0, 0, 0, 0xaf])
            .into_iter()
            .map(|a| a.into_string().unwrap())
            .collect()
    }

    const TCG: Flavour = Flavour { accel: Accel::Tcg, tb_size_mib: 64, readonly_memory: false };

    #[test]
    fn a_restore_has_the_devices_of_the_boot_in_the_same_order() {
        let boot = line(Start::Boot { vmlinuz: 20, initramfs: 21, tsc_khz: Some(2_600_000) }, TCG);
        let restore = line(Start::Restore { devices: 22 }, TCG);
        let devices = |args: &[String]| {
            args.windows(2)
                .filter(|w| w[0] == "-device" || w[0] == "-M" || w[0] == "-smp")
                .map(|w| w[1].clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(devices(&boot), devices(&restore));
        assert!(boot.contains(&"virtio-net-device,netdev=net0,mac=02:63:00:00:00:af".to_owned()));
        assert!(boot.iter().any(|a| a.ends_with("tsc_early_khz=2600000 tsc=reliable root=/dev/vda")));
        assert!(restore.contains(&"fd:22".to_owned()) && !restore.contains(&"-kernel".to_owned()));
    }

    #[test]
    fn only_tcg_gets_a_tsc_frequency_and_only_new_qemu_a_read_only_memory_file() {
        let kvm = Flavour { accel: Accel::Kvm, tb_size_mib: 64, readonly_memory: true };
        let boot = line(Start::Boot { vmlinuz: 20, initramfs: 21, tsc_khz: None }, kvm);
        assert!(boot.iter().all(|a| !a.contains("tsc_early_khz")));
        assert!(boot.iter().any(|a| a.contains("share=off,size=256M,readonly=on,rom=off")));
        assert!(line(Start::Restore { devices: 1 }, TCG).iter().all(|a| !a.contains("readonly=on")));
    }
}
