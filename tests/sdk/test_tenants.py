"""Tenants on a real server: what each sees, what each may have, and what is written down of it."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pandastack import AuthError, BadRequestError, Client, NotFoundError, Sandbox

from harness.cli import Cli
from harness.paths import REPO
from harness.recorder import recorded
from harness.server import Server
from harness.wire import Wire

METHODS = ("GET", "PUT", "POST", "DELETE", "PATCH")


@pytest.fixture
def tenant(server: Server) -> Iterator[Callable[[str], Wire]]:
    """Makes workspaces, by name. They are emptied and deleted when the test is over."""
    made: dict[str, Wire] = {}

    def make(name: str, **more: Any) -> Wire:
        made[name] = server.wire(server.foreign_key(name, **more))
        return made[name]

    yield make
    for name, wire in made.items():
        for kind in ("sandboxes", "snapshots"):
            rows = wire.json("GET", f"/v1/{kind}")
            for row in rows.json() if rows.status == 200 else []:
                assert wire.json("DELETE", f"/v1/{kind}/{row['id']}").status in (204, 404)
        assert server.wire().json("DELETE", f"/v1/workspaces/{name}").status in (204, 404)


def set_quota(server: Server, name: str, **quota: int) -> None:
    """As an admin."""
    assert server.wire().json("PUT", f"/v1/workspaces/{name}", quota).status == 200


def test_a_second_tenant_gets_404_on_every_route_about_a_thing_of_the_first(
    server: Server, client: Client, shared: Sandbox, tenant: Callable[[str], Wire]
) -> None:
    snapshot = shared.snapshot()
    (prefix,) = [token.prefix for token in client.tokens.list()][:1]
    names = {"sandboxes": shared.id, "snapshots": snapshot, "me": prefix, "workspaces": "default"}
    stranger = tenant("stranger")
    routes = json.loads((REPO / "docs" / "openapi.json").read_text())["paths"]
    tried = 0
    for route in routes:
        kind = route.split("/")[2] if route.count("/") > 2 else ""
        if kind not in names or "{" not in route:
            continue
        path = route.replace("{id}", names[kind]).replace("{name}", names[kind]).replace("{prefix}", prefix)
        path = path.replace("{port}", "8080")
        for method in METHODS:
            body = {"cmd": "touch /root/was-here", "port": 8080} if method != "GET" else None
            reply = stranger.json(method, f"{path}?path=/etc/passwd", body)
            assert reply.status == 404 or (reply.status == 405 and method.lower() not in routes[route]), (
                method,
                path,
                reply,
            )
            tried += 1
    assert tried > 80
    assert stranger.json("POST", "/v1/sandboxes", {"from_snapshot": snapshot}).status == 404
    assert stranger.json("GET", "/v1/sandboxes").body == b"[]" and stranger.json("GET", "/v1/snapshots").json() == []
    assert shared.refresh().status == "running" and shared.exec("test -e /root/was-here").exit_code == 1
    assert prefix in {token.prefix for token in client.tokens.list()}
    client.snapshots.delete(snapshot)


def test_120_over_quota_is_refused_once_and_for_all(server: Server, tenant: Callable[[str], Wire]) -> None:
    wire = tenant("small")
    set_quota(server, "small", sandboxes=2, fan_out=1, snapshots=0)
    # It would repeat what is worth repeating.
    theirs = server.client(api_key=wire.key, max_create_retry_seconds=30)
    first = theirs.sandboxes.create(template="base")
    with recorded() as sent, pytest.raises(BadRequestError, match="fan-out"):
        first.fork_tree(2)
    assert len(sent) == 1
    (child,) = first.fork_tree(1)
    with recorded() as sent, pytest.raises(BadRequestError, match="max sandboxes reached"):
        theirs.sandboxes.create(template="base")
    assert sent == [("POST", "/v1/sandboxes")]
    with pytest.raises(BadRequestError, match="max snapshots reached"):
        first.snapshot()
    reply = wire.json("POST", "/v1/sandboxes", {"template": "base"})
    assert reply.status == 429 and "retry-after" not in reply.headers and reply.json()["code"] == "quota_exceeded"
    assert {row.id for row in theirs.sandboxes.list()} == {first.id, child.id}
    usage = server.wire().json("GET", "/v1/workspaces/small").json()["usage"]
    assert usage["sandboxes"] == 2 and usage["memory_mb"] == 2 * first.memory_mb and usage["disk_mb"] > 0
    child.kill()
    memory = usage["memory_mb"]
    set_quota(server, "small", memory_mb=memory - 1)
    with pytest.raises(BadRequestError, match="MiB of memory"):
        first.fork_tree(1)
    set_quota(server, "small", disk_mb=usage["disk_mb"] - 1)
    with pytest.raises(BadRequestError, match="MiB of disk"):
        first.fork_tree(1)
    set_quota(server, "small")
    (again,) = first.fork_tree(1)
    assert again.exec("true").exit_code == 0


def test_120_a_quota_holds_after_a_restart(own_server: Server) -> None:
    key = own_server.foreign_key("a")
    set_quota(own_server, "a", sandboxes=1)
    sandbox = own_server.client(api_key=key).sandboxes.create(template="base")
    own_server.restart()
    with pytest.raises(BadRequestError, match="max sandboxes reached"):
        own_server.client(api_key=key).sandboxes.create(template="base")
    sandbox.kill()


def test_120_a_rate_is_for_creates_and_is_waited_for(new_server: Callable[..., Server]) -> None:
    server = new_server(["--create-rate", "1"]).start()
    wire = server.wire()
    bad = {"template": "no-such-template"}
    replies = [wire.json("POST", "/v1/sandboxes", bad) for _ in range(4)]
    assert [reply.status for reply in replies[:2]] == [400, 400] and replies[3].status == 429, replies
    assert replies[3].headers["retry-after"] == "1" and replies[3].json()["code"] == "rate_limited"
    assert all(wire.json("GET", "/v1/sandboxes").status == 200 for _ in range(30))
    patient = server.client(max_create_retry_seconds=30)
    with recorded() as sent, pytest.raises(BadRequestError, match="unknown template"):
        patient.sandboxes.create(template="no-such-template")
    assert len(sent) >= 2
    assert server.close() == []


def test_workspaces_from_the_command_line(server: Server, tenant: Callable[[str], Wire]) -> None:
    tenant("cli-old")
    cli = Cli(server)
    key = cli.ok("token", "create", "first", "--workspace", "cli-new").strip()
    assert server.client(api_key=key).me()["current_org"] == "cli-new"
    assert {"default", "cli-new", "cli-old"} <= {row["name"] for row in cli.json("workspace", "list")}
    shown = cli.json("workspace", "set-quota", "cli-new", "--sandboxes", "3", "--memory-mb", "4096")
    assert shown["quota"] == {"sandboxes": 3, "memory_mb": 4096}
    assert cli.json("workspace", "set-quota", "cli-new", "--sandboxes", "unlimited")["quota"] == {"memory_mb": 4096}
    assert "0 of 4096" in cli.ok("workspace", "show", "cli-new")
    # A member looks at its own workspace, and at nothing else.
    env = {"PANDASTACK_API": server.api, "PANDASTACK_API_KEY": key}
    assert json.loads(cli.run("--json", "workspace", "show", **env).out)["name"] == "cli-new"
    for command in (("workspace", "list"), ("audit",), ("token", "create", "x", "--role", "admin")):
        done = cli.run(*command, **env)
        assert done.code == 1 and "admin" in done.err, done
    assert "workspace cli-old not found" in cli.run("workspace", "show", "cli-old", **env).err
    assert cli.ok("workspace", "delete", "cli-new") == "deleted cli-new\n"
    with pytest.raises(AuthError):
        server.client(api_key=key).me()
    rows = cli.json("audit", "--limit", "200")
    routes = [(row["method"], row["route"], row["status"]) for row in rows]
    assert ("DELETE", "/v1/workspaces/{name}", 204) in routes
    assert ("POST", "/v1/me/tokens", 403) in routes
    assert not any(key in json.dumps(row) for row in rows)


def test_the_server_still_knows_its_tenants_after_a_restart(own_server: Server) -> None:
    key = own_server.foreign_key("a", expires_in_days=1)
    client = own_server.client(api_key=key)
    operator = own_server.key()
    own_server.restart()
    assert client.me()["current_org"] == "a"
    assert own_server.key() == operator
    with pytest.raises(NotFoundError):
        client.tokens.revoke(operator[:12])
    assert (own_server.data_dir / "credentials.env").stat().st_mode & 0o077 == 0
