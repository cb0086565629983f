"""What the children of a live fork have of their parent, what they don't, and that all of it is of one instant."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pandastack import Client, Sandbox

from harness.guest import Told, ask_holder, clock_error, identity, sh, start_holder
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


def test_all_children_are_of_the_same_instant(sandbox: Sandbox, fork_tree: Callable) -> None:
    # A program that stops by itself when it is copied: it waits for a word that only the test gives, in each machine.
    sh(sandbox, "dd if=/dev/urandom of=/dev/shm/memory bs=1M count=24 2>/dev/null; cp /dev/shm/memory /root/disk")
    expected = sh(sandbox, "sha256sum /dev/shm/memory /root/disk")
    children = fork_tree(sandbox, 4)
    sh(sandbox, "echo changed | tee /dev/shm/memory >/root/disk")
    assert everywhere(lambda child: sh(child, "sha256sum /dev/shm/memory /root/disk"), children) == [expected] * 4


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


def test_names_randomness_and_generation_differ_in_every_machine(sandbox: Sandbox, fork_tree: Callable) -> None:
    # The copies share even a generator that was just used.
    sh(sandbox, "head -c 4096 /dev/urandom >/dev/null")
    parent_before = identity(sandbox)
    children = fork_tree(sandbox, 4)
    seen = [*everywhere(identity, children), identity(sandbox)]
    for field in ("hostname", "machine_id", "random", "urandom", "generation", "sandbox_id"):
        values = [getattr(one, field) for one in seen]
        assert len(set(values)) == len(seen), (field, values)
    for child, one in zip(children, seen, strict=False):
        assert one.sandbox_id == child.id
        assert len(one.machine_id) == 32 and int(one.machine_id, 16)
    # The parent stays who it was.
    parent = seen[-1]
    for field in ("hostname", "machine_id", "generation", "sandbox_id"):
        assert getattr(parent, field) == getattr(parent_before, field)


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


def test_clocks_are_right_in_every_child_and_in_the_parent(sandbox: Sandbox, fork_tree: Callable) -> None:
    children = fork_tree(sandbox, 4)
    for one in [*children, sandbox]:
        assert clock_error(one) < 0.1


def test_time_does_not_jump_for_what_waits(sandbox: Sandbox, fork_tree: Callable) -> None:
    """A timer that was armed before the fork fires in each machine once, and not at once."""
    sh(sandbox, "setsid sh -c 'sleep 6; echo fired >>/root/timer' </dev/null >/dev/null 2>&1 & echo")
    armed = time.monotonic()
    children = fork_tree(sandbox, 2)
    everyone = [*children, sandbox]
    if time.monotonic() - armed < 4:
        assert all(one.exec("cat /root/timer").exit_code != 0 for one in everyone)
    for one in everyone:
        until("the timer fires", lambda one=one: one.exec("cat /root/timer").stdout == "fired\n", 15, 0.2)


def test_a_command_of_the_parent_is_answered_in_the_parent_only(sandbox: Sandbox, fork_tree: Callable) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(sandbox.exec, "sleep 4; echo $HOSTNAME; hostname; echo ran >>/root/ran; cat /root/ran")
        until("it runs", lambda: sandbox.exec("pgrep -x sleep").exit_code == 0)
        children = fork_tree(sandbox, 2)
        # New commands in the children are their own from the start.
        assert everywhere(lambda child: sh(child, "echo own"), children) == ["own\n"] * 2
        assert running.result().stdout.endswith("ran\n")
    assert sh(sandbox, "cat /root/ran") == "ran\n"


def test_sixteen_children_all_answer_within_30_s(sandbox: Sandbox, fork_tree: Callable) -> None:
    before = start_holder(sandbox)
    started = time.monotonic()
    children = fork_tree(sandbox, 16)
    told = everywhere(ask_holder, children)
    took = time.monotonic() - started
    assert took < 30
    assert {(one.pid, one.secret) for one in told} == {(before.pid, before.secret)}
    assert len({one.generation for one in everywhere(identity, children)}) == 16


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
