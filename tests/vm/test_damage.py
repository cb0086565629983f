"""Files of templates, snapshots and kernels that are missing or changed: an error that names them, and nothing left."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pandastack import Sandbox

from harness import host
from harness.guest import sh
from harness.paths import binary
from harness.poll import until
from harness.server import Server, clone_tree, free_port


def image_dir(server: Server) -> Path:
    """The baked image of the template `base`."""
    template = server.data_dir / "templates" / "base"
    image = template / (template / "current").read_text().strip() / "snapshot"
    assert (image / "manifest.json").is_file()
    return image


@pytest.fixture(scope="module")
def damaged(new_server: Callable[..., Server]) -> Iterator[Server]:
    """A server with templates of its own, which may be damaged. Not started."""
    server = new_server(templates=["base"], own=True)
    yield server


def flip(path: Path) -> None:
    """Changes one byte in the middle of what the file really holds."""
    with path.open("r+b") as file:
        at = os.lseek(file.fileno(), path.stat().st_size // 2, os.SEEK_DATA)
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def truncate(path: Path) -> None:
    """Takes the last page away."""
    os.truncate(path, path.stat().st_size - 4096 if path.stat().st_size > 4096 else 1)


def newer(path: Path) -> None:
    """As another build would write it."""
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"version": 9}))


#: Codes of errors that say so.
DAMAGED = {"template_damaged", "image_damaged", "image_incompatible"}
DAMAGES = [
    ("memory", Path.unlink, "memory"),
    ("memory", truncate, "memory"),
    ("memory", flip, "memory"),
    ("devices", Path.unlink, "devices"),
    ("devices", flip, "devices"),
    ("disk.ext4", Path.unlink, "disk"),
    ("disk.ext4", truncate, "disk"),
    ("disk.ext4", flip, "disk"),
    ("manifest.json", Path.unlink, "no machine image"),
    ("manifest.json", flip, "manifest"),
    ("manifest.json", newer, "version 9"),
]


def damage_name(value: object) -> str:
    """For the test's id."""
    return getattr(value, "__name__", str(value)).split(".")[0]


@pytest.mark.parametrize(("file", "damage", "named"), DAMAGES, ids=damage_name)
def test_a_damaged_template_is_named_and_nothing_is_left(
    damaged: Server, tmp_path: Path, file: str, damage: Callable[[Path], None], named: str
) -> None:
    image = image_dir(damaged)
    whole = image.with_name(f"{image.name}.whole")
    clone_tree(image, whole)
    damage(image / file)
    try:
        damaged.start()
        reply = damaged.wire().json("POST", "/v1/sandboxes", {"template": "base"})
        assert reply.status == 500 and reply.json()["code"] in DAMAGED, reply
        assert named in reply.json()["error"], reply
        assert "template build" in reply.json().get("hint", ""), reply
        assert damaged.ids() == set()
        assert damaged.left_overs() == []
        # It is still listed, so that it can be looked at and made again, and the server serves.
        assert damaged.wire().json("GET", "/v1/templates").status == 200
    finally:
        if damaged.process is not None:
            damaged.stop()
        shutil.rmtree(image)
        whole.rename(image)


@pytest.mark.parametrize("name", ["vmlinuz", "initramfs"])
def test_a_missing_kernel_is_named_and_nothing_is_left(damaged: Server, name: str) -> None:
    files = [path for path in (damaged.data_dir / "kernels").rglob(f"{name}*") if path.is_file()]
    assert files
    for path in files:
        path.rename(path.with_name(f".away-{path.name}"))
    try:
        damaged.start()
        reply = damaged.wire().json("POST", "/v1/sandboxes", {"template": "base"})
        assert reply.status == 500 and name in reply.json()["error"], reply
        assert damaged.ids() == set() and damaged.left_overs() == []
    finally:
        if damaged.process is not None:
            damaged.stop()
        for path in files:
            path.with_name(f".away-{path.name}").rename(path)


@pytest.mark.parametrize(("file", "damage", "named"), [DAMAGES[1], DAMAGES[4], DAMAGES[6], DAMAGES[9]], ids=damage_name)
def test_a_damaged_snapshot_is_named_and_its_source_is_unharmed(
    server: Server, sandbox: Sandbox, file: str, damage: Callable[[Path], None], named: str
) -> None:
    wire = server.wire()
    snapshot = sandbox.snapshot()
    before = server.ids()
    damage(server.data_dir / "snapshots" / snapshot / file)
    reply = wire.json("POST", "/v1/sandboxes", {"from_snapshot": snapshot})
    assert reply.status == 500 and reply.json()["code"] in DAMAGED, reply
    assert named in reply.json()["error"], reply
    assert server.ids() == before and sh(sandbox, "echo unharmed") == "unharmed\n"
    assert wire.json("DELETE", f"/v1/snapshots/{snapshot}").status == 204
    assert not (server.data_dir / "snapshots" / snapshot).exists()


def test_a_flipped_bit_in_the_memory_of_a_snapshot_is_found(server: Server, sandbox: Sandbox) -> None:
    wire = server.wire()
    sh(sandbox, "head -c 8M /dev/urandom >/dev/shm/x")
    snapshot = sandbox.snapshot()
    flip(server.data_dir / "snapshots" / snapshot / "memory")
    reply = wire.json("POST", "/v1/sandboxes", {"from_snapshot": snapshot})
    if reply.status == 201:
        wire.json("DELETE", f"/v1/sandboxes/{reply.json()['id']}")
    wire.json("DELETE", f"/v1/snapshots/{snapshot}")
    assert reply.status == 500 and "memory" in reply.json()["error"], reply


def run_up(data_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """A server that should not start."""
    command = [str(binary()), "up", "--data-dir", str(data_dir), "--listen", f"127.0.0.1:{free_port()}", *more]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def test_without_qemu_the_server_says_so(damaged: Server) -> None:
    done = run_up(damaged.data_dir, "--no-prepare", "--qemu", "/nonexistent/qemu-system-x86_64")
    assert done.returncode == 1
    assert "/nonexistent/qemu-system-x86_64" in done.stderr and "hint:" in done.stderr, done.stderr
    assert damaged.left_overs() == []


def test_a_data_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = run_up(tmp_path / "file")
    assert done.returncode == 1 and str(tmp_path / "file") in done.stderr, done.stderr
    assert (tmp_path / "file").read_text() == "mine" and [one.name for one in tmp_path.iterdir()] == ["file"]


def test_an_address_in_use_is_refused_before_anything_is_made(tmp_path: Path, server: Server) -> None:
    command = [str(binary()), "up", "--data-dir", str(tmp_path / "new"), "--listen", f"127.0.0.1:{server.port}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and str(server.port) in done.stderr and "--listen" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_templates_a_create_says_how_to_make_them(new_server: Callable[..., Server]) -> None:
    server = new_server(templates=[]).start()
    reply = server.wire().json("POST", "/v1/sandboxes", {"template": "base"})
    assert reply.status == 400 and "base" in reply.json()["error"] and "coppice template" in reply.json()["hint"], reply
    assert server.close() == []


def test_vmms_are_gone_after_a_restore_that_failed(damaged: Server) -> None:
    """The devices' state is whole by its checksum, and QEMU refuses it all the same: another machine's."""
    image = image_dir(damaged)
    whole = image.with_name(f"{image.name}.whole")
    clone_tree(image, whole)
    try:
        damaged.start()
        client = damaged.client()
        with client.sandboxes.create(template="base") as sandbox:
            assert sh(sandbox, "echo fine") == "fine\n"
        # After the image was opened and checked, under the server's feet.
        os.truncate(image / "devices", 100)
        reply = damaged.wire().json("POST", "/v1/sandboxes", {"template": "base"})
        assert reply.status == 500 and reply.json()["code"], reply
        until("no VMM is left", lambda: not host.vmm_pids(damaged.data_dir), 10)
        assert damaged.ids() == set() and damaged.left_overs() == []
    finally:
        if damaged.process is not None:
            damaged.stop()
        shutil.rmtree(image)
        whole.rename(image)
