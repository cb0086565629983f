"""VMMs that die or stand still, guests that misbehave: a named state or error in bounded time; nobody else is hit."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from pandastack import Client, Sandbox

from harness import host
from harness.guest import ask_holder, sh, start_holder
from harness.poll import until
from harness.server import Server
from harness.wire import Reply, Wire


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process that does nothing, as if its host were stuck."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        # It may have been killed meanwhile, which works on a stopped process.
        if host.is_alive(pid):
            os.kill(pid, signal.SIGCONT)


def assert_failed(wire: Wire, sandbox: Sandbox, within: float = 5.0) -> str:
    """It is shown as failed, says why, and refuses to be used; gives the reason."""
    path = f"/v1/sandboxes/{sandbox.id}"
    row = until(
        "it is shown as failed", lambda: (row := wire.json("GET", path).json())["status"] == "failed" and row, within
    )
    assert row["error"].strip(), row
    for method, suffix, body in [
        ("POST", "exec", {"cmd": "true"}),
        ("POST", "exec/stream", {"cmd": "true"}),
        ("GET", "fs?path=/etc/hostname", None),
        ("POST", "fork-tree", {"count": 1}),
        ("POST", "fork", {"count": 1}),
        ("POST", "snapshots", None),
        ("POST", "pause", None),
        ("POST", "resume", None),
    ]:
        started = time.monotonic()
        reply = wire.json(method, f"{path}/{suffix}", body)
        assert reply.status == 409 and reply.json()["code"] == "sandbox_failed", (suffix, reply)
        assert time.monotonic() - started < 2
    # What it wrote last can still be read.
    assert wire.json("GET", f"{path}/logs").status == 200
    return row["error"]


def test_a_killed_vmm_is_a_failed_sandbox_at_once(
    server: Server, wire: Wire, sandbox: Sandbox, shared: Sandbox
) -> None:
    host.kill(server.vmm(sandbox))
    reason = assert_failed(wire, sandbox)
    assert "9" in reason or "kill" in reason.lower(), reason
    sandbox.kill()
    assert not any(sandbox.id in line for line in server.left_overs())
    assert sh(shared, "echo unharmed") == "unharmed\n"


def test_an_exec_in_flight_fails_when_its_vmm_dies(server: Server, wire: Wire, sandbox: Sandbox) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(wire.json, "POST", f"/v1/sandboxes/{sandbox.id}/exec", {"cmd": "sleep 60"})
        until("it runs", lambda: sandbox.exec("pgrep -x sleep").exit_code == 0)
        host.kill(server.vmm(sandbox))
        reply: Reply = running.result(15)
    assert reply.status >= 500 and reply.json()["code"], reply
    # Nothing in it invites a client to run the command again.
    for word in ("connection refused", "no route to host", "i/o timeout"):
        assert word not in reply.json()["error"]


@pytest.mark.parametrize(
    ("key", "what"), [("o", "power off"), ("c", "panic"), ("b", "reboot")], ids=["powers off", "panics", "reboots"]
)
def test_a_guest_that_ends_itself_is_a_failed_sandbox(
    server: Server, wire: Wire, sandbox: Sandbox, key: str, what: str
) -> None:
    wire.json(
        "POST", f"/v1/sandboxes/{sandbox.id}/exec", {"cmd": f"echo {key} >/proc/sysrq-trigger", "timeout_seconds": 5}
    )
    assert assert_failed(wire, sandbox, 15)
    sandbox.kill()
    assert not any(sandbox.id in line for line in server.left_overs())


@pytest.mark.slow
def test_a_guest_that_does_not_answer_is_waited_for_no_longer_than_the_timeout_and_some_grace(
    server: Server, wire: Wire, sandbox: Sandbox, shared: Sandbox
) -> None:
    told = start_holder(sandbox)
    path = f"/v1/sandboxes/{sandbox.id}"
    with standing_still(server.vmm(sandbox)), ThreadPoolExecutor() as pool:
        started = time.monotonic()
        calls = {
            "exec": pool.submit(wire.json, "POST", f"{path}/exec", {"cmd": "true", "timeout_seconds": 2}),
            "stat": pool.submit(wire.json, "GET", f"{path}/fs/stat?path=/etc"),
        }
        for name, call in calls.items():
            reply: Reply = call.result(60)
            assert reply.status >= 500 and reply.json()["code"], (name, reply)
            assert "timeout" in reply.json()["error"], (name, reply)
        assert time.monotonic() - started < 45
        # Others are not held up, nor is what only reads records.
        assert sh(shared, "echo unharmed") == "unharmed\n"
        assert wire.json("GET", path).status == 200
    # It was only slow: it goes on.
    until("it answers again", lambda: wire.json("POST", f"{path}/exec", {"cmd": "true"}).status == 200, 30, 0.5)
    assert ask_holder(sandbox).secret == told.secret


@pytest.mark.slow
def test_a_fork_of_a_vmm_that_does_not_answer_is_a_bounded_error_and_leaves_nothing(
    server: Server, wire: Wire, sandbox: Sandbox
) -> None:
    told = start_holder(sandbox)
    before = server.left_overs()
    with standing_still(server.vmm(sandbox)):
        started = time.monotonic()
        reply = wire.json("POST", f"/v1/sandboxes/{sandbox.id}/fork-tree", {"count": 2}, timeout=120)
        assert reply.status >= 500 and reply.json()["code"], reply
        assert time.monotonic() - started < 60
    assert sorted(server.left_overs()) == sorted(before)
    row = wire.json("GET", f"/v1/sandboxes/{sandbox.id}").json()
    # The parent runs on as it was, or says what became of it; it is never left paused.
    if row["status"] == "running":
        until(
            "it answers",
            lambda: wire.json("POST", f"/v1/sandboxes/{sandbox.id}/exec", {"cmd": "true"}).status == 200,
            30,
        )
        assert ask_holder(sandbox).secret == told.secret
    else:
        assert row["status"] == "failed" and row["error"]


def test_a_vmm_that_does_not_answer_can_be_deleted(server: Server, client: Client) -> None:
    sandbox = client.sandboxes.create(template="base")
    vmm = server.vmm(sandbox)
    with standing_still(vmm):
        started = time.monotonic()
        sandbox.kill()
        assert time.monotonic() - started < 20
    assert not host.is_alive(vmm)
    assert not any(sandbox.id in line for line in server.left_overs())


def test_a_guest_that_uses_up_its_memory_kills_its_own_process_only(sandbox: Sandbox) -> None:
    result = sandbox.exec(
        "python3 -c 'x = bytearray(2 << 30)'; python3 -c 'x = b\"x\" * (3 << 28)'; echo survived", timeout_seconds=60
    )
    assert result.stdout.endswith("survived\n")
    assert sh(sandbox, "echo on") == "on\n"


def test_a_guest_that_fills_its_disk_gets_no_space_and_goes_on(sandbox: Sandbox) -> None:
    # Allocated only: it is the guest's file system that is full.
    result = sandbox.exec(
        "fallocate -l 1T /root/huge || fallocate -l $(df --output=avail -B1 / | tail -1) /root/huge; echo x >/root/y"
    )
    assert "space" in result.stderr.lower()
    assert sh(sandbox, "rm -f /root/huge; echo on >/root/y; cat /root/y") == "on\n"


def test_endless_output_is_cut_off_and_the_server_stays_small(server: Server, wire: Wire, sandbox: Sandbox) -> None:
    path = f"/v1/sandboxes/{sandbox.id}/exec"
    with ThreadPoolExecutor() as pool:
        replies = [pool.submit(wire.json, "POST", path, {"cmd": "yes", "timeout_seconds": 30}) for _ in range(4)]
        assert [reply.result().status for reply in replies] == [413] * 4
    assert sandbox.exec("pgrep -x yes").exit_code == 1
    # A reader that doesn't read.
    with wire.begun("POST", f"{path}/stream", {"cmd": "yes"}):
        until("it runs", lambda: sandbox.exec("pgrep -x yes").exit_code == 0)
        time.sleep(2)
        assert sh(sandbox, "echo others are not blocked") == "others are not blocked\n"
        assert host.memory(server.pid)["Rss"] < 400 << 20
    until("it is killed", lambda: sandbox.exec("pgrep -x yes").exit_code == 1, 15)


def test_a_flooded_console_is_bounded_on_the_host(server: Server, sandbox: Sandbox) -> None:
    sandbox.exec("timeout 8 sh -c 'yes flood >/dev/console'", timeout_seconds=20)
    log = server.data_dir / "sandboxes" / sandbox.id / "console.log"
    assert log.stat().st_size <= 16 << 20
    assert sh(sandbox, "echo on") == "on\n"


def test_garbage_on_the_channel_harms_nobody_else(
    server: Server, wire: Wire, sandbox: Sandbox, shared: Sandbox
) -> None:
    """A guest's root writes into the host's own ports."""
    command = 'for p in /dev/vport*; do timeout 2 sh -c "head -c 1M /dev/urandom >$p" & done; wait; echo tried'
    wire.json("POST", f"/v1/sandboxes/{sandbox.id}/exec", {"cmd": command, "timeout_seconds": 15})
    assert sh(shared, "echo unharmed") == "unharmed\n"
    assert wire.request("GET", "/healthz").status == 200

    # It is either usable again, or failed with a reason; never something in between for long.
    def settled() -> bool:
        reply = wire.json("POST", f"/v1/sandboxes/{sandbox.id}/exec", {"cmd": "true", "timeout_seconds": 5})
        return reply.status == 200 or (reply.status == 409 and "failed" in reply.json()["error"])

    until("it is usable or failed", settled, 60, 0.5)


def test_names_of_guest_files_never_reach_the_hosts_file_system(
    server: Server, wire: Wire, sandbox: Sandbox, tmp_path: Path, delete_after: Callable[[str], None]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    sh(sandbox, f"mkdir -p {tmp_path} && ln -s {secret} /root/link && ln -s /proc/1/root{secret} /root/link2")
    for path in ("/root/link", "/root/link2", f"/root/../../../../..{secret}"):
        reply = wire.request("GET", f"/v1/sandboxes/{sandbox.id}/fs?path={path}")
        assert reply.status == 404 and b"of the host" not in reply.body, (path, reply)


def test_vmms_run_as_an_unprivileged_user_in_their_own_session_and_sandboxed(server: Server, sandbox: Sandbox) -> None:
    pid = server.vmm(sandbox)
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert "0" not in status["Uid"].split()
    assert "0" not in status["Gid"].split()
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert status["Seccomp"] == "2" and status["NoNewPrivs"] == "1"
    assert os.getsid(pid) == pid != os.getsid(server.pid)
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    assert command[command.index("-sandbox") + 1].startswith("on,")
