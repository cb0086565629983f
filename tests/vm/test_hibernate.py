"""Hibernate and wake on real machines: who wakes, and `kill -9` at any moment. Many rounds: `test_rounds.py`."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pandastack import Client, PandastackError, Sandbox

from harness import host
from harness.guest import ask_holder, clock_error, sh, start_holder
from harness.server import Server
from harness.wire import Wire


def status(wire: Wire, sandbox: Sandbox) -> str:
    return str(wire.json("GET", f"/v1/sandboxes/{sandbox.id}").json()["status"])


def test_looking_does_not_wake_and_every_use_does(server: Server, wire: Wire, sandbox: Sandbox) -> None:
    told = start_holder(sandbox)
    path = f"/v1/sandboxes/{sandbox.id}"
    uses = [
        ("POST", "exec", {"cmd": "true"}, 200),
        ("GET", "fs?path=/etc/hostname", None, 200),
        ("GET", "fs/dir?path=/root", None, 200),
        ("GET", "ports", None, 200),
        ("GET", "proxy/1", None, None),
        ("POST", "resume", None, 204),
    ]
    for method, suffix, body, expected in uses:
        assert wire.json("POST", f"{path}/hibernate").json() == {"status": "hibernated"}
        row = wire.json("GET", path).json()
        assert (row["status"], row["guest_ip"]) == ("hibernated", "")
        for look in ("", "/lifecycle", "/logs", "/network", "/previews"):
            assert wire.request("GET", path + look).status < 500
        assert [one["status"] for one in wire.json("GET", "/v1/sandboxes").json() if one["id"] == sandbox.id] == [
            "hibernated"
        ]
        assert host.vmm_pids(server.data_dir, sandbox.id) == {}
        begin = time.monotonic()
        reply = (
            wire.request(method, f"{path}/{suffix}") if body is None else wire.json(method, f"{path}/{suffix}", body)
        )
        assert expected is None or reply.status == expected, (suffix, reply)
        assert status(wire, sandbox) == "running", suffix
        assert time.monotonic() - begin < 20
        assert ask_holder(sandbox).secret == told.secret


def test_many_at_once_get_one_machine(server: Server, sandbox: Sandbox) -> None:
    told = start_holder(sandbox)
    for _ in range(3):
        sandbox.hibernate()
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(sh, sandbox, "cat /etc/hostname") for _ in range(6)]
            pool.submit(sandbox.wake).result()
            assert len({one.result() for one in asked}) == 1
        assert ask_holder(sandbox).secret == told.secret
        assert len(host.vmm_pids(server.data_dir, sandbox.id)) == 1


def test_a_woken_one_has_its_policy_and_an_address_and_is_forked(client: Client, wire: Wire, sandbox: Sandbox) -> None:
    told = start_holder(sandbox)
    policy = {"egress": {"allow": ["203.0.113.7:443"]}}
    assert wire.json("PATCH", f"/v1/sandboxes/{sandbox.id}/network", policy).status == 200
    sandbox.hibernate()
    child, other = sandbox.fork_tree(2)
    row = wire.json("GET", f"/v1/sandboxes/{sandbox.id}").json()
    assert row["status"] == "running" and row["network"] == policy
    assert f" {row['guest_ip']}/" in sh(sandbox, "ip -4 addr show")
    assert ask_holder(child).secret == told.secret
    # A child, too: it is still told of its fork.
    fork = json.loads(sh(child, "cat /run/coppice/identity.json"))["fork"]
    child.hibernate()
    assert ask_holder(child).secret == told.secret
    now = json.loads(sh(child, "cat /run/coppice/identity.json"))
    assert fork["count"] == 2 and (now["fork"], now["reason"]) == (fork, "wake")
    for one in (child, other):
        one.hibernate()
        one.kill()
    assert wire.json("GET", f"/v1/sandboxes/{child.id}").status == 404


def test_a_hibernated_one_outlives_the_server(own_server: Server) -> None:
    sandbox = own_server.client().sandboxes.create(template="base")
    told = start_holder(sandbox)
    sandbox.hibernate()
    for _ in range(2):
        own_server.kill9()
        own_server.start()
        assert status(own_server.wire(), sandbox) == "hibernated"
        assert host.vmm_pids(own_server.data_dir) == {}
    sandbox = own_server.client().sandboxes.get(sandbox.id)
    after = ask_holder(sandbox)
    assert (after.pid, after.secret) == (told.pid, told.secret) and clock_error(sandbox) < 0.1


@pytest.mark.parametrize("change", ["hibernate", "wake"])
def test_kill_9_in_the_middle_loses_nothing(own_server: Server, change: str) -> None:
    sandbox = own_server.client().sandboxes.create(template="base", persistent=True)
    told = start_holder(sandbox)
    digest = sh(sandbox, "head -c 1000000 /dev/urandom >/root/data; sha256sum /root/data")
    seen = set()
    # Few: every step has a fault point of its own in test_crash_points.py. This is for what is between them.
    for round in range(4):
        if change == "wake":
            sandbox.hibernate()

        def ask(sandbox: Sandbox = sandbox) -> None:
            try:
                sandbox.hibernate() if change == "hibernate" else sandbox.wake()
            except PandastackError:
                pass

        asked = threading.Thread(target=ask)
        asked.start()
        time.sleep(random.Random(round).uniform(0, 1.2))
        own_server.kill9()
        asked.join(30)
        own_server.start()
        now = status(own_server.wire(), sandbox)
        seen.add(now)
        assert now in ("running", "hibernated")
        assert len(host.vmm_pids(own_server.data_dir)) == (now == "running")
        sandbox = own_server.client().sandboxes.get(sandbox.id)
        after = ask_holder(sandbox)
        assert (after.pid, after.secret) == (told.pid, told.secret), round
        assert sh(sandbox, "echo 3 >/proc/sys/vm/drop_caches; sha256sum /root/data") == digest
        assert clock_error(sandbox) < 0.2
    assert seen
