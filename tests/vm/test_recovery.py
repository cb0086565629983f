"""`kill -9` of the server at any time, and a restart: what ran goes on, what was half-made is gone."""

import random
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pandastack import Client, NotFoundError, PandastackError, Sandbox

from harness import host, traces
from harness.guest import Told, ask_holder, clock_error, sh, start_holder
from harness.paths import binary
from harness.poll import holds, until
from harness.server import Server, free_port


def fetch(client: Client, *sandboxes: Sandbox) -> list[Sandbox]:
    """The same sandboxes, through another client."""
    return [client.sandboxes.get(sandbox.id) for sandbox in sandboxes]


def test_29_sandboxes_answer_after_kill_9_with_the_same_processes(own_server: Server) -> None:
    client = own_server.client()
    parent = client.sandboxes.create(template="base", persistent=True, metadata={"a": "b"})
    told = start_holder(parent)
    child, paused = parent.fork_tree(2)
    snapshot = parent.snapshot()
    paused.pause()
    # A command that nobody will be told the end of, and one that runs detached.
    with ThreadPoolExecutor() as pool:
        in_flight = pool.submit(parent.exec, "sleep 3; echo done >>/root/in-flight")
        sh(
            parent,
            "setsid sh -c 'while :; do date +%s.%N >/root/heartbeat; sleep 0.1; done' </dev/null >/dev/null 2>&1 &",
        )
        until("it runs", lambda: parent.exec("pgrep -x sleep").exit_code == 0)
        vmms = {one.id: own_server.vmm(one) for one in (parent, child, paused)}
        own_server.kill9()
        with pytest.raises(PandastackError):
            in_flight.result(20)
    # Nobody looks after them, and they run.
    assert all(host.is_alive(pid) for pid in vmms.values())
    own_server.start()
    client = own_server.client()
    assert {row.id: row.status for row in client.sandboxes.list()} == {
        parent.id: "running",
        child.id: "running",
        paused.id: "paused",
    }
    assert {one.id: own_server.vmm(one) for one in (parent, child, paused)} == vmms
    parent, child, paused = fetch(client, parent, child, paused)
    for one in (parent, child):
        after = ask_holder(one)
        assert (after.pid, after.secret) == (told.pid, told.secret) and after.ticks > told.ticks
        assert clock_error(one) < 0.1
    assert parent.metadata["a"] == "b" and parent.lifecycle()["persistent"] is True
    assert child.metadata["fork_parent_id"] == parent.id
    paused.resume()
    assert ask_holder(paused).secret == told.secret and clock_error(paused) < 0.1
    # Every operation works on what was taken over.
    assert [row["id"] if isinstance(row, dict) else row.id for row in client.snapshots.list()] == [snapshot]
    copy = client.sandboxes.create(from_snapshot=snapshot)
    assert ask_holder(copy).secret == told.secret
    (grandchild,) = child.fork_tree(1)
    assert ask_holder(grandchild).secret == told.secret
    assert child.promote(cleanup_siblings=True)["deleted"] == [paused.id]
    # The command of before was not begun twice.
    until("it ended by itself", lambda: parent.exec("cat /root/in-flight").stdout == "done\n", 15)


def test_a_command_in_flight_runs_on_when_the_server_dies(own_server: Server) -> None:
    client = own_server.client()
    sandbox = client.sandboxes.create(template="base")
    with ThreadPoolExecutor() as pool:
        in_flight = pool.submit(sandbox.exec, "sleep 4; echo done >/root/in-flight")
        until("it runs", lambda: sandbox.exec("pgrep -x sleep").exit_code == 0)
        own_server.restart()
        with pytest.raises(PandastackError):
            in_flight.result(20)
    (sandbox,) = fetch(own_server.client(), sandbox)
    until("it ended by itself", lambda: sandbox.exec("cat /root/in-flight").stdout == "done\n", 15)


def test_a_polite_end_leaves_the_machines_running_too(own_server: Server) -> None:
    client = own_server.client()
    sandbox = client.sandboxes.create(template="base")
    told = start_holder(sandbox)
    assert own_server.stop() == 0
    holds("the VMM runs", lambda: host.vmm_pids(own_server.data_dir, sandbox.id), 1)
    own_server.start()
    (sandbox,) = fetch(own_server.client(), sandbox)
    assert ask_holder(sandbox).secret == told.secret


def test_a_polite_end_with_stop_all_leaves_nothing(new_server: Callable[..., Server]) -> None:
    server = new_server(["--stop-all"], ["base"]).start()
    running, paused, asleep = (server.client().sandboxes.create(template="base", persistent=True) for _ in range(3))
    paused.pause()
    asleep.hibernate()
    assert sh(running, "echo runs") == "runs\n"
    assert server.stop() == 0
    assert server.left_overs() == [] and traces.traces(server.data_dir) == []
    # Nor do they come back.
    server.start()
    assert server.ids() == set()


def test_three_restarts_in_a_row(own_server: Server) -> None:
    sandbox = own_server.client().sandboxes.create(template="base")
    told = start_holder(sandbox)
    for _ in range(3):
        own_server.restart()
        (sandbox,) = fetch(own_server.client(), sandbox)
        assert ask_holder(sandbox).secret == told.secret


@pytest.mark.slow
def test_ttls_count_on_across_a_restart(own_server: Server) -> None:
    client = own_server.client()
    ttl = 8
    short, long = (client.sandboxes.create(template="base", ttl_seconds=seconds) for seconds in (ttl, 600))
    child, _ = long.fork_tree(2, metadata={"explore": "1", "explore_ttl": str(ttl)})
    created = time.monotonic()
    time.sleep(3)
    own_server.kill9()
    time.sleep(1)
    own_server.start()
    assert own_server.ids() >= {short.id, long.id, child.id}
    until("those with a short TTL are reaped", lambda: own_server.ids() == {long.id}, ttl + 10)
    assert time.monotonic() - created >= ttl - 1
    # It did not begin again: the long one knows that it was idle all the while.
    (long,) = fetch(own_server.client(), long)
    assert long.lifecycle()["idle_seconds"] >= 3


def test_a_vm_that_died_while_the_server_was_down_is_shown_as_failed(own_server: Server) -> None:
    client = own_server.client()
    dead, alive = (client.sandboxes.create(template="base") for _ in range(2))
    vmm = own_server.vmm(dead)
    own_server.kill9()
    host.kill(vmm)
    until("it is dead", lambda: not host.is_alive(vmm))
    own_server.start()
    client = own_server.client()
    dead, alive = fetch(client, dead, alive)
    assert (dead.status, alive.status) == ("failed", "running")
    row = own_server.wire().json("GET", f"/v1/sandboxes/{dead.id}").json()
    assert row["error"]
    assert own_server.wire().json("POST", f"/v1/sandboxes/{dead.id}/exec", {"cmd": "true"}).status == 409
    dead.kill()
    assert sh(alive, "echo on") == "on\n"


def test_what_merely_names_a_directory_of_ours_is_not_ended(own_server: Server) -> None:
    nobody = f"{own_server.data_dir}/run/00000000-0000-4000-8000-000000000000/x"
    command = ["python3", "-c", "input()", nobody]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as bystander:
        own_server.restart()
        assert bystander.poll() is None
        bystander.communicate(b"\n")
        assert bystander.returncode == 0


def begin(action: Callable[[], object]) -> threading.Thread:
    """In the background; how it ends does not matter: its server is about to be killed."""

    def run() -> None:
        try:
            action()
        except Exception:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def assert_whole(server: Server, expected: set[str]) -> None:
    """Every sandbox that is listed runs, with a VMM of its own; there is no other VMM and no other file."""
    rows = {row["id"]: row for row in server.wire().json("GET", "/v1/sandboxes").json()}
    assert set(rows) >= expected
    assert {row["status"] for row in rows.values()} <= {"running"}, rows
    vmms = sorted(host.vmm_pids(server.data_dir).values())
    assert vmms == sorted(rows), "VMMs and sandboxes are not the same"
    for folder in ("sandboxes", "run"):
        assert {
            name for name in (one.name for one in (server.data_dir / folder).iterdir()) if host.is_uuid(name)
        } == set(rows)
    assert [one for one in server.left_overs() if one.startswith("staging/")] == []
    for id in rows:
        assert sh(server.client().sandboxes.get(id), "echo answers") == "answers\n"


def interrupted(server: Server, what: str, parent: Sandbox, moment: float) -> None:
    """Begins something, kills the server a moment later, and starts it again."""
    client = server.client()
    spare = client.sandboxes.create(template="base") if what == "delete" else parent
    thread = begin(
        {
            "fork-tree": lambda: client.sandboxes.fork_tree(parent.id, 16),
            "create": lambda: [client.sandboxes.create(template="base") for _ in range(3)],
            "plain fork": lambda: client.sandboxes.fork(parent.id),
            "snapshot": parent.snapshot,
            "delete": spare.kill,
        }[what]
    )
    time.sleep(moment)
    server.restart()
    thread.join(30)


def assert_undone(server: Server, parent: Sandbox, told: Told) -> None:
    """What is listed is whole, the parent runs on and can be used, and nothing else is left."""
    assert_whole(server, {parent.id})
    client = server.client()
    (parent,) = fetch(client, parent)
    after = ask_holder(parent)
    assert (after.pid, after.secret) == (told.pid, told.secret)
    # It was not left paused.
    until("it counts", lambda: ask_holder(parent).ticks > after.ticks, 5)
    listed = {row["id"] for row in server.wire().json("GET", "/v1/snapshots").json()}
    assert listed <= {one.name for one in (server.data_dir / "snapshots").iterdir()}
    for snapshot in listed:
        copy = client.sandboxes.create(from_snapshot=snapshot)
        assert ask_holder(copy).secret == told.secret
        copy.kill()
    (child,) = parent.fork_tree(1)
    assert ask_holder(child).secret == told.secret


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "longest"),
    [("fork-tree", 2.5), ("create", 1.0), ("plain fork", 5.0), ("snapshot", 1.0), ("delete", 0.3)],
)
def test_kill_9_in_the_middle_leaves_nothing_half_made(own_server: Server, what: str, longest: float) -> None:
    parent = own_server.client().sandboxes.create(template="base")
    told = start_holder(parent)
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    # Few: every step has a fault point of its own in test_crash_points.py. This is for what is between them.
    for round in range(2):
        # Spread over the operation, and once soon after its begin, where most of the records are made.
        moment = moments.uniform(0.0, 0.15) if round == 0 else moments.uniform(0.0, longest)
        try:
            interrupted(own_server, what, parent, moment)
            assert_undone(own_server, parent, told)
        except (AssertionError, PandastackError) as error:
            raise AssertionError(f"{what}, killed after {moment:.3f} s (seed {seed}): {error}") from error
        for id in own_server.ids() - {parent.id}:
            own_server.client().sandboxes.get(id).kill()


def test_a_deleted_sandbox_does_not_come_back(own_server: Server) -> None:
    client = own_server.client()
    gone, kept = (client.sandboxes.create(template="base") for _ in range(2))
    gone.kill()
    own_server.restart()
    client = own_server.client()
    with pytest.raises(NotFoundError):
        client.sandboxes.get(gone.id)
    assert own_server.ids() == {kept.id}


def test_a_second_server_on_the_same_data_is_refused(own_server: Server) -> None:
    sandbox = own_server.client().sandboxes.create(template="base")
    command = [str(binary()), "up", "--data-dir", str(own_server.data_dir), "--listen", f"127.0.0.1:{free_port()}"]
    second = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert second.returncode != 0 and "error" in second.stderr.lower(), second
    assert sh(sandbox, "echo unharmed") == "unharmed\n"
    assert f"PANDASTACK_API={own_server.api}" in (own_server.data_dir / "credentials.env").read_text()
