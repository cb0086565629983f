"""Random operations of many clients on real machines, with `kill -9` of the server in between, against a model.

Of each sandbox the model knows which states it may be in, and which lines were written. An answer must be one that a
state of the time between request and answer gives. What was acknowledged before a command began is there, in every
later copy too; nothing that was never sent, nothing of a sibling's. The sharper check, of all orders, is on fakes:
`crates/host/tests/with_fake_engine/stress`.

`STRESS="SECONDS SEED"` chooses another run than CI's (`make stress`: ten minutes).
"""

import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness import host
from harness.footprint import assert_as_before, footprint
from harness.server import Server
from harness.wire import Reply

SECONDS, SEED = (int(word) for word in os.environ.get("STRESS", "25 1").split())
CLIENTS = 6
#: Machines at most, those that are just being made included.
CROWD = 10
#: How long a client waits: a command may be caught by a pause.
PATIENCE = 6.0

RUNNING, PAUSED, ASLEEP, GONE = "running", "paused", "hibernated", "gone"
#: Another one has taken its place.
STOPPED = "stopped"

#: Per operation and state: the status code, and the state afterwards.
MODEL: dict[str, dict[str, tuple[int, str]]] = {
    "exec": {RUNNING: (200, RUNNING), PAUSED: (409, PAUSED), ASLEEP: (200, RUNNING)},
    "get": {RUNNING: (200, RUNNING), PAUSED: (200, PAUSED), ASLEEP: (200, ASLEEP)},
    "ttl": {RUNNING: (200, RUNNING), PAUSED: (200, PAUSED), ASLEEP: (200, ASLEEP)},
    "pause": {RUNNING: (204, PAUSED), PAUSED: (204, PAUSED), ASLEEP: (409, ASLEEP)},
    "resume": {RUNNING: (204, RUNNING), PAUSED: (204, RUNNING), ASLEEP: (204, RUNNING)},
    "hibernate": {RUNNING: (200, ASLEEP), PAUSED: (200, ASLEEP), ASLEEP: (200, ASLEEP)},
    "wake": {RUNNING: (200, RUNNING), PAUSED: (409, PAUSED), ASLEEP: (200, RUNNING)},
    "snapshot": {RUNNING: (201, RUNNING), PAUSED: (201, PAUSED), ASLEEP: (201, RUNNING)},
    "fork-tree": {RUNNING: (201, RUNNING), PAUSED: (409, PAUSED), ASLEEP: (201, RUNNING)},
    "fork": {RUNNING: (201, RUNNING), PAUSED: (409, PAUSED), ASLEEP: (201, RUNNING)},
    "warm": {RUNNING: (201, STOPPED), PAUSED: (409, PAUSED), ASLEEP: (201, STOPPED)},
    "promote": {RUNNING: (200, RUNNING), PAUSED: (200, PAUSED), ASLEEP: (200, ASLEEP)},
    # What a promotion does to the siblings.
    "lose": {RUNNING: (204, GONE), PAUSED: (204, GONE), ASLEEP: (204, GONE)},
    "delete": {RUNNING: (204, GONE), PAUSED: (204, GONE), ASLEEP: (204, GONE)},
}
#: Of what is stopped the record can be looked at, changed and deleted; what needs a machine is refused.
OF_STOPPED = {
    "get": (200, STOPPED), "ttl": (200, STOPPED), "lose": (204, GONE), "delete": (204, GONE),
}  # fmt: skip
for name, answers in MODEL.items():
    answers[GONE] = (404, GONE)
    answers[STOPPED] = OF_STOPPED.get(name, (409, STOPPED))
#: How often each is chosen.
WEIGHTS = {
    "exec": 14, "get": 1, "ttl": 1, "pause": 2, "resume": 4, "hibernate": 2, "wake": 2, "snapshot": 1, "fork-tree": 3,
    "fork": 1, "warm": 2, "promote": 1, "delete": 1, "create": 2, "create-from": 2, "delete-snapshot": 1, "list": 1,
}  # fmt: skip


@dataclass
class Lines:
    """What is known of what was written to a sandbox, or is in a snapshot."""

    must: set[str] = field(default_factory=set)
    may: set[str] = field(default_factory=set)

    def copy(self) -> "Lines":
        return Lines(set(self.must), set(self.may))


@dataclass
class Box:
    """One sandbox, as far as it is known."""

    id: str
    lines: Lines
    #: The secret of a process that it must have; empty where it has none.
    secret: str = ""
    tree: str = ""
    #: Who took its place.
    successor: "Box | None" = None
    #: States that it may be in now.
    may_be: set[str] = field(default_factory=lambda: {RUNNING})
    #: Operations under way, each with all states that it may have met.
    under_way: list[tuple[str, set[str]]] = field(default_factory=list)
    #: How many operations have begun.
    begun: int = 0
    dead: bool = False

    def begin(self, name: str, met: set[str]) -> tuple[str, set[str]]:
        """From now on it may have happened, and what others under way make of that."""
        self.begun += 1
        entry = (name, met)
        self.under_way.append(entry)
        size = 0
        while size != len(self.may_be):
            size = len(self.may_be)
            self.may_be |= {MODEL[one][state][1] for one, _ in self.under_way for state in self.may_be}
        for _, seen in self.under_way:
            seen |= self.may_be
        return entry

    def finish(self, entry: tuple[str, set[str]]) -> None:
        """It is answered."""
        self.under_way = [one for one in self.under_way if one is not entry]


class Violation(AssertionError):
    """Something that no order of the operations gives."""


class Stress:
    """The model, and the clients that compare it."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.wire = server.wire()
        self.seed = seed
        self.lock = threading.RLock()
        self.idle = threading.Condition(self.lock)
        self.open = True
        self.killed = False
        self.busy = 0
        self.making = 0
        self.boxes: dict[str, Box] = {}
        self.snapshots: dict[str, tuple[Lines, str]] = {}
        self.tally: Counter[str] = Counter()
        self.failures: list[str] = []
        self.serial = 0
        self.end = 0.0

    # --- one operation ------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self) -> Iterator[None]:
        """While the gate is open."""
        with self.idle:
            self.idle.wait_for(lambda: self.open)
            self.busy += 1
        try:
            yield
        finally:
            with self.idle:
                self.busy -= 1
                self.idle.notify_all()

    def ask(self, method: str, path: str, value: object | None = None, timeout: float = PATIENCE * 5) -> Reply | None:
        """None when nobody knows how it ended."""
        try:
            reply = self.wire.json(method, path, value, timeout)
            # The half that was not killed lives on for a moment, and can do nothing.
            return None if self.killed and reply.status >= 500 else reply
        except OSError:
            return None
        except Exception as error:
            # A response that breaks off.
            if "http.client" in type(error).__module__:
                return None
            raise

    def on(self, name: str, box: Box, act: Callable[[], Reply | None]) -> Reply | None:
        """Does it, and compares the answer with the model."""
        model = MODEL[name]
        with self.lock:
            met = set(box.may_be)
            alone = not box.under_way
            entry = box.begin(name, met)
            begun = box.begun
        reply = act()
        with self.lock:
            box.finish(entry)
            self.tally[f"{name} {reply.status if reply else 'unknown'}"] += 1
            if reply is None:
                return None
            fitting = {state for state in met if model[state][0] == reply.status}
            if not fitting and not self.excused(name, reply, met):
                raise Violation(f"{name} of {box.id}, which may have been {sorted(met)}: {reply.status} {reply.body!r}")
            if name == "delete":
                box.dead, box.may_be = True, {GONE}
            elif alone and fitting and begun == box.begun and not box.dead:
                box.may_be = {model[state][1] for state in fitting}
        return reply

    def excused(self, name: str, reply: Reply, met: set[str]) -> bool:
        """What may happen in any state, or because something else happens at the same time."""
        code = reply.json().get("code") if reply.body[:1] == b"{" else ""
        if reply.status in (507, 429) or code == "processes_not_held":
            return name in ("fork-tree", "fork", "warm", "snapshot", "pause", "hibernate", "wake", "exec", "resume")
        if name == "exec" and met & {PAUSED, ASLEEP, STOPPED, GONE}:
            # Its machine went, or stood still, under it.
            return reply.status in (500, 504)
        if GONE in met and reply.status == 409:
            # It is just being deleted.
            return True
        return name == "promote" and reply.status == 400

    # --- operations ---------------------------------------------------------------------------------------------------

    def line(self) -> str:
        with self.lock:
            self.serial += 1
            text = f"{self.serial}"
        return f"{text}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def exec(self, box: Box) -> None:
        line = self.line()
        pid = box.secret.partition(":")[0]
        command = (
            f"echo {line} >>/dev/shm/log; echo {line} >>/root/log; cat /dev/shm/log; echo --; cat /root/log; echo --;"
            f" tr '\\0' '\\n' </proc/{pid or 1}/environ | grep ^SECRET="
        )
        with self.lock:
            before = set(box.lines.must)
            box.lines.may.add(line)
        body = {"cmd": command, "timeout_seconds": 5}
        reply = self.on("exec", box, lambda: self.ask("POST", f"/v1/sandboxes/{box.id}/exec", body, PATIENCE))
        with self.lock:
            if reply is None or reply.status in (500, 504):
                return
            if reply.status != 200:
                box.lines.may.discard(line)
                return
            memory, disk, secret = reply.json()["stdout"].split("--\n")
            known = box.lines.must | box.lines.may
            for name, text in (("memory", memory), ("disk", disk)):
                found = text.split()
                if len(found) != len(set(found)) or line not in found:
                    raise Violation(f"{name} of {box.id}: a command ran twice, or not at all: {found}")
                wanted = before if name == "disk" or box.secret else {line}
                if not wanted <= set(found) <= known:
                    raise Violation(f"{name} of {box.id}: lost {wanted - set(found)}, foreign {set(found) - known}")
            if box.secret and secret.strip() != f"SECRET={box.secret.partition(':')[2]}":
                raise Violation(f"{box.id} lost its process: {secret!r} is not {box.secret}")
            box.lines.must.add(line)
            box.lines.must |= set(disk.split()) & set(memory.split())

    def add(self, id: str, lines: Lines, secret: str, tree: str = "") -> Box:
        box = Box(id, lines, secret, tree)
        with self.lock:
            self.boxes[id] = box
        return box

    def create(self) -> None:
        reply = self.ask("POST", "/v1/sandboxes", {"template": "base", "ttl_seconds": 3600})
        self.tally[f"create {reply.status if reply else 'unknown'}"] += 1
        if reply is None or reply.status == 507:
            return
        if reply.status != 201:
            raise Violation(f"create gave {reply.status} {reply.body!r}")
        id, secret = reply.json()["id"], random.randbytes(8).hex()
        begun = self.ask(
            "POST",
            f"/v1/sandboxes/{id}/exec",
            {"cmd": f"SECRET={secret} setsid sleep 100000 </dev/null >/dev/null 2>&1 & echo $!", "timeout_seconds": 5},
        )
        if begun is not None and begun.status == 200:
            self.add(id, Lines(), f"{begun.json()['stdout'].strip()}:{secret}")
        elif begun is None:
            # The server was killed: it is found as one that nobody was told of.
            return
        else:
            raise Violation(f"the first command gave {begun.status} {begun.body!r}")

    def create_from(self, snapshot: str) -> None:
        with self.lock:
            lines, secret = self.snapshots[snapshot]
            copy = lines.copy()
        reply = self.ask("POST", "/v1/sandboxes", {"from_snapshot": snapshot, "ttl_seconds": 3600})
        self.tally[f"create-from {reply.status if reply else 'unknown'}"] += 1
        if reply is not None and reply.status == 201:
            self.add(reply.json()["id"], copy, secret)
        elif reply is not None and reply.status == 404:
            with self.lock:
                if snapshot in self.snapshots:
                    raise Violation(f"snapshot {snapshot} is lost: {reply.body!r}")
        elif reply is not None and reply.status != 507:
            raise Violation(f"create-from gave {reply.status} {reply.body!r}")

    def copied(self, box: Box, before: Lines) -> Lines:
        """What a copy may have that was made since `before` was taken."""
        with self.lock:
            return Lines(set(before.must), (box.lines.must | box.lines.may | before.may) - before.must)

    def snapshot(self, box: Box) -> None:
        with self.lock:
            before = box.lines.copy()
        reply = self.on("snapshot", box, lambda: self.ask("POST", f"/v1/sandboxes/{box.id}/snapshots"))
        if reply is not None and reply.status == 201:
            with self.lock:
                self.snapshots[reply.json()["id"]] = (self.copied(box, before), box.secret)

    def fork(self, box: Box, name: str, count: int) -> None:
        with self.lock:
            before = box.lines.copy()
        path, wish = (f"/v1/sandboxes/{box.id}/{name}", {"count": count})
        if name == "warm":
            path, wish = f"/v1/sandboxes/{box.id}/fork", {"mode": "warm"}
        reply = self.on(name, box, lambda: self.ask("POST", path, wish))
        if reply is None or reply.status != 201:
            return
        fork = reply.json()
        if fork.get("errors"):
            raise Violation(f"children of {box.id} failed: {fork['errors']}")
        for child in fork["children"]:
            lines = self.copied(box, before)
            if not fork["flushed"]:
                lines = Lines(set(), lines.must | lines.may)
            secret = box.secret if name != "fork" else ""
            one = self.add(child["id"], lines, secret, fork["tree_id"])
            if name == "warm":
                with self.lock:
                    box.successor = one
                    if box.may_be & {GONE}:
                        # It may have lost to a sibling meanwhile, and its successor with it.
                        one.may_be.add(GONE)

    def promote(self, box: Box) -> None:
        with self.lock:
            siblings = [one for one in self.boxes.values() if one.tree and one.tree == box.tree and one is not box]
            for one in siblings:
                # Whoever took the place of one goes with it.
                siblings += [one.successor] if one.successor and one.successor not in siblings else []
            losing = [(one, one.begin("lose", set())) for one in siblings]
        reply = self.on(
            "promote", box, lambda: self.ask("POST", f"/v1/sandboxes/{box.id}/promote", {"cleanup_siblings": True})
        )
        with self.lock:
            for one, entry in losing:
                one.finish(entry)
            if reply is None or reply.status != 200:
                return
            if reply.json()["failures"]:
                raise Violation(f"promote of {box.id}: {reply.json()}")
            for one in siblings:
                if one.id in reply.json()["deleted"]:
                    one.dead, one.may_be = True, {GONE}

    def act(self, chance: random.Random) -> None:
        """One operation, on what is there."""
        with self.lock:
            alive = [box for box in self.boxes.values() if not box.dead]
            crowded = len(alive) + self.making >= CROWD
            name = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            # Half of the time the newest: clients meet there.
            box = (alive[-1] if chance.random() < 0.5 else chance.choice(alive)) if alive else None
            kept = chance.choice(list(self.snapshots)) if self.snapshots else None
            count = chance.randint(1, 2)
            if name in ("create", "create-from", "fork", "fork-tree", "warm") and crowded:
                name = "delete"
            makes = name in ("create", "create-from", "fork", "fork-tree", "warm")
            if box is None or (name == "create-from" and kept is None):
                name, makes = "create", True
            if box is not None and box.may_be == {STOPPED} and name != "create":
                name = "delete"
            if name == "delete-snapshot" and (kept is None or len(self.snapshots) < 3):
                name = "list"
            if name == "snapshot" and len(self.snapshots) > 4:
                name, kept = "delete-snapshot", next(iter(self.snapshots))
            self.making += 2 * makes
        try:
            self.perform(name, box, kept, count)
        finally:
            with self.lock:
                self.making -= 2 * makes

    def perform(self, name: str, box: Box | None, kept: str | None, count: int) -> None:
        if name == "create" or box is None:
            self.create()
        elif name == "create-from" and kept is not None:
            self.create_from(kept)
        elif name == "list":
            reply = self.ask("GET", "/v1/sandboxes")
            assert reply is None or reply.status == 200
        elif name == "delete-snapshot":
            with self.lock:
                there = self.snapshots.pop(kept or "", None)
            reply = self.ask("DELETE", f"/v1/snapshots/{kept}")
            if there and reply is not None and reply.status not in (204, 404):
                raise Violation(f"delete of snapshot {kept} gave {reply.status} {reply.body!r}")
        elif name == "exec":
            self.exec(box)
        elif name == "snapshot":
            self.snapshot(box)
        elif name in ("fork", "fork-tree", "warm"):
            self.fork(box, name, count if name == "fork-tree" else 1)
        elif name == "promote":
            self.promote(box)
        else:
            self.simple(name, box)

    def simple(self, name: str, box: Box) -> None:
        path = f"/v1/sandboxes/{box.id}"
        method, suffix, value = {
            "get": ("GET", "", None),
            "delete": ("DELETE", "", None),
            "ttl": ("PATCH", "/lifecycle", {"ttl_seconds": 3000}),
        }.get(name, ("POST", f"/{name}", None))
        self.on(name, box, lambda: self.ask(method, path + suffix, value))

    # --- all together -------------------------------------------------------------------------------------------------

    def client(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        while time.monotonic() < self.end and not self.failures:
            try:
                with self.turn():
                    self.act(chance)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def settle(self, kill: bool) -> None:
        """Nobody begins anything; the server is killed under what is under way; then the model is compared."""
        with self.idle:
            self.open = False
        if kill:
            self.killed = True
            self.server.restart()
        with self.idle:
            assert self.idle.wait_for(lambda: self.busy == 0, 120), "operations don't end"
            self.killed = False
            rows = {row["id"]: row["status"] for row in self.wire.json("GET", "/v1/sandboxes").json()}
            for id in set(rows) - set(self.boxes):
                # Of a create or fork that nobody was told of: whole. Of others there are none.
                used = self.ask("POST", f"/v1/sandboxes/{id}/exec", {"cmd": "echo usable", "timeout_seconds": 10})
                if not kill or used is None or used.json().get("stdout") != "usable\n":
                    raise Violation(f"{id} ({rows[id]}) is there and not known, or not usable: {used}")
                assert self.wire.json("DELETE", f"/v1/sandboxes/{id}").status == 204
            for box in list(self.boxes.values()):
                now = rows.get(box.id, GONE)
                if now not in box.may_be:
                    raise Violation(f"{box.id} is {now}, and may be {box.may_be}")
                box.may_be, box.dead = {now}, now == GONE
                if box.dead:
                    del self.boxes[box.id]
            listed = {row["id"] for row in self.wire.json("GET", "/v1/snapshots").json()}
            if lost := set(self.snapshots) - listed:
                raise Violation(f"snapshots are lost: {lost}")
            for id in listed - set(self.snapshots):
                assert self.wire.json("DELETE", f"/v1/snapshots/{id}").status in (204, 404)
            machines = sorted(id for id, box in self.boxes.items() if not box.may_be <= {ASLEEP, STOPPED})
            if sorted(host.vmm_pids(self.server.data_dir).values()) != machines:
                raise Violation(f"machines are {host.vmm_pids(self.server.data_dir)}, not {machines}")
            self.open = True
            self.idle.notify_all()

    def run(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        clients = [threading.Thread(target=self.client, args=(number,), daemon=True) for number in range(CLIENTS)]
        for one in clients:
            one.start()
        chance, kills = random.Random(f"{self.seed} kills"), 0
        try:
            while time.monotonic() < self.end - 5 and not self.failures:
                time.sleep(
                    min(chance.uniform(6, 12 if SECONDS < 60 else 40), max(0.0, self.end - 5 - time.monotonic()))
                )
                self.settle(kill=True)
                kills += 1
        finally:
            self.end = 0.0
            with self.idle:
                self.open = True
                self.idle.notify_all()
            for one in clients:
                one.join(180)
        assert not self.failures, self.failures
        self.settle(kill=False)
        self.tally["kill -9"] = kills


@pytest.mark.timeout(SECONDS + 240)
def test_random_operations_of_many_clients_keep_to_the_model(own_server: Server) -> None:
    print(f'STRESS="{SECONDS} {SEED}"')
    before = footprint(own_server)
    stress = Stress(own_server, SEED)
    try:
        stress.run(SECONDS)
    except AssertionError as error:
        raise AssertionError(f'STRESS="{SECONDS} {SEED}": {error}') from error
    finally:
        print(dict(sorted(stress.tally.items())))
    own_server.delete_all()
    own_server.settle()
    after: dict[str, Any] = assert_as_before(own_server, before, restarted=True)
    print(f"{before} -> {after}")
