#!/usr/bin/env python3
"""Measures one host: prints every sample and the medians, states what is inside each number, counts failures.

It asserts nothing and compares only numbers of its own run. Everything goes through the public HTTP API of a real
`coppice up` with a data directory of its own on the prepared volume; nothing is left behind. Run it with `make bench`.
"""

import argparse
import fcntl
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness import host, outside
from harness.paths import CACHE, PREPARED, binary
from harness.server import Server, make_data_dir, prepared_templates, remove_workspace
from harness.wire import Wire

MIB = 1 << 20
GIB = 1 << 30
#: Of the ioctl that shares a whole file's extents (include/uapi/linux/fs.h).
FICLONE = 0x40049409


@dataclass
class Report:
    """Prints for people, and keeps one JSON object per measurement."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: int = 0
    section: tuple[str, float] | None = None

    def head(self, title: str, *inside: str) -> None:
        """A section: its title, and what is inside its numbers. The one before ends, and says how long it took."""
        if self.section:
            before, since = self.section
            took = time.monotonic() - since
            self.rows.append({"name": f"section: {before}", "unit": "s", "value": took})
            print(f"  (this section took {took:.0f} s)")
        self.section = (title, time.monotonic())
        print(f"\n{title}\n{'-' * len(title)}")
        for line in inside:
            print(f"  {line}")

    def samples(self, name: str, values: Sequence[float], unit: str, **more: Any) -> float:
        """A line of raw samples with their median, which it gives."""
        median = statistics.median(values) if values else float("nan")
        self.rows.append({"name": name, "unit": unit, "samples": list(values), "median": median} | more)
        shown = "  ".join(number(value) for value in values)
        print(f"  {name:<46} median {number(median):>8} {unit:<5} n={len(values):<3} [{shown}]", flush=True)
        return median

    def fact(self, name: str, value: Any, text: str) -> None:
        """One line that is derived from others, or a fact of the machine."""
        self.rows.append({"name": name, "value": value})
        print(f"  {name:<46} {text}", flush=True)

    def failure(self, what: str) -> None:
        """Something that did not work; it is in no sample."""
        self.failures += 1
        self.rows.append({"name": "failure", "value": what})
        print(f"  FAILED: {what}", flush=True)


def number(value: float) -> str:
    """Three digits, or whole above a hundred."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Failed(Exception):
    """A request that was not answered as it should."""


@dataclass
class Bench:
    """What the measurements share."""

    server: Server
    wire: Wire
    report: Report
    template: str

    def call(self, method: str, path: str, body: object | None, expected: int) -> Any:
        """JSON of an answer with the expected status."""
        reply = self.wire.json(method, path, body, timeout=180)
        if reply.status != expected:
            raise Failed(f"{method} {path}: {reply.status} {reply.body.decode(errors='replace')[:300]}")
        return reply.json() if reply.body else None

    def create(self, template: str | None = None) -> dict[str, Any]:
        """A sandbox."""
        return self.call("POST", "/v1/sandboxes", {"template": template or self.template}, 201)

    def put(self, id: str, path: str, text: str) -> None:
        """Writes a file in it."""
        file = f"/v1/sandboxes/{id}/fs?path={path}"
        reply = self.wire.request("PUT", file, text.encode())
        if reply.status >= 300:
            raise Failed(f"PUT {file}: {reply}")

    def background(self, id: str, command: str) -> None:
        """Starts a command in it that goes on by itself."""
        self.exec(id, f"setsid {command} </dev/null >/dev/null 2>&1 & echo")

    def exec(self, id: str, command: str = "true") -> str:
        """Standard output of a command that succeeds."""
        done = self.call("POST", f"/v1/sandboxes/{id}/exec", {"cmd": command, "timeout_seconds": 100}, 200)
        if done["exit_code"] != 0:
            raise Failed(f"{command!r} in {id} ended with {done['exit_code']}: {done['stderr'][:200]}")
        return done["stdout"]

    def delete(self, *ids: str) -> None:
        """Whatever they are doing."""
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda id: self.wire.json("DELETE", f"/v1/sandboxes/{id}"), ids))

    def attempt(self, what: str, action: Callable[[], None]) -> None:
        """One sample; what goes wrong is counted and is no sample."""
        try:
            action()
        except (Failed, OSError) as error:
            self.report.failure(f"{what}: {error}")

    @contextmanager
    def sandbox(self, template: str | None = None) -> Iterator[str]:
        """One that is used, and deleted in the end."""
        id = self.create(template)["id"]
        try:
            self.exec(id)
            yield id
        finally:
            self.delete(id)


def millis(since: float) -> float:
    """Since a moment of `perf_counter`."""
    return (time.perf_counter() - since) * 1000


def machine(bench: Bench) -> None:
    """Where this was measured."""
    report = bench.report
    report.head("Machine")
    version = bench.wire.json("GET", "/version").json()
    report.fact("server", version, f"coppice {version['version']}, engine {version['engine']}")
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = cpu[0].partition(":")[2].strip() if cpu else "?"
    report.fact("cpu", os.cpu_count(), f"{os.cpu_count()} x {model}")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    report.fact("memory", memory, f"{memory / GIB:.1f} GiB")
    report.fact("kernel", platform.release(), platform.release())
    file_system = next(
        (
            words[2]
            for words in sorted(
                (line.split() for line in Path("/proc/mounts").read_text().splitlines()), key=lambda one: -len(one[1])
            )
            if bench.server.data_dir.is_relative_to(words[1])
        ),
        "?",
    )
    report.fact("data directory", file_system, f"{bench.server.data_dir} on {file_system}")
    template = bench.call("GET", f"/v1/templates/{bench.template}", None, 200)
    report.fact("template", template["name"], f"{template['name']}: {template['cpu']} CPU, {template['memory_mb']} MiB")


BOOT_PARTS = ("prepare", "spawn", "load", "session", "handshake")
CAPTURE_PARTS = ("stop", "devices", "disk", "memory", "publish")


def parts(report: Report, name: str, rows: Sequence[dict[str, float] | None], names: Sequence[str]) -> None:
    """Medians of what a time was made of."""
    known = [row for row in rows if row]
    if not known:
        return
    medians = {part: statistics.median(row[part] for row in known) for part in names}
    report.rows.append({"name": f"{name}: parts", "unit": "ms", "medians": medians, "n": len(known)})
    print(f"  {'':<4}made of (medians): " + "  ".join(f"{part} {number(value)}" for part, value in medians.items()))


def start(bench: Bench, rounds: int, cold_rounds: int) -> None:
    """A restored machine against one that boots."""
    report = bench.report
    report.head(
        "Create against a cold boot, each to its first successful exec",
        "create: POST /sandboxes sent -> answered -> POST exec `true` answered. The machine is restored from the",
        "  baked template. Inside: HTTP, record, disk clone, VMM start, load, handshake, one command.",
        "cold boot: the same for POST /fork of an idle sandbox of the template, whose child boots kernel, init and",
        "  agent on a clone of its disk. Inside in addition: flush, freeze and clone of the parent's disk.",
    )
    taken: dict[str, list[float]] = {"create": [], "cold": []}
    boots: dict[str, list[dict[str, float] | None]] = {"create": [], "cold": []}

    def sample(kind: str, path: str, body: object, pick: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        since = time.perf_counter()
        made = pick(bench.call("POST", path, body, 201))
        try:
            bench.exec(made["id"])
            taken[kind].append(millis(since))
            boots[kind].append(made.get("boot"))
        finally:
            bench.delete(made["id"])

    for _ in range(rounds):
        bench.attempt(
            "create", lambda: sample("create", "/v1/sandboxes", {"template": bench.template}, lambda one: one)
        )
    with bench.sandbox() as parent:
        for _ in range(cold_rounds):
            path = f"/v1/sandboxes/{parent}/fork"
            bench.attempt("cold boot", lambda path=path: sample("cold", path, {}, lambda fork: fork["children"][0]))
    create = report.samples("create -> first exec", taken["create"], "ms")
    parts(report, "create -> first exec", boots["create"], BOOT_PARTS)
    cold = report.samples("cold boot -> first exec", taken["cold"], "ms")
    parts(report, "cold boot -> first exec", boots["cold"], BOOT_PARTS)
    report.fact("cold boot / create", cold / create, f"{cold / create:.1f} times (target: 15 or more)")


@dataclass
class Forked:
    """One fork-tree."""

    answered: float
    children: list[float]
    pss: list[float]
    fork: dict[str, Any]

    @property
    def pause_rate(self) -> float | None:
        """MiB/s at which memory was copied inside the pause."""
        took = (self.fork.get("capture") or {}).get("memory")
        return self.fork["memory_bytes"] / MIB / (took / 1000) if took else None


def fork_once(bench: Bench, parent: str, count: int) -> Forked:
    """Forks, waits for the first successful exec in every child, measures them and deletes them."""
    since = time.perf_counter()
    fork = bench.call("POST", f"/v1/sandboxes/{parent}/fork-tree", {"count": count}, 201)
    answered = millis(since)
    ids = [child["id"] for child in fork["children"]]
    try:

        def first(id: str) -> float:
            bench.exec(id)
            return millis(since)

        with ThreadPoolExecutor(count) as pool:
            children = list(pool.map(first, ids))
        pss = [host.memory(bench.server.vmm(id))["Pss"] / MIB for id in ids]
    finally:
        bench.delete(*ids)
    for error in fork.get("errors", []):
        bench.report.failure(f"child {error['index']} of {count}: {error['err']}")
    if len(ids) != count:
        raise Failed(f"{len(ids)} of {count} children")
    return Forked(answered, children, pss, fork)


def fork_tree(bench: Bench, rounds: dict[int, int]) -> None:
    """1, 4 and 16 children of a small parent."""
    report = bench.report
    report.head(
        "Fork-tree: request -> first successful exec in EVERY child",
        "From POST /fork-tree sent until the last child answered its first `true`; all are asked at the same time.",
        "The parent is an idle sandbox of the template that ran one command.",
    )
    with bench.sandbox() as parent:
        for count, times in rounds.items():
            done: list[Forked] = []
            for _ in range(times):
                bench.attempt(
                    f"fork-tree of {count}", lambda count=count, done=done: done.append(fork_once(bench, parent, count))
                )
            if not done:
                continue
            name = f"fork-tree of {count}"
            report.samples(f"{name}: all children answered", [max(one.children) for one in done], "ms")
            report.samples(f"{name}: HTTP answer", [one.answered for one in done], "ms")
            report.samples(f"{name}: each child", [taken for one in done for taken in one.children], "ms")
            boots = [child.get("boot") for one in done for child in one.fork["children"]]
            parts(report, f"{name}: each child", boots, BOOT_PARTS)
            report.samples(f"{name}: parent_paused_ms", [one.fork["parent_paused_ms"] for one in done], "ms")
            parts(report, f"{name}: capture", [one.fork.get("capture") for one in done], CAPTURE_PARTS)
            report.samples(f"{name}: memory copied", [one.fork["memory_bytes"] / MIB for one in done], "MiB")
            report.samples(f"{name}: PSS of each child's VMM", [pss for one in done for pss in one.pss], "MiB")
            report.fact(f"{name}: disk clone", done[0].fork["disk_clone"], done[0].fork["disk_clone"])
            if count > 1:
                per = statistics.median(max(one.children) for one in done) / count
                report.fact(f"{name}: all answered / {count}", per, f"{number(per)} ms per child")


def write_file(file: Path, source: memoryview) -> float:
    """MiB/s of writing a new file in pieces of 1 MiB."""
    since = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for at in range(0, len(source), MIB):
            out.write(source[at : at + MIB])
        return len(source) / MIB / (time.perf_counter() - since)


def write_rates(bench: Bench, rounds: int) -> dict[str, float]:
    """How fast pages can be written to the same file system, single-threaded, without fsync: fresh ones, and others."""
    # As long as what is written, so that it does not come out of the CPU's caches: a guest's memory doesn't either.
    source = memoryview(os.urandom(256 * MIB))
    files = [bench.server.data_dir / "staging" / f"bench-write-{number}" for number in range(rounds)]
    try:
        # Removed at the end only, so that none gets the pages that the one before just gave back.
        rates = [write_file(file, source) for file in files]
        fresh = bench.report.samples("write 256 MiB, fresh pages", rates, "MiB/s")
        again = []
        for _ in range(rounds):
            files[0].unlink()
            again.append(write_file(files[0], source))
        recycled = bench.report.samples("write 256 MiB, pages given back just before", again, "MiB/s")
    finally:
        for file in files:
            file.unlink(missing_ok=True)
    return {"fresh pages": fresh, "pages given back just before": recycled}


# The largest gap of a ticker of a millisecond, milliseconds by the wall clock, since it was last asked. Goes before all
# other processes of the guest, so that what it misses is not their doing.
TICKER = r"""
import os, time
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
last, worst = time.time(), 0.0
while True:
    time.sleep(0.001)
    now = time.time()
    worst, last = max(worst, now - last), now
    if os.path.exists('/dev/shm/ask'):
        os.unlink('/dev/shm/ask')
        with open('/dev/shm/told.new', 'w') as out:
            out.write(str(worst * 1000))
        os.rename('/dev/shm/told.new', '/dev/shm/told')
        last, worst = time.time(), 0.0
"""

#: What is filled is more than the machine of a template has.
LARGE = "bench-large"
LARGE_RECIPE = f'name = "{LARGE}"\nlabel = "For the bench: base with more memory"\nbase = "base"\nmemory_mb = 1024\n'


def make_large(bench: Bench) -> str:
    """Makes the template of the machines that hold much, in the data directory of this run."""
    recipe = bench.server.data_dir.parent / "recipes" / LARGE / "recipe.toml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(LARGE_RECIPE)
    command = [str(bench.server.program), "template", "build", LARGE, "--recipes", str(recipe.parents[1])]
    command += ["--data-dir", str(bench.server.data_dir), "--cache-dir", str(CACHE)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise Failed(f"`template build {LARGE}` ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    with bench.sandbox(LARGE):
        return LARGE


@dataclass
class Filled:
    """A parent that holds much memory, and a ticker."""

    bench: Bench
    id: str

    def start(self, size: int) -> None:
        """Starts both, and waits until they are there."""
        code = (
            f"import os, time; x = bytearray(os.urandom(1 << 20)) * {size}; open('/run/filled', 'w'); time.sleep(900)"
        )
        self.bench.background(self.id, f'python3 -c "{code}"')
        self.bench.exec(self.id, "until test -e /run/filled; do sleep 0.1; done")
        self.bench.put(self.id, "/root/ticker.py", TICKER)
        self.bench.background(self.id, "python3 /root/ticker.py")
        self.gap()

    def gap(self) -> float:
        """The ticker's largest gap since the last question."""
        ask = (
            "rm -f /dev/shm/told; : >/dev/shm/ask; until test -e /dev/shm/told; do sleep 0.01; done; cat /dev/shm/told"
        )
        return float(self.bench.exec(self.id, ask))

    def idle(self) -> float:
        """The gap while nothing happens."""
        self.gap()
        time.sleep(0.5)
        return self.gap()

    def beside_a_create(self) -> float:
        """The gap while another machine starts on the host: the same work as that for a child, and no capture."""
        self.gap()
        with self.bench.sandbox(LARGE):
            return self.gap()

    def fork(self) -> "Stalled":
        """One fork, with the gap around it."""
        self.gap()
        forked = fork_once(self.bench, self.id, 1)
        return Stalled(forked, self.gap())

    def fork_while_a_child_lives(self) -> "Stalled":
        """The second of two forks, whose first has a child that is still there."""
        first = self.bench.call("POST", f"/v1/sandboxes/{self.id}/fork-tree", {"count": 1}, 201)
        try:
            return self.fork()
        finally:
            self.bench.delete(*(child["id"] for child in first["children"]))


@dataclass
class Stalled:
    """One fork, and what the parent's guest saw of it."""

    forked: Forked
    gap: float

    @property
    def paused(self) -> float:
        """By the host's clock."""
        return float(self.forked.fork["parent_paused_ms"])

    @property
    def publish(self) -> float:
        """After the pause."""
        return float(self.forked.fork["capture"]["publish"])

    @property
    def written(self) -> float:
        """Bytes that went to the image, MiB."""
        return float(self.forked.fork["memory_written_bytes"]) / MIB


@dataclass
class Forks:
    """All forks of parents of one size."""

    first: list[Stalled] = field(default_factory=list)
    later: list[Stalled] = field(default_factory=list)
    beside: list[Stalled] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    create: list[float] = field(default_factory=list)


def measure_parent(bench: Bench, size: int, later: int, into: Forks) -> None:
    """A parent of its own: only its first fork is a first one."""
    with bench.sandbox(LARGE) as id:
        parent = Filled(bench, id)
        parent.start(size)
        into.idle.append(parent.idle())
        into.create.append(parent.beside_a_create())
        into.first.append(parent.fork())
        for _ in range(later):
            bench.attempt(f"later fork with {size} MiB", lambda: into.later.append(parent.fork()))
        bench.attempt(
            f"fork with {size} MiB beside a child", lambda: into.beside.append(parent.fork_while_a_child_lives())
        )


def show_stalls(report: Report, size: int, forks: Forks) -> None:
    """Host pause and guest's stall."""
    name, every = f"{size} MiB more", [*forks.first, *forks.later]
    paused = report.samples(f"{name}: parent_paused_ms", [one.paused for one in every], "ms")
    parts(report, f"{name}: capture", [one.forked.fork.get("capture") for one in every], CAPTURE_PARTS)
    gap = report.samples(f"{name}: largest gap in the guest", [one.gap for one in every], "ms")
    report.samples(f"{name}: the same when idle", forks.idle, "ms")
    report.samples(f"{name}: the same beside a create", forks.create, "ms")
    if any(one.gap < one.paused for one in every):
        report.failure("a gap is shorter than the pause: the guest's clock was not stepped to the host's after it")
    report.fact(f"{name}: gap / pause", gap / paused, f"{gap / paused:.2f}")


def show_second(report: Report, size: int, forks: Forks) -> None:
    """The second fork against the first one."""
    name = f"{size} MiB more"
    kinds = {"first fork": forks.first, "later fork": forks.later, "later, child alive": forks.beside}
    medians: dict[str, dict[str, float]] = {}
    for kind, done in kinds.items():
        if not done:
            continue
        medians[kind] = {
            "answered": report.samples(f"{name}: {kind}, HTTP answer", [one.forked.answered for one in done], "ms"),
            "publish": report.samples(f"{name}: {kind}, publish", [one.publish for one in done], "ms"),
            "written": report.samples(f"{name}: {kind}, written", [one.written for one in done], "MiB"),
        }
    first = medians.get("first fork")
    for kind, row in medians.items():
        if first and row is not first:
            ratios = {what: row[what] / first[what] for what in row}
            report.fact(
                f"{name}: {kind} / first fork",
                ratios,
                ", ".join(f"{what} {value:.2f}" for what, value in ratios.items()),
            )


def dirty(bench: Bench, sizes: Sequence[int], parents: int, later: int) -> None:
    """The pause against the bytes in it, from outside and from inside; the second fork against the first."""
    report = bench.report
    report.head(
        "The parent's pause against the memory it owns, and its second fork against the first",
        "Parents of 1 GiB, each with a process that holds so many MiB more; fork-tree of 1, whose child is deleted",
        "before the next one. Rate inside the pause = memory_bytes / capture.memory (finding and copying).",
        "Largest gap: of a process in the parent that looks at the wall clock every millisecond with real-time",
        "  priority, between a question before the request and one after the child was used and deleted: holding",
        "  the guest's processes, the pause (in which its clock stands still; it is stepped after it), releasing them;",
        "  and whatever the host does not let the machine run meanwhile. Idle: the same in half a second in which",
        "  nothing happens. Beside a create: the same while another sandbox is made, used and deleted.",
        "Publish: from the end of the pause until the image is complete. Written: of the memory copied, what went",
        "  to the image's file. Later forks follow the first one of the same parent.",
        "Compared with writing a new file on the same file system in this run: one thread, write(2) of 256 MiB of",
        "  memory, no fsync, until the last write returned.",
    )
    writing = write_rates(bench, 5)
    make_large(bench)
    rates: list[float] = []
    for size in sizes:
        forks = Forks()
        for _ in range(parents):
            bench.attempt(
                f"parent with {size} MiB", lambda size=size, forks=forks: measure_parent(bench, size, later, forks)
            )
        if not forks.first:
            continue
        every = [one.forked for one in [*forks.first, *forks.later]]
        show_stalls(report, size, forks)
        report.samples(f"{size} MiB more: memory copied", [one.fork["memory_bytes"] / MIB for one in every], "MiB")
        rate = [one.pause_rate for one in every if one.pause_rate]
        report.samples(f"{size} MiB more: rate inside the pause", rate, "MiB/s")
        show_second(report, size, forks)
        rates += rate
    if rates:
        for what, rate in writing.items():
            ratio = statistics.median(rates) / rate
            target = " (target: 0.5 or more)" if what == "fresh pages" else ""
            report.fact(f"inside the pause / {what}", ratio, f"{ratio:.2f}{target}")


def wake(bench: Bench, rounds: int) -> None:
    """A hibernated sandbox until it is of use again."""
    report = bench.report
    report.head(
        "Wake: of a hibernated sandbox",
        "wake: POST /wake sent -> answered -> POST exec `true` answered. By use: the same command sent to a sandbox",
        "  that is hibernated, which wakes it. In it: HTTP, slot, disk clone, VMM start, load, handshake, a command.",
        "  The image was written a moment ago by the hibernation, whose own time is below (POST /hibernate sent ->",
        "  answered: capture, checksums, and all of it on the disk).",
    )
    taken: dict[str, list[float]] = {"hibernate": [], "wake": [], "use": []}
    with bench.sandbox() as id:

        def once(kind: str) -> None:
            since = time.perf_counter()
            bench.call("POST", f"/v1/sandboxes/{id}/hibernate", None, 200)
            taken["hibernate"].append(millis(since))
            since = time.perf_counter()
            if kind == "wake":
                bench.call("POST", f"/v1/sandboxes/{id}/wake", None, 200)
            bench.exec(id)
            taken[kind].append(millis(since))

        for _ in range(rounds):
            for kind in ("wake", "use"):
                bench.attempt(f"hibernate and {kind}", lambda kind=kind: once(kind))
    report.samples("wake -> first exec", taken["wake"], "ms")
    report.samples("exec of a hibernated sandbox", taken["use"], "ms")
    report.samples("hibernate", taken["hibernate"], "ms")


def clones(bench: Bench, rounds: int) -> None:
    """Sharing extents does not depend on the size."""
    report = bench.report
    report.head(
        "Clone of a disk image by its size",
        "FICLONE of an allocated file with 64 pieces of 1 MiB written all over it: the same number of extents in both.",
        "The time goes with the number of extents, not with the size: a disk that was written for long takes longer.",
    )
    staging = bench.server.data_dir / "staging"
    medians = {}
    for size in (GIB, 8 * GIB):
        source, target = staging / "bench-source", staging / "bench-clone"
        try:
            with source.open("wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                for at in range(0, size, size // 64):
                    os.pwrite(file.fileno(), os.urandom(MIB), at)
                os.fsync(file.fileno())
            taken = []
            for _ in range(rounds):
                with source.open("rb") as whole, target.open("wb") as clone:
                    since = time.perf_counter()
                    fcntl.ioctl(clone.fileno(), FICLONE, whole.fileno())
                    taken.append(millis(since))
                target.unlink()
            medians[size] = report.samples(f"clone of {size // GIB} GiB", taken, "ms")
        except OSError as error:
            report.failure(f"clone of {size // GIB} GiB: {error}")
        finally:
            source.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
    if len(medians) == 2:
        ratio = medians[8 * GIB] / medians[GIB]
        report.fact("8 GiB / 1 GiB", ratio, f"{ratio:.2f} (target: 1)")


def second_image(bench: Bench, rounds: int) -> None:
    """Why a second image does not begin as a reflink of the first one."""
    report = bench.report
    report.head(
        "A second image of the same memory: written whole against reflinked",
        "128 MiB in 4,096 pieces all over a file of 512 MiB. whole: writing them to a new file. reflink: FICLONE of a",
        "file in which they were just written (its pages are flushed first). Then reading them: of the clone, whose",
        "pages are not in memory, against the file that was written.",
    )
    staging = bench.server.data_dir / "staging"
    first, clone = staging / "bench-first", staging / "bench-second"
    piece = os.urandom(32 << 10)
    taken: dict[str, list[float]] = {"whole": [], "reflink": [], "clone": [], "written": []}

    def pieces(what: str, work: Callable[[int], object]) -> None:
        since = time.perf_counter()
        for at in range(0, 512 * MIB, 128 << 10):
            work(at)
        taken[what].append(millis(since))

    for _ in range(rounds):
        try:
            with first.open("w+b", buffering=0) as source, clone.open("w+b", buffering=0) as target:
                source.truncate(512 * MIB)
                pieces("whole", lambda at, to=source: os.pwrite(to.fileno(), piece, at))
                since = time.perf_counter()
                fcntl.ioctl(target.fileno(), FICLONE, source.fileno())
                taken["reflink"].append(millis(since))
                for what, file in (("written", source), ("clone", target)):
                    pieces(what, lambda at, of=file: os.pread(of.fileno(), len(piece), at))
        except OSError as error:
            report.failure(f"second image: {error}")
        finally:
            first.unlink(missing_ok=True)
            clone.unlink(missing_ok=True)
    whole = report.samples("whole", taken["whole"], "ms")
    reflink = report.samples("reflink", taken["reflink"], "ms")
    written = report.samples("reading what was written", taken["written"], "ms")
    cold = report.samples("reading the clone", taken["clone"], "ms")
    ratio = (reflink + cold) / (whole + written)
    report.fact("reflinked / whole, with reading", ratio, f"{ratio:.1f}")


def exec_round_trip(bench: Bench, rounds: int) -> None:
    """One command, over HTTP."""
    bench.report.head(
        "Exec round trip", "POST exec `true` in a running sandbox: HTTP, channel, fork and exec in the guest."
    )
    taken = []
    with bench.sandbox() as id:
        for _ in range(rounds):
            since = time.perf_counter()
            bench.exec(id)
            taken.append(millis(since))
    bench.report.samples("exec true", taken, "ms")


#: What slot_bench measures.
SLOTS = {
    "take_ahead_us": "taking a ready slot",
    "take_ahead_listed_us": "taking a ready slot, with an allow-list",
    "take_cold_us": "building a slot",
}


def slots(bench: Bench) -> None:
    """A ready slot against one that is built when it is asked for. Without machines."""
    report = bench.report
    report.head(
        "Network: taking a slot against building one",
        "taking: from the call until TAP, address and MAC are there and its rules are in force, from a pool that was",
        "  made ahead; with an allow-list, its rules are made in the call. building: the same when nothing was made",
        "  ahead. All by target/release/examples/slot_bench, in process, in a namespace of its own, in this run.",
    )
    program = binary().parent / "examples" / "slot_bench"
    if not program.is_file():
        report.failure(f"{program} is missing: `make bench` builds it")
        return
    done = subprocess.run([str(program)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        report.failure(f"{program.name} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return
    told = {words[0]: words[2:] for line in done.stdout.splitlines() if (words := line.split())[1:2] == ["samples"]}
    medians = {}
    for key, name in SLOTS.items():
        values = [float(value) / 1000 for value in told.get(key, [])]
        if not values:
            report.failure(f"{program.name} told nothing of {key}, but of {sorted(told)}")
            return
        medians[key] = statistics.median(values)
        report.rows.append({"name": name, "unit": "ms", "samples": values, "median": medians[key]})
        print(f"  {name:<46} median {number(medians[key]):>8} ms    n={len(values)}")
        shown = "  ".join(number(value) for value in values[:16])
        print(f"  {'':<4}the first ones: [{shown}]", flush=True)
    taking, building = medians["take_ahead_us"], medians["take_cold_us"]
    report.fact("taking a ready slot, p50", taking, f"{number(taking)} ms (target: under 1)")
    report.fact("building / taking", building / taking, f"{building / taking:.0f} times")


# Sends so many bytes to whoever asks.
SENDER = r"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        left, chunk = int(self.path.rpartition('/')[2]), bytes(1 << 18)
        self.send_response(200)
        self.send_header('Content-Length', str(left))
        self.end_headers()
        while left > 0:
            left -= self.wfile.write(chunk[:left])
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(('0.0.0.0', 8000), Handler).serve_forever()
"""


def throughput(bench: Bench, size: int, rounds: int) -> None:
    """How fast bytes come out of a guest, by both ways that there are, and into it."""
    report = bench.report
    report.head(
        "Network: throughput of one connection",
        f"{size // MIB} MiB of zeros over one TCP connection. guest -> host by the proxy: a server in Python in it,",
        "  read by this program at /v1/sandboxes/ID/proxy/8000/. guest -> outside and back: curl in it against a",
        "  server in a namespace behind the host (routed and masqueraded twice); the clock runs in the guest.",
    )
    with outside.outside() as far, bench.sandbox() as id:
        bench.put(id, "/root/sender.py", SENDER)
        bench.background(id, "python3 /root/sender.py")
        bench.exec(id, "until curl -s -o /dev/null http://127.0.0.1:8000/1; do sleep 0.1; done")
        taken: dict[str, list[float]] = {"proxy": [], "up": [], "down": []}

        def proxied() -> None:
            since = time.perf_counter()
            reply = bench.wire.request("GET", f"/v1/sandboxes/{id}/proxy/8000/{size}", timeout=180)
            if reply.status != 200 or len(reply.body) != size:
                raise Failed(f"the proxy answered {reply.status} and {len(reply.body)} bytes")
            taken["proxy"].append(size / MIB / (time.perf_counter() - since))

        def curl(kind: str, what: str) -> None:
            seconds = bench.exec(id, f"curl -s -f -o /dev/null -w '%{{time_total}}' {what}")
            taken[kind].append(size / MIB / float(seconds.strip()))

        for _ in range(rounds):
            bench.attempt("proxy", proxied)
            up = f"head -c {size} /dev/zero | curl -s -f -o /dev/null -w '%{{time_total}}' -H 'Expect:'"
            up += f" -H 'Content-Length: {size}' -H 'Transfer-Encoding:' -X POST -T - http://{far.address}/"
            bench.attempt("up", lambda up=up: taken["up"].append(size / MIB / float(bench.exec(id, up).strip())))
            bench.attempt("down", lambda: curl("down", f"http://{far.address}/bytes/{size}"))
    report.samples("guest -> host by the proxy", taken["proxy"], "MiB/s")
    report.samples("guest -> outside", taken["up"], "MiB/s")
    report.samples("outside -> guest", taken["down"], "MiB/s")


def fork_with_network(bench: Bench, before: Bench | None, rounds: int) -> None:
    """What the network costs a fork-tree of 16."""
    report = bench.report
    report.head(
        "Network: fork-tree of 16 with and without it",
        "Every machine of this build has a network. "
        + (
            "Compared with another build (--before) on the same host, one fork of each"
            if before
            else "No build without one was given (--before PROGRAM:DIR), so only"
        ),
        "in turn, each until all children answered their first `true`."
        if before
        else "the parts of the time are shown: taking the slots is in `prepare`, setting the address in `handshake`.",
    )
    sides = {"with": bench} | ({"without": before} if before else {})
    done: dict[str, list[Forked]] = {name: [] for name in sides}
    with ExitStack() as stack:
        parents = {name: stack.enter_context(one.sandbox()) for name, one in sides.items()}
        for _ in range(rounds):
            for name, one in sides.items():
                bench.attempt(
                    f"fork {name}", lambda name=name, one=one: done[name].append(fork_once(one, parents[name], 16))
                )
    medians = {}
    for name, forks in done.items():
        if forks:
            medians[name] = report.samples(f"{name} a network", [max(one.children) for one in forks], "ms")
            boots = [child.get("boot") for one in forks for child in one.fork["children"]]
            parts(report, f"{name} a network: each child", boots, BOOT_PARTS)
    if len(medians) == 2:
        ratio = medians["with"] / medians["without"]
        report.fact("with / without", ratio, f"{ratio:.2f} (target: 1.10 or less)")


@contextmanager
def another_build(given: str | None, folder: Path, report: Report, template: str) -> Iterator[Bench | None]:
    """A server of the build that was given as PROGRAM:DIR, where DIR has its kernels and templates."""
    if not given:
        yield None
        return
    program, _, prepared = given.partition(":")
    data = make_data_dir(folder / "before", [template], prepared=Path(prepared))
    server = Server(data, program=Path(program).resolve())
    try:
        server.start()
        yield Bench(server, server.wire(), report, template)
    finally:
        server.close()


def run(arguments: argparse.Namespace) -> int:
    """All measurements on a server of its own."""
    for missing, hint in (
        (not binary().is_file() and binary(), "make build"),
        (
            arguments.template not in prepared_templates() and f"template {arguments.template} in {PREPARED}",
            "make setup",
        ),
    ):
        if missing:
            print(f"bench: {missing} is missing: run `{hint}` first", file=sys.stderr)
            return 2
    started = time.monotonic()
    folder = PREPARED / "t" / f"bench-{os.getpid()}"
    folder.mkdir(parents=True, mode=0o755)
    report = Report()
    server = Server(make_data_dir(folder, [arguments.template]))
    try:
        server.start()
        bench = Bench(server, server.wire(), report, arguments.template)
        machine(bench)
        # Once before anything is measured: the image comes into the page cache.
        with bench.sandbox():
            pass
        quick = arguments.quick
        start(bench, 3 if quick else 10, 2 if quick else 5)
        fork_tree(bench, {1: 2, 4: 1, 16: 1} if quick else {1: 5, 4: 5, 16: 3})
        bench.attempt("dirty", lambda: dirty(bench, (16, 128, 512), 1 if quick else 3, 2 if quick else 3))
        bench.attempt("wake", lambda: wake(bench, 2 if quick else 5))
        clones(bench, 5 if quick else 11)
        second_image(bench, 1 if quick else 3)
        exec_round_trip(bench, 20 if quick else 50)
        slots(bench)
        bench.attempt("throughput", lambda: throughput(bench, (16 if quick else 64) * MIB, 2 if quick else 5))
        with another_build(arguments.before, folder, report, arguments.template) as before:
            fork_with_network(bench, before, 2 if quick else 7)
    finally:
        left = server.close()
        remove_workspace(folder)
    report.head("Summary")
    report.fact("failures", report.failures, str(report.failures))
    report.fact("left behind", left, str(left or "nothing"))
    report.fact("took", time.monotonic() - started, f"{time.monotonic() - started:.0f} s")
    if arguments.json:
        Path(arguments.json).write_text("".join(json.dumps(row) + "\n" for row in report.rows))
    return 0


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write every measurement as a line of JSON")
    parser.add_argument("--template", default="base", help="what is measured (default: base)")
    parser.add_argument("--quick", action="store_true", help="fewer samples: to see that it works, not to compare")
    parser.add_argument(
        "--before",
        metavar="PROGRAM:DIR",
        help="another build, and where its kernels and templates are: to compare forks",
    )
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
