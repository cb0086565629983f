"""Checklist D: streamed commands and logs, with the published Python client and byte by byte."""

import contextlib
import hashlib
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pandastack import (
    BadRequestError,
    Client,
    ExecInterrupted,
    NotFoundError,
    Sandbox,
    SandboxTimeout,
    ServerError,
)

from harness import host
from harness.guest import sh
from harness.poll import until
from harness.server import Server
from harness.wire import Wire

NOBODY = "00000000-0000-0000-0000-000000000000"


def test_47_output_arrives_when_it_is_written(shared: Sandbox) -> None:
    out: list[tuple[float, str]] = []
    err: list[tuple[float, str]] = []
    code = shared.exec_stream(
        "echo a; sleep 1; echo b >&2; exit 3",
        lambda text: out.append((time.monotonic(), text)),
        lambda text: err.append((time.monotonic(), text)),
    )
    assert code == 3
    assert "".join(text for _, text in out) == "a\n" and "".join(text for _, text in err) == "b\n"
    assert 0.7 < err[0][0] - out[0][0] < 3


def test_48_the_stream_has_the_shape_that_clients_parse(wire: Wire, shared: Sandbox) -> None:
    connection = http.client.HTTPConnection(wire.host, wire.port, timeout=30)
    headers = wire.headers({"Content-Type": "application/json", "Accept-Encoding": "gzip, deflate"})
    with contextlib.closing(connection):
        body = json.dumps({"cmd": "echo out; echo err >&2; exit 4"})
        connection.request("POST", f"/v1/sandboxes/{shared.id}/exec/stream", body, headers)
        response = connection.getresponse()
        assert response.status == 200
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        assert response.getheader("transfer-encoding") == "chunked"
        assert response.getheader("content-encoding") is None
        assert "no-cache" in (response.getheader("cache-control") or "")
        text = response.read().decode("ascii")
    assert "\r" not in text
    assert text.endswith("\n\n")
    frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    seen = []
    for frame in frames:
        event, data = frame.split("\n")
        assert event.startswith("event: ") and data.startswith("data: ")
        seen.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert sorted(seen[:-1], key=str) == [("stderr", {"chunk": "err\n"}), ("stdout", {"chunk": "out\n"})]
    name, exit = seen[-1]
    assert name == "exit" and exit["exit_code"] == 4 and exit["duration_ms"] >= 0


@pytest.mark.parametrize("text", ["é\u2028x", "a\u2029b\u0085c", "\x0b\x0c\x1c\x1d\x1e|", "😀\r\n\r\nz", 'q"\\u0041'])
def test_49_characters_that_some_readers_take_for_line_ends_survive(shared: Sandbox, text: str) -> None:
    octal = "".join(f"\\{byte:03o}" for byte in text.encode())
    got: list[str] = []
    assert shared.exec_stream(f"printf '{octal}'", got.append) == 0
    assert "".join(got) == text


def test_50_five_mebibytes_of_multi_byte_text_are_not_split(shared: Sandbox) -> None:
    line = "aé✓\u2028"
    count = (5 << 20) // len(line.encode()) + 1
    got: list[str] = []
    assert (
        shared.exec_stream(
            f"PYTHONUTF8=1 python3 -c 'import sys; sys.stdout.write({json.dumps(line)} * {count})'", got.append
        )
        == 0
    )
    text = "".join(got)
    assert "\ufffd" not in text
    assert hashlib.sha256(text.encode()).digest() == hashlib.sha256((line * count).encode()).digest()


def test_50_bytes_that_are_no_text_become_replacement_characters(shared: Sandbox) -> None:
    got: list[str] = []
    assert (
        shared.exec_stream(
            "printf 'a\\377'; sleep 0.3; printf '\\303'; sleep 0.3; printf '\\251z\\342\\202'", got.append
        )
        == 0
    )
    assert "".join(got) == "a\ufffdéz\ufffd"


def test_51_a_timeout_of_a_stream_is_an_event(wire: Wire, shared: Sandbox) -> None:
    with pytest.raises(SandboxTimeout):
        shared.exec_stream("echo before; sleep 30", timeout_seconds=2)
    path = f"/v1/sandboxes/{shared.id}/exec/stream"
    lines = [line for _, line in wire.events("POST", path, {"cmd": "sleep 30", "timeout_seconds": 1}) if line]
    assert lines[0] == "event: error" and "timeout" in json.loads(lines[1].removeprefix("data: "))["error"]
    assert len(lines) == 2


def test_53_a_vmm_that_dies_never_looks_like_success(server: Server, sandbox: Sandbox) -> None:
    got: list[str] = []
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(sandbox.exec_stream, "echo begun; sleep 60", got.append)
        until("the command has begun", lambda: got)
        host.kill(server.vmm(sandbox))
        with pytest.raises((ServerError, ExecInterrupted)):
            stream.result(15)
    assert "".join(got) == "begun\n"


def test_54_what_can_not_start_is_an_error_and_no_stream(client: Client, shared: Sandbox) -> None:
    unknown = client.sandboxes.get(shared.id)
    unknown.id = NOBODY
    with pytest.raises(NotFoundError):
        unknown.exec_stream("true")
    with pytest.raises(BadRequestError, match="cmd required"):
        shared.exec_stream("")


def test_55_logs_are_lines_of_the_console(shared: Sandbox) -> None:
    sh(shared, "echo 'a line for the log: é' >/dev/console")
    lines = until(
        "the line is in the log", lambda: [line for line in shared.logs() if "a line for the log" in line], 10
    )
    assert lines[0].endswith("é")


def test_56_a_followed_log_gives_what_is_there_then_what_comes_and_ends_with_the_sandbox(client: Client) -> None:
    sandbox = client.sandboxes.create(template="base")
    sh(sandbox, "echo first-line >/dev/console")
    until("it is in the log", lambda: any("first-line" in line for line in sandbox.logs()), 10)
    seen: list[str] = []
    with ThreadPoolExecutor() as pool:
        follow = pool.submit(lambda: [seen.append(line) for line in sandbox.logs(follow=True)])
        until("the old line comes", lambda: any("first-line" in line for line in seen), 10)
        # What a careless parser would take for JSON.
        sh(sandbox, "printf '42\\nnull\\n[1]\\nsecond-line\\n' >/dev/console")
        until("the new lines come", lambda: any("second-line" in line for line in seen), 10)
        sandbox.kill()
        follow.result(15)
    assert all(type(line) is str and not line.startswith("{") for line in seen)
    # Once each, in order; the agent may have had something to say in between.
    expected = ["42", "null", "[1]", "second-line"]
    assert [line.strip() for line in seen if line.strip() in expected] == expected


def test_57_follow_is_read_as_people_write_it(wire: Wire, shared: Sandbox) -> None:
    base = f"/v1/sandboxes/{shared.id}/logs"
    sh(shared, "echo something >/dev/console")
    for query in ("follow=true", "follow=1", "follow=yes&stream=stdout"):
        lines = wire.events("GET", f"{base}?{query}")
        assert any(line.startswith("data: {") for _, line in zip(range(3), (text for _, text in lines), strict=False))
        lines.close()
    for query in ("", "?follow=false", "?follow=0", "?stream=stderr", "?stream=both&follow=false"):
        reply = wire.request("GET", f"{base}{query}")
        assert reply.status == 200 and reply.content_type == "text/plain; charset=utf-8"
