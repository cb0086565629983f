"""Checklist J: tokens, with the published Python client."""

import sqlite3
import time
from collections.abc import Iterator

import pytest
from pandastack import AuthError, BadRequestError, Client, NotFoundError

from harness.cli import Cli
from harness.server import Server


@pytest.fixture(autouse=True)
def no_token_left(client: Client) -> Iterator[None]:
    """Tokens that a test made are revoked when it is over."""
    before = {token.prefix for token in client.tokens.list()}
    yield
    for token in client.tokens.list():
        if token.prefix not in before:
            client.tokens.revoke(token.prefix)


def test_117_a_token_is_made_used_listed_and_revoked(server: Server, client: Client) -> None:
    made = client.tokens.create("ci")
    assert made.token and made.token.startswith("pds_") and len(made.token) == 36
    assert made.token.startswith(made.prefix) and made.name == "ci"
    theirs = server.client(api_key=made.token)
    assert theirs.me()["user_id"] == made.prefix
    (listed,) = [token for token in client.tokens.list() if token.prefix == made.prefix]
    assert listed.name == "ci" and not listed.token
    for row in client.tokens.list():
        assert len(row.prefix) == 12
    # A member's own calls reach its own tokens.
    assert made.prefix in {token.prefix for token in theirs.tokens.list()}
    client.tokens.revoke(made.prefix)
    with pytest.raises(AuthError):
        theirs.me()
    for unknown in (made.prefix, "pds_nothing", "x"):
        with pytest.raises(NotFoundError):
            client.tokens.revoke(unknown)


def test_117_a_token_ends_when_it_expires(server: Server, client: Client) -> None:
    month = client.tokens.create("month", expires_in_days=30)
    rows = server.wire().json("GET", "/v1/me/tokens").json()
    (row,) = [row for row in rows if row["prefix"] == month.prefix]
    assert row["expires_at"][:10] == time.strftime("%Y-%m-%d", time.gmtime(time.time() + 30 * 24 * 3600))
    for bad in (0, -1):
        with pytest.raises(BadRequestError):
            client.tokens.create("x", expires_in_days=bad)
    short = server.wire().json("POST", "/v1/me/tokens", {"label": "short", "expires_in_seconds": 1}).json()
    theirs = server.client(api_key=short["token"])
    assert theirs.me()["user_id"] == short["prefix"]
    time.sleep(1.1)
    with pytest.raises(AuthError):
        theirs.me()


def test_the_database_has_hashes_only(server: Server, client: Client) -> None:
    token = client.tokens.create("secret").token
    server.client(api_key=token).me()
    server.wire().json("GET", "/v1/audit")
    for file in server.data_dir.glob("control.db*"):
        assert token.encode() not in file.read_bytes(), file
    with sqlite3.connect(f"file:{server.data_dir}/control.db?mode=ro", uri=True) as database:
        lengths = {len(row[0]) for row in database.execute("SELECT hash FROM tokens")}
    database.close()
    assert lengths == {32}


def test_tokens_from_the_command_line(server: Server, client: Client) -> None:
    cli = Cli(server)
    token = cli.ok("token", "create", "from the shell", "--expires", "2h").strip()
    assert server.client(api_key=token).me()["user_id"] == token[:12]
    assert "from the shell" in cli.ok("token", "list")
    assert {row["prefix"] for row in cli.json("token", "list")} == {row.prefix for row in client.tokens.list()}
    assert cli.ok("token", "revoke", token) == f"deleted {token[:12]}\n"
    with pytest.raises(AuthError):
        server.client(api_key=token).me()
    done = cli.run("token", "revoke", token)
    assert done.code == 1 and "not found" in done.err
