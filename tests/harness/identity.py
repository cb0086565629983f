"""Trying things as somebody else: in a process's namespaces, root, user and groups, without its program."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Everything is imported and opened before the world changes. Prints, for each attempt, "done" or the error's name.
SCRIPT = r"""
import ctypes, encodings.idna, errno, json, os, signal, socket, sys
order = json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)
pid, status = order['pid'], {}
for line in open(f'/proc/{pid}/status'):
    name, _, value = line.partition(':')
    status[name] = value.split()
if order['whole']:
    root = os.open(f'/proc/{pid}/root', os.O_PATH | os.O_DIRECTORY)
    spaces = [os.open(f'/proc/{pid}/ns/{name}', os.O_RDONLY) for name in ('net', 'ipc', 'uts', 'pid', 'mnt')]
    for fd in spaces:
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), 'setns')
    os.fchdir(root)
    os.chroot('.')
    for fd in [root, *spaces]:
        os.close(fd)
child = os.fork()
if child:
    # A pid namespace is entered by children only.
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.setgroups([int(group) for group in status['Groups']])
os.setresgid(*(int(status['Gid'][0]),) * 3)
os.setresuid(*(int(status['Uid'][0]),) * 3)
libc.prctl(38, 1, 0, 0, 0)

def read(path):
    with open(path, 'rb') as file:
        file.read(1)
def write(path):
    os.close(os.open(path, os.O_WRONLY))
def listing(path):
    os.listdir(path)
def signalled(pid):
    os.kill(pid, 0)
def traced(pid):
    PTRACE_SEIZE = 0x4206
    if libc.ptrace(PTRACE_SEIZE, pid, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), 'ptrace')
def connected(address):
    socket.create_connection(tuple(address), timeout=2).close()
def made(path):
    with open(path, 'x'):
        pass
def root_again(_):
    os.setresuid(0, 0, 0)
def packets(_):
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()

told = []
for name, argument in order['attempts']:
    try:
        globals()[name](argument)
        told.append('done')
    except OSError as error:
        told.append(errno.errorcode.get(error.errno, type(error).__name__))
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Attempt:
    """`read`, `write`, `listing` or `made` of a path, `signalled` or `traced` of a process, `connected` to a place."""

    name: str
    argument: str | int | tuple[str, int] | None = None


def attempts(pid: int, tries: Sequence[Attempt], *, whole: bool) -> dict[Attempt, str]:
    """What becomes of these as the user of a process; with `whole` also in its namespaces and below its root."""
    order = {"pid": pid, "whole": whole, "attempts": [[one.name, one.argument] for one in tries]}
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT], input=json.dumps(order), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(tries, json.loads(done.stdout), strict=True))


def status(pid: int) -> dict[str, list[str]]:
    """`/proc/PID/status`, each value split into words."""
    rows = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value.split() for name, _, value in rows}


def namespace(pid: int | str, kind: str) -> str:
    """Which one it is in."""
    return str(Path(f"/proc/{pid}/ns/{kind}").readlink())


def limits(pid: int) -> dict[str, str]:
    """Soft limits by their names in `/proc/PID/limits`."""
    rows = Path(f"/proc/{pid}/limits").read_text().splitlines()
    at = rows[0].index("Soft Limit")
    return {row[:at].strip(): row[at:].split()[0] for row in rows[1:]}


def descriptors(pid: int) -> list[tuple[str, int]]:
    """What is open: its path and access mode (`os.O_RDONLY` and so on)."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            path = str(fd.readlink())
            info = Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text()
        except FileNotFoundError:
            # Closed meanwhile.
            continue
        flags = next(int(line.split()[1], 8) for line in info.splitlines() if line.startswith("flags:"))
        found.append((path, flags & os.O_ACCMODE))
    return found


def shared_writable(pid: int) -> list[str]:
    """Files that are mapped so that writes to the mapping reach them."""
    rows = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return [row[5] for row in rows if len(row) == 6 and row[1][1] == "w" and row[1][3] == "s"]


def cgroups(pid: int) -> dict[str, Path]:
    """The directory of its group by controller; in v2 layouts the same one for all."""
    root = Path("/sys/fs/cgroup")
    found: dict[str, Path] = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            base = root / "unified" if (root / "unified").is_dir() else root
            group = base / path.lstrip("/")
            kinds = (
                (group / "cgroup.controllers").read_text().split() if (group / "cgroup.controllers").exists() else []
            )
        else:
            group, kinds = root / names / path.lstrip("/"), names.split(",")
        for kind in kinds:
            found.setdefault(kind, group if group.exists() else root / kind / path.lstrip("/"))
    return found
