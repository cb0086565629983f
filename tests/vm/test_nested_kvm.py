"""The same product where KVM runs unmodified kernels: in a host inside this one.

The `/dev/kvm` of a nested host is emulated hardware, so this works wherever the other tests do. Cgroups have
layout v2 there, whatever they have here. Everything takes some ten times as long as on hardware: nothing in here is
about speed.
"""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from harness import nested
from harness.nested import CONFORMANCE, JAIL, PROGRAM, RECIPES, CannotRun, NestedHost
from harness.paths import REPO, binary

#: How far the clock of a guest may be from its host's.
CLOCK = 0.05
#: Whether hibernate and wake are tried, too: a fork's capture and restore again, and checksums, which take long there.
SLEEPS = "COPPICE_NESTED_SLEEPS" in os.environ
#: What the engine's conformance may take, seconds: two minutes alone.
CONFORM = 800.0


def compiled_tests() -> dict[str, Path]:
    """The engine's tests, as `make test` compiled them just before."""
    # Of all the workspace, so that features of dependencies are the same and nothing is compiled anew.
    command = ["cargo", "test", "--workspace", "--locked", "--no-run", "--message-format=json", "-q"]
    command += ["--test", "qemu_conformance", "--test", "jail"]
    path = os.environ["PATH"] + os.pathsep + str(Path.home() / ".cargo/bin")
    env = os.environ | {"PATH": path}
    done = subprocess.run(command, cwd=REPO, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    found = {}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        if said.get("executable"):
            found[said["target"]["name"]] = Path(said["executable"])
    return {CONFORMANCE: found["qemu_conformance"], JAIL: found["jail"]}


@pytest.fixture
def inner(workspace: Path) -> Iterator[NestedHost]:
    """The host inside."""
    try:
        nested.check()
    except CannotRun as reason:
        pytest.skip(f"there can be no host inside this one: {reason}")
    folder = workspace / "nested"
    folder.mkdir()
    host = nested.start(folder, {PROGRAM: binary(), **compiled_tests()})
    yield host
    host.close()
    shutil.rmtree(folder)


@dataclass(frozen=True)
class State:
    """What a guest says of itself."""

    memory: str
    disk: str
    processes: int
    hostname: str
    clocksource: str
    identity: dict[str, Any]


def state(host: NestedHost, sandbox: str) -> State:
    """Asks a guest; its clock is between two readings of its host's, as far as clocks may differ."""
    line = "cat /dev/shm/memory /root/disk; pgrep -x -c sleep; hostname; "
    line += "cat /sys/devices/system/clocksource/clocksource0/current_clocksource; "
    line += "date +%s.%N; cat /run/coppice/identity.json"
    ask = shlex.join([PROGRAM, "sandbox", "exec", sandbox, line])
    before, *said = host.ok(f"date +%s.%N; {ask}; date +%s.%N").splitlines()
    memory, disk, processes, hostname, clocksource, clock, *identity, after = said
    assert float(before) - CLOCK < float(clock) < float(after) + CLOCK, "the guest's clock is wrong"
    return State(memory, disk, int(processes), hostname, clocksource, json.loads("".join(identity)))


# One test, since the host is the expensive part. Other tests may run at the same time.
@pytest.mark.first
@pytest.mark.timeout(1800)
def test_on_kvm_the_engine_conforms_the_jail_holds_and_a_live_sandbox_forks(inner: NestedHost) -> None:
    the_probe_finds_it(inner)
    a_live_sandbox_forks(inner)
    the_jail_holds(inner)
    the_engine_conforms(inner)


def the_probe_finds_it(host: NestedHost) -> None:
    """And `coppice doctor` says so."""
    checks = {check["name"]: check for check in json.loads(host.shell(f"{PROGRAM} --json doctor").out)["checks"]}
    assert checks["engine"]["finding"].startswith("kvm: /dev/kvm runs kernel code at "), checks["engine"]
    assert checks["jail"]["level"] == "ok", checks["jail"]
    assert " cgroup2 " in host.ok("grep /sys/fs/cgroup /proc/mounts")


def a_live_sandbox_forks(host: NestedHost) -> None:
    """A template is baked, and a server runs its sandboxes; their kernel is Debian's."""
    host.ok(f"{PROGRAM} setup --templates base --recipes {RECIPES}")
    host.ok(f"setsid {PROGRAM} up --no-prepare --templates base >/run/up.log 2>&1 &")
    ready = "tail -n +1 -f /run/up.log | grep -q -m 1 ^ready"
    host.ok(f"timeout 60 sh -c {shlex.quote(ready)} || {{ cat /run/up.log >&2; exit 1; }}")
    engine = next(line for line in host.ok("cat /run/up.log").splitlines() if "qemu engine" in line)
    assert "accel=Kvm" in engine and "jail=On { missing: [] }" in engine, engine

    parent = host.coppice("sandbox", "create", "base")["id"]
    line = "cd /proc/sys/kernel/random; cat uuid >/dev/shm/memory; cat uuid >/root/disk; "
    line += "setsid sleep 4321 >/dev/null 2>&1 &"
    host.ok(shlex.join([PROGRAM, "sandbox", "exec", parent, line]))
    first = state(host, parent)
    assert first.clocksource == "kvm-clock" and first.processes == 1

    tree = host.coppice("fork-tree", parent, "-n", "2")
    children = [child["id"] for child in tree["children"]]
    assert [child["boot_mode"] for child in tree["children"]] == ["snapshot", "snapshot"]
    # Each VMM has the device.
    vmms = host.ok("for comm in $(grep -l ^qemu /proc/[0-9]*/comm); do readlink ${comm%/comm}/fd/*; done")
    assert vmms.splitlines().count("/dev/kvm") >= 3, vmms
    for index, child in enumerate(children):
        forked = state(host, child)
        assert (forked.memory, forked.disk, forked.processes) == (first.memory, first.disk, 1)
        assert forked.hostname == f"sb-{child.replace('-', '')[:12]}"
        fork = forked.identity["fork"]
        assert (fork["parent"], fork["index"], fork["count"]) == (parent, index, 2)

    if SLEEPS:
        host.coppice("sandbox", "hibernate", parent)
        assert host.coppice("sandbox", "wake", parent)["status"] == "running"
        woken = state(host, parent)
        assert woken == replace(first, identity=woken.identity) and woken.identity["reason"] == "wake"
    host.coppice("sandbox", "rm", parent, *children)
    assert host.coppice("sandbox", "list") == []


def the_jail_holds(host: NestedHost) -> None:
    """With the device in it, and cgroups of version 2."""
    names = ["from_inside_a_vmms_identity", "a_vmm_is_limited_holds_no_writable_image"]
    report = host.ok(shlex.join([JAIL, "--nocapture", "--test-threads=1", *names]))
    assert "test result: ok. 2 passed" in report and "skipped" not in report, report


def the_engine_conforms(host: NestedHost) -> None:
    """As it does without the device."""
    names = ["--nocapture", "--test-threads=1", "the_qemu_engine_conforms"]
    report = host.ok(shlex.join([CONFORMANCE, *names]) + " 2>&1", CONFORM)
    assert "test result: ok. 1 passed" in report, report
    assert "accel=Kvm" in report and "skipped" not in report, report
    assert 'name="a guest that powers off or panics says so"' in report, report
