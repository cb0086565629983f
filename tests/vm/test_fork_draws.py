"""Numbers, names and clocks of many copies of one machine: each has its own, also much later.

`COPPICE_FORK_CHILDREN=16 COPPICE_FORK_ROUNDS=3 COPPICE_SNAPSHOT_AGE=90` make it longer.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from pandastack import Client, Sandbox

from harness import fork_probe
from harness.fork_probe import Clock
from harness.server import prepared_templates
from harness.wire import Wire

CHILDREN = int(os.environ.get("COPPICE_FORK_CHILDREN", "8"))
ROUNDS = int(os.environ.get("COPPICE_FORK_ROUNDS", "1"))
#: How old the snapshot is at least when it is used, seconds.
AGE = float(os.environ.get("COPPICE_SNAPSHOT_AGE", "20"))
#: How far a clock may be off.
CLOCK = 0.05

NUMBERS = ("random", "numpy", "openssl")
NAMES = ("hostname", "machine_id", "boot_id", "address", "mac")


@dataclass
class Copy:
    """What was seen in one machine."""

    told: dict[str, Any]
    drawn: dict[str, list[Any]]
    facts: dict[str, Any]
    clock: Clock

    def numbers(self) -> list[object]:
        """Of the process that had seeded before, and of the kernel: asked by that process, and by another one."""
        seeded = [self.drawn[name][0] for name in NUMBERS]
        return [*seeded, *self.drawn["kernel"], *self.facts["kernel"]]

    def names(self) -> list[tuple[str, object]]:
        """That no other machine has."""
        generation = self.facts["identity"]["generation"]
        return [("generation", generation), *((name, self.facts[name]) for name in NAMES)]


@dataclass
class Original:
    """A machine with a process that has seeded its generators, and a snapshot of it."""

    sandbox: Sandbox
    told: dict[str, Any]
    snapshot: str
    #: When it was taken, by the monotonic clock.
    taken: float


@pytest.fixture(scope="module")
def original(client: Client, wire: Wire, longer_lived: set[str]) -> Iterator[Original]:
    """Made first, so that the snapshot is old when it is used."""
    if "code-interpreter" not in prepared_templates():
        pytest.skip("no template with numpy is prepared")
    sandbox = client.sandboxes.create(template="code-interpreter")
    told = fork_probe.start_probe(sandbox, wire)
    fork_probe.seed(wire, sandbox.id)
    snapshot = sandbox.snapshot()
    longer_lived |= {sandbox.id, snapshot}
    yield Original(sandbox, told, snapshot, time.monotonic())
    wire.json("DELETE", f"/v1/snapshots/{snapshot}")
    sandbox.kill()
    longer_lived -= {sandbox.id, snapshot}


def look(wire: Wire, sandbox: Sandbox) -> Copy:
    """Draws first: what a process does first in a copy is what goes wrong."""
    drawn = fork_probe.draw(wire, sandbox.id)
    told = fork_probe.told(wire, sandbox.id)
    assert told is not None
    clock = fork_probe.clock(fork_probe.reader(sandbox, wire), CLOCK)
    return Copy(told, drawn, fork_probe.facts(sandbox), clock)


def all_of(wire: Wire, original: Original, sandboxes: list[Sandbox]) -> list[Copy]:
    """All of them, a few at a time. Each is the original gone on, with a clock that is right."""
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(lambda one: look(wire, one), sandboxes))
    for copy in copies:
        assert (copy.told["pid"], copy.told["secret"]) == (original.told["pid"], original.told["secret"])
        assert copy.clock.most <= CLOCK, copy.clock
    return copies


def assert_nothing_twice(copies: list[Copy]) -> None:
    for find in (Copy.numbers, Copy.names):
        found = [one for copy in copies for one in find(copy)]
        assert len(set(found)) == len(found), sorted(str(one) for one in found if found.count(one) > 1)
    for copy in copies:
        assert copy.facts["hostname"] == copy.facts["etc_hostname"]
        assert len(copy.facts["machine_id"]) == 32 and int(copy.facts["machine_id"], 16)


def test_children_share_no_number_and_no_name_and_have_the_right_time(
    wire: Wire, original: Original, delete_after: Callable[[str], None]
) -> None:
    seen = []
    before = fork_probe.facts(original.sandbox)
    for round in range(ROUNDS):
        begin = time.monotonic()
        children = original.sandbox.fork_tree(CHILDREN)
        for child in children:
            delete_after(child.id)
        # The parent's turn comes first: the next number of all is drawn from one state.
        (parent,) = all_of(wire, original, [original.sandbox])
        assert [parent.facts[name] for name in NAMES] == [before[name] for name in NAMES]
        # Whoever was not copied goes on with the seed that it chose.
        assert round > 0 or parent.drawn["random"][0] == parent.drawn["random"][1]
        seen += all_of(wire, original, children)
        took = time.monotonic() - begin
        print(f"round {round}: {took:.1f} s, clocks within {max(one.clock.most for one in seen) * 1000:.0f} ms")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(Sandbox.kill, children))
        # The parent keeps its names: only its numbers are compared.
        numbers = [number for copy in [*seen, parent] for number in copy.numbers()]
        assert len(set(numbers)) == len(numbers)
    assert_nothing_twice(seen)


def test_what_comes_of_an_old_snapshot_is_of_today(
    client: Client, wire: Wire, original: Original, delete_after: Callable[[str], None]
) -> None:
    time.sleep(max(0.0, original.taken + AGE - time.monotonic()))
    copies = [client.sandboxes.create(from_snapshot=original.snapshot) for _ in range(3)]
    for copy in copies:
        delete_after(copy.id)
    print(f"the snapshot is {time.monotonic() - original.taken:.0f} s old")
    assert_nothing_twice(all_of(wire, original, copies))
