"""Takes machines through every way to a copy and says in words what each keeps: the page that `make docs` writes.

It says what was seen, and asserts nothing but that it could look.
"""

import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pandastack import Client, Sandbox

from . import fork_probe
from .fork_probe import Clock
from .outside import ECHO, Servers
from .paths import REPO
from .poll import until
from .server import Server
from .wire import Wire

PAGE = REPO / "docs" / "what-a-fork-preserves.md"
README = REPO / "README.md"
#: What is between these lines of the README is the page's first table.
BEGIN, END = "<!-- The fork table: `make docs` writes it. -->", "<!-- The end of the fork table. -->"
TABLE = re.compile(re.escape(BEGIN) + r"\n(.*?)" + re.escape(END), re.DOTALL)

#: How long a machine is away, at least, where a person decides how long: longer than what a timer may be late.
AWAY = 2.0
#: What a timer may be late, beside what its machine shows to have been held up.
LATE = 1.0
#: How far a clock may be off, and how long a connection may seem to live.
CLOCK, SECOND = 0.05, 1.0
POLICY = {"egress": {"allow": ["198.51.100.0/24"]}}

FORK, TREE, WARM = "disk fork (`fork`)", "live fork (`fork-tree`)", "warm fork (`fork`, `mode: warm`)"
RESTORE, WAKE, RESUME = "snapshot → create", "hibernate → wake", "pause → resume"
GONE = "gone"


@dataclass
class Machine:
    """One machine at one time."""

    row: dict[str, Any]
    ttl: int
    facts: dict[str, Any]
    #: The program in it, if it runs: at once, and when its timers have ended.
    first: dict[str, Any] | None = None
    told: dict[str, Any] | None = None
    drawn: dict[str, list[Any]] = field(default_factory=dict)
    clock: Clock | None = None

    def numbers(self) -> set[str]:
        """That its kernel drew."""
        return {*self.facts["kernel"], *self.drawn.get("kernel", [])}


@dataclass
class Case:
    """One way, and the machines at its ends."""

    name: str
    before: Machine
    #: Hash of what was written last, and never flushed.
    written: str
    after: list[Machine] = field(default_factory=list)
    #: Where one parent has children: it, afterwards.
    parent: Machine | None = None
    parent_status: str = ""
    #: That the kernels of all other machines drew.
    others: set[str] = field(default_factory=set)
    #: Lifetime and policy of a sandbox that was made without any.
    default_ttl: int = 0
    default_policy: object = None
    #: Numbers of children for which it was refused.
    refused: list[int] = field(default_factory=list)


class Looker:
    """Looks into the machines of one server."""

    def __init__(self, server: Server) -> None:
        self.client: Client = server.client()
        self.wire: Wire = server.wire()

    def sandbox(self, id: str) -> Sandbox:
        """For the client's methods."""
        return self.client.sandboxes.get(id)

    def row(self, id: str) -> dict[str, Any]:
        """As the API shows it."""
        reply = self.wire.json("GET", f"/v1/sandboxes/{id}")
        return reply.json() if reply.status == 200 else {"status": "gone"}

    def ttl(self, id: str) -> int:
        """After how many idle seconds it is deleted."""
        return int(self.wire.json("GET", f"/v1/sandboxes/{id}/lifecycle").json()["ttl_seconds"])

    def machine(self, id: str) -> Machine:
        """Everything that can be seen at once."""
        first = fork_probe.told(self.wire, id)
        return Machine(self.row(id), self.ttl(id), fork_probe.facts(self.sandbox(id)), first)

    def clock(self, id: str) -> Clock:
        """How far it is off the host's."""
        return fork_probe.clock(fork_probe.reader(self.sandbox(id), self.wire), CLOCK)

    def settled(self, id: str) -> Machine:
        """The same, and again when the timers have ended; the generators' next numbers."""
        seen = self.machine(id)
        if seen.first is not None:
            ended = {"sleep", "time_of_day"}
            seen.told = until(
                "the timers end",
                lambda: (now := fork_probe.told(self.wire, id)) and ended <= now["timers"].keys() and now,
                fork_probe.TIME_OF_DAY + 20,
                0.25,
            )
            seen.drawn = fork_probe.draw(self.wire, id)
        return seen


def _ids(fork: dict[str, Any]) -> list[str]:
    children = fork.get("children") or [fork["sandbox"]]
    return [child["id"] for child in children]


class Observer:
    """Takes machines through all the ways at once: a parent with children, and one machine for each of the others."""

    def __init__(self, server: Server, outside: Servers) -> None:
        self.look = Looker(server)
        self.wire = self.look.wire
        self.outside = outside
        self.made: list[str] = []
        self.snapshots: list[str] = []
        self.unsupported: dict[str, str] = {}

    def post(self, id: str, path: str, order: object | None = None, expect: int = 201) -> dict[str, Any]:
        """An operation that works."""
        reply = self.wire.json("POST", f"/v1/sandboxes/{id}/{path}", order, 120)
        assert reply.status == expect, (path, reply)
        told = reply.json() if reply.body else {}
        self.made += _ids(told) if "children" in told else []
        return told

    def observe(self) -> list[Case]:
        """All of it. Takes as long as the timers and the cold boot of one child."""
        order = {"metadata": {"of": "the original"}, "ttl_seconds": 1234, "network": POLICY}
        try:
            parent, bare = self.create(order | {"template": "code-interpreter"}), self.create({"template": "base"})
            fork_probe.start_probe(self.look.sandbox(parent), self.wire)
            # Copies of the program while it holds nothing yet: starting it costs more.
            wakes, resumes, warms = _ids(self.post(parent, "fork-tree", {"count": 3, "metadata": order["metadata"]}))
            with ThreadPoolExecutor() as pool:
                running = [
                    pool.submit(self.children, parent, pool),
                    pool.submit(self.itself, WAKE, wakes, "hibernate", "wake"),
                    pool.submit(self.itself, RESUME, resumes, "pause", "resume"),
                    pool.submit(self.warm, warms),
                ]
                cases = [case for one in running for case in one.result()]
            machines = [one for case in cases for one in [*case.after, *([case.parent] if case.parent else [])]]
            ttl, policy = self.look.ttl(bare), self.look.row(bare)["network"]
            for one in {id(one): one for one in machines}.values():
                one.clock = self.look.clock(one.row["id"])
            for case in cases:
                own = [id(one) for one in case.after]
                case.others = {n for one in machines if id(one) not in own for n in one.numbers()}
                case.default_ttl, case.default_policy = ttl, policy
            return cases
        finally:
            self.close()

    def create(self, order: dict[str, Any]) -> str:
        """A sandbox."""
        reply = self.wire.json("POST", "/v1/sandboxes", order, 120)
        assert reply.status == 201, reply
        self.made.append(reply.json()["id"])
        return self.made[-1]

    def begin(self, name: str, id: str) -> Case:
        """Everything is open, then armed."""
        fork_probe.hold(self.wire, id, self.outside.address, ECHO)
        return Case(name, self.look.machine(id), fork_probe.arm(self.wire, id))

    def children(self, id: str, pool: ThreadPoolExecutor) -> list[Case]:
        """Forks, and what comes of a snapshot. Of one parent, one after the other; they are looked at meanwhile."""
        metadata = {"of": "the call"}
        tree, looks = self.begin(TREE, id), []

        def seen(case: Case, ids: Iterable[str]) -> None:
            looks.append((case, [pool.submit(self.look.settled, one) for one in ids]))

        tree_children = _ids(self.post(id, "fork-tree", {"count": 2, "metadata": metadata}))
        seen(tree, tree_children)
        restore = Case(RESTORE, tree.before, fork_probe.arm(self.wire, id))
        self.snapshots.append(self.post(id, "snapshots")["id"])
        captured = time.monotonic()
        fork = Case(FORK, tree.before, fork_probe.arm(self.wire, id))
        # The child boots; the parent does not wait for it.
        booting: Future[dict[str, Any]] = pool.submit(self.post, id, "fork", {"count": 1, "metadata": metadata})
        time.sleep(max(0.0, captured + AWAY - time.monotonic()))
        restored = [self.create({"from_snapshot": self.snapshots[0], "metadata": metadata}) for _ in range(2)]
        seen(restore, restored)
        seen(fork, _ids(booting.result()))
        parent = self.look.settled(id)
        for case, futures in looks:
            case.after = [one.result() for one in futures]
            case.parent, case.parent_status = parent, str(parent.row["status"])
        for case, path in ((tree, "fork-tree"), (fork, "fork")):
            case.refused = [n for n in (0, 17) if self.status(id, path, {"count": n}) == 400]
        return [fork, tree, restore]

    def status(self, id: str, path: str, order: object) -> int:
        """Of an answer; what it makes is kept in mind."""
        reply = self.wire.json("POST", f"/v1/sandboxes/{id}/{path}", order, 120)
        self.made += _ids(reply.json()) if reply.status == 201 else []
        return reply.status

    def itself(self, name: str, id: str, leave: str, back: str) -> list[Case]:
        """A machine that goes away and comes back."""
        case = self.begin(name, id)
        for path in (leave, back):
            reply = self.wire.json("POST", f"/v1/sandboxes/{id}/{path}", timeout=120)
            assert reply.status in (200, 204), (path, reply)
            time.sleep(AWAY if path == leave else 0)
        case.after = [self.look.settled(id)]
        return [case]

    def warm(self, id: str) -> list[Case]:
        """One child that takes its parent's place, if the server can."""
        order = {"mode": "warm", "metadata": {"of": "the call"}}
        refused = [n for n in (0, 2) if self.status(id, "fork", order | {"count": n}) == 400]
        case = self.begin(WARM, id)
        reply = self.wire.json("POST", f"/v1/sandboxes/{id}/fork", order, 120)
        if reply.status == 400:
            self.unsupported["warm fork"] = f"{reply.status} `{reply.json()['code']}`"
            return []
        assert reply.status == 201, reply
        (child,) = _ids(reply.json())
        self.made.append(child)
        case.after, case.refused = [self.look.settled(child)], refused
        case.parent_status = str(self.look.row(id)["status"])
        return [case]

    def close(self) -> None:
        """Deletes all of them, a few at a time."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda one: self.wire.json("DELETE", f"/v1/sandboxes/{one}"), self.made))
        for one in self.snapshots:
            self.wire.json("DELETE", f"/v1/snapshots/{one}")


# --- words ------------------------------------------------------------------------------------------------------------

Word = Callable[[Case, Machine], str]


def of_program(word: Word) -> Word:
    """Of what goes with its process where that is gone."""

    def find(case: Case, now: Machine) -> str:
        if now.told is None:
            return GONE if not now.facts["programs"] else "there, and does not answer"
        return word(case, now)

    return find


def same(find: Callable[[Machine], object], new: str = "new") -> Word:
    """Whether it is what it was in the original."""
    return lambda case, now: "the same" if find(now) == find(case.before) else new


def grows(now: Machine, find: Callable[[dict[str, Any]], int]) -> bool:
    """Whether it went on between two looks."""
    assert now.first and now.told
    return find(now.told) > find(now.first)


def process(case: Case, now: Machine) -> str:
    told, before = now.told, case.before.first
    assert told and before
    kept = (told["pid"], told["secret"]) == (before["pid"], before["secret"])
    return "goes on, with its memory" if kept and grows(now, lambda one: one["ticks"]) else "another one"


def talk(name: str) -> Word:
    def word(_: Case, now: Machine) -> str:
        assert now.told
        error = now.told["talks"][name]["error"]
        if error is None:
            return "goes on" if grows(now, lambda one: one["talks"][name]["count"]) else "hangs"
        return f"ends: {error}"

    return of_program(word)


def outside_connection(_: Case, now: Machine) -> str:
    told = now.told
    assert told
    ends = [told["talks"]["outer"], told["idle"]]
    if all(one["error"] is None for one in ends):
        return "goes on" if grows(now, lambda one: one["talks"]["outer"]["count"]) else "hangs"
    if any(one["error"] is None for one in ends):
        return "ends only when it is used"
    # Its clock may have been set once more, later.
    resumed = max(told["steps"], key=lambda step: step["stood"])["after"]
    within = all(one["at"] - resumed <= SECOND for one in ends)
    names = " or ".join(f"`{name}`" for name in sorted({str(one["error"]) for one in ends}))
    return f"ends {'within 1 s' if within else 'late'}, with {names}"


def parents_connection(case: Case, _: Machine) -> str:
    if case.parent is None:
        return "(there is no other)"
    told = case.parent.told
    assert told
    errors = {told["talks"]["outer"]["error"], told["idle"]["error"]} - {None}
    if errors:
        return f"ends: {errors}"
    return "goes on" if grows(case.parent, lambda one: one["talks"]["outer"]["count"]) else "hangs"


def open_file(name: str) -> Word:
    def word(case: Case, now: Machine) -> str:
        assert now.told and case.before.first
        file, before = now.told["files"][name], case.before.first["files"][name]
        if not file["right"]:
            return "another content"
        return "open, at the same offset" if file["offset"] == before["offset"] else "open, at another offset"

    return of_program(word)


def when(kind: str) -> Word:
    """How a timer ended that was armed before."""

    def word(_: Case, now: Machine) -> str:
        told = now.told
        assert told
        timers, steps = told["timers"], [step for step in told["steps"] if step["after"] > told["timers"]["armed"]]
        ended, copied = timers[kind], max(steps, key=lambda step: step["stood"])
        if ended < copied["before"]:
            raise AssertionError(f"the timer ended before the machine was copied: {timers}, {steps}")
        if kind == "sleep":
            # Its machine stood still for so long, and a rest does not get shorter by that.
            due = timers["armed"] + timers["rest"] + sum(step["stood"] for step in steps)
        else:
            # It may have come while the machine was away.
            due = timers["at"]
        if ended < due - 0.1:
            return "ends too early"
        if ended > max(due, copied["after"]) + LATE + told["late"]:
            return "ends late"
        return "ends when its rest has passed" if kind == "sleep" else "ends at that time"

    return of_program(word)


def clock(_: Case, now: Machine | None) -> str:
    if now is None:
        return "(there is no other)"
    assert now.clock
    if now.clock.most <= CLOCK:
        return "within 50 ms"
    assert now.clock.least > CLOCK, f"this host is too busy to say how far off the clock is: {now.clock}"
    return "off by more than 50 ms"


def generator(name: str) -> Word:
    def word(_: Case, now: Machine) -> str:
        if name not in now.drawn:
            return "(no numpy)"
        number, due = now.drawn[name]
        return "the original's next numbers" if number == due else "new numbers"

    return of_program(word)


def kernel(case: Case, now: Machine) -> str:
    own = [number for one in case.after for number in one.numbers()]
    fresh = len(set(own)) == sum(len(one.numbers()) for one in case.after)
    return "new numbers" if fresh and not set(own) & case.others and now.numbers() else "numbers of another machine"


def openssl(case: Case, now: Machine) -> str:
    own = [one.drawn["openssl"][0] for one in case.after if one.drawn]
    if now.told is None:
        return GONE
    if len(case.after) == 1:
        return "(there is no sibling to compare with)"
    return "new numbers" if len(set(own)) == len(own) else "a sibling's next numbers"


def listener(case: Case, now: Machine) -> str:
    assert now.told and case.before.first
    at = "its" if now.told["address"] == now.facts["address"] == now.row["guest_ip"] else "another"
    moved = now.told["address"] != case.before.first["address"]
    return f"listens, at {at} {'new ' if moved and at == 'its' else ''}address"


def environment(case: Case, now: Machine) -> str:
    assert now.told and case.before.first
    return "as it was" if now.told["environment"] == case.before.first["environment"] else "another"


def later_environment(case: Case, now: Machine) -> str:
    names = now.facts["environment"]
    expected = (now.row["id"], now.facts["identity"]["generation"], now.facts["hostname"])
    seen = tuple(names.get(f"COPPICE_{name}") for name in ("SANDBOX_ID", "GENERATION", "HOSTNAME"))
    if seen != expected:
        return "not its own"
    return "the same" if names == case.before.facts["environment"] else "its own"


def identity(case: Case, now: Machine) -> str:
    file = now.facts["identity"]
    if file == case.before.facts["identity"]:
        return "the same"
    fork = file["fork"]
    says = f"its own, reason `{file['reason']}`"
    if not fork or fork == case.before.facts["identity"]["fork"]:
        return says
    # Only a fork tells of a parent, and it tells the truth.
    metadata = now.row["metadata"]
    right = (fork["parent"], fork["tree"], str(fork["index"]), fork["count"]) == (
        metadata["fork_parent_id"],
        metadata["fork_tree_id"],
        metadata["fork_index"],
        len(case.after),
    )
    return f"{says}, mode `{fork['mode']}`" + (", parent, tree, index, count" if right else ", and not its own parent")


def lifetime(case: Case, now: Machine) -> str:
    names = {case.before.ttl: "the same", case.default_ttl: "the server's default"}
    return names.get(now.ttl, "another")


def policy(case: Case, now: Machine) -> str:
    if now.row["network"] == case.before.row["network"]:
        return "the same"
    return "the server's default" if now.row["network"] == case.default_policy else "another"


def metadata(_: Case, now: Machine) -> str:
    return {"the original": "the same", "the call": "that of the call"}.get(now.row["metadata"].get("of"), "none")


def unflushed(case: Case, now: Machine) -> str:
    return "there, whole" if now.facts["unflushed"] == case.written else "lost"


def tmpfs(case: Case, now: Machine) -> str:
    assert case.before.first
    if now.facts["tmpfs"] is None:
        return "empty"
    return "there" if now.facts["tmpfs"] == case.before.first["secret"] else "another content"


def generation(case: Case, now: Machine) -> str:
    ids = [one.facts["identity"]["generation"] for one in case.after]
    if now.facts["identity"]["generation"] == case.before.facts["identity"]["generation"]:
        return "the same"
    return "new" if len(set(ids)) == len(ids) else "a sibling's"


def names_agree(now: Machine) -> tuple[object, ...]:
    return now.facts["hostname"], now.facts["etc_hostname"]


ROWS: dict[str, Word] = {
    "a running process": of_program(process),
    "its child process, and the pipes to it": talk("child"),
    "an open file": open_file("kept"),
    "an open file that was deleted": open_file("deleted"),
    "a file that was just written, and never flushed": unflushed,
    "tmpfs (`/dev/shm`)": tmpfs,
    "a sleep that was begun before": when("sleep"),
    "a timer for a time of day": when("time_of_day"),
    "wall clock": clock,
    "wall clock of the parent": lambda case, now: clock(case, case.parent),
    "a connection to the outside: in the parent": parents_connection,
    "a connection to the outside: in this machine": of_program(outside_connection),
    "a connection inside the machine": talk("inner"),
    "a listening port": of_program(listener),
    "kernel randomness (`getrandom`, `uuid4`)": kernel,
    "Python's `random`, seeded before": generator("random"),
    "`numpy.random`, seeded before": generator("numpy"),
    "OpenSSL's generator, used before": openssl,
    "a `random.Random(seed)` of the program's own": generator("own"),
    "a `numpy.random.default_rng(seed)`": generator("own_numpy"),
    "generation (`identity.json`)": generation,
    "host name": same(names_agree),
    "`/etc/machine-id`": same(lambda one: one.facts["machine_id"]),
    "`boot_id` of the kernel": same(lambda one: one.facts["boot_id"]),
    "IP address": same(lambda one: one.facts["address"]),
    "MAC": same(lambda one: one.facts["mac"]),
    "environment of a running process": of_program(environment),
    "environment of later commands (`COPPICE_…`)": later_environment,
    "`/run/coppice/identity.json`": identity,
    "idle lifetime (`ttl_seconds`)": lifetime,
    "metadata": metadata,
    "network policy": policy,
}


# --- the page ---------------------------------------------------------------------------------------------------------

ORDER = [FORK, TREE, WARM, RESTORE, WAKE, RESUME]


def columns(cases: list[Case]) -> dict[str, dict[str, str]]:
    """The words of every way, in the page's order. Machines that differ have all their words in the cell."""
    found = {}
    for case in sorted(cases, key=lambda one: ORDER.index(one.name)):
        found[case.name] = {
            row: " / ".join(dict.fromkeys(word(case, one) for one in case.after)) for row, word in ROWS.items()
        }
    return found


def table(columns: dict[str, dict[str, str]]) -> str:
    """In Markdown."""
    rows = list(next(iter(columns.values())))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(column[row] for column in columns.values())] for row in rows]
    text = ["|".join(["", *(f" {cell} " if cell else " " for cell in line), ""]) for line in lines]
    text[1] = "|".join(["", *lines[1], ""])
    return "\n".join(text) + "\n"


def summary(cases: list[Case]) -> dict[str, dict[str, str]]:
    """What the README says of forks."""
    found = {}
    for case in sorted(cases, key=lambda one: ORDER.index(one.name)):
        if case.name not in (FORK, TREE, WARM):
            continue
        words = columns([case])[case.name]
        child = case.after[0]
        disk, memory = words["a file that was just written, and never flushed"], words["tmpfs (`/dev/shm`)"]
        inherits = {
            ("there, whole", "empty"): "disk, including writes not yet flushed",
            ("there, whole", "there"): "disk and memory",
        }
        paused = f"running (paused only for the {'clone' if case.name == FORK else 'capture'})"
        goes_on = case.parent is not None and case.parent_status == "running"
        addresses = {words["IP address"], words["MAC"]}
        found[case.name] = {
            "child inherits": inherits.get((disk, memory), "something else"),
            "running processes survive": "yes" if words["a running process"].startswith("goes on") else "no",
            "how the child starts": {"cold": "kernel + init boot", "snapshot": "snapshot restore"}.get(
                child.row["boot_mode"], child.row["boot_mode"]
            ),
            "children per call": {(0, 17): "1-16", (0, 2): "exactly 1"}.get(tuple(case.refused), "other counts"),
            "parent afterwards": paused if goes_on else case.parent_status,
            "child network identity": {("new",): "fresh IP and MAC", ("the same",): "the parent's"}.get(
                tuple(addresses), "half of the parent's"
            ),
        }
    return found


HEAD = """# What a fork preserves

`make docs` wrote this page: it took real machines each of these ways and put down what it saw.
`tests/vm/test_fork_matrix.py` looks again and fails when a cell is no longer true.

"""

PROPERTIES = "## Property by property"
WAYS = f"""
{PROPERTIES}

What becomes of each in the machine that comes out: the child of a fork, the sandbox made of a snapshot, the sandbox
itself when it woke or was resumed, {AWAY:g} s later. "The same" and "new" are meant against the machine that went in.

"""

FOOT = """
A disk fork's child boots: what belongs to a process is gone with it. A generator that a program made itself goes on
with the same numbers in every copy; [guest.md](guest.md) says how a program is told. A clock's error is what looks at
the host's clock before and after leave possible.
"""


@dataclass
class Seen:
    """What the page is made of."""

    summary: dict[str, dict[str, str]]
    columns: dict[str, dict[str, str]]
    unsupported: dict[str, str]

    def page(self) -> str:
        """The whole page."""
        missing = "".join(
            f"\nNot supported by this server: {what} ({how}).\n" for what, how in self.unsupported.items()
        )
        return HEAD + table(self.summary) + WAYS + table(self.columns) + missing + FOOT

    def write(self) -> None:
        """The page, and the README's table."""
        PAGE.write_text(self.page())
        text = README.read_text()
        README.write_text(TABLE.sub(lambda _: f"{BEGIN}\n\n{table(self.summary)}\n{END}", text))

    def differences(self) -> list[str]:
        """Where the committed page says something else, cell by cell; and where the README does."""
        written = PAGE.read_text() if PAGE.exists() else ""
        found = []
        above, _, below = written.partition(PROPERTIES)
        for made, part in ((self.summary, above), (self.columns, below)):
            said = read_table(part)
            for way, cells in made.items():
                for row, cell in cells.items():
                    if (before := said.get(way, {}).get(row)) != cell:
                        found.append(f"{row}, {way}: the page says {before!r}, these machines {cell!r}")
        if not found and written != self.page():
            found.append("the page has other words around its tables, or more than was seen")
        in_readme = TABLE.search(README.read_text())
        if in_readme is None or in_readme[1].strip() != table(self.summary).strip():
            found.append("the table in the README is another one")
        return found


def read_table(text: str) -> dict[str, dict[str, str]]:
    """Columns of a Markdown table."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    rows = [row for row in rows if not set("".join(row)) <= set("-")]
    if not rows:
        return {}
    return {way: {row[0]: row[at] for row in rows[1:] if at < len(row)} for at, way in enumerate(rows[0]) if at > 0}


def see(server: Server, outside: Servers) -> Seen:
    """Looks at all the ways."""
    observer = Observer(server, outside)
    cases = observer.observe()
    return Seen(summary(cases), columns(cases), observer.unsupported)
