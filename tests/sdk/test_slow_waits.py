"""Waits of 40 s: what happens when nothing is said for longer than clients wait. All three wait at the same time."""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from pandastack import ExecResult, Sandbox

from harness.guest import sh
from harness.server import Server
from harness.wire import Wire

#: Longer than the 30 s after which the client gives up on a silent connection.
SILENCE = 40


@dataclass(frozen=True)
class Waits:
    """What was begun together."""

    exec: Future[ExecResult]
    stream: Future[int]
    comments: Future[list[float]]
    follow: Future[list[str]]
    followed: Sandbox


@pytest.fixture(scope="module")
def waits(server: Server, wire: Wire, shared: Sandbox, longer_lived: set[str]) -> Iterator[Waits]:
    followed = server.client().sandboxes.create(template="base")
    longer_lived.add(followed.id)

    def follow() -> list[str]:
        lines = []
        for line in followed.logs(follow=True):
            lines.append(line)
            if "written after the silence" in line:
                break
        return lines

    def comments() -> list[float]:
        started = time.monotonic()
        path = f"/v1/sandboxes/{shared.id}/exec/stream"
        events = wire.events("POST", path, {"cmd": f"sleep {SILENCE}"}, timeout=SILENCE + 30)
        return [at - started for at, line in events if line.startswith(":")]

    pool = ThreadPoolExecutor()
    yield Waits(
        # The client of the shared fixture waits 30 s at most.
        pool.submit(shared.exec, f"sleep {SILENCE}; echo done", timeout_seconds=SILENCE + 20),
        pool.submit(shared.exec_stream, f"sleep {SILENCE}; exit 5"),
        pool.submit(comments),
        pool.submit(follow),
        followed,
    )
    followed.kill()
    longer_lived.discard(followed.id)
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow
def test_42_an_exec_of_40_s_works_with_the_default_client(waits: Waits) -> None:
    result = waits.exec.result(SILENCE + 30)
    assert (result.stdout, result.exit_code) == ("done\n", 0)
    assert result.duration_ms >= SILENCE * 1000


@pytest.mark.slow
def test_52_a_stream_that_is_silent_for_40_s_returns_its_code_and_is_kept_alive_by_comments(waits: Waits) -> None:
    assert waits.stream.result(SILENCE + 30) == 5
    at = [0.0, *waits.comments.result(SILENCE + 30), SILENCE]
    assert max(later - earlier for earlier, later in itertools.pairwise(at)) < 25, at


@pytest.mark.slow
def test_56_a_followed_log_survives_40_s_of_silence(waits: Waits) -> None:
    waits.exec.result(SILENCE + 30)
    assert not waits.follow.done(), waits.follow.result()
    sh(waits.followed, "echo 'written after the silence' >/dev/console")
    lines = waits.follow.result(10)
    assert "written after the silence" in lines[-1]
    assert all(type(line) is str for line in lines)
