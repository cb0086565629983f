"""Requests made from the API's own document, right ones and wrong ones, against a real server with a real machine.

Nothing may be a 500 or hang, and every answer must be what the document says. The requests are the same in every run;
how many are sent depends on a budget of time, as some of them make machines.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from schemathesis.checks import CheckContext
from schemathesis.core.transport import Response
from schemathesis.generation import GenerationMode
from schemathesis.generation.case import Case
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from harness.paths import REPO
from harness.server import Server
from harness.wire import Wire

DOCUMENT = json.loads((REPO / "docs/openapi.json").read_text())
#: For all operations together, in seconds, and what one request may take.
BUDGET, LONGEST = 60.0, 30.0
EXAMPLES = 60
#: The only answers of 500 and more that are not the server's fault: no room now, a command's time is over, not enough
#: slots or memory.
EXCUSED = {503, 504, 507}
#: Where a guest's own server does not answer, which is the guest's fault.
PROXIED = EXCUSED | {502}

schema = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS: list[APIOperation] = [one.ok() for one in schema.get_all_operations()]


def only_excused_server_errors(ctx: CheckContext, response: Response, case: Case) -> bool | None:
    """No 500; what is excused says why."""
    if response.status_code >= 500:
        assert response.status_code in (PROXIED if "/proxy/" in case.operation.path else EXCUSED), response.text
        body = response.json()
        assert body["error"] and body["code"], body
    return None


def bodies_are_as_documented(ctx: CheckContext, response: Response, case: Case) -> bool | None:
    """By their schemas. An event stream is documented as text, and tests/sdk/test_stream.py is about what is in it."""
    if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return None
    return response_schema_conformance(ctx, response, case)


CHECKS = [only_excused_server_errors, status_code_conformance, content_type_conformance, bodies_are_as_documented]


class Target:
    """A sandbox that requests are aimed at, made anew when one of them ended it; and what else they make is deleted."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.id = ""

    def renew(self) -> None:
        """There is a running one."""
        found = self.wire.json("GET", f"/v1/sandboxes/{self.id}") if self.id else None
        if found is not None and found.status == 200 and found.json()["status"] == "running":
            return
        self.remove_all("sandboxes", keep="")
        made = self.wire.json("POST", "/v1/sandboxes", {"template": "base"})
        assert made.status == 201, made
        self.id = made.json()["id"]

    def remove_all(self, kind: str, keep: str) -> None:
        """Everything of a kind but one."""
        for row in self.wire.json("GET", f"/v1/{kind}").json():
            if row["id"] != keep:
                assert self.wire.json("DELETE", f"/v1/{kind}/{row['id']}").status in (204, 404)

    def tidy(self) -> None:
        """Only the one is left."""
        self.remove_all("sandboxes", keep=self.id)
        self.remove_all("snapshots", keep="")


@pytest.fixture(scope="module")
def fuzzed(new_server: Callable[..., Server]) -> Iterator[Server]:
    """A server for these requests alone: some of them change what others would see."""
    server = new_server(templates=["base"]).start()
    yield server
    assert server.process is not None and server.process.poll() is None, f"the server ended:\n{server.log_tail()}"
    server.end()


@pytest.fixture(scope="module")
def target(fuzzed: Server) -> Target:
    """See [`Target`]."""
    return Target(fuzzed.wire())


def tame(body: Any) -> None:
    """Makes a request cheap: two children are as good as sixteen here."""
    if isinstance(body, dict) and isinstance(body.get("count"), int) and 2 < body["count"] <= 16:
        body["count"] = 2


def strategies(operation: APIOperation) -> list[st.SearchStrategy[Case]]:
    """Requests as they should be; and others, if there is anything in them that can be wrong."""
    made = [operation.as_strategy(generation_mode=GenerationMode.POSITIVE)]
    if operation.query or operation.body:
        made.append(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    return made


def send(case: Case, server: Server, path: dict[str, Any]) -> Response:
    """The answer, whole, in time."""
    case.path_parameters = {**(case.path_parameters or {}), **path}
    if isinstance(case.query, dict) and case.query.get("follow") not in (None, "", "0", "false", False):
        # Such an answer ends with the sandbox; test_stream.py is about it.
        case.query["follow"] = False
    tame(case.body)
    headers = {"Authorization": f"Bearer {server.key()}"}
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(case.call, base_url=server.api, headers=headers, timeout=LONGEST).result(LONGEST + 5)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.label)
def test_no_request_is_a_500_or_hangs_and_answers_are_as_documented(
    fuzzed: Server, target: Target, operation: APIOperation
) -> None:
    until = time.monotonic() + BUDGET / len(OPERATIONS)
    sent = 0

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(strategies(operation)), aimed=st.booleans() | st.just(True))
    def run(case: Case, aimed: bool) -> None:
        nonlocal sent
        if sent and time.monotonic() > until:
            return
        target.renew()
        aims = {"id": target.id} if aimed and "/sandboxes/{id}" in operation.path else {}
        response = send(case, fuzzed, aims)
        sent += 1
        case.validate_response(response, checks=CHECKS)
        if operation.method.upper() != "GET":
            target.tidy()

    try:
        run()
    except HypothesisException as error:
        raise AssertionError(f"no request could be made for {operation.label}") from error
    finally:
        target.tidy()
    assert sent > 0
    assert fuzzed.wire(key="").request("GET", "/healthz", timeout=5).status == 200


#: What no schema describes.
BODIES = {
    "cut": b'{"cmd": "tr',
    "not UTF-8": b'{"cmd": "\xff\xfe"}',
    "another type": b"[1]",
    "a text": b'"x"',
    "a number": b"1e999",
    "deep": b"[" * 50_000,
    "a key twice": b'{"count": 1, "count": 2, "cmd": "true", "cmd": "true"}',
    "NUL": b'{"cmd": "a\\u0000b", "path": "/a\\u0000b", "template": "a\\u0000b", "name": "a\\u0000b"}',
    "half a character": b'{"cmd": "\\ud800", "template": "\\ud800"}',
    "large numbers": b'{"count": 99999999999999999999, "ttl_seconds": -1e300, "timeout_seconds": 1e308, "cmd": "true"}',
    "form": b"a=b&c=%zz",
}
SEGMENTS = [
    "%00",
    "..%2f..%2fetc",
    "%ff%fe",
    "x" * 6000,
    "%e2%80%a8",
    "'; DROP TABLE sandboxes; --".replace(" ", "%20"),
    "-1",
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.label)
def test_garbage_is_a_clients_mistake(fuzzed: Server, target: Target, operation: APIOperation) -> None:
    wire, method = fuzzed.wire(), operation.method.upper()
    target.renew()
    sent = []
    if method not in ("GET", "DELETE"):
        path = operation.path.replace("{id}", target.id)
        for name, body in BODIES.items():
            sent.append((name, path, wire.request(method, path, body, {"Content-Type": "application/json"}, LONGEST)))
    if "{" in operation.path:
        for segment in SEGMENTS:
            path = re.sub(r"\{\w+\}", segment, operation.path)
            sent.append((segment[:40], path[:80], wire.request(method, path, timeout=LONGEST)))
    target.tidy()
    for name, path, reply in sent:
        assert reply.status < 500 or (reply.status == 502 and "/proxy/" in path), (name, path, reply)
        if reply.status >= 400:
            body = reply.json()
            assert body["error"] and body["code"], (name, path, reply)
    assert fuzzed.wire(key="").request("GET", "/healthz", timeout=5).status == 200
