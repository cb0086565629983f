"""Checklist A: transport and errors, as the published Python client and plain HTTP see them."""

import json
import socket
from collections.abc import Callable

import pytest
from pandastack import AuthError, Client, NotFoundError, Sandbox

from harness.recorder import recorded
from harness.server import Server
from harness.wire import Reply, Wire

NOBODY = "00000000-0000-0000-0000-000000000000"


def assert_error(reply: Reply, status: int) -> dict[str, str]:
    """Every error has one shape."""
    assert reply.status == status, reply
    assert reply.content_type.split(";")[0] == "application/json", reply
    assert "location" not in reply.headers
    body = reply.json()
    assert isinstance(body["error"], str) and body["error"].strip(), body
    assert isinstance(body["code"], str) and body["code"].replace("_", "").isalnum() and body["code"].islower(), body
    reply.body.decode("ascii" if "charset" not in reply.content_type else "utf-8")
    return body


def test_01_me_says_who_the_token_belongs_to(client: Client) -> None:
    me = client.me()
    assert me["user_id"] and me["current_org"]


def test_02_a_wrong_token_is_an_auth_error(server: Server) -> None:
    with pytest.raises(AuthError):
        server.client(api_key="bad").me()
    for header in ({}, {"Authorization": "Bearer "}, {"Authorization": "Basic eDp5"}, {"Authorization": "pds_1"}):
        assert_error(server.wire(key="").request("GET", "/v1/me", headers=header), 401)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_03_base_urls_may_end_in_any_way(server: Server, suffix: str) -> None:
    assert server.client(api_url=server.api + suffix).me()["user_id"]


def test_04_an_unknown_sandbox_is_not_found_after_two_requests(client: Client) -> None:
    with recorded() as sent, pytest.raises(NotFoundError, match=NOBODY):
        client.sandboxes.get(NOBODY)
    assert sent == [("GET", f"/v1/sandboxes/{NOBODY}")] * 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/no-such-route", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/volumes", 404),
        ("POST", f"/v1/sandboxes/{NOBODY}/hibernate", 404),
        ("GET", f"/v1/sandboxes/{NOBODY}/ports", 404),
        ("GET", "/v1/sandboxes/", 404),
        ("DELETE", "/v1/sandboxes", 405),
        ("PUT", "/v1/me", 405),
        ("GET", f"/v1/sandboxes/{NOBODY}/exec", 405),
    ],
)
def test_05_unknown_routes_and_methods_are_json_errors_and_never_redirects(
    wire: Wire, method: str, path: str, status: int
) -> None:
    assert_error(wire.request(method, path), status)


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        "7",
        '"x"',
        "\xff\xfe",
        '{"ttl_seconds":"soon"}',
        '{"metadata":{"a":1}}',
        '{"metadata":[]}',
        '{"template":7}',
    ],
)
def test_06_a_malformed_body_is_a_bad_request_and_makes_nothing(server: Server, wire: Wire, body: str) -> None:
    before = server.ids()
    reply = wire.request("POST", "/v1/sandboxes", body.encode("latin-1"), {"Content-Type": "application/json"})
    assert_error(reply, 400)
    assert server.ids() == before


def test_07_every_error_body_is_a_sentence_and_a_code(wire: Wire, shared: Sandbox) -> None:
    sandbox = f"/v1/sandboxes/{shared.id}"
    for method, path, body, status in [
        ("GET", "/v1/sandboxes/nope", None, 404),
        ("GET", "/v1/sandboxes/..%2f..%2fetc", None, 404),
        ("GET", f"/v1/sandboxes/{'x' * 3000}", None, 404),
        ("POST", f"{sandbox}/exec", {}, 400),
        ("POST", f"{sandbox}/exec", {"cmd": "true", "timeout_seconds": -1}, 400),
        ("POST", f"{sandbox}/exec", {"cmd": "true", "cwd": "relative"}, 400),
        ("POST", f"{sandbox}/exec", {"cmd": "true", "user": "nobody-here"}, 400),
        ("GET", f"{sandbox}/fs", None, 400),
        ("GET", f"{sandbox}/fs?path=/no/such/\u00fc", None, 404),
        ("POST", f"{sandbox}/fork-tree", {"count": "many"}, 400),
        ("POST", f"{sandbox}/fork", {"mode": "unheard-of"}, 400),
        ("POST", f"{sandbox}/promote", {"cleanup_siblings": True}, 400),
        ("GET", "/v1/snapshots/nope", None, 404),
        ("GET", "/v1/templates/n%C3%B6", None, 404),
    ]:
        reply = wire.json(method, path.replace("\u00fc", "%C3%BC"), body)
        assert_error(reply, status)


@pytest.mark.parametrize("content_type", [None, "text/plain;charset=UTF-8"])
def test_08_posts_without_a_body_are_all_defaults(wire: Wire, sandbox: Sandbox, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}

    def post(path: str, expected: int) -> dict:
        reply = wire.request("POST", path, b"", {"Content-Length": "0"} | headers)
        assert reply.status == expected, reply
        return reply.json() if reply.body else {}

    base = f"/v1/sandboxes/{sandbox.id}"
    post(f"{base}/pause", 204)
    post(f"{base}/resume", 204)
    snapshot = post(f"{base}/snapshots", 201)["id"]
    children = post(f"{base}/fork-tree", 201)["children"] + post(f"{base}/fork", 201)["children"]
    assert len(children) == 2
    post(f"/v1/sandboxes/{children[0]['id']}/promote", 200)
    children += [post("/v1/sandboxes", 201)]
    for child in children:
        assert wire.request("DELETE", f"/v1/sandboxes/{child['id']}").status == 204
    assert wire.request("DELETE", f"/v1/snapshots/{snapshot}").status == 204


def test_09_another_workspace_sees_and_reaches_nothing(server: Server, wire: Wire, shared: Sandbox) -> None:
    snapshot = wire.json("POST", f"/v1/sandboxes/{shared.id}/snapshots").json()["id"]
    other = wire.as_holder_of(server.foreign_key("other"))
    assert other.json("GET", "/v1/me").json()["current_org"] == "other"
    assert other.json("GET", "/v1/sandboxes").body == b"[]"
    assert other.json("GET", "/v1/snapshots").json() in ([], {"snapshots": []})
    base = f"/v1/sandboxes/{shared.id}"
    for method, path, body in [
        ("GET", base, None),
        ("POST", f"{base}/exec", {"cmd": "touch /root/was-here"}),
        ("POST", f"{base}/exec/stream", {"cmd": "touch /root/was-here"}),
        ("GET", f"{base}/fs?path=/etc/passwd", None),
        ("PUT", f"{base}/fs?path=/root/was-here", {}),
        ("DELETE", f"{base}/fs?path=/etc/passwd", None),
        ("GET", f"{base}/fs/dir?path=/", None),
        ("GET", f"{base}/fs/stat?path=/", None),
        ("GET", f"{base}/logs", None),
        ("GET", f"{base}/logs?follow=1", None),
        ("GET", f"{base}/lifecycle", None),
        ("PATCH", f"{base}/lifecycle", {"ttl_seconds": 1}),
        ("POST", f"{base}/snapshots", None),
        ("POST", f"{base}/fork", None),
        ("POST", f"{base}/fork-tree", None),
        ("POST", f"{base}/promote", None),
        ("POST", f"{base}/pause", None),
        ("POST", f"{base}/resume", None),
        ("DELETE", base, None),
        ("GET", f"/v1/snapshots/{snapshot}", None),
        ("DELETE", f"/v1/snapshots/{snapshot}", None),
        ("POST", "/v1/sandboxes", {"from_snapshot": snapshot}),
    ]:
        assert_error(other.json(method, path, body), 404)
    assert shared.refresh().status == "running"
    assert shared.exec("test -e /root/was-here").exit_code == 1
    assert shared.lifecycle()["ttl_seconds"] > 1
    assert wire.json("DELETE", f"/v1/snapshots/{snapshot}").status == 204


@pytest.mark.skip(
    reason="no route of this version answers 403 for a sandbox; test_103 covers 403 for a global template"
)
def test_10_forbidden_is_a_bad_request() -> None: ...


def test_health_version_and_openapi_need_no_token_and_metrics_count(server: Server, client: Client) -> None:
    anybody = server.wire(key="")
    assert anybody.request("GET", "/healthz").json() == {"status": "ok"}
    version = anybody.request("GET", "/version").json()
    assert version["version"] and "qemu" in version["engine"]
    document = anybody.request("GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path in ("/v1/sandboxes", "/v1/sandboxes/{id}/fork-tree", "/v1/sandboxes/{id}/exec/stream"):
        assert path in document["paths"]
    client.me()
    metrics = anybody.request("GET", "/metrics")
    assert metrics.content_type.startswith("text/plain") and b"coppice_sandboxes" in metrics.body


def test_a_head_that_never_ends_does_not_hold_up_others(wire: Wire) -> None:
    with socket.create_connection((wire.host, wire.port)) as slow:
        slow.sendall(b"GET /v1/me HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert wire.json("GET", "/v1/me").status == 200


def test_credentials_are_for_the_operator_only(server: Server) -> None:
    file = server.data_dir / "credentials.env"
    assert file.stat().st_mode & 0o777 == 0o600
    assert f"export PANDASTACK_API={server.api}\n" in file.read_text()
    # It says them, so that a newcomer needs no file.
    assert "export PANDASTACK_API=" in server.log_path.read_text()


def test_an_unknown_field_is_ignored(wire: Wire, delete_after: Callable[[str], None]) -> None:
    reply = wire.json("POST", "/v1/sandboxes", {"template": "base", "cpu": 64, "memory_mb": 1, "new_in_2030": [1]})
    assert reply.status == 201, reply
    delete_after(reply.json()["id"])
    assert json.loads(reply.body)["cpu"] != 64
