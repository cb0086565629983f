"""What the children of a live fork have of their parent, what they don't, and that all of it is of one instant."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pandastack import Client, Sandbox

from harness import host
from harness.guest import Told, ask_holder, identity, sh, start_holder
from harness.poll import until
from harness.server import Server


@pytest.fixture
def fork_tree(server: Server) -> Iterator[Callable[..., list[Sandbox]]]:
    """Forks; the children are deleted when the test is over."""
    made: list[Sandbox] = []

    def fork(parent: Sandbox, count: int) -> list[Sandbox]:
        children = parent.fork_tree(count)
        made.extend(children)
        return children

    yield fork
    alive = server.ids()
    for child in made:
        if child.id in alive:
            child.kill()


def everywhere(function: Callable[[Sandbox], object], sandboxes: list[Sandbox]) -> list:
    """The same in all of them at once."""
    with ThreadPoolExecutor(len(sandboxes)) as pool:
        return list(pool.map(function, sandboxes))


def assert_goes_on(child: Sandbox, before: Told, after: Told) -> None:
    """The same process, with its memory and files, counting on from somewhere between the two moments in the parent."""
    told = ask_holder(child)
    assert (told.pid, told.secret, told.nameless) == (before.pid, before.secret, before.secret)
    assert told.ticks >= before.ticks
    # Everything that the parent had written by then is there, in order and without a hole: one instant.
    lines = sh(child, "cat /root/holder.log").split()
    assert [int(line) for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) >= before.ticks
    # The open file goes on growing.
    more = until("the open file grows", lambda: (later := ask_holder(child)).log > told.log and later, 5)
    assert more.ticks > told.ticks
    assert after.secret == before.secret


def test_every_child_goes_on_with_processes_memory_and_open_files(sandbox: Sandbox, fork_tree: Callable) -> None:
    before = start_holder(sandbox)
    children = fork_tree(sandbox, 4)
    after = ask_holder(sandbox)
    everywhere(lambda child: assert_goes_on(child, before, after), children)
    # The parent too, undisturbed.
    assert (after.pid, after.secret) == (before.pid, before.secret)
    until("the parent counts on", lambda: ask_holder(sandbox).ticks > after.ticks, 5)


# Writes the same number to the disk, past all caches, and then to 256 pages of memory, as fast as it can.
WRITER = r"""
import mmap, os, struct
block = mmap.mmap(-1, 4096)
disk = os.open('/root/direct', os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
pages = os.open('/dev/shm/pages', os.O_RDWR | os.O_CREAT, 0o644)
os.ftruncate(pages, 256 * 4096)
memory = mmap.mmap(pages, 256 * 4096)
n = 0
while True:
    n += 1
    block[:8] = struct.pack('<Q', n)
    os.pwritev(disk, [block], 0)
    for at in range(0, len(memory), 4096):
        memory[at:at + 8] = struct.pack('<Q', n)
"""

# Runs in a child before any process does: what the disk itself and the memory have. The writer has done its work there.
LOOK = """#!/bin/sh
dd if=/root/direct of=/dev/shm/of-disk iflag=direct bs=4096 count=1 2>/dev/null
cp /dev/shm/pages /dev/shm/of-memory
pkill -KILL -f [w]riter.py
"""


def test_disk_and_memory_of_every_child_are_of_one_instant(sandbox: Sandbox, fork_tree: Callable) -> None:
    sandbox.filesystem.write("/etc/coppice/resume.d/10-look", LOOK)
    sandbox.filesystem.write("/root/writer.py", WRITER)
    sh(sandbox, "chmod 755 /etc/coppice/resume.d/10-look; setsid python3 /root/writer.py </dev/null >/root/err 2>&1 &")

    def disk(one: Sandbox, path: str) -> int:
        return int(sh(one, f"od -An -N8 -td8 {path}"))

    until("it writes", lambda: sandbox.exec("test -s /dev/shm/pages").exit_code == 0 and disk(sandbox, "/root/direct"))
    children = fork_tree(sandbox, 4)
    seen = set()
    for child in children:
        pages = child.filesystem.read("/dev/shm/of-memory")
        numbers = [int.from_bytes(pages[at : at + 8], "little") for at in range(0, len(pages), 4096)]
        seen.add((disk(child, "/dev/shm/of-disk"), tuple(numbers)))
    # All of them were there.
    ((on_disk, numbers),) = seen
    # First the disk, then the pages one after the other: at no instant is it otherwise.
    assert len(numbers) == 256 and list(numbers) == sorted(numbers, reverse=True)
    assert {on_disk, on_disk - 1} >= set(numbers), (on_disk, numbers[0], numbers[-1])
    assert disk(sandbox, "/root/direct") > on_disk, "the writer did not go on, and would not have been noticed"


def test_a_file_that_was_never_flushed_is_in_every_child_and_writes_diverge(
    sandbox: Sandbox, fork_tree: Callable
) -> None:
    sh(sandbox, "echo common >/root/f; mkdir -p /srv/x; echo common >/srv/x/f; head -c 8M /dev/urandom >/root/big")
    digest = sh(sandbox, "md5sum </root/big")
    children = fork_tree(sandbox, 4)
    everyone = [*children, sandbox]

    def diverge(one: Sandbox) -> None:
        assert sh(one, "cat /root/f /srv/x/f") == "common\ncommon\n"
        assert sh(one, "md5sum </root/big") == digest
        sh(one, f"echo {one.id} >>/root/f; echo {one.id} >/dev/shm/mine; head -c 1M /dev/zero >/root/big; sync")

    everywhere(diverge, everyone)
    for one in everyone:
        assert sh(one, "cat /root/f /dev/shm/mine") == f"common\n{one.id}\n{one.id}\n"
    # What they share on the host is not damaged by anybody's writes.
    assert everywhere(lambda one: sh(one, "cat /srv/x/f"), fork_tree(sandbox, 2)) == ["common\n"] * 2


def test_a_copy_of_a_copy_taken_at_once_is_a_third_machine(sandbox: Sandbox, fork_tree: Callable) -> None:
    before = start_holder(sandbox)
    generations = [sandbox]
    for _ in range(3):
        generations += fork_tree(generations[-1], 1)
    for one in generations:
        told = ask_holder(one)
        assert (told.pid, told.secret, told.nameless) == (before.pid, before.secret, before.secret)
        sh(one, f"echo {one.id} >>/root/lineage")
    # Each is nobody's copy any more: all end in the middle of the chain, the rest goes on.
    generations[1].kill()
    deepest = generations[-1]
    assert ask_holder(deepest).secret == before.secret
    assert sh(deepest, "cat /root/lineage") == f"{deepest.id}\n"
    assert len({identity(one).generation for one in (generations[0], generations[2], deepest)}) == 3
    (last,) = fork_tree(deepest, 1)
    assert ask_holder(last).secret == before.secret


def test_a_command_of_the_parent_is_answered_in_the_parent_only(sandbox: Sandbox, fork_tree: Callable) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(sandbox.exec, "sleep 4; echo $HOSTNAME; hostname; echo ran >>/root/ran; cat /root/ran")
        until("it runs", lambda: sandbox.exec("pgrep -x sleep").exit_code == 0)
        children = fork_tree(sandbox, 2)
        # New commands in the children are their own from the start.
        assert everywhere(lambda child: sh(child, "echo own"), children) == ["own\n"] * 2
        assert running.result().stdout.endswith("ran\n")
    assert sh(sandbox, "cat /root/ran") == "ran\n"


def test_the_parent_can_be_deleted_and_its_children_live_and_fork_on(client: Client, fork_tree: Callable) -> None:
    parent = client.sandboxes.create(template="base")
    before = start_holder(parent)
    one, two = fork_tree(parent, 2)
    parent.kill()
    one.kill()
    assert ask_holder(two).secret == before.secret
    # Reads what was not touched yet, of an image that has no name any more.
    sh(two, "find /usr -xdev -type f -size -200k -print0 | xargs -0 cat | wc -c")
    (child,) = fork_tree(two, 1)
    assert ask_holder(child).secret == before.secret


def test_many_forks_of_one_running_parent(sandbox: Sandbox) -> None:
    """16 forks one after the other, each right: nothing is used up, and no fork disturbs the next one."""
    before = start_holder(sandbox)
    ticks = before.ticks
    for round in range(16):
        sh(sandbox, f"echo {round} >/root/round; echo {round} >/dev/shm/round")
        child, other = sandbox.fork_tree(2)
        for one in (child, other):
            assert sh(one, "cat /root/round /dev/shm/round") == f"{round}\n{round}\n"
            assert ask_holder(one).secret == before.secret
            one.kill()
        now = ask_holder(sandbox).ticks
        assert now > ticks
        ticks = now


def test_most_of_what_a_parent_has_mapped_is_read_ahead_for_its_children(
    server: Server, sandbox: Sandbox, fork_tree: Callable
) -> None:
    """Their memory file is new, and what it shares with the parent's is read ahead while they start."""
    of_parent = host.memory(server.vmm(sandbox))
    mapped = of_parent["Rss"] - of_parent["Anonymous"]

    def read_in_time() -> bool:
        (child,) = fork_tree(sandbox, 1)
        read = host.bytes_read(server.vmm(child))
        print(f"the parent has mapped {mapped >> 20} MiB, its child has waited for {read >> 20} MiB")
        return read < mapped / 2

    # A disk or a host that is busy with other tests may be late.
    assert any(read_in_time() for _ in range(6))
