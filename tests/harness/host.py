"""Eyes on the host: VMM processes of a data directory, their memory, what is left of them."""

import os
import signal
import uuid
from pathlib import Path


def vmm_pids(data_dir: Path, sandbox: str | None = None) -> dict[int, str]:
    """Process ids of the VMMs of a data directory, each with the id of its sandbox: whose disk it has open."""
    prefix = f"{data_dir}/sandboxes/"
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            program = (entry / "cmdline").read_bytes().split(b"\0", 1)[0].decode(errors="replace")
            if not Path(program).name.startswith("qemu-system"):
                continue
            files = [str(fd.readlink()) for fd in (entry / "fd").iterdir()]
        except OSError:
            # It has just ended.
            continue
        for file in files:
            if file.startswith(prefix):
                id = file.removeprefix(prefix)[:36]
                if sandbox is None or id == sandbox:
                    found[int(entry.name)] = id
    return found


def vmm_pid(data_dir: Path, sandbox: str) -> int:
    """The VMM of a sandbox."""
    pids = list(vmm_pids(data_dir, sandbox))
    assert len(pids) == 1, f"sandbox {sandbox} has the VMMs {pids}"
    return pids[0]


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int) -> None:
    """SIGKILL, to one process that may be gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def memory(pid: int) -> dict[str, int]:
    """Bytes of `Rss`, `Pss`, `Private_Dirty` and so on of a process."""
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) << 10
    return sizes


def bytes_read(pid: int) -> int:
    """What a process has had read from disks so far."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["read_bytes"])


def links(pid: int) -> list[tuple[int, str]]:
    """What a process has open: its descriptors, and where they lead."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append((int(fd.name), str(fd.readlink())))
        except FileNotFoundError:
            # Closed meanwhile.
            continue
    return found


def child_pids(pid: int) -> list[int]:
    """Of all threads of a process, which may come and go."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            # It has ended, and its children are another's.
            continue
    return found


def is_uuid(name: str) -> bool:
    """Whether a name is that of a sandbox's, VM's or snapshot's directory."""
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False


def left_overs(data_dir: Path) -> list[str]:
    """Everything in a data directory that belongs to a sandbox or a snapshot, or is half-made: names and processes."""
    left = [f"process {pid} of VM {vm}" for pid, vm in vmm_pids(data_dir).items()]
    for folder in ("sandboxes", "snapshots", "staging", "run"):
        entries = sorted((data_dir / folder).iterdir()) if (data_dir / folder).is_dir() else []
        # In run/ the server itself may keep a lock or a socket.
        left += [f"{folder}/{entry.name}" for entry in entries if folder != "run" or is_uuid(entry.name)]
    return left


def mounts_and_loops() -> list[str]:
    """Mounted file systems and attached loop devices of the host. Not namespaces: see [`traces.traces`]."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    mounts = [one for one in mounts if not one.startswith("/run/netns")]
    loops = []
    for device in sorted(Path("/sys/block").glob("loop*/loop/backing_file")):
        try:
            loops.append(f"{device.parts[3]} {device.read_text().strip()}")
        except OSError:
            continue
    return sorted(mounts) + loops


def children(pid: int) -> list[tuple[int, str]]:
    """Child processes, each with its start time: a pid alone may be given to another process."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [(int(child), start) for child in listed if (start := _start_time(int(child)))]


def runs(process: tuple[int, str]) -> bool:
    """Whether a process of [`children`] is still there, and no zombie."""
    return _start_time(process[0]) == process[1]


def _start_time(pid: int) -> str:
    """Field 22 of /proc/PID/stat; empty for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
