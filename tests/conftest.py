"""Fixtures: a server for all tests, others for those that break theirs, and the proof that nothing is left."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from pandastack import Client, Sandbox

from harness import host
from harness.paths import PREPARED, binary
from harness.server import Server, make_data_dir, prepared_templates, remove_workspace
from harness.wire import Wire

#: Makes sandboxes quickly; has python3.
TEMPLATE = "base"


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory on the prepared volume for everything that this run makes. Short: paths of sockets are limited."""
    if not binary().is_file():
        pytest.exit(f"{binary()} is missing: run `make build` first, or set COPPICE_BIN", 2)
    if TEMPLATE not in prepared_templates():
        pytest.exit(f"{PREPARED} has no template {TEMPLATE!r}: run `make setup` first, or set COPPICE_DATA_DIR", 2)
    for old in PREPARED.glob("t/*"):
        # What a killed run left.
        if old.name.isdigit() and not host.is_alive(int(old.name)):
            for pid in host.vmm_pids(old):
                host.kill(pid)
            shutil.rmtree(old, ignore_errors=True)

    folder = PREPARED / "t" / str(os.getpid())
    folder.mkdir(parents=True, mode=0o755)
    yield folder
    remove_workspace(folder)
    # Only of this run: others may be at work on the same host.
    places = (str(folder), str(tmp_path_factory.getbasetemp()))
    left = [line for line in host.mounts_and_loops() if any(place in line for place in places)]
    assert left == [], "mounts or loop devices are left"


@pytest.fixture(scope="session")
def new_server(workspace: Path) -> Iterator[Callable[..., Server]]:
    """Makes servers, each on a data directory of its own. Not started. All are ended with the session at the latest."""
    made: list[Server] = []

    def make(arguments: Sequence[str] = (), templates: Iterable[str] | None = None, *, own: bool = False) -> Server:
        server = Server(make_data_dir(workspace / str(len(made)), templates, own=own), arguments)
        made.append(server)
        return server

    yield make
    for server in made:
        if server.data_dir.exists():
            server.close()


@pytest.fixture(scope="session")
def server(new_server: Callable[..., Server]) -> Iterator[Server]:
    """The server that most tests share. In the end nothing of any sandbox is left on the host."""
    server = new_server().start()
    yield server
    assert server.process is not None and server.process.poll() is None, f"the server ended:\n{server.log_tail()}"
    left = server.close()
    assert left == [], f"left behind by all tests together: {left}\n{server.log_tail()}"


@pytest.fixture
def own_server(new_server: Callable[..., Server]) -> Iterator[Server]:
    """A started server for one test, which may kill it. Nothing may be left of it either."""
    server = new_server().start()
    yield server
    server.end()


@pytest.fixture(scope="session")
def client(server: Server) -> Client:
    """The published client of the shared server."""
    return server.client()


@pytest.fixture(scope="session")
def wire(server: Server) -> Wire:
    """Plain HTTP to the shared server."""
    return server.wire()


@pytest.fixture(scope="session")
def longer_lived() -> set[str]:
    """Ids of sandboxes that more than one test uses."""
    return set()


@pytest.fixture(scope="module")
def shared(client: Client, longer_lived: set[str]) -> Iterator[Sandbox]:
    """A sandbox for the tests of a module that don't change what others see."""
    sandbox = client.sandboxes.create(template=TEMPLATE)
    longer_lived.add(sandbox.id)
    yield sandbox
    sandbox.kill()
    longer_lived.discard(sandbox.id)


@pytest.fixture
def sandbox(client: Client) -> Iterator[Sandbox]:
    """A sandbox for one test."""
    sandbox = client.sandboxes.create(template=TEMPLATE)
    yield sandbox
    if sandbox.id in {row.id for row in client.sandboxes.list()}:
        sandbox.kill()


@pytest.fixture
def delete_after(wire: Wire) -> Iterator[Callable[[str], None]]:
    """Takes ids of sandboxes that are deleted when the test is over; those that are gone by then are fine."""
    ids: list[str] = []
    yield ids.append
    for one in ids:
        assert wire.json("DELETE", f"/v1/sandboxes/{one}").status in (204, 404)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, longer_lived: set[str]) -> Iterator[None]:
    """After each test the shared server has the sandboxes and snapshots that it had before."""
    if "server" not in request.fixturenames:
        yield
        return
    server: Server = request.getfixturevalue("server")
    wire = server.wire()

    def all_ids(kind: str) -> set[str]:
        return {row["id"] for row in wire.json("GET", f"/v1/{kind}").json()}

    before = {kind: all_ids(kind) for kind in ("sandboxes", "snapshots")}
    yield
    for kind, ids in before.items():
        left = all_ids(kind) - ids - longer_lived
        for one in left:
            wire.json("DELETE", f"/v1/{kind}/{one}")
        assert not left, f"the test left {kind}: {left}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes begins first: begun last, it would run on alone when all others are done."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test shows the end of its servers' logs."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for name, value in item.funcargs.items():
            if isinstance(value, Server):
                report.sections.append((f"log of {name}", value.log_tail(15)))
    return report
