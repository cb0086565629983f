"""Checklist H: snapshots, with the published Python client."""

from collections.abc import Callable, Iterator

import pytest
from pandastack import BadRequestError, Client, NotFoundError, PandastackError, Sandbox

from harness.guest import ask_holder, sh, start_holder
from harness.server import Server


@pytest.fixture
def snapshot_of(client: Client) -> Iterator[Callable[[Sandbox], str]]:
    """Takes snapshots; those that are left are deleted when the test is over."""
    made: list[str] = []

    def snapshot(sandbox: Sandbox) -> str:
        made.append(sandbox.snapshot())
        return made[-1]

    yield snapshot
    left = {row["id"] if isinstance(row, dict) else row.id for row in client.snapshots.list()}
    for one in made:
        if one in left:
            client.snapshots.delete(one)


def field(row: object, name: str) -> object:
    """Of a snapshot as the client gives it."""
    return row[name] if isinstance(row, dict) else getattr(row, name)


def test_96_a_snapshot_leaves_the_sandbox_running(sandbox: Sandbox, snapshot_of: Callable[[Sandbox], str]) -> None:
    one, two = snapshot_of(sandbox), snapshot_of(sandbox)
    assert one and two and one != two
    assert sandbox.refresh().status == "running" and sh(sandbox, "echo on") == "on\n"


def test_97_98_a_sandbox_from_a_snapshot_has_its_files_memory_and_size(
    client: Client, sandbox: Sandbox, snapshot_of: Callable[[Sandbox], str], delete_after: Callable[[str], None]
) -> None:
    before = start_holder(sandbox)
    sh(sandbox, "echo kept >/root/97")
    snapshot = snapshot_of(sandbox)
    sh(sandbox, "echo later >/root/97")
    # The client sends its default template along, which is another than the snapshot's.
    copy = client.sandboxes.create(from_snapshot=snapshot)
    delete_after(copy.id)
    assert copy.id != sandbox.id and copy.from_snapshot == snapshot
    assert (copy.template, copy.cpu, copy.memory_mb) == (sandbox.template, sandbox.cpu, sandbox.memory_mb)
    assert sh(copy, "cat /root/97") == "kept\n"
    after = ask_holder(copy)
    assert (after.pid, after.secret, after.nameless) == (before.pid, before.secret, before.secret)
    assert after.ticks > before.ticks
    assert ask_holder(copy).ticks > after.ticks


def test_98_one_snapshot_can_be_used_many_times(
    client: Client, sandbox: Sandbox, snapshot_of: Callable[[Sandbox], str], delete_after: Callable[[str], None]
) -> None:
    before = start_holder(sandbox)
    snapshot = snapshot_of(sandbox)
    copies = [client.sandboxes.create(from_snapshot=snapshot) for _ in range(3)]
    for copy in copies:
        delete_after(copy.id)
        sh(copy, f"echo {copy.id} >/root/mine")
    for copy in copies:
        assert ask_holder(copy).secret == before.secret
        assert sh(copy, "cat /root/mine") == f"{copy.id}\n"


def test_99_an_unknown_snapshot_or_volumes_are_refused(
    server: Server, client: Client, sandbox: Sandbox, snapshot_of: Callable[[Sandbox], str]
) -> None:
    before = server.ids()
    for unknown in ("nope", "00000000-0000-0000-0000-000000000000", "../../etc"):
        with pytest.raises((NotFoundError, BadRequestError)):
            client.sandboxes.create(from_snapshot=unknown)
    with pytest.raises(BadRequestError, match="volumes"):
        client.sandboxes.create(from_snapshot=snapshot_of(sandbox), volumes=[{"name": "v"}])
    assert server.ids() == before


def test_100_the_list_is_newest_first_and_can_be_filtered(
    client: Client, sandbox: Sandbox, shared: Sandbox, snapshot_of: Callable[[Sandbox], str]
) -> None:
    first, other, last = snapshot_of(sandbox), snapshot_of(shared), snapshot_of(sandbox)
    rows = client.snapshots.list()
    assert [field(row, "id") for row in rows] == [last, other, first]
    assert [field(row, "id") for row in client.snapshots.list(sandbox_id=sandbox.id)] == [last, first]
    for row in rows:
        assert field(row, "template") == "base" and field(row, "created_at")
        size = field(row, "size_bytes")
        assert isinstance(size, int) and size > 1 << 20
    assert field(rows[0], "sandbox_id") == sandbox.id


def test_101_a_deleted_snapshot_is_gone_and_what_was_made_of_it_runs_on(
    client: Client, sandbox: Sandbox, snapshot_of: Callable[[Sandbox], str], delete_after: Callable[[str], None]
) -> None:
    before = start_holder(sandbox)
    snapshot = snapshot_of(sandbox)
    assert field(client.snapshots.get(snapshot), "id") == snapshot
    copy = client.sandboxes.create(from_snapshot=snapshot)
    delete_after(copy.id)
    client.snapshots.delete(snapshot)
    with pytest.raises(NotFoundError):
        client.snapshots.get(snapshot)
    with pytest.raises(NotFoundError):
        client.snapshots.delete(snapshot)
    with pytest.raises(PandastackError):
        client.sandboxes.create(from_snapshot=snapshot)
    # It reads what it had not yet touched of the image, which has no name any more: every file, and its memory.
    assert ask_holder(copy).secret == before.secret
    sh(
        copy,
        "find / -xdev -type f -newermt 2000-01-01 -size -1M -print0 | xargs -0 cat >/dev/null; python3 -c 'import ssl'",
    )
    # And it can be forked.
    (child,) = copy.fork_tree(1)
    delete_after(child.id)
    assert ask_holder(child).secret == before.secret


def test_a_snapshot_outlives_its_source(
    server: Server, client: Client, snapshot_of: Callable[[Sandbox], str], delete_after: Callable[[str], None]
) -> None:
    source = client.sandboxes.create(template="base")
    before = start_holder(source)
    snapshot = snapshot_of(source)
    source.kill()
    copy = client.sandboxes.create(from_snapshot=snapshot)
    delete_after(copy.id)
    assert ask_holder(copy).secret == before.secret
    assert [field(row, "sandbox_id") for row in client.snapshots.list()] == [source.id]


def test_a_paused_sandbox_can_be_captured_and_stays_paused(
    client: Client, sandbox: Sandbox, snapshot_of: Callable[[Sandbox], str], delete_after: Callable[[str], None]
) -> None:
    before = start_holder(sandbox)
    sandbox.pause()
    snapshot = snapshot_of(sandbox)
    assert sandbox.refresh().status == "paused"
    copy = client.sandboxes.create(from_snapshot=snapshot)
    delete_after(copy.id)
    assert copy.status == "running" and ask_holder(copy).secret == before.secret
