"""Clients that hang up in the middle: nothing is left of what nobody waits for."""

import socket
from collections.abc import Callable

import pytest
from pandastack import Sandbox

from harness import host
from harness.guest import ask_holder, sh, start_holder
from harness.poll import until
from harness.server import Server
from harness.wire import Wire


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sandboxes", {"template": "base"}),
        ("/v1/sandboxes/{id}/fork-tree", {"count": 8}),
        ("/v1/sandboxes/{id}/fork", {"count": 2}),
    ],
    ids=["create", "fork-tree", "plain fork"],
)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "when machines start"])
def test_hanging_up_leaves_nothing(
    server: Server, wire: Wire, sandbox: Sandbox, path: str, body: dict[str, object], late: bool
) -> None:
    told = start_holder(sandbox)
    ids, files = server.ids(), sorted(server.left_overs())
    with wire.begun("POST", path.format(id=sandbox.id), body):
        # The request was read as soon as something of it is there; then its machines come.
        until("it has begun", lambda: sorted(server.left_overs()) != files, 10, 0.002)
        if late:
            known = len(files)
            until("a machine starts", lambda: len(server.left_overs()) > known + 1, 10, 0.002)
    until("files and machines are as before", lambda: sorted(server.left_overs()) == files, 60, 0.1)
    assert server.ids() == ids
    # And the parent is as it was.
    assert sandbox.refresh().status == "running"
    after = ask_holder(sandbox)
    assert (after.pid, after.secret) == (told.pid, told.secret) and after.ticks > told.ticks


@pytest.mark.parametrize("path", ["exec", "exec/stream"])
def test_hanging_up_in_a_command_kills_its_process_group(wire: Wire, shared: Sandbox, path: str) -> None:
    command = "sleep 71.5 & sleep 71.5 & trap '' HUP TERM; sleep 71.5; sleep 71.5"
    count: Callable[[], int] = lambda: len(shared.exec("pgrep -x sleep").stdout.split())  # noqa: E731
    with wire.begun("POST", f"/v1/sandboxes/{shared.id}/{path}", {"cmd": command}):
        until("it runs", lambda: count() == 3)
    until("its processes are gone", lambda: count() == 0, 15)


def test_hanging_up_in_a_command_spares_what_was_detached(wire: Wire, shared: Sandbox) -> None:
    with wire.begun("POST", f"/v1/sandboxes/{shared.id}/exec", {"cmd": "setsid sleep 72.5 & sleep 73.5"}):
        until("it runs", lambda: shared.exec("pgrep -f 'sleep 7[3].5'").exit_code == 0)
    until("it is gone", lambda: shared.exec("pgrep -f 'sleep 7[3].5'").exit_code == 1, 15)
    assert shared.exec("pgrep -f 'sleep 7[2].5'").exit_code == 0
    sh(shared, "pkill -f 'sleep 7[2].5'")


def test_hanging_up_in_an_upload_keeps_the_old_file_and_no_half_of_the_new_one(wire: Wire, shared: Sandbox) -> None:
    sh(shared, "mkdir -p /root/up && echo old >/root/up/f")
    with socket.create_connection((wire.host, wire.port)) as upload:
        head = [f"PUT /v1/sandboxes/{shared.id}/fs?path=/root/up/f HTTP/1.1", "Host: x", f"Content-Length: {64 << 20}"]
        head += [f"{name}: {value}" for name, value in wire.headers().items()]
        upload.sendall("\r\n".join([*head, "", ""]).encode() + bytes(8 << 20))
        until("some of it has arrived", lambda: "old" in sh(shared, "cat /root/up/f"))
    until("nothing else is left", lambda: sh(shared, "ls -A /root/up") == "f\n", 15)
    assert sh(shared, "cat /root/up/f") == "old\n"


def test_hanging_up_in_a_snapshot_leaves_a_whole_one_or_none(server: Server, wire: Wire, sandbox: Sandbox) -> None:
    files = sorted(server.left_overs())
    with wire.begun("POST", f"/v1/sandboxes/{sandbox.id}/snapshots"):
        until("it has begun", lambda: sorted(server.left_overs()) != files, 10, 0.002)
    names = lambda: {one.name for one in (server.data_dir / "snapshots").iterdir()}  # noqa: E731
    listed = lambda: {row["id"] for row in wire.json("GET", "/v1/snapshots").json()}  # noqa: E731
    until("what is on disk is what is listed", lambda: names() == listed(), 30, 0.1)
    for id in listed():
        assert wire.json("DELETE", f"/v1/snapshots/{id}").status == 204
    assert sorted(server.left_overs()) == files
    assert host.is_alive(server.vmm(sandbox)) and sh(sandbox, "echo on") == "on\n"
