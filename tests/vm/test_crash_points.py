"""`kill -9` of the server at every named point of its operations: what was begun is done or undone, nothing is harmed.

The points are in the sources (`coppice_fault::point!`), in dev builds only. Each is killed at in turn, on the same data
directory with the same parent, which must live through all of them. `COPPICE_CRASH=all` takes all, and reaches those
that several operations share by each of these (`make crash`).
"""

import json
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
from pandastack import PandastackError, Sandbox

from harness import host
from harness.guest import ASK, Told, ask_holder, sh, start_holder
from harness.paths import REPO, binary, dev_binary
from harness.poll import until
from harness.server import Server

#: Which operations come by the points of a name's first word. The first is enough to have been there.
OPERATIONS = {
    "launch": ("create", "fork-tree", "create-from"),
    "create": ("create",),
    "slot": ("create", "wake"),
    "vmm": ("create", "fork-disk"),
    "fork-tree": ("fork-tree",),
    "fork-disk": ("fork-disk",),
    "fork-warm": ("fork-warm",),
    "disk-clone": ("fork-disk",),
    "capture": ("snapshot", "fork-tree", "hibernate"),
    "snapshot": ("snapshot",),
    "delete-snapshot": ("delete-snapshot",),
    "promote": ("promote",),
    "pause": ("pause",),
    "resume": ("resume",),
    "hibernate": ("hibernate",),
    "wake": ("wake",),
    "delete": ("delete",),
}
#: Points that others of their kind are not like.
SPECIAL = {
    "vmm.killed": ("delete", "hibernate"),
    "slot.given-back": ("delete", "hibernate"),
    # A machine that stands still is captured without any.
    "capture.held": ("snapshot", "fork-tree"),
}
#: Where the host is as it is at another point: not each time.
ALIKE = {
    "vmm.group": "launch.placed",
    "vmm.spawned": "vmm.started",
    "launch.slot": "slot.taken",
    "create.made": "launch.running",
    "delete.ended": "vmm.killed",
    "delete.slot": "slot.given-back",
    "delete.record": "delete.forgotten",
    "capture.prepared": "snapshot.image",
    "fork-tree.image": "snapshot.image",
    "fork-tree.recorded": "fork-tree.started",
    "fork-disk.staged": "fork-disk.quiesced",
    "fork-warm.seat": "fork-warm.intended",
    "hibernate.image": "hibernate.held",
    "hibernate.files": "hibernate.slot",
    "wake.image-dropped": "wake.recorded",
    "pause.recorded": "pause.paused",
    "resume.acknowledged": "resume.resumed",
    "promote.deleted": "promote.settled",
}
#: The second child of two is not like the first.
SECOND = ("launch.recorded", "launch.started", "launch.running")


def points() -> list[str]:
    """All of them, from the sources."""
    text = "\n".join(file.read_text() for file in sorted((REPO / "crates").glob("*/src/**/*.rs")))
    found = re.findall(r'coppice_fault::point!\("([^"]+)"\)', text)
    assert len(found) == len(set(found)), "two points have the same name"
    return found


def cases() -> list[tuple[str, str]]:
    """Points, each with an operation."""
    every = os.environ.get("COPPICE_CRASH") == "all"
    chosen: list[tuple[str, str]] = []
    known = points()
    assert set(ALIKE) | set(ALIKE.values()) | set(SPECIAL) | set(SECOND) <= set(known)
    for point in known:
        if point in ALIKE and not every:
            continue
        operations = SPECIAL.get(point) or OPERATIONS[point.partition(".")[0]]
        chosen += [(point, operation) for operation in (operations if every else operations[:1])]
    return chosen + ([(f"{point}:2", "fork-tree") for point in SECOND] if every else [])


@dataclass
class Lives:
    """One sandbox that must live through everything."""

    id: str
    told: Told
    digest: str


@dataclass
class World:
    """A server, what lives on it, and a snapshot that was acknowledged."""

    server: Server
    parent: Lives
    sleeper: Lives
    kept: str
    #: What the sandbox has whose place is to be taken.
    mover: Told | None = None

    def get(self, id: str) -> Sandbox:
        return self.server.client().sandboxes.get(id)

    def arm(self, point: str) -> None:
        """The server ends when it comes by this point; never by an empty one."""
        (self.server.data_dir.parent / "faults").write_text(point)

    def check(self, one: Lives) -> None:
        """It has the process, the memory and the file that it had, and goes on."""
        # One command: there are many points.
        holder, digest = sh(self.get(one.id), f"{ASK}; sha256sum </root/data").splitlines()
        now = Told(**json.loads(holder))
        assert (now.pid, now.secret, now.nameless) == (one.told.pid, one.told.secret, one.told.secret)
        assert now.ticks > one.told.ticks, "it stands still"
        assert digest == one.digest
        one.told = now


def alive(server: Server) -> Lives:
    sandbox = server.client().sandboxes.create(template="base", persistent=True)
    digest = sh(sandbox, "head -c 1000000 /dev/urandom >/root/data; sha256sum </root/data").strip()
    return Lives(sandbox.id, start_holder(sandbox), digest)


@pytest.fixture(scope="module")
def world(new_server: Callable[..., Server]) -> Iterator[World]:
    server = new_server(templates=["base"])
    server.program = dev_binary()
    faults = server.data_dir.parent / "faults"
    faults.write_text("")
    server.env["COPPICE_FAULTS"] = str(faults)
    server.start()
    parent, sleeper = alive(server), alive(server)
    yield World(server, parent, sleeper, server.client().sandboxes.get(parent.id).snapshot())
    server.end()


def prepare(world: World, operation: str) -> Callable[[], object]:
    """What is there before the operation, and the operation."""
    client = world.server.client()
    wire = world.server.wire()
    parent, sleeper = f"/v1/sandboxes/{world.parent.id}", f"/v1/sandboxes/{world.sleeper.id}"

    def post(path: str, value: object | None = None) -> Callable[[], object]:
        return lambda: wire.json("POST", path, value)

    if operation == "hibernate":
        assert wire.json("POST", f"{sleeper}/wake").status == 200
    if operation == "wake":
        assert wire.json("POST", f"{sleeper}/hibernate").status == 200
    if operation == "resume":
        assert wire.json("POST", f"{sleeper}/wake").status == 200
        assert wire.json("POST", f"{sleeper}/pause").status == 204
    if operation == "pause":
        assert wire.json("POST", f"{sleeper}/wake").status == 200
    if operation == "delete":
        victim = client.sandboxes.create(template="base").id
        return lambda: wire.json("DELETE", f"/v1/sandboxes/{victim}")
    if operation == "fork-warm":
        mover = client.sandboxes.create(template="base")
        world.mover = start_holder(mover)
        return post(f"/v1/sandboxes/{mover.id}/fork", {"mode": "warm"})
    if operation == "delete-snapshot":
        snapshot = client.sandboxes.get(world.parent.id).snapshot()
        return lambda: wire.json("DELETE", f"/v1/snapshots/{snapshot}")
    if operation == "promote":
        winner = client.sandboxes.get(world.parent.id).fork_tree(2)[0]
        return post(f"/v1/sandboxes/{winner.id}/promote", {"cleanup_siblings": True})
    return {
        "create": post("/v1/sandboxes", {"template": "base"}),
        "create-from": post("/v1/sandboxes", {"from_snapshot": world.kept}),
        "fork-tree": post(f"{parent}/fork-tree", {"count": 2}),
        "fork-disk": post(f"{parent}/fork", {"count": 1}),
        "snapshot": post(f"{parent}/snapshots"),
        "hibernate": post(f"{sleeper}/hibernate"),
        "wake": post(f"{sleeper}/wake"),
        "pause": post(f"{sleeper}/pause"),
        "resume": post(f"{sleeper}/resume"),
    }[operation]


def begin(operation: Callable[[], object]) -> None:
    """In the background; it ends with its server."""

    def run() -> None:
        try:
            operation()
        except (OSError, PandastackError, ValueError):
            pass

    threading.Thread(target=run, daemon=True).start()


def ids(server: Server, kind: str, where: str = "") -> set[str]:
    """What is recorded."""
    with closing(sqlite3.connect(f"file:{server.data_dir}/coppice.db?mode=ro", uri=True)) as records:
        return {row[0] for row in records.execute(f"SELECT id FROM {kind} {where}")}


def on_disk(server: Server, folder: str) -> set[str]:
    return {one.name for one in (server.data_dir / folder).iterdir() if host.is_uuid(one.name)}


def assert_consistent(world: World) -> dict[str, str]:
    """Records, files, processes and places on the network are of the sandboxes that are listed, and of no others."""
    server = world.server
    rows = {row["id"]: row["status"] for row in server.wire().json("GET", "/v1/sandboxes").json()}
    assert set(rows.values()) <= {"running", "hibernated", "paused", "stopped"}, rows
    machines = {id for id, status in rows.items() if status in ("running", "paused")}
    assert sorted(host.vmm_pids(server.data_dir).values()) == sorted(machines)
    assert ids(server, "sandboxes") == on_disk(server, "sandboxes") == set(rows)
    assert on_disk(server, "run") == machines
    assert ids(server, "snapshots") == on_disk(server, "snapshots")
    assert world.kept in ids(server, "snapshots", "WHERE kind = 'kept'")
    assert list((server.data_dir / "staging").iterdir()) == []
    assert server.metric("coppice_network_slots", state="taken") == len(machines)
    return rows


@pytest.mark.parametrize(("point", "operation"), cases())
def test_kill_9_at(world: World, point: str, operation: str) -> None:
    server = world.server
    if server.process is None or server.process.poll() is not None:
        # Of a test that failed.
        server.process = None
        world.arm("")
        server.start()
    act = prepare(world, operation)
    world.arm(point)
    server.die(lambda: begin(act))
    world.arm("")
    server.start()
    rows = assert_consistent(world)
    assert {world.parent.id, world.sleeper.id} <= set(rows)
    assert rows[world.parent.id] == "running"
    wire = server.wire()
    if rows[world.sleeper.id] == "paused":
        assert (
            operation in ("pause", "resume")
            and wire.json("POST", f"/v1/sandboxes/{world.sleeper.id}/resume").status == 204
        )
    # What was made for somebody who was never told is whole, or not there.
    extra = set(rows) - {world.parent.id, world.sleeper.id}
    used = [id for id in extra if rows[id] != "stopped"]
    for id in used:
        assert sh(world.get(id), "echo usable") == "usable\n"
    if operation == "fork-warm":
        # The one or the other, with the same process.
        (mover,) = used
        assert world.mover is not None and ask_holder(world.get(mover)).secret == world.mover.secret
    kept = ids(server, "snapshots", "WHERE kind = 'kept'") - {world.kept}
    for snapshot in kept:
        copy = server.client().sandboxes.create(from_snapshot=snapshot)
        assert ask_holder(copy).secret == world.parent.told.secret
        copy.kill()
    world.check(world.parent)
    if operation in ("hibernate", "wake", "pause", "resume"):
        world.check(world.sleeper)
    for kind, left in (("sandboxes", extra), ("snapshots", kept)):
        for id in left:
            assert wire.json("DELETE", f"/v1/{kind}/{id}").status == 204
    if operation in ("fork-tree", "fork-disk", "snapshot"):
        (child,) = world.get(world.parent.id).fork_tree(1)
        assert ask_holder(child).secret == world.parent.told.secret
        child.kill()
    until("all of it is gone", lambda: set(assert_consistent(world)) == {world.parent.id, world.sleeper.id}, 5)


def test_what_was_acknowledged_before_all_crashes_is_whole(world: World) -> None:
    copy = world.server.client().sandboxes.create(from_snapshot=world.kept)
    assert ask_holder(copy).secret == world.parent.told.secret
    copy.kill()
    world.check(world.parent)
    world.check(world.sleeper)


def test_a_release_build_has_no_fault_points() -> None:
    if binary() == dev_binary():
        pytest.skip("COPPICE_BIN is a dev build")
    assert b"COPPICE_FAULTS" in dev_binary().read_bytes()
    assert b"COPPICE_FAULTS" not in binary().read_bytes()
