"""Checklist B: from create to kill, TTL and pause, with the published Python client."""

import re
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pandastack import BadRequestError, Client, NotFoundError, Sandbox, ServerError

from harness import host
from harness.guest import ask_holder, clock_error, sh, start_holder
from harness.poll import holds, until
from harness.server import Server
from harness.wire import Wire

NOBODY = str(uuid.UUID(int=0))
#: A TTL of 2 s is acted on within so many seconds at the latest: the TTL, the interval of the reaper, and the deletion.
REAPED = 2 + 5 + 5


def is_gone(client: Client, id: str) -> bool:
    """By the list, which doesn't count as use."""
    return id not in {row.id for row in client.sandboxes.list()}


def test_11_a_new_sandbox_says_what_it_is(client: Client, sandbox: Sandbox) -> None:
    assert str(uuid.UUID(sandbox.id)) == sandbox.id
    assert sandbox.status == "running"
    template = client.templates.get("base")
    assert (sandbox.cpu, sandbox.memory_mb) == (template.cpu, template.memory_mb)
    assert sandbox.template == "base"
    assert isinstance(sandbox.boot_ms, int) and sandbox.boot_ms > 0
    assert sandbox.boot_mode == "snapshot"
    assert sandbox.created_at.endswith("Z") and "T" in sandbox.created_at
    assert sandbox.persistent is False


def test_12_metadata_comes_back_and_reserved_keys_can_not_be_spoofed(
    client: Client, delete_after: Callable[[str], None]
) -> None:
    spoofed = {"workspace": "x", "fork_tree_id": "x", "fork_parent_id": "x", "fork_index": "x", "fork_tree_role": "x"}
    sandbox = client.sandboxes.create(template="base", metadata={"a": "b", "é": "✓\u2028"} | spoofed)
    delete_after(sandbox.id)
    listed = next(row for row in client.sandboxes.list() if row.id == sandbox.id)
    for seen in (sandbox, client.sandboxes.get(sandbox.id), listed):
        assert seen.metadata["a"] == "b" and seen.metadata["é"] == "✓\u2028"
        assert "x" not in seen.metadata.values()


def test_13_an_unknown_template_is_named_and_nothing_is_made(server: Server, client: Client) -> None:
    before = server.ids()
    with pytest.raises(BadRequestError, match="no-such"):
        client.sandboxes.create(template="no-such")
    with pytest.raises(BadRequestError):
        client.sandboxes.create(template="../../etc")
    assert server.ids() == before


def test_14_size_is_the_templates(client: Client, delete_after: Callable[[str], None], shared: Sandbox) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sandbox = client.sandboxes.create(template="base", cpu=8, memory_mb=1)
    delete_after(sandbox.id)
    assert any(issubclass(one.category, DeprecationWarning) for one in seen)
    assert (sandbox.cpu, sandbox.memory_mb) == (shared.cpu, shared.memory_mb)


@pytest.mark.parametrize("ttl", [-1, 0, 10**12])
def test_15_a_ttl_that_makes_no_sense_is_refused(server: Server, client: Client, ttl: int) -> None:
    before = server.ids()
    with pytest.raises(BadRequestError, match="ttl_seconds"):
        client.sandboxes.create(template="base", ttl_seconds=ttl)
    assert server.ids() == before


def test_16_persistent_is_kept(client: Client, delete_after: Callable[[str], None]) -> None:
    sandbox = client.sandboxes.create(template="base", persistent=True)
    delete_after(sandbox.id)
    assert client.sandboxes.get(sandbox.id).persistent is True
    assert sandbox.lifecycle()["persistent"] is True


def test_17_the_list_is_an_array_even_when_empty(server: Server, client: Client, sandbox: Sandbox) -> None:
    assert sandbox.id in {row.id for row in client.sandboxes.list()}
    empty = server.wire().as_holder_of(server.foreign_key("empty"))
    assert empty.json("GET", "/v1/sandboxes").body == b"[]"


def test_18_refresh_updates_in_place(sandbox: Sandbox) -> None:
    sandbox.status = "unknown"
    assert sandbox.refresh() is sandbox
    assert sandbox.status == "running"


def test_19_lifecycle_has_ints_and_a_bool(sandbox: Sandbox) -> None:
    lifecycle = sandbox.lifecycle()
    assert type(lifecycle["ttl_seconds"]) is int and lifecycle["ttl_seconds"] > 0
    assert type(lifecycle["idle_seconds"]) is int
    assert lifecycle["persistent"] is False


def test_20_a_ttl_can_be_changed(client: Client, sandbox: Sandbox) -> None:
    assert sandbox.set_ttl(600)["ttl_seconds"] == 600
    assert sandbox.lifecycle()["ttl_seconds"] == 600
    for bad in (-1, 0):
        with pytest.raises(BadRequestError):
            sandbox.set_ttl(bad)
    assert sandbox.lifecycle()["ttl_seconds"] == 600
    unknown = client.sandboxes.get(sandbox.id)
    unknown.id = NOBODY
    with pytest.raises(NotFoundError):
        unknown.set_ttl(5)


def test_21_persistence_can_be_changed(sandbox: Sandbox) -> None:
    sandbox.set_persistent(True)
    assert sandbox.lifecycle()["persistent"] is True
    sandbox.set_persistent(False)
    assert sandbox.lifecycle()["persistent"] is False


@pytest.mark.slow
def test_22_an_idle_sandbox_is_reaped_and_one_in_use_is_not(
    server: Server, client: Client, wire: Wire, delete_after: Callable[[str], None]
) -> None:
    idle, busy, long, held = (client.sandboxes.create(template="base", ttl_seconds=2) for _ in range(4))
    hibernates = {"template": "base", "ttl_seconds": 2, "on_ttl": "hibernate"}
    kept = client.sandboxes.get(wire.json("POST", "/v1/sandboxes", hibernates).json()["id"])
    for one in (idle, busy, long, held, kept):
        delete_after(one.id)
    kept.exec("echo memory >/dev/shm/x")
    listen = "import socket, time; s = socket.create_server(('0.0.0.0', 3000)); c = s.accept(); time.sleep(1000)"
    sh(held, f'setsid python3 -c "{listen}" </dev/null >/dev/null 2>&1 & echo started')
    until("it listens", lambda: 3000 in held.preview_urls(), 30)
    stop = threading.Event()

    def use() -> None:
        while not stop.wait(0.5):
            busy.exec("true")

    # One command that runs on is use, too, and a connection to a port whose answer does not come.
    with ThreadPoolExecutor() as pool, wire.begun("GET", f"/v1/sandboxes/{held.id}/proxy/3000/"):
        working = pool.submit(use)
        running = pool.submit(long.exec, f"sleep {REAPED + 5}; echo done", timeout_seconds=REAPED * 2)
        try:
            until("the idle sandbox is reaped", lambda: is_gone(client, idle.id), REAPED)
            with pytest.raises(NotFoundError):
                client.sandboxes.get(idle.id)
            assert server.data_dir.joinpath("sandboxes", idle.id).exists() is False
            # Several times their TTL, and at least one more look of the reaper.
            used = {busy.id, long.id, held.id}
            holds("those in use stay", lambda: used <= server.ids(), 6)
        finally:
            stop.set()
        working.result()
        long.exec("pkill sleep")
        assert running.result().stdout == "done\n"
    until("they go when they are idle", lambda: not used & server.ids(), REAPED)
    # One that asked for it was not deleted.
    row = next(row for row in wire.json("GET", "/v1/sandboxes").json() if row["id"] == kept.id)
    assert (row["status"], row["on_ttl"]) == ("hibernated", "hibernate")
    assert kept.exec("cat /dev/shm/x").stdout == "memory\n"


def test_23_pause_stops_and_resume_goes_on_where_it_was(wire: Wire, sandbox: Sandbox) -> None:
    before = start_holder(sandbox)
    sandbox.pause()
    assert sandbox.refresh().status == "paused"
    for call in (lambda: sandbox.exec("true"), lambda: sandbox.filesystem.read("/etc/hostname")):
        with pytest.raises(BadRequestError, match="paused"):
            call()
    assert wire.json("POST", f"/v1/sandboxes/{sandbox.id}/exec", {"cmd": "true"}).status == 409
    sandbox.pause()
    # Long enough that a clock which was not put right would be seen.
    time.sleep(0.5)
    sandbox.resume()
    sandbox.resume()
    assert sandbox.refresh().status == "running"
    after = ask_holder(sandbox)
    assert (after.pid, after.secret) == (before.pid, before.secret)
    assert after.ticks >= before.ticks
    assert clock_error(sandbox) < 0.1


def test_24_a_hibernated_sandbox_is_listed_as_such_and_woken_by_its_next_use(
    server: Server, client: Client, sandbox: Sandbox
) -> None:
    before = start_holder(sandbox)
    sh(sandbox, "echo kept >/tmp/x")
    vmm = server.vmm(sandbox)
    assert sandbox.hibernate() is None
    for _ in range(2):
        assert {row.id: row.status for row in client.sandboxes.list()}[sandbox.id] == "hibernated"
        assert sandbox.refresh().status == "hibernated"
    assert not host.is_alive(vmm)
    assert sandbox.exec("cat /tmp/x").stdout == "kept\n"
    assert sandbox.refresh().status == "running"
    after = ask_holder(sandbox)
    assert (after.pid, after.secret, after.nameless) == (before.pid, before.secret, before.nameless)
    assert clock_error(sandbox) < 0.1


def test_25_wake_brings_it_back_and_is_idempotent(sandbox: Sandbox) -> None:
    before = start_holder(sandbox)
    sandbox.wake()
    sandbox.hibernate()
    assert sandbox.wake() is None
    assert sandbox.refresh().status == "running"
    sandbox.wake()
    assert ask_holder(sandbox).secret == before.secret


def test_26_hibernate_is_idempotent_and_a_hibernated_sandbox_can_be_killed(
    server: Server, client: Client, sandbox: Sandbox
) -> None:
    sandbox.hibernate()
    sandbox.hibernate()
    assert sandbox.refresh().status == "hibernated"
    sandbox.kill()
    assert is_gone(client, sandbox.id)
    with pytest.raises(NotFoundError):
        sandbox.wake()
    assert sandbox.id not in server.ids()


def test_27_kill_is_final(server: Server, client: Client, wire: Wire) -> None:
    sandbox = client.sandboxes.create(template="base")
    vmm = server.vmm(sandbox)
    assert sandbox.kill() is None
    assert not any(sandbox.id in line for line in server.left_overs()), (vmm, server.left_overs())
    with pytest.raises(NotFoundError):
        client.sandboxes.get(sandbox.id)
    with pytest.raises(NotFoundError):
        sandbox.kill()


def test_28_a_with_block_ends_what_is_not_persistent(client: Client, delete_after: Callable[[str], None]) -> None:
    with client.sandboxes.create(template="base") as short:
        assert sh(short, "echo hi") == "hi\n"
    assert is_gone(client, short.id)
    with client.sandboxes.create(template="base", persistent=True) as kept:
        delete_after(kept.id)
    assert not is_gone(client, kept.id)


# 29, a restart of the server: vm/test_recovery.py.


def test_30_ten_creates_at_once_make_ten_sandboxes_or_say_that_there_is_no_room(
    client: Client, delete_after: Callable[[str], None]
) -> None:
    def create(_: int) -> Sandbox | ServerError:
        try:
            return client.sandboxes.create(template="base")
        except ServerError as refused:
            return refused

    with ThreadPoolExecutor(10) as pool:
        made = list(pool.map(create, range(10)))
    sandboxes = [one for one in made if isinstance(one, Sandbox)]
    for one in sandboxes:
        delete_after(one.id)
    assert len({one.id for one in sandboxes}) == len(sandboxes) > 0
    for refused in made:
        assert isinstance(refused, Sandbox) or re.search("insufficient host|no compute capacity", str(refused))
    with ThreadPoolExecutor(10) as pool:
        names = list(pool.map(lambda one: sh(one, "hostname"), sandboxes))
    assert len(set(names)) == len(sandboxes)
