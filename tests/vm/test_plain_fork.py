"""What the children of a plain fork have of their parent: its disk, flushed, and nothing else."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pandastack import Client, Sandbox

from harness.guest import clock_error, identity, sh, start_holder, try_holder
from harness.wire import Wire


@pytest.fixture
def children(
    client: Client, wire: Wire, sandbox: Sandbox, delete_after: Callable[[str], None]
) -> Iterator[list[Sandbox]]:
    """Three children of a parent that has a process and files which nobody flushed."""
    start_holder(sandbox)
    sh(
        sandbox,
        "echo memory >/dev/shm/m; mkdir -p /srv/deep; for d in /root /srv/deep /opt; do echo unsynced >$d/f; done",
    )
    reply = wire.json("POST", f"/v1/sandboxes/{sandbox.id}/fork", {"count": 3})
    assert reply.status == 201, reply
    fork = reply.json()
    for child in fork["children"]:
        delete_after(child["id"])
    assert fork["flushed"] is True and fork.get("errors", []) == []
    assert [child["metadata"]["fork_index"] for child in fork["children"]] == ["0", "1", "2"]
    yield [client.sandboxes.get(child["id"]) for child in fork["children"]]


def test_every_child_has_the_files_and_none_has_the_process_or_memory(
    sandbox: Sandbox, children: list[Sandbox]
) -> None:
    def look(child: Sandbox) -> None:
        assert sh(child, "cat /root/f /srv/deep/f /opt/f") == "unsynced\n" * 3
        assert child.exec("pgrep -f '[h]older.py'").exit_code == 1
        assert try_holder(child) is None
        assert child.exec("cat /dev/shm/m").exit_code != 0
        # The log of the process was captured in the middle: whole lines up to one instant.
        lines = sh(child, "cat /root/holder.log").split()
        assert len(lines) > 0 and [int(line) for line in lines] == list(range(1, len(lines) + 1))
        # A clean file system, which was frozen for the clone.
        assert sh(child, "touch /root/writable && findmnt -no FSTYPE,OPTIONS / | grep -c rw").strip() == "1"
        assert child.exec("dmesg | grep -iE 'ext4.*error|corrupt'").exit_code == 1
        assert clock_error(child) < 0.1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(look, children))
        seen = list(pool.map(identity, [*children, sandbox]))
    for field in ("hostname", "machine_id", "random", "generation", "sandbox_id"):
        assert len({getattr(one, field) for one in seen}) == 4, field
    # The parent was paused for the clone only, and its frozen file system was thawed.
    assert try_holder(sandbox) is not None
    sh(sandbox, "echo parent >/root/f && sync")
    for child in children:
        assert sh(child, "cat /root/f") == "unsynced\n"
        sh(child, "echo child >/root/f")
    assert sh(sandbox, "cat /root/f") == "parent\n"
