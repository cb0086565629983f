"""Room on a real host: measured, promised, refused before anything is made, and explained."""

import time
from collections.abc import Callable, Iterator

import pytest

from harness.cli import Cli
from harness.guest import ask_holder, sh, start_holder
from harness.poll import until
from harness.server import Server

MIB = 1 << 20


@pytest.fixture
def small(new_server: Callable[..., Server]) -> Iterator[Server]:
    """A server whose sandboxes may use a GiB, all together."""
    server = new_server(["--memory-limit", "1024", "--memory-reserve", "0"], templates=["base"]).start()
    yield server
    left = server.close()
    assert left == [], left


def test_a_fan_out_that_does_not_fit_is_refused_with_numbers_and_a_smaller_one_is_made(small: Server) -> None:
    wire, cli = small.wire(), Cli(small)
    parent = small.client().sandboxes.create(template="base")
    told = start_holder(parent)
    before = small.left_overs()
    started = time.monotonic()
    reply = wire.json("POST", f"/v1/sandboxes/{parent.id}/fork-tree", {"count": 16})
    assert time.monotonic() - started < 2
    assert (reply.status, reply.json()["code"]) == (507, "no_memory"), reply
    assert "insufficient host memory for 16 more" in reply.json()["error"] and "MiB" in reply.json()["error"]
    assert "coppice host show" in reply.json()["hint"]
    # Nothing was made, and the parent was not touched.
    assert small.ids() == {parent.id} and small.left_overs() == before
    assert ask_holder(parent).pid == told.pid
    children = parent.fork_tree(2)
    assert [ask_holder(child).secret for child in children] == [told.secret] * 2

    def memory() -> dict[str, int]:
        report = cli.json("host", "show")
        assert report["memory"]["pss"] == report["memory"]["private"] + report["memory"]["images"]
        assert report["sandboxes"]["by_status"] == {"running": 3} and report["memory"]["being_made"] == 0
        return report["memory"]

    # A machine's own pages, and those of images, which many have in common: measured within seconds.
    fresh = until("all are measured", lambda: (m := memory())["private"] > 3 * 10 * MIB and m, 60)
    assert 0 < fresh["promised"] < 3 * 576 * MIB and fresh["images"] > 0
    # What a guest writes moves from what is promised to what is measured.
    sh(children[0], "head -c 150M /dev/urandom >/dev/shm/x")
    # Measuring rests for fifty times as long as it took, which on a busy host is long.
    grown = until(
        "the writes are measured", lambda: (m := memory())["private"] > fresh["private"] + 140 * MIB and m, 60
    )
    assert grown["promised"] < fresh["promised"] - 140 * MIB and grown["headroom"] < fresh["headroom"]
    # A person reads why.
    shown = cli.ok("host", "show")
    assert shown.startswith("room for ") and "headroom" in shown and "1.0 GiB" in shown, shown
    metrics = wire.request("GET", "/metrics").body.decode()
    assert 'coppice_host_memory_bytes{what="headroom"}' in metrics and 'code="no_memory"' in metrics
