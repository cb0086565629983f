"""The server is two processes: root does little and hears nobody, the other half may do nothing and does the rest."""

import os
import pwd
import random
import signal
import stat
import time
from pathlib import Path

import pytest

from harness import host
from harness.poll import until
from harness.server import DEAD, Server

#: In the environment of the unprivileged half only.
HALF = b"COPPICE_UNPRIVILEGED_HALF=true"


def status(pid: int) -> dict[str, str]:
    """The lines of `/proc/PID/status`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


def other_half(pid: int) -> int:
    """The unprivileged half of the server with this process id: the child that was told so when it was executed.

    VMMs are its children, too, and one that is not executed yet has its parent's arguments and environment.
    """
    found = host.child_pids(pid)
    halves = [child for child in found if HALF in Path(f"/proc/{child}/environ").read_bytes()]
    assert len(halves) == 1, f"process {pid} has the children {found}"
    return halves[0]


def inodes(pid: int) -> set[str]:
    """Of the sockets that a process has open."""
    sockets = [link for _, link in host.links(pid) if link.startswith("socket:")]
    return {link.removeprefix("socket:[").removesuffix("]") for link in sockets}


def listening(pid: int) -> set[int]:
    """TCP ports that a process listens at."""
    own, ports = inodes(pid), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def gone(pid: int, within: float = DEAD) -> None:
    """It ends in time."""
    until(f"process {pid} is gone", lambda: not host.is_alive(pid) or None, within, 0.01)


def test_what_hears_clients_has_no_privileges(own_server: Server) -> None:
    root, other = own_server.pid, other_half(own_server.pid)
    user = pwd.getpwnam("coppice")
    said = status(other)
    assert said["Uid"].split() == [str(user.pw_uid)] * 4 and user.pw_uid != 0
    assert said["Gid"].split() == [str(user.pw_gid)] * 4 and user.pw_gid != 0
    assert said["Groups"] == ""
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(said[kind], 16) == 0, kind
    assert said["NoNewPrivs"] == "1" and said["Umask"] == "0077"
    assert status(root)["Uid"].split()[0] == "0"
    # One hears, the other does not; both are recognizable.
    assert listening(other) == {own_server.port} and listening(root) == set()
    for pid in (root, other):
        assert status(pid)["Name"] == "coppice"
        assert str(own_server.data_dir).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    # Of what root has open, only what was meant for it: the output, the lock, and the sockets.
    links = {link for _, link in host.links(other)}
    assert not [link for link in links if link.startswith(("net:", "/dev/net/", "/proc/", "mnt:"))], links


def test_the_data_directory_is_the_servers_and_the_token_roots_to_read(own_server: Server) -> None:
    user = pwd.getpwnam("coppice").pw_uid
    top = own_server.data_dir.stat()
    assert top.st_uid == user and stat.S_IMODE(top.st_mode) == 0o700
    for folder, folders, files in os.walk(own_server.data_dir):
        for name in folders + files:
            assert (Path(folder) / name).lstat().st_uid == user, f"{folder}/{name}"
    credentials = (own_server.data_dir / "credentials.env").stat()
    assert stat.S_IMODE(credentials.st_mode) == 0o600
    assert own_server.client().sandboxes.list() == []


@pytest.mark.parametrize("killed", ["root", "other"])
def test_the_end_of_one_half_is_the_end_of_the_other_and_not_of_sandboxes(own_server: Server, killed: str) -> None:
    sandbox = own_server.client().sandboxes.create(template="base", persistent=True)
    sandbox.exec("echo 1 >/root/mark")
    vmm = own_server.vmm(sandbox)
    root, other = own_server.pid, other_half(own_server.pid)
    process = own_server.process
    assert process is not None
    os.kill(root if killed == "root" else other, signal.SIGKILL)
    if killed == "root":
        process.wait(DEAD)
        gone(other)
        assert "the privileged half of the server is gone" in own_server.log_tail()
    else:
        assert process.wait(DEAD) == 1
        assert "was killed by signal 9" in own_server.log_tail()
    assert host.is_alive(vmm)
    own_server.process = None
    own_server.start()
    assert own_server.vmm(sandbox) == vmm
    again = own_server.client().sandboxes.get(sandbox.id)
    assert again.exec("cat /root/mark").stdout.strip() == "1"
    again.kill()
    gone(vmm, 10)


@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_of_it_ends_it_once(own_server: Server, signal_: signal.Signals) -> None:
    other = other_half(own_server.pid)
    process = own_server.process
    assert process is not None
    # As a terminal does: to the whole process group.
    os.killpg(os.getpgid(process.pid), signal_)
    assert process.wait(20) == 0
    own_server.process = None
    assert not host.is_alive(other)
    log = own_server.log_path.read_text()
    assert log.count("\nstopped") == 1 and "gone" not in log, log


def test_killed_at_any_moment_of_its_start_it_comes_up_again(own_server: Server) -> None:
    random.seed(7)
    own_server.stop()
    for round_ in range(8):
        begin = time.monotonic()
        own_server.start()
        took = time.monotonic() - begin
        own_server.kill9()
        # Sometimes before the other half is there, sometimes while it starts.
        process = own_server.spawn()
        time.sleep(took * random.random())
        try:
            victim = other_half(process.pid) if round_ % 2 else process.pid
        except (AssertionError, OSError):
            victim = process.pid
        host.kill(victim)
        process.wait(DEAD)
    own_server.start()
    assert own_server.client().sandboxes.list() == []
