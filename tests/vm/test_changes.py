"""What a sandbox has changed since its fork point, read from its disk: exact, in every state, and waking nothing."""

from collections.abc import Callable, Iterator

import pytest
from pandastack import Client, Sandbox

from harness import host
from harness.cli import Cli
from harness.guest import sh
from harness.server import Server
from harness.wire import Wire

EDITS = """
set -e
cd /root
echo new >made; mkdir -p tree/deep; echo x >tree/deep/file; ln -s made 'a link'
printf 'twelve bytes' >old; chmod 600 mode; rm gone; mv moved elsewhere; touch touched
echo shared >/dev/shm/not-on-the-disk
"""


@pytest.fixture(scope="module")
def parent(client: Client, longer_lived: set[str]) -> Iterator[Sandbox]:
    """With files to change, some of which are on its disk and some in its memory only."""
    parent = client.sandboxes.create(template="base")
    longer_lived.add(parent.id)
    sh(parent, "cd /root; for f in old mode gone touched; do echo $f >$f; done; echo mine >/opt/mine; sync")
    # Not flushed: in the memory of a live fork's children, and not on the disk that they begin with.
    sh(parent, "cd /root; for f in moved parents; do echo $f >$f; done")
    yield parent
    parent.kill()
    longer_lived.discard(parent.id)


def changes(wire: Wire, method: str, id: str, query: str = "") -> dict:
    reply = wire.json(method, f"/v1/sandboxes/{id}/changes{query}")
    assert reply.status == 200, reply
    return dict(reply.json())


def lines(seen: dict) -> list[str]:
    """`A path size`, `M path what`, `D path size`."""
    added = [f"A {entry['path']} {entry['size']}" for entry in seen["added"]]
    modified = [f"M {entry['path']} {' '.join(entry['changed'])}" for entry in seen["modified"]]
    return added + modified + [f"D {entry['path']} {entry['size']}" for entry in seen["deleted"]]


def fork(wire: Wire, parent: Sandbox, kind: str) -> dict:
    reply = wire.json("POST", f"/v1/sandboxes/{parent.id}/{kind}", {"count": 1})
    assert reply.status == 201, reply
    return dict(reply.json())


DONE = [
    "A /root/a link 4",
    "A /root/elsewhere 6",
    "A /root/made 4",
    "A /root/tree 0",
    "A /root/tree/deep 0",
    "A /root/tree/deep/file 2",
    "M /root/mode mode",
    "M /root/old content",
    "D /root/gone 5",
]


def test_a_live_forks_child_has_changed_what_it_did_and_not_what_its_parent_had_in_memory(
    client: Client, wire: Wire, parent: Sandbox, delete_after: Callable[[str], None]
) -> None:
    forked = fork(wire, parent, "fork-tree")
    (child,) = forked["children"]
    delete_after(child["id"])
    fresh = changes(wire, "POST", child["id"])
    assert (lines(fresh), fresh["flushed"], fresh.get("incomplete")) == ([], True, None)
    assert (fresh["since"]["kind"], fresh["since"]["id"]) == ("fork", parent.id)
    # When its parent was captured, to the second.
    assert fresh["since"]["at"][:16] == forked["at"][:16]

    sh(client.sandboxes.get(child["id"]), EDITS)
    seen = changes(wire, "POST", child["id"])
    # Its parent's `moved` was never on the disk that it began with.
    assert lines(seen) == DONE
    assert seen["counts"]["earlier"] == 1
    assert seen["bytes"]["added"] == 16 and seen["modified"][1]["size_before"] == 4
    assert lines(changes(wire, "POST", child["id"], "?path=/root/tree&limit=1")) == ["A /root/tree 0"]
    # Nothing that the child did is in its parent, and the parent's own fork point is its template.
    mine = changes(wire, "POST", parent.id, "?path=/opt")
    assert (lines(mine), mine["since"]["kind"], mine["since"]["id"]) == (["A /opt/mine 5"], "template", "base")


def test_a_plain_forks_child_is_told_too_and_keeps_its_fork_point_when_it_hibernates_and_wakes(
    server: Server, client: Client, wire: Wire, parent: Sandbox, delete_after: Callable[[str], None]
) -> None:
    (made,) = fork(wire, parent, "fork")["children"]
    delete_after(made["id"])
    child = client.sandboxes.get(made["id"])
    sh(child, EDITS)
    done = sorted([*DONE, "D /root/moved 6"])
    assert sorted(lines(changes(wire, "POST", child.id))) == done
    sh(child, "echo unflushed >/root/later")

    child.hibernate()
    for method in ("GET", "POST"):
        asleep = changes(wire, method, child.id)
        assert asleep["flushed"] is False and "POST" in asleep["note"]
        assert set(done) <= set(lines(asleep)), method
    assert wire.json("GET", f"/v1/sandboxes/{child.id}").json()["status"] == "hibernated"
    assert host.vmm_pids(server.data_dir, child.id) == {}

    child.wake()
    assert sorted(lines(changes(wire, "POST", child.id))) == sorted([*done, "A /root/later 10"])
    wire.json("POST", f"/v1/sandboxes/{child.id}/pause")
    assert sorted(lines(changes(wire, "GET", child.id))) == sorted([*done, "A /root/later 10"])


def test_a_look_at_a_running_sandbox_flushes_nothing_and_reads_a_journal_that_goes_on(
    client: Client, wire: Wire, parent: Sandbox, delete_after: Callable[[str], None]
) -> None:
    (made,) = fork(wire, parent, "fork-tree")["children"]
    delete_after(made["id"])
    child = client.sandboxes.get(made["id"])
    # Committed to the journal, again and again, and hardly ever to its place.
    sh(child, "cd /root; for n in $(seq 60); do echo $n >n$n; rm -f n$((n - 20)); sync n$n; done; mkdir d; sync")
    before = sh(child, "grep -E '^(Dirty|Writeback):' /proc/meminfo; cat /sys/fs/ext4/vda/session_write_kbytes")
    sh(child, "echo memory >/root/memory")
    wanted = sorted([*(f"A /root/n{n} {len(str(n)) + 1}" for n in range(41, 61)), "A /root/d 0"])
    seen = changes(wire, "GET", child.id, "?path=/root")
    assert seen["flushed"] is False and seen.get("incomplete") is None
    assert sorted(line for line in lines(seen) if "/root/n" in line or "/root/d" in line) == wanted
    assert "A /root/memory 7" not in lines(seen), before
    assert "A /root/memory 7" in lines(changes(wire, "POST", child.id, "?path=/root"))


def test_the_fork_point_outlives_the_snapshot_and_the_siblings(
    client: Client, wire: Wire, parent: Sandbox, delete_after: Callable[[str], None]
) -> None:
    made = wire.json("POST", "/v1/sandboxes", {"from_snapshot": parent.snapshot()}).json()
    delete_after(made["id"])
    wire.json("DELETE", f"/v1/snapshots/{made['from_snapshot']}")
    sh(client.sandboxes.get(made["id"]), "echo new >/root/new")
    seen = changes(wire, "POST", made["id"])
    assert (lines(seen), seen["since"]["kind"]) == (["A /root/new 4"], "snapshot")

    children = wire.json("POST", f"/v1/sandboxes/{parent.id}/fork-tree", {"count": 2}).json()["children"]
    winner = children[0]["id"]
    delete_after(winner)
    assert wire.json("POST", f"/v1/sandboxes/{winner}/promote", {"cleanup_siblings": True}).status == 200
    sh(client.sandboxes.get(winner), "echo won >/root/won")
    assert lines(changes(wire, "POST", winner)) == ["A /root/won 4"]


def test_names_and_files_that_a_guest_means_to_do_harm_with(wire: Wire, sandbox: Sandbox) -> None:
    script = r"""
import os
os.chdir(b"/root")
open(b"bad-\xff\xfe", "w").close()
open("new\nline \x1b[2J \u202e", "w").close()
os.symlink("/etc/shadow", "shadow")
with open("holes", "w") as holes:
    holes.truncate(1 << 40)
for n in range(3000):
    open(f"many-{n}", "w").close()
path = "x"
for _ in range(600):
    os.mkdir("deeper"); os.chdir("deeper")
"""
    sh(sandbox, f"python3 - <<'EOF'\n{script}\nEOF")
    seen = changes(wire, "POST", sandbox.id, "?limit=10000")
    paths = {entry["path"]: entry for entry in seen["added"]}
    assert "/root/bad-\ufffd\ufffd" in paths and "/root/new\nline \x1b[2J \u202e" in paths
    assert (paths["/root/shadow"]["type"], paths["/root/shadow"]["size"]) == ("symlink", 11)
    assert paths["/root/holes"]["size"] == 1 << 40
    # Deeper than any path can be said in one piece: not followed to the end, and that is said.
    assert 3500 < seen["counts"]["added"] < 3604 and not seen["truncated"]
    assert seen["incomplete"] == "1 names or directories on the disk can't be read"
    cut = changes(wire, "POST", sandbox.id, "?limit=5")
    assert (len(cut["added"]), cut["truncated"], cut["counts"]) == (5, True, seen["counts"])
    # Its own disk overwritten with nonsense, past the file system: refused, and the server goes on.
    sh(sandbox, "dd if=/dev/urandom of=/dev/vda bs=4096 count=3000 seek=1 conv=notrunc,fsync 2>/dev/null; true")
    broken = wire.json("GET", f"/v1/sandboxes/{sandbox.id}/changes")
    assert (broken.status, broken.json()["code"]) == (409, "file_system_unreadable")
    assert wire.json("GET", f"/v1/sandboxes/{sandbox.id}").status == 200


def test_explore_says_what_each_branch_changed(
    server: Server, sandbox: Sandbox, delete_after: Callable[[str], None]
) -> None:
    cli = Cli(server)
    sh(sandbox, "echo before >/root/before")
    tries = ["--try", "good=echo 1 >/opt/one; rm /root/before", "--try", "bad=echo 22 >/srv/two; exit 1"]
    outcome = cli.json("explore", sandbox.id, *tries)
    delete_after(outcome["winner_id"])
    good, bad = (branch["changes"] for branch in outcome["branches"])
    assert ([entry["path"] for entry in good["added"]], good["flushed"]) == (["/opt/one"], True)
    assert [entry["path"] for entry in bad["added"]] == ["/srv/two"]
    assert outcome["branches"][0]["files_changed"] == ["/opt/one"]
    shown = cli.ok("sandbox", "changes", outcome["winner_id"])
    assert "/opt/one      2 B" in shown and f"since the fork of {sandbox.id[:8]}" in shown
