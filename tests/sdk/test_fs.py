"""Checklist E: files, with the published Python client."""

import hashlib
import os
from pathlib import Path

import pytest
from pandastack import BadRequestError, NotFoundError, PandastackError, Sandbox

from harness.guest import sh
from harness.recorder import recorded
from harness.wire import Wire


def test_58_write_makes_parents_and_read_gives_the_bytes(shared: Sandbox) -> None:
    assert shared.filesystem.write("/tmp/58/e/f.txt", "hé") == {"path": "/tmp/58/e/f.txt", "bytes": 3}
    assert shared.filesystem.read("/tmp/58/e/f.txt") == b"h\xc3\xa9"


@pytest.mark.parametrize("content", [bytes(range(256)) * 300, b""], ids=["all byte values", "empty"])
def test_59_bytes_round_trip(shared: Sandbox, content: bytes) -> None:
    shared.filesystem.write("/tmp/59", content)
    assert shared.filesystem.read("/tmp/59") == content


def test_60_names_are_not_touched(shared: Sandbox) -> None:
    names = {"a b&c=d+e%41", "é\u2028ü", "..x", "-rf", "q'\"$(x)`", "#?"}
    for name in names:
        shared.filesystem.write(f"/tmp/60/{name}", name)
    assert {entry.name for entry in shared.filesystem.listdir("/tmp/60")} == names
    assert shared.filesystem.read("/tmp/60/é\u2028ü").decode() == "é\u2028ü"
    assert sh(shared, "cat '/tmp/60/a b&c=d+e%41'") == "a b&c=d+e%41"


def test_61_sixteen_mebibytes_round_trip(shared: Sandbox) -> None:
    content = os.urandom(16 << 20)
    shared.filesystem.write("/root/61", content)
    assert sh(shared, "sha256sum </root/61").split()[0] == hashlib.sha256(content).hexdigest()
    assert shared.filesystem.read("/root/61") == content
    sh(shared, "rm /root/61")


def test_61_a_file_that_does_not_fit_the_guests_disk_is_refused_and_leaves_nothing(
    wire: Wire, sandbox: Sandbox
) -> None:
    sh(sandbox, "mkdir /mnt/small && mount -t tmpfs -o size=1m none /mnt/small && echo old >/mnt/small/f")
    reply = wire.request("PUT", f"/v1/sandboxes/{sandbox.id}/fs?path=/mnt/small/f", bytes(4 << 20))
    assert 400 <= reply.status < 600 and reply.json()["code"], reply
    # The old content stays, and no temporary file.
    assert sh(sandbox, "cat /mnt/small/f; ls -A /mnt/small") == "old\nf\n"


def test_62_what_can_not_be_read_is_an_error(shared: Sandbox) -> None:
    with pytest.raises(NotFoundError):
        shared.filesystem.read("/tmp/no-such-file")
    with pytest.raises(PandastackError):
        shared.filesystem.read("/tmp")
    with pytest.raises(PandastackError):
        shared.filesystem.write("/tmp", b"x")


@pytest.mark.parametrize("path", ["relative", "", "./x", "../etc/passwd"])
def test_63_paths_are_absolute(shared: Sandbox, path: str) -> None:
    for call in (shared.filesystem.read, shared.filesystem.listdir, shared.filesystem.stat):
        with pytest.raises(BadRequestError):
            call(path)
    with pytest.raises(BadRequestError):
        shared.filesystem.write(path, b"x")


def test_64_listings(shared: Sandbox) -> None:
    sh(shared, "rm -rf /tmp/64; mkdir -p /tmp/64/e /tmp/64/empty; ln -s /tmp/64 /tmp/64/loop; echo x >/tmp/64/f")
    entries = {entry.name: entry for entry in shared.filesystem.listdir("/tmp/64")}
    assert set(entries) == {"e", "empty", "loop", "f"}
    assert entries["e"].is_dir and entries["e"].path == "/tmp/64/e"
    assert not entries["loop"].is_dir and not entries["f"].is_dir
    assert (entries["f"].size, entries["f"].mode, entries["loop"].mode) == (2, "f", "l")
    assert shared.filesystem.listdir("/tmp/64/empty") == []
    with pytest.raises(NotFoundError):
        shared.filesystem.listdir("/tmp/64/none")
    with pytest.raises(PandastackError):
        shared.filesystem.listdir("/tmp/64/f")
    walked = list(shared.filesystem.walk("/tmp/64"))
    assert [dir for dir, _, _ in walked] == ["/tmp/64", "/tmp/64/e", "/tmp/64/empty"]


def test_65_stat(wire: Wire, shared: Sandbox) -> None:
    shared.filesystem.write("/tmp/65", "12345")
    info = shared.filesystem.stat("/tmp/65")
    assert (info.name, info.is_dir, info.size) == ("65", False, 5)
    raw = wire.request("GET", f"/v1/sandboxes/{shared.id}/fs/stat?path=/tmp/65").json()
    assert type(raw["mtime"]) is int and abs(raw["mtime"] - int(sh(shared, "date +%s"))) < 60
    assert shared.filesystem.stat("/").is_dir
    with pytest.raises(NotFoundError):
        shared.filesystem.stat("/tmp/65-none")


def test_66_exists(shared: Sandbox) -> None:
    assert shared.filesystem.exists("/etc/passwd")
    with recorded() as sent:
        assert not shared.filesystem.exists("/tmp/66-none")
    assert len(sent) == 2


def test_68_upload_and_download(shared: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(300_001))
    shared.filesystem.upload(str(tmp_path / "a"), "/root/68")
    shared.filesystem.download("/root/68", str(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_69_a_shorter_file_replaces_a_longer_one(shared: Sandbox) -> None:
    shared.filesystem.write("/tmp/69", "x" * 100_000)
    shared.filesystem.write("/tmp/69", "short")
    assert shared.filesystem.read("/tmp/69") == b"short"


def test_delete_removes_a_tree_but_never_what_a_link_points_to(wire: Wire, shared: Sandbox) -> None:
    sh(shared, "mkdir -p /tmp/del/a/b /tmp/del-kept && echo x >/tmp/del-kept/f && ln -s /tmp/del-kept /tmp/del/a/link")
    base = f"/v1/sandboxes/{shared.id}/fs?path="
    assert wire.request("DELETE", f"{base}/tmp/del").status == 204
    assert sh(shared, "ls -d /tmp/del /tmp/del-kept/f 2>/dev/null || true") == "/tmp/del-kept/f\n"
    assert wire.request("DELETE", f"{base}/tmp/del").status in (204, 404)
    assert wire.request("DELETE", f"{base}/").status == 400
