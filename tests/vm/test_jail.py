"""What holds a VMM back, looked at from outside while it runs, and tried from inside its identity."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pandastack import Sandbox

from harness import host, traces
from harness.guest import sh
from harness.identity import (
    Attempt,
    attempts,
    cgroups,
    descriptors,
    limits,
    namespace,
    shared_writable,
    status,
)
from harness.network import Namespace
from harness.server import Server

#: Above systemd's range for containers, below 2^31.
UIDS = range(1_879_048_192, 1 << 31)
#: What a process that must not see or reach something is told.
REFUSALS = {"EACCES", "EPERM", "ENOENT", "ESRCH", "ENETUNREACH", "ENETDOWN", "EROFS", "ENOTDIR", "EHOSTUNREACH"}


@pytest.fixture(scope="module")
def own(new_server: Callable[..., Server]) -> Iterator[Server]:
    """A server whose sandboxes stay while the module runs."""
    server = new_server(templates=["base"]).start()
    yield server
    server.end()


@pytest.fixture(scope="module")
def machines(own: Server) -> dict[int, Sandbox]:
    """By VMM: one restored from the template, its live child, its cold-booted child."""
    parent = own.client().sandboxes.create(template="base")
    made = [parent, *parent.fork_tree(1), parent.fork()]
    return {own.vmm(one): one for one in made}


def server_pids(server: Server) -> list[int]:
    """All processes of the server itself."""
    found, todo = [], [server.pid]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += [one for one in host.child_pids(pid) if one not in host.vmm_pids(server.data_dir)]
    return found


def disk_of(server: Server, sandbox: Sandbox) -> Path:
    """The file with its disk: the largest in its directory."""
    folder = server.data_dir / "sandboxes" / sandbox.id
    return max((one for one in folder.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)


def test_each_vmm_has_a_user_of_its_own_and_no_rights(machines: dict[int, Sandbox]) -> None:
    users = set()
    for pid in machines:
        told = status(pid)
        (uid,) = {int(one) for one in told["Uid"]}
        (gid,) = {int(one) for one in told["Gid"]}
        assert uid == gid and uid in UIDS, told["Uid"]
        users.add(uid)
        kvm = {str(Path("/dev/kvm").stat().st_gid)} if Path("/dev/kvm").exists() else set()
        assert set(told["Groups"]) <= kvm
        assert told["NoNewPrivs"] == ["1"] and told["Seccomp"] == ["2"], told
        for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(told[kind][0], 16) == 0, (kind, told[kind])
    assert len(users) == len(machines)


def test_each_vmm_is_in_namespaces_with_nothing_in_them(own: Server, machines: dict[int, Sandbox]) -> None:
    router = traces.router(own.data_dir).stat().st_ino
    for pid in machines:
        for kind in ("net", "mnt"):
            assert namespace(pid, kind) != namespace("self", kind), kind
        assert namespace(pid, "net") != f"net:[{router}]"
        void = Namespace.of(f"/proc/{pid}/ns/net")
        assert void.ip("-br", "link").split()[::3][:1] == ["lo"] and len(void.ip("-br", "link").splitlines()) == 1
        assert void.ip("-br", "addr", "show", "up") == "" and void.ip("route", "show", "table", "all") == ""
        void.close()
        # Of the host's files only programs and libraries, and none of what is below the data directory.
        root = Path(f"/proc/{pid}/root")
        assert not (root / own.data_dir.relative_to("/")).exists()
        for hidden in ("root", "home", "var/lib/coppice", "etc/shadow", "run/netns", "sys/fs/cgroup"):
            assert not (root / hidden).exists(), hidden


def test_a_vmm_has_only_its_own_files_open_and_no_shared_image_for_writing(
    own: Server, machines: dict[int, Sandbox]
) -> None:
    data = f"{own.data_dir}/"
    for pid, sandbox in machines.items():
        files = [(path, mode) for path, mode in descriptors(pid) if path.startswith("/") and "/dev/" not in path]
        assert files, "its disk is open"
        for path, mode in files:
            if path.startswith(f"{data}sandboxes/"):
                assert path.startswith(f"{data}sandboxes/{sandbox.id}"), f"another's file is open: {path}"
            elif mode != os.O_RDONLY:
                assert path.startswith((f"{data}run/{sandbox.id}", "/memfd:")), f"writable: {path}"
            for secret in ("control.db", "coppice.db", "credentials.env"):
                assert secret not in path
        shared = [path for path in shared_writable(pid) if path.startswith(data)]
        assert shared == [], f"writes to memory reach {shared}"


def test_each_vmm_has_limits_in_a_control_group_of_its_own(own: Server, machines: dict[int, Sandbox]) -> None:
    id = traces.instance(own.data_dir)
    seen: set[Path] = set()
    for pid, sandbox in machines.items():
        groups = cgroups(pid)
        assert {"memory", "pids", "cpu"} <= set(groups), groups
        for kind in ("memory", "pids", "cpu"):
            assert f"coppice-{id}" in groups[kind].parts, groups[kind]
        assert groups["memory"] not in seen
        seen.add(groups["memory"])

        def limit(kind: str, *names: str, groups: dict[str, Path] = groups) -> str:
            file = next(groups[kind] / name for name in names if (groups[kind] / name).exists())
            return file.read_text().split()[0]

        memory = limit("memory", "memory.max", "memory.limit_in_bytes")
        assert memory.isdigit() and sandbox.memory_mb << 20 <= int(memory) < 4 * (sandbox.memory_mb << 20), memory
        pids = limit("pids", "pids.max")
        assert pids.isdigit() and int(pids) <= 4096, pids
        quota = limit("cpu", "cpu.max", "cpu.cfs_quota_us")
        assert quota.isdigit() and int(quota) > 0, quota


def test_a_vmm_goes_first_when_memory_runs_out_and_leaves_no_core(machines: dict[int, Sandbox]) -> None:
    for pid in machines:
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) > 0
        have = limits(pid)
        assert have["Max core file size"] == "0"
        assert int(have["Max open files"]) <= 4096
        assert have["Max file size"].isdigit()


def test_nobody_else_may_read_a_disk(own: Server, machines: dict[int, Sandbox]) -> None:
    for pid, sandbox in machines.items():
        disk = disk_of(own, sandbox).stat()
        assert disk.st_mode & (stat.S_IRWXO) == 0, oct(disk.st_mode)
        assert disk.st_mode & stat.S_IRWXG == 0 or disk.st_gid == int(status(pid)["Gid"][0])


@pytest.mark.parametrize("whole", [True, False], ids=["in its namespaces", "with its user alone"])
def test_from_inside_a_vmms_identity_nothing_of_others_is_reached(
    own: Server, machines: dict[int, Sandbox], whole: bool
) -> None:
    (pid, mine), (other, theirs), *_ = machines.items()
    data = own.data_dir
    files = [data / name for name in ("coppice.db", "control.db", "credentials.env")]
    files += [disk_of(own, theirs), Path("/etc/shadow"), *(data / "templates").rglob("memory*")]
    tries = [Attempt(name, str(path)) for path in files for name in ("read", "write")]
    tries += [Attempt("listing", str(data / name)) for name in ("", "sandboxes", "snapshots", f"run/{theirs.id}")]
    tries += [Attempt("made", str(place / "x")) for place in (data, data / "sandboxes", data / "staging", Path("/usr"))]
    others = [other, *server_pids(own), 1]
    for one in others:
        tries += [Attempt("signalled", one), Attempt("traced", one)]
        tries += [Attempt("read", f"/proc/{one}/{name}") for name in ("environ", "mem", "maps")]
        tries += [Attempt("listing", f"/proc/{one}/{name}") for name in ("root/", "fd")]
    tries += [Attempt("root_again"), Attempt("packets")]
    if whole:
        tries += [Attempt("connected", ("127.0.0.1", own.port))]
        tries += [Attempt("listing", "/proc/1/root/"), Attempt("write", "/proc/sys/kernel/core_pattern")]
    told = attempts(pid, tries, whole=whole)
    assert {one: said for one, said in told.items() if said not in REFUSALS} == {}
    # The attempt itself is sound: root does all of these.
    assert all(path.exists() for path in files) and host.is_alive(other)
    assert sh(theirs, "echo unharmed") == sh(mine, "echo unharmed") == "unharmed\n"


def test_from_inside_the_servers_identity_the_host_is_not_reached(own: Server, machines: dict[int, Sandbox]) -> None:
    (server,) = [pid for pid in server_pids(own) if status(pid)["Uid"][0] != "0"]
    tries = [Attempt(name, path) for path in ("/etc/shadow", "/root/.bashrc") for name in ("read", "write")]
    tries += [Attempt("listing", path) for path in ("/root", "/proc/1/root/", f"/proc/{own.pid}/fd")]
    tries += [Attempt("made", f"{place}/x") for place in ("/usr", "/etc", "/run", "/run/netns", "/sys/fs/cgroup")]
    tries += [Attempt("write", "/proc/sys/net/ipv4/ip_forward"), Attempt("write", "/dev/kmsg")]
    for pid in (own.pid, 1, *machines):
        tries += [Attempt("signalled", pid), Attempt("traced", pid), Attempt("read", f"/proc/{pid}/mem")]
    tries += [Attempt("root_again"), Attempt("packets")]
    told = attempts(server, tries, whole=True)
    assert {one: said for one, said in told.items() if said not in REFUSALS} == {}


def test_its_own_sockets_are_not_reachable_by_another_vmm(own: Server, machines: dict[int, Sandbox]) -> None:
    (pid, _), (_, theirs), *_ = machines.items()
    sockets = [one for one in (own.data_dir / "run").rglob("*") if one.is_socket()]
    told = attempts(pid, [Attempt("read", str(one)) for one in sockets], whole=False)
    assert {one: said for one, said in told.items() if said not in REFUSALS} == {}
    assert sh(theirs, "echo unharmed") == "unharmed\n"
