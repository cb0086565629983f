"""No process of a machine runs in a copy of it before the copy is a machine of its own."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pandastack import Client, Sandbox

from harness.guest import sh
from harness.poll import until
from harness.wire import Wire

CHILDREN = 4

# Says all the time who the machine is and what it draws. A line is written at once or not at all, and what is in it was
# looked at in this order, between two marks.
WITNESS = r"""
import json, os, random, time, uuid
random.seed(4711)
out = os.open('/dev/shm/witness', os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
n = 0
while True:
    n += 1
    with open('/run/coppice/identity.json') as file:
        generation = json.load(file)['generation']
    line = dict(n=n, at=time.monotonic_ns(), generation=generation, host=os.uname().nodename,
                uuid=uuid.uuid4().hex, random=random.random(), kernel=os.getrandom(16).hex())
    os.write(out, (json.dumps(line) + '\n').encode())
    time.sleep(0.001)
"""

# The largest gap of a ticker of a millisecond, milliseconds, since it was last asked.
TICKER = r"""
import os, time
last, worst = time.monotonic(), 0.0
while True:
    time.sleep(0.001)
    now = time.monotonic()
    worst, last = max(worst, now - last), now
    if os.path.exists('/dev/shm/ask'):
        os.unlink('/dev/shm/ask')
        with open('/dev/shm/told.new', 'w') as out:
            out.write(str(worst * 1000))
        os.rename('/dev/shm/told.new', '/dev/shm/told')
        worst = 0.0
"""


def start(sandbox: Sandbox, name: str, program: str) -> None:
    """Runs a program in a session of its own, whose parent is gone."""
    sandbox.filesystem.write(f"/root/{name}.py", program)
    sh(sandbox, f"setsid python3 /root/{name}.py </dev/null >/root/{name}.err 2>&1 & echo started")


def lines(sandbox: Sandbox) -> list[dict]:
    """What the witness has written."""
    return [json.loads(line) for line in sandbox.filesystem.read("/dev/shm/witness").splitlines()]


def more_lines(sandbox: Sandbox, than: int) -> list[dict]:
    """The same once there are some more."""
    return until("the witness goes on", lambda: (now := lines(sandbox)) and len(now) > than and now, 20)


# Runs for a while in every handshake, while nothing else may run. Marks its begin and end among the lines.
HOOK = """#!/bin/sh
echo '{"hook": "begin"}' >>/dev/shm/witness
sleep 0.3
echo '{"hook": "end"}' >>/dev/shm/witness
"""


@pytest.fixture
def witnessed(sandbox: Sandbox) -> Sandbox:
    """A sandbox with a witness that writes."""
    sandbox.filesystem.write("/etc/coppice/resume.d/10-mark", HOOK)
    sh(sandbox, "chmod 755 /etc/coppice/resume.d/10-mark")
    start(sandbox, "witness", WITNESS)
    until("the witness writes", lambda: sh(sandbox, "wc -l </dev/shm/witness 2>/dev/null || echo 0").strip() > "1", 30)
    return sandbox


def identity_of(sandbox: Sandbox) -> tuple[str, str]:
    """Generation and host name, as the guest's file says."""
    told = json.loads(sh(sandbox, "cat /run/coppice/identity.json"))
    return told["generation"], told["hostname"]


def assert_only_after(child: Sandbox, parent_identity: tuple[str, str]) -> list[dict]:
    """Every line of the child's own was written by a machine that had its identity."""
    mine = identity_of(child)
    written = more_lines(child, 0)
    written = more_lines(child, len(written) + 3)
    begin, end = written.index({"hook": "begin"}), written.index({"hook": "end"})
    assert end == begin + 1, f"{end - begin - 1} lines were written during the handshake"
    past, mixed, own = written[:begin], written[end + 1], written[end + 2 :]
    assert all((line["generation"], line["host"]) == parent_identity for line in past)
    # The line that was in the making when the machine stopped may have looked at one or both before.
    assert mixed["generation"] in (mine[0], parent_identity[0]) and mixed["host"] in (mine[1], parent_identity[1])
    assert own and all((line["generation"], line["host"]) == mine for line in own)
    assert [line["n"] for line in [*past, mixed, *own]] == list(range(1, len(written) - 1))
    return [mixed, *own]


def everywhere(function: Callable[[Sandbox], object], sandboxes: list[Sandbox]) -> list:
    """The same in all of them at once."""
    with ThreadPoolExecutor(len(sandboxes)) as pool:
        return list(pool.map(function, sandboxes))


@pytest.fixture
def children(witnessed: Sandbox) -> Iterator[list[Sandbox]]:
    """Forked from it."""
    made = witnessed.fork_tree(CHILDREN)
    yield made
    for child in made:
        child.kill()


def test_no_process_runs_in_a_child_before_it_is_acknowledged(witnessed: Sandbox, children: list[Sandbox]) -> None:
    parent = identity_of(witnessed)
    own = everywhere(lambda child: assert_only_after(child, parent), children)
    # How many lines of the parent's last instant a child has is the same in all of them: none was written by a child.
    assert len({lines_of[0]["n"] for lines_of in own}) == 1
    # The parent goes on.
    more_lines(witnessed, len(lines(witnessed)))
    for what in ("uuid", "kernel"):
        drawn = [line[what] for lines_of in own for line in lines_of[1:]]
        drawn += [line[what] for line in lines(witnessed)]
        assert len(set(drawn)) == len(drawn), what


def test_random_numbers_of_a_seeded_process_differ_in_every_copy(witnessed: Sandbox, children: list[Sandbox]) -> None:
    # The witness chose its seed before the fork. Its parent goes on with it; a child's next number is its own.
    parent = identity_of(witnessed)
    own = everywhere(lambda child: assert_only_after(child, parent)[1:], children)
    drawn = [line["random"] for lines_of in own for line in lines_of] + [line["random"] for line in lines(witnessed)]
    assert len(set(drawn)) == len(drawn)


def test_nothing_runs_early_in_a_sandbox_from_a_snapshot(witnessed: Sandbox, client: Client, wire: Wire) -> None:
    snapshot = witnessed.snapshot()
    try:
        child = client.sandboxes.create(from_snapshot=snapshot)
        assert_only_after(child, identity_of(witnessed))
        child.kill()
    finally:
        wire.json("DELETE", f"/v1/snapshots/{snapshot}")


def test_a_paused_sandbox_goes_on_and_so_do_its_copies(witnessed: Sandbox, client: Client, wire: Wire) -> None:
    witnessed.pause()
    snapshot = witnessed.snapshot()
    child = client.sandboxes.create(from_snapshot=snapshot)
    try:
        witnessed.resume()
        assert_only_after(child, identity_of(witnessed))
        more_lines(witnessed, len(lines(witnessed)))
    finally:
        child.kill()
        wire.json("DELETE", f"/v1/snapshots/{snapshot}")


def test_commands_and_what_they_leave_behind_are_held(sandbox: Sandbox) -> None:
    # In one group: a command, its background child, a daemon, and one in a session of its own.
    sandbox.exec("sleep 600 & (setsid sleep 601 &) ; setsid -f sleep 602; echo done")
    inside = sh(sandbox, "ps -o args= -p $(paste -sd, /sys/fs/cgroup/commands/cgroup.procs)")
    assert all(f"sleep {n}" in inside for n in (600, 601, 602))
    outside = sh(
        sandbox, "for p in $(cat /sys/fs/cgroup/cgroup.procs); do readlink /proc/$p/exe; done; true"
    ).splitlines()
    # The agent; threads of the kernel have no program.
    assert len(outside) == 1


def test_a_process_that_cannot_be_held_refuses_the_fork_and_nothing_is_harmed(sandbox: Sandbox, wire: Wire) -> None:
    # A process that waits for the disk can't be frozen.
    sh(sandbox, "fsfreeze -f / && (setsid sh -c 'echo x >/root/blocked' </dev/null >/dev/null 2>&1 &) && sleep 0.3")
    for path, body in (("fork-tree", {"count": 2}), ("snapshots", {}), ("pause", {})):
        refused = wire.json("POST", f"/v1/sandboxes/{sandbox.id}/{path}", body)
        assert refused.status == 409 and b"processes_not_held" in refused.body, (path, refused)
    # Commands run as before, and once the disk is back so does everything.
    sh(sandbox, "fsfreeze -u /")
    until("the process goes on", lambda: sandbox.exec("cat /root/blocked").stdout == "x\n", 10)
    child = sandbox.fork_tree(1)[0]
    assert sh(child, "cat /root/blocked") == "x\n"
    child.kill()


def test_the_witness_would_notice(witnessed: Sandbox) -> None:
    # Root may take a process out of the group. It is then not held, and the other tests would fail.
    sh(witnessed, "pgrep -of witness.py >/sys/fs/cgroup/cgroup.procs")
    child = witnessed.fork_tree(1)[0]
    written = more_lines(child, 3)
    child.kill()
    assert written.index({"hook": "end"}) > written.index({"hook": "begin"}) + 1


def test_the_parent_stands_still_for_little_more_than_the_pause(sandbox: Sandbox) -> None:
    start(sandbox, "ticker", TICKER)

    def worst() -> float:
        sh(sandbox, "rm -f /dev/shm/told; : >/dev/shm/ask")
        return float(until("the ticker answers", lambda: sh(sandbox, "cat /dev/shm/told 2>/dev/null || true"), 20))

    until("the ticker runs", lambda: sandbox.exec("pgrep -f ticker.py").exit_code == 0, 20)
    worst()
    for count in (1, CHILDREN):
        before = worst()
        children = sandbox.fork_tree(count)
        stall = worst()
        print(f"fork-tree({count}): stall {stall:.1f} ms in the guest ({before:.1f} without)")
        for child in children:
            child.kill()
        assert stall < 5_000
