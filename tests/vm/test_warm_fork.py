"""Warm fork: one child takes its parent's place, with memory, disk, address and connections; the parent is stopped."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

import pytest
from pandastack import Client, Sandbox

from harness import host, traces
from harness.guest import Told, ask_holder, clock_error, identity, sh, start_holder
from harness.network import Namespace
from harness.outside import ECHO, Servers
from harness.poll import until
from harness.probes import PORT, Interface, ask, connections, interface, start_connections
from harness.server import Server
from harness.wire import Reply

#: Time to do something to a child before its guest has acknowledged.
SLOW_HOOK = '#!/bin/sh\n[ "$COPPICE_REASON" != fork ] || sleep 3\n'
#: The address of the first slot.
FIRST = IPv4Address("10.203.1.0")


@pytest.fixture(scope="module")
def own(new_server: Callable[..., Server], outside: Servers) -> Iterator[Server]:
    """A server for this module, and nothing of it is left on the host."""
    server = new_server(templates=["base"]).start()
    yield server
    server.end()


@dataclass
class Machine:
    """A sandbox with a program, a nameless file, connections to the outside and a file on its disk."""

    server: Server
    sandbox: Sandbox
    told: Told
    interface: Interface
    connected: dict[str, Any]

    @classmethod
    def make(cls, server: Server, outside: Servers) -> "Machine":
        """Makes it."""
        sandbox = server.client().sandboxes.create(template="base", metadata={"a": "b"})
        # Never flushed.
        sh(sandbox, "echo written >/root/file")
        told = start_holder(sandbox)
        return cls(server, sandbox, told, interface(sandbox), start_connections(sandbox, outside.address, ECHO))

    def fork(self, **more: Any) -> Reply:
        """As the contract has it."""
        path = f"/v1/sandboxes/{self.sandbox.id}/fork"
        return self.server.wire().json("POST", path, {"count": 1, "mode": "warm"} | more, timeout=120)

    def row(self, id: str | None = None) -> dict[str, Any]:
        """Of the sandbox, or another, as the API shows it."""
        row: dict[str, Any] = self.server.wire().json("GET", f"/v1/sandboxes/{id or self.sandbox.id}").json()
        return row

    def move_to(self, client: Client, id: str) -> None:
        """From now on this is the sandbox."""
        self.sandbox = client.sandboxes.get(id)

    def moved(self) -> str:
        """Forks it, and goes on with the child. Answers the parent's id."""
        parent = self.sandbox.id
        reply = self.fork()
        assert reply.status == 201, reply
        self.move_to(self.server.client(), reply.json()["children"][0]["id"])
        return parent

    def is_whole(self) -> None:
        """Whatever it was in the meantime: the same program, files, address and connections, which are in use."""
        told = ask_holder(self.sandbox)
        same = (self.told.pid, self.told.secret, self.told.nameless)
        assert (told.pid, told.secret, told.nameless) == same and told.ticks > self.told.ticks
        assert sh(self.sandbox, "cat /root/file") == "written\n"
        assert interface(self.sandbox) == self.interface and self.row()["guest_ip"] == self.interface.address
        now = connections(self.sandbox)
        assert now is not None and now["active"]["error"] is None and now["idle"]["error"] is None, now
        later = until(
            "the connection is in use",
            lambda: (told := connections(self.sandbox)) and told["active"]["count"] > now["active"]["count"] and told,
            20,
        )
        assert later["pid"] == self.connected["pid"]
        assert later["active"]["count"] > self.connected["active"]["count"]
        assert clock_error(self.sandbox) < 0.1
        # It is alone: one process, one seat.
        pids = host.vmm_pids(self.server.data_dir)
        assert set(pids.values()) == {self.sandbox.id} and len(pids) == 1, pids
        router = Namespace.of(traces.router(self.server.data_dir))
        try:
            links = {link["ifname"] for link in json.loads(router.ip("-j", "link"))}
        finally:
            router.close()
        slot = int(IPv4Address(self.interface.address)) - int(FIRST)
        assert len(links & {f"t{slot}", f"t{slot}b"}) == 1, links


@pytest.fixture
def machine(own: Server, outside: Servers) -> Iterator[Machine]:
    """For one test; nothing of it is left."""
    yield Machine.make(own, outside)
    own.delete_all()
    own.settle()


def test_147_one_child_has_the_parents_place_and_the_parent_is_stopped(machine: Machine, outside: Servers) -> None:
    server, wire, parent = machine.server, machine.server.wire(), machine.sandbox
    for count in (0, 2, 16):
        assert machine.fork(count=count).status == 400
    before, vmm = identity(parent), server.vmm(parent)
    reply = machine.fork(metadata={"k": "v", "successor": "x"})
    assert reply.status == 201, reply
    fork = reply.json()
    (child,) = fork["children"]
    assert child["id"] != parent.id and child["boot_ms"] > 0 and child["status"] == "running"
    assert (fork["mode"], fork["parent_id"], fork["flushed"]) == ("warm", parent.id, True)
    assert 0 < fork["parent_paused_ms"] < 30_000 and fork["tree_id"] == child["metadata"]["fork_tree_id"]
    assert child["metadata"]["k"] == "v" and child["metadata"]["fork_parent_id"] == parent.id
    assert "successor" not in child["metadata"]
    # The parent is no more than its record, which says where it went.
    assert not host.is_alive(vmm)
    stopped = machine.row(parent.id)
    assert (stopped["status"], stopped["guest_ip"], stopped["metadata"]["successor"]) == ("stopped", "", child["id"])
    assert stopped["metadata"]["a"] == "b"
    for method, path, body in (
        ("POST", "exec", {"cmd": "true"}),
        ("POST", "fork", {"mode": "warm"}),
        ("POST", "fork-tree", {}),
        ("POST", "wake", {}),
        ("POST", "hibernate", {}),
        ("POST", "snapshots", {}),
        ("GET", f"proxy/{PORT}/", None),
    ):
        refused = wire.json(method, f"/v1/sandboxes/{parent.id}/{path}", body)
        assert refused.status in (409, 503), (path, refused)
        assert child["id"] in refused.body.decode(), (path, refused)
    # The child is the machine, and told who it is.
    machine.move_to(server.client(), child["id"])
    machine.is_whole()
    after = identity(machine.sandbox)
    assert after.sandbox_id == child["id"] and after.hostname == f"sb-{child['id'].replace('-', '')[:12]}"
    for name in ("hostname", "machine_id", "random", "urandom", "generation"):
        assert getattr(before, name) != getattr(after, name), name
    told = json.loads(sh(machine.sandbox, "cat /run/coppice/identity.json"))
    assert told["fork"]["mode"] == "warm" and told["fork"]["parent"] == parent.id
    served = wire.request("GET", f"/v1/sandboxes/{child['id']}/proxy/{PORT}/").json()
    assert (served["pid"], served["address"]) == (machine.connected["pid"], machine.interface.address)
    assert ask(machine.sandbox, "tcp", outside.address, ECHO).startswith("peer ")
    assert wire.json("DELETE", f"/v1/sandboxes/{parent.id}").status == 204
    machine.is_whole()


def test_a_warm_fork_of_a_warm_fork_and_what_else_can_be_done_with_one(machine: Machine) -> None:
    own = machine.server
    for _ in range(2):
        machine.moved()
        machine.is_whole()
    # Children of it have another address, and nothing of it is theirs.
    (child,) = machine.sandbox.fork_tree(1)
    assert interface(child).address != machine.interface.address
    assert ask_holder(child).secret == machine.told.secret
    child.kill()
    machine.is_whole()
    # Over a restart: the daemon never had the device that the machine has.
    own.restart()
    machine.move_to(own.client(), machine.sandbox.id)
    machine.is_whole()
    machine.moved()
    machine.is_whole()
    own.restart()
    machine.move_to(own.client(), machine.sandbox.id)
    machine.is_whole()
    # One that wakes has another address, as any that wakes.
    machine.sandbox.hibernate()
    machine.sandbox.wake()
    assert ask_holder(machine.sandbox).secret == machine.told.secret
    parent = machine.moved()
    assert ask_holder(machine.sandbox).secret == machine.told.secret
    assert machine.row(parent)["metadata"]["successor"] == machine.sandbox.id


def forked_slowly(machine: Machine, pool: ThreadPoolExecutor) -> Future[Reply]:
    """A warm fork in the background, whose child takes its time to acknowledge."""
    machine.sandbox.filesystem.write("/etc/coppice/resume.d/10-slow", SLOW_HOOK)
    sh(machine.sandbox, "chmod 755 /etc/coppice/resume.d/10-slow")
    return pool.submit(machine.fork)


def child_vmm(machine: Machine) -> int:
    """The VMM of the child that there is to be, once it runs."""

    def others() -> list[int]:
        return [pid for pid, id in host.vmm_pids(machine.server.data_dir).items() if id != machine.sandbox.id]

    (pid,) = until("the child's VMM is there", others, 60, 0.01)
    return pid


def test_a_child_that_dies_before_it_has_acknowledged_leaves_the_parent_as_it_was(machine: Machine) -> None:
    vmm = machine.server.vmm(machine.sandbox)
    # As it starts, and when its guest is at its hook.
    for moment in (0.0, 0.7):
        with ThreadPoolExecutor() as pool:
            forking = forked_slowly(machine, pool)
            pid = child_vmm(machine)
            time.sleep(moment)
            host.kill(pid)
            reply = forking.result(60)
        assert reply.status == 500 and "none of the 1 children started" in reply.json()["error"], reply
        assert machine.row()["status"] == "running" and "successor" not in machine.row()["metadata"]
        assert machine.server.vmm(machine.sandbox) == vmm
        machine.is_whole()
        assert machine.server.ids() == {machine.sandbox.id}
    # The next one is not harmed by it.
    sh(machine.sandbox, "rm /etc/coppice/resume.d/10-slow")
    machine.moved()
    machine.is_whole()


def test_kill_9_of_the_server_in_the_middle_leaves_the_parent_as_it_was(machine: Machine) -> None:
    own = machine.server
    vmm = own.vmm(machine.sandbox)
    with ThreadPoolExecutor() as pool:
        forking = forked_slowly(machine, pool)
        pid = child_vmm(machine)
        # Its guest is at its hook: it runs, and has not acknowledged.
        time.sleep(0.5)
        own.kill9()
        with pytest.raises(OSError):
            forking.result(60)
    assert host.is_alive(vmm)
    own.start()
    assert not host.is_alive(pid)
    machine.move_to(own.client(), machine.sandbox.id)
    assert own.ids() == {machine.sandbox.id} and own.vmm(machine.sandbox) == vmm
    until("it goes on", lambda: machine.sandbox.exec("true").exit_code == 0, 30)
    machine.is_whole()
