"""The host's disk is full, while guests write too: failures have a name, nothing hangs, all goes on afterwards."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pandastack import Sandbox

from harness.guest import ask_holder, sh, start_holder
from harness.poll import until
from harness.server import Server, make_data_dir

MIB = 1 << 20
#: Less is free: no sandbox is admitted.
FLOOR = 1024 * MIB


class Volume:
    """A small file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.mount = folder / "v"
        self.ballast = self.mount / "ballast"

    def free(self) -> int:
        """Bytes."""
        stat = os.statvfs(self.mount)
        return stat.f_bavail * stat.f_frsize

    def leave(self, size: int) -> None:
        """Takes all space but so much."""
        have = self.ballast.stat().st_size if self.ballast.exists() else 0
        want = have + self.free() - size
        self.release()
        with self.ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, want)

    def release(self) -> None:
        """Gives it back."""
        self.ballast.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    folder = tmp_path_factory.mktemp("full")
    image = folder / "image"
    volume = Volume(folder)
    volume.mount.mkdir()
    with image.open("wb") as file:
        file.truncate(4 << 30)
    quiet = {"check": True, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], **quiet)
    subprocess.run(["mount", "-o", "loop,nodev,nosuid", str(image), str(volume.mount)], **quiet)
    # VMMs run as another user, and pytest's directories are private.
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o001 == 0:
            path.chmod(path.stat().st_mode | 0o011)
    try:
        yield volume
    finally:
        subprocess.run(["umount", str(volume.mount)], **quiet)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def full(volume: Volume) -> Iterator[Server]:
    server = Server(make_data_dir(volume.mount, ["base"])).start()
    yield server
    volume.release()
    server.end()


@pytest.fixture
def parent(volume: Volume, full: Server) -> Iterator[Sandbox]:
    """A sandbox on the volume, which has room again afterwards."""
    sandbox = full.client().sandboxes.create(template="base")
    try:
        yield sandbox
    finally:
        volume.release()
        full.delete_all()
        assert full.left_overs() == []


def test_without_room_nothing_is_begun(volume: Volume, full: Server, parent: Sandbox) -> None:
    told = start_holder(parent)
    volume.leave(FLOOR - 16 * MIB)
    before = full.left_overs()
    wire = full.wire()
    for path, body in [
        ("/v1/sandboxes", {"template": "base"}),
        (f"/v1/sandboxes/{parent.id}/fork-tree", {"count": 2}),
        (f"/v1/sandboxes/{parent.id}/fork", {"count": 1}),
    ]:
        started = time.monotonic()
        reply = wire.json("POST", path, body)
        assert reply.status == 507 and reply.json()["code"] == "no_storage", reply
        assert "storage" in reply.json()["error"] and reply.json()["hint"]
        assert time.monotonic() - started < 2
    assert full.left_overs() == before
    assert ask_holder(parent).secret == told.secret
    # One that waits for room gets it as soon as there is some.
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(full.client(max_create_retry_seconds=60).sandboxes.create, template="base")
        time.sleep(1)
        assert not waiting.done()
        volume.release()
        assert sh(waiting.result(60), "echo in") == "in\n"


def test_a_capture_that_fills_the_disk_is_refused_by_name_and_the_parent_runs_on(
    volume: Volume, full: Server, parent: Sandbox
) -> None:
    told = start_holder(parent)
    sh(parent, "head -c 96M /dev/urandom >/dev/shm/x")
    volume.leave(24 * MIB)
    before = full.left_overs()
    reply = full.wire().json("POST", f"/v1/sandboxes/{parent.id}/snapshots")
    assert reply.status == 507 and reply.json()["code"] == "no_storage", reply
    assert full.left_overs() == before
    assert full.wire().json("GET", "/v1/snapshots").json() == []
    assert parent.refresh().status == "running"
    after = ask_holder(parent)
    assert (after.pid, after.secret) == (told.pid, told.secret) and after.ticks > told.ticks
    volume.release()
    assert parent.snapshot()


@pytest.mark.slow
def test_guests_that_write_into_a_full_disk_while_they_are_forked(
    volume: Volume, full: Server, parent: Sandbox
) -> None:
    told = start_holder(parent)
    children = parent.fork_tree(2)
    family = [parent, *children]
    wire = full.wire()
    volume.leave(64 * MIB)

    def write(one: Sandbox) -> tuple[int, str]:
        command = "dd if=/dev/zero of=/root/much bs=1M count=150 conv=fsync 2>&1"
        started = time.monotonic()
        reply = wire.json("POST", f"/v1/sandboxes/{one.id}/exec", {"cmd": command, "timeout_seconds": 8}, timeout=60)
        assert time.monotonic() - started < 30, "it was waited for too long"
        return reply.status, reply.body.decode()

    with ThreadPoolExecutor() as pool:
        writing = [pool.submit(write, one) for one in family]
        refused = [wire.json("POST", f"/v1/sandboxes/{parent.id}/fork-tree", {"count": 1}) for _ in range(3)]
        results = [one.result() for one in writing]
    # Refused for want of room, or because the parent already stands still; never anything else, and never made.
    assert {reply.status for reply in refused} <= {507, 409}, refused
    assert full.ids() == {one.id for one in family}
    # At least one of them can't have got its 150 MiB; each says so: in the guest, or by its state.
    rows = {row["id"]: row for row in wire.json("GET", "/v1/sandboxes").json()}
    unlucky = []
    for one, (status, body) in zip(family, results, strict=True):
        if status == 200 and '"exit_code":0' in body:
            continue
        unlucky.append(one)
        row = rows[one.id]
        assert row["status"] in ("running", "failed"), row
        if row["status"] == "failed":
            assert "space" in row["error"].lower() or "disk" in row["error"].lower(), row
        else:
            assert "error" in body or "space" in body.lower(), body
    assert unlucky, results
    # There is room again: everything goes on, with its memory and processes.
    volume.release()
    for one in family:
        until("it runs", lambda one=one: one.refresh().status == "running", 30, 0.2)
        until(
            "it answers",
            lambda one=one: (
                wire.json("POST", f"/v1/sandboxes/{one.id}/exec", {"cmd": "true", "timeout_seconds": 5}).status == 200
            ),
            60,
            0.5,
        )
        assert ask_holder(one).secret == told.secret
    (child,) = parent.fork_tree(1)
    assert ask_holder(child).secret == told.secret
