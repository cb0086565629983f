"""Checklist G, 76 to 89: fork, fork-tree and promote, with the published Python client.

What a child inherits of a running machine is proved in `vm/test_fork_state.py`.
"""

import time
from collections.abc import Callable, Iterator

import pytest
from pandastack import BadRequestError, Client, NotFoundError, Sandbox

from harness.guest import identity, sh
from harness.server import Server
from harness.wire import Wire

NOBODY = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def family(client: Client, server: Server) -> Iterator[Callable[..., list[Sandbox]]]:
    """Forks a sandbox; the children are deleted when the test is over."""
    made: list[Sandbox] = []

    def fork_tree(parent: Sandbox, count: int, **more: object) -> list[Sandbox]:
        children = parent.fork_tree(count, **more)
        made.extend(children)
        return children

    yield fork_tree
    alive = server.ids()
    for child in made:
        if child.id in alive:
            child.kill()


def test_76_a_fork_without_a_body_is_one_child(client: Client, shared: Sandbox, delete_after: Callable) -> None:
    child = shared.fork()
    delete_after(child.id)
    assert child.id != shared.id
    assert child.metadata["fork_parent_id"] == shared.id
    assert child.boot_mode == "cold"
    assert sh(child, "echo child") == "child\n"
    assert shared.refresh().status == "running" and sh(shared, "echo parent") == "parent\n"


def test_77_an_unsynced_file_is_in_the_child_and_writes_diverge(sandbox: Sandbox, delete_after: Callable) -> None:
    sh(sandbox, "echo before >/root/77; mkdir -p /srv/deep && echo before >/srv/deep/77")
    child = sandbox.fork(metadata={"b": "1"})
    delete_after(child.id)
    assert sh(child, "cat /root/77 /srv/deep/77") == "before\nbefore\n"
    sh(child, "echo child >>/root/77")
    sh(sandbox, "echo parent >>/root/77")
    assert sh(child, "cat /root/77") == "before\nchild\n"
    assert sh(sandbox, "cat /root/77") == "before\nparent\n"


def test_79_metadata_of_a_fork_is_stored(client: Client, shared: Sandbox, delete_after: Callable) -> None:
    child = shared.fork(metadata={"b": "1"})
    delete_after(child.id)
    assert child.metadata["b"] == client.sandboxes.get(child.id).metadata["b"] == "1"


def test_80_what_does_not_run_can_not_be_forked(server: Server, client: Client, sandbox: Sandbox) -> None:
    for fork in (client.sandboxes.fork, lambda id: client.sandboxes.fork_tree(id, 1)):
        with pytest.raises(NotFoundError):
            fork(NOBODY)
    sandbox.pause()
    before = server.ids()
    for fork in (sandbox.fork, lambda: sandbox.fork_tree(2)):
        with pytest.raises(BadRequestError, match="paused"):
            fork()
    assert server.ids() == before


def test_81_children_come_in_order_with_their_lineage(client: Client, shared: Sandbox, family: Callable) -> None:
    children = family(shared, 4, metadata={"k": "v"})
    assert [child.metadata["fork_index"] for child in children] == ["0", "1", "2", "3"]
    assert len({child.id for child in children} | {shared.id}) == 5
    assert len({child.metadata["fork_tree_id"] for child in children}) == 1
    for child in children:
        assert child.metadata["fork_parent_id"] == shared.id and child.metadata["k"] == "v"
        assert child.status == "running" and child.boot_mode == "snapshot"
        assert (child.template, child.cpu, child.memory_mb) == (shared.template, shared.cpu, shared.memory_mb)
        assert client.sandboxes.get(child.id).metadata == child.metadata
    assert shared.refresh().status == "running"
    assert "fork_tree_id" not in shared.metadata


def test_81_the_answer_says_what_it_did(wire: Wire, shared: Sandbox, delete_after: Callable) -> None:
    reply = wire.json("POST", f"/v1/sandboxes/{shared.id}/fork-tree", {"count": 2})
    assert reply.status == 201
    fork = reply.json()
    for child in fork["children"]:
        delete_after(child["id"])
        assert child["boot_ms"] > 0
    assert fork["parent_id"] == shared.id and fork["snapshot_id"] and fork["tree_id"] and fork["at"].endswith("Z")
    assert fork["parent_paused_ms"] > 0 and fork["memory_bytes"] > 0
    assert fork["disk_clone"] in ("reflink", "copy") and fork["flushed"] is True and fork["mode"] == "fork-tree"
    assert "memory" in fork["inherited"] and "\n" not in fork["inherited"]
    inside = sum(fork["capture"][part] for part in ("stop", "devices", "disk", "memory"))
    assert inside <= fork["parent_paused_ms"] * 1.01 + 1
    # Gone snapshots of forks are the server's business.
    assert fork["snapshot_id"] not in wire.json("GET", "/v1/snapshots").body.decode()


def test_82_sixteen_children_within_30_s(shared: Sandbox, family: Callable) -> None:
    started = time.monotonic()
    children = family(shared, 16)
    assert len(children) == 16
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("count", [17, 0, -1, 10**18])
def test_82_counts_out_of_range_are_refused(server: Server, shared: Sandbox, count: int) -> None:
    before = server.ids()
    with pytest.raises(BadRequestError, match="count"):
        shared.fork_tree(count)
    assert server.ids() == before


def test_84_children_have_networks_and_randomness_of_their_own(shared: Sandbox, family: Callable) -> None:
    machines = [shared.refresh(), *family(shared, 3)]
    addresses = [machine.guest_ip for machine in machines]
    assert len(set(addresses)) == 4 and "" not in addresses
    for machine, address in zip(machines, addresses, strict=True):
        assert f" {address}/32 " in sh(machine, "ip -4 -o addr show eth0")
    identities = [identity(machine) for machine in machines]
    for field in ("hostname", "machine_id", "random", "urandom", "generation"):
        assert len({getattr(one, field) for one in identities}) == 4, field


def test_85_promote_without_cleanup(shared: Sandbox, family: Callable) -> None:
    winner, sibling = family(shared, 2)
    tree = winner.metadata["fork_tree_id"]
    assert winner.promote() == {"winner": winner.id, "tree_id": tree, "deleted": [], "failures": {}}
    assert sibling.refresh().status == "running"
    # A sandbox that is no child can be promoted too: nothing changes.
    assert shared.promote()["deleted"] == []


@pytest.mark.parametrize("name_the_tree", [True, False], ids=["tree named", "tree inferred"])
def test_86_87_promote_deletes_the_siblings_once(
    client: Client, server: Server, shared: Sandbox, family: Callable, name_the_tree: bool
) -> None:
    losers, others = family(shared, 3), family(shared, 1)
    winner = losers.pop(1)
    tree = winner.metadata["fork_tree_id"]
    tree_id = tree if name_the_tree else None
    answer = winner.promote(cleanup_siblings=True, tree_id=tree_id)
    assert sorted(answer["deleted"]) == sorted(loser.id for loser in losers)
    assert (answer["winner"], answer["tree_id"], answer["failures"]) == (winner.id, tree, {})
    assert server.ids() >= {winner.id, shared.id, others[0].id}
    for loser in losers:
        with pytest.raises(NotFoundError):
            client.sandboxes.get(loser.id)
    again = winner.promote(cleanup_siblings=True, tree_id=tree_id)
    assert again == answer | {"deleted": []}
    assert sh(winner, "echo on") == "on\n"


def test_88_a_foreign_tree_is_refused_and_nothing_is_deleted(server: Server, shared: Sandbox, family: Callable) -> None:
    one, other = family(shared, 2), family(shared, 2)
    before = server.ids()
    for tree in (other[0].metadata["fork_tree_id"], NOBODY, "x"):
        with pytest.raises(BadRequestError):
            one[0].promote(cleanup_siblings=True, tree_id=tree)
    with pytest.raises(BadRequestError):
        shared.promote(cleanup_siblings=True)
    assert server.ids() == before


def test_89_lineage_can_not_be_spoofed(shared: Sandbox, family: Callable) -> None:
    spoofed = {"workspace": "x", "fork_tree_id": "x", "fork_parent_id": "x", "fork_index": "x", "successor": "x"}
    (child,) = family(shared, 1, metadata=spoofed)
    assert "x" not in child.metadata.values()
    assert child.metadata["fork_parent_id"] == shared.id


def test_a_plain_fork_says_what_it_did_and_cold_is_a_name_of_it(
    wire: Wire, shared: Sandbox, delete_after: Callable
) -> None:
    fork = wire.json("POST", f"/v1/sandboxes/{shared.id}/fork", {"count": 2, "mode": "cold"}).json()
    for child in fork["children"]:
        delete_after(child["id"])
    assert len(fork["children"]) == 2 and fork["mode"] == "disk" and fork["flushed"] is True
    assert fork.get("snapshot_id") is None and "processes" in fork["inherited"]
