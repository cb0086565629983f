"""A host inside a host: a machine under TCG whose processor has SVM, so that its `/dev/kvm` runs unmodified kernels.

In it are this host's QEMU and the programs under test, on one XFS disk that is made for it and thrown away. It is told
commands by a channel, one at a time, by a shell that is its first process.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import closure
from .paths import CACHE, PREPARED, REPO, binary

#: Its memory, and what must be free beside it, MiB.
MEMORY_MIB = 3072
SPARE_MIB = 1024
#: Of its disk, which is sparse.
DISK_GIB = 12
#: What its start may take, until its first process answers.
BOOT = 240.0
#: What a command may take: other tests may run at the same time.
LONG = 300.0
#: Where our programs are in it.
PROGRAM = "/opt/coppice/coppice"
RECIPES = "/opt/coppice/recipes"
CONFORMANCE = "/opt/coppice/conformance"
JAIL = "/opt/coppice/jail"

TOOLS = [
    "sh",
    "mount",
    "kmod",
    "mkdir",
    "mkfifo",
    "ls",
    "cat",
    "rm",
    "cp",
    "sleep",
    "date",
    "stat",
    "grep",
    "tail",
    "ip",
]
TOOLS += ["timeout", "setsid", "readlink", "losetup", "umount", "mkfs.xfs"]
#: For its own root disk and channel; then what the product needs.
FIRST = ["virtio_mmio", "virtio_blk", "virtio_console", "xfs"]
LATER = [*FIRST, "kvm_amd", "tun", "veth", "loop", "virtio_rng", "overlay", "inet_diag", "tcp_diag", "udp_diag"]
NETFILTER = ("kernel/net/netfilter/nf", "kernel/net/ipv4/netfilter/nf", "kernel/net/ipv6/netfilter/nf")

INIT = """#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs run /run
while read module; do insmod "$module" || echo "no $module" >/dev/console; done </order
mount -t xfs /dev/vda /new || exec sh
exec switch_root /new /init
"""

#: The first process. A command is one line; the answer is a line with its exit code, the lengths of what it wrote to
#: standard output and standard error, and its milliseconds, and then both.
AGENT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root NO_COLOR=1
mount -t cgroup2 cgroup /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
for dir in /dev/shm /tmp; do mount -t tmpfs -o mode=1777 tmpfs $dir; done
modprobe -a {modules}
ip link set lo up
until [ -c /dev/vport*p1 ]; do sleep 0.05; done
exec 3<>$(echo /dev/vport*p1)
echo ready >&3
while :; do
    # Nothing to read, for a moment, until the driver has heard that somebody is at the other end.
    read -r line <&3 || {{ sleep 0.05; continue; }}
    sh -c "$line" >/run/out 2>/run/err </dev/null 3>&-
    code=$?
    echo "$code $(stat -c %s /run/out) $(stat -c %s /run/err)" >&3
    cat /run/out /run/err >&3
done
"""


class CannotRun(Exception):
    """Why there can be no such host here."""


@dataclass(frozen=True)
class Done:
    """One command."""

    code: int
    out: str
    err: str


class NestedHost:
    """A running one."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, console: Path) -> None:
        self.process = process
        self.console = console
        self._channel = channel
        self._reader = channel.makefile("rb")

    def _line(self, within: float) -> str:
        self._channel.settimeout(within)
        line = self._reader.readline()
        assert line, f"the nested host ended:\n{self.said()}"
        return line.decode().strip()

    def said(self) -> str:
        """The end of its console."""
        return self.console.read_text(errors="replace")[-4000:] if self.console.exists() else ""

    def ready(self) -> None:
        """Waits for its first process."""
        try:
            assert self._line(BOOT) == "ready"
        except TimeoutError as error:
            raise AssertionError(f"the nested host did not start within {BOOT} s:\n{self.said()}") from error

    def shell(self, line: str, timeout: float = LONG) -> Done:
        """Runs a line of shell."""
        assert "\n" not in line
        begin = time.monotonic()
        self._channel.sendall(line.encode() + b"\n")
        try:
            code, out, err = (int(field) for field in self._line(timeout).split())
            texts = [self._reader.read(length).decode(errors="replace") for length in (out, err)]
        except TimeoutError as error:
            raise AssertionError(f"{line!r} took longer than {timeout} s:\n{self.said()}") from error
        # Shown when the test fails.
        print(f"{time.monotonic() - begin:7.2f} s, its host used {self._cpu_seconds():6.1f} s: {line}")
        return Done(code, *texts)

    def _cpu_seconds(self) -> float:
        """Of processor time that it has used since it started."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ok(self, line: str, timeout: float = LONG) -> str:
        """Standard output of a line that succeeds."""
        done = self.shell(line, timeout)
        assert done.code == 0, f"{line!r} ended with {done.code}\n{done.out}{done.err}\n{self.said()}"
        return done.out

    def coppice(self, *words: str, timeout: float = LONG) -> Any:
        """What `coppice --json …` says."""
        return json.loads(self.ok(shlex.join([PROGRAM, "--json", *words]), timeout))

    def close(self) -> None:
        """Ends it, as a power cut does."""
        self.process.kill()
        self.process.wait(timeout=30)
        self._reader.close()
        self._channel.close()


def tsc_khz() -> int:
    """Of this host, as a guest under TCG counts it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return round(float(line.partition(":")[2]) * 1000)
    raise CannotRun("/proc/cpuinfo does not say how fast the processor is")


def check() -> None:
    """Raises [`CannotRun`] where a nested host can't be."""
    if os.geteuid() != 0:
        raise CannotRun("it needs root")
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    if int(available.split()[1]) >> 10 < MEMORY_MIB + SPARE_MIB:
        raise CannotRun(f"a host in a host needs {MEMORY_MIB + SPARE_MIB} MiB of free memory")
    try:
        rootfs_of(current_template("base"))
        kernel_package().stat()
    except OSError as error:
        raise CannotRun(f"the cache was emptied after the set-up: {error}") from error


def current_template(name: str) -> dict[str, Any]:
    """What `make setup` wrote about a template."""
    folder = PREPARED / "templates" / name
    generation = folder / (folder / "current").read_text().strip()
    return dict(json.loads((generation / "template.json").read_text())["body"])


def kernel_package() -> Path:
    """The package that guest kernels are from."""
    folder = CACHE / "kernels"
    return folder / json.loads((folder / "current.json").read_text())["file"]


def rootfs_of(template: dict[str, Any]) -> Path:
    """The directory of a template's root file system in the cache."""
    for described in (CACHE / "rootfs").glob("*/rootfs.json"):
        if json.loads(described.read_text())["digest"] == template["rootfs"]:
            return described.parent
    raise FileNotFoundError(f"the cache {CACHE} has no root file system of the template {template['name']}")


def _first_root(modules: closure.Modules, folder: Path) -> bytes:
    """The initramfs: finds the root disk."""
    root = closure.Root(folder)
    root.programs(["sh", "mount", "kmod", "switch_root"])
    root.inside("usr/bin/insmod").symlink_to("kmod")
    for name in ("proc", "sys", "dev", "run", "new"):
        root.inside(name).mkdir(exist_ok=True)
    order = modules.order(FIRST)
    for path in order:
        root.file(Path("/m", path), modules.dir / path)
    root.text("order", "".join(f"/m/{path}\n" for path in order))
    root.text("init", INIT, 0o755)
    return closure.initramfs(folder)


def _put_tiny_disk(root: closure.Root, scratch: Path) -> None:
    """A root disk for the engine's conformance, newer than the template's: it is read again and again."""
    tree = closure.Root(scratch)
    tree.programs(["sh", "cat", "cmp", "rm", "sleep", "mkdir", "head", "dd", "sha256sum"])
    for name in ("proc", "sys", "dev", "run", "tmp", "root", "etc"):
        tree.inside(name).mkdir(exist_ok=True)
    disk = root.inside("var/cache/coppice/rootfs/tiny/rootfs.ext4")
    disk.parent.mkdir(parents=True)
    disk.touch()
    command = [str(closure.find("mke2fs")), "-qq", "-t", "ext4", "-d", str(scratch), str(disk), "128M"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _small_recipe() -> str:
    """The recipe of the template `base` with less memory and nothing warmed: its root file system is the cached one."""
    text = (REPO / "templates/base/recipe.toml").read_text()
    text = re.sub(r"^warm = \[.*?^\]$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^aliases = .*$", "", text, flags=re.MULTILINE)
    text, changed = re.subn(r"^memory_mb = \d+$", "memory_mb = 256", text, flags=re.MULTILINE)
    assert changed == 1
    return text


def _fill(folder: Path, modules: closure.Modules, programs: dict[str, Path]) -> None:
    """The root disk: QEMU, tools, our programs, and what `coppice setup` would download."""
    root = closure.Root(folder)
    root.programs(TOOLS)
    for name in ("modprobe", "insmod", "lsmod"):
        root.inside(f"usr/sbin/{name}").parent.mkdir(parents=True, exist_ok=True)
        root.inside(f"usr/sbin/{name}").symlink_to("/usr/bin/kmod")
    qemu = closure.find("qemu-system-x86_64")
    root.program(qemu)
    for place in ("/usr/share/qemu", "/usr/share/seabios", "/usr/lib/x86_64-linux-gnu/qemu"):
        root.tree(Path(place))
    # Loaded when it is needed.
    root.program(closure.library("libnftables.so.1"))
    for path in ("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ld.so.cache"):
        root.file(Path(path))
    for name, source in programs.items():
        root.program(Path(name), source)
    root.file(Path(PROGRAM).with_name("coppice-guest"), binary().with_name("coppice-guest"))
    modules.put(root, [*LATER, *modules.below(*NETFILTER)])
    names = " ".join(name for name in LATER if modules.order([name]))
    root.text("init", AGENT.format(modules=names), 0o755)
    for name in ("proc", "sys", "dev", "run", "tmp", "root", "var/lib/coppice", "var/cache/coppice/rootfs", "mnt"):
        root.inside(name).mkdir(parents=True, exist_ok=True)
    root.tree(Path(RECIPES, "base"), REPO / "templates/base")
    root.text(f"{RECIPES}/base/recipe.toml", _small_recipe())
    template = current_template("base")
    rootfs = rootfs_of(template)
    kernels = root.inside("var/lib/coppice/kernels")
    kernels.mkdir()
    copies = [
        (rootfs, root.inside("var/cache/coppice/rootfs") / rootfs.name),
        (PREPARED / "kernels" / template["kernel"], kernels / template["kernel"]),
    ]
    for source, target in copies:
        subprocess.run(["cp", "-r", "--sparse=always", str(source), str(target)], check=True, stdin=subprocess.DEVNULL)
    _put_tiny_disk(root, folder.with_name("tiny"))
    (kernels / "current").write_text(template["kernel"] + "\n")


@contextmanager
def _mounted(image: Path, at: Path) -> Iterator[None]:
    """A new XFS image, mounted."""
    at.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_GIB << 30)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True, stdin=subprocess.DEVNULL)
    subprocess.run(["mount", "-o", "loop", str(image), str(at)], check=True, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True, stdin=subprocess.DEVNULL)


def build(folder: Path, programs: dict[str, Path]) -> tuple[Path, Path, Path]:
    """Kernel, initramfs and root disk below a directory of its own."""
    unpacked, image = folder / "kernel", folder / "host.xfs"
    subprocess.run(["dpkg-deb", "-x", str(kernel_package()), str(unpacked)], check=True, stdin=subprocess.DEVNULL)
    modules = closure.Modules(unpacked)
    vmlinuz = folder / "vmlinuz"
    shutil.move(unpacked / "boot" / f"vmlinuz-{modules.release}", vmlinuz)
    first = folder / "initramfs"
    first.write_bytes(_first_root(modules, folder / "first"))
    with _mounted(image, folder / "mnt"):
        _fill(folder / "mnt", modules, programs)
    shutil.rmtree(unpacked)
    return vmlinuz, first, image


def _command(vmlinuz: Path, first: Path, image: Path, console: Path, channel: int) -> list[str]:
    khz = tsc_khz()
    line = f"console=ttyS0 quiet loglevel=4 panic=-1 reboot=t random.trust_cpu=on tsc_early_khz={khz} tsc=reliable"
    return [
        str(closure.find("qemu-system-x86_64")),
        *("-no-user-config", "-nodefaults", "-nographic", "-no-reboot"),
        *("-M", "microvm,acpi=on,rtc=on,pit=on,pic=on"),
        *("-accel", "tcg,thread=multi,tb-size=512"),
        # As the product's own emulated machines, and with what KVM needs.
        *("-cpu", "max,+svm,erms=off,fsrm=off,la57=off"),
        # One processor. With two, a guest or this host's own kernel crashed: in 2 of 3 runs of the conformance with
        # `tb-size=48`, and in 0 of 4 with one. As far as the source tells (7.2 to 10.2): VMRUN leaves the vector that
        # it has injected in `exception_index`, and a processor that has to leave its loop for no interrupt, as when
        # another one throws translated code away, delivers it once more.
        *("-smp", "1", "-m", f"{MEMORY_MIB}M"),
        *("-serial", f"file:{console}"),
        *("-drive", f"if=none,id=disk,format=raw,file={image},cache=unsafe,discard=unmap"),
        *("-device", "virtio-blk-device,drive=disk"),
        *("-device", "virtio-rng-device"),
        *("-device", "virtio-serial-device"),
        *("-chardev", f"socket,id=channel,fd={channel}"),
        *("-device", "virtserialport,chardev=channel,name=channel"),
        *("-kernel", str(vmlinuz), "-initrd", str(first), "-append", line),
    ]


def start(folder: Path, programs: dict[str, Path]) -> NestedHost:
    """Builds and starts one; [`NestedHost.close`] ends it. Its first process answers."""
    vmlinuz, first, image = build(folder, programs)
    ours, theirs = socket.socketpair()
    console = folder / "console.log"
    command = _command(vmlinuz, first, image, console, theirs.fileno())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()
    host = NestedHost(process, ours, console)
    try:
        host.ready()
        host.ok(f"date -s @{time.time():.3f}")
    except BaseException:
        host.close()
        raise
    return host
