"""Plain HTTP, for what a client library hides: headers, exact bodies, when bytes arrive, and hanging up."""

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Reply:
    """One response, whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def content_type(self) -> str:
        """The header, or nothing."""
        return self.headers.get("content-type", "")


class Wire:
    """Requests to one server, a connection each."""

    def __init__(self, api: str, key: str | None) -> None:
        parts = urlsplit(api)
        assert parts.hostname and parts.port
        self.host, self.port, self.key = parts.hostname, parts.port, key

    def as_holder_of(self, key: str | None) -> "Wire":
        """The same server, another token."""
        return Wire(f"http://{self.host}:{self.port}", key)

    def headers(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Authorization, and what is given."""
        auth = {"Authorization": f"Bearer {self.key}"} if self.key is not None else {}
        return {**auth, **(more or {})}

    def request(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> Reply:
        """Sends exactly these headers (plus Host and Content-Length) and this body, and reads the whole response."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request(method, path, body, self.headers(headers))
            response = connection.getresponse()
            lower = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, lower, response.read())
        finally:
            connection.close()

    def json(self, method: str, path: str, value: object | None = None, timeout: float = 60.0) -> Reply:
        """With a JSON body, or an empty one."""
        if value is None:
            return self.request(method, path, timeout=timeout)
        return self.request(method, path, json.dumps(value), {"Content-Type": "application/json"}, timeout)

    @contextmanager
    def begun(self, method: str, path: str, value: object | None = None) -> Iterator[socket.socket]:
        """A request that was sent and whose response was not read. Leaving the block hangs up, with a reset."""
        body = b"" if value is None else json.dumps(value).encode()
        head = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", f"Content-Length: {len(body)}"]
        head += [f"{name}: {text}" for name, text in self.headers({"Content-Type": "application/json"}).items()]
        connection = socket.create_connection((self.host, self.port), timeout=60)
        try:
            connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
            yield connection
        finally:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            connection.close()

    def events(
        self, method: str, path: str, value: object | None = None, timeout: float = 60.0
    ) -> Iterator[tuple[float, str]]:
        """Lines of an event stream, comments and blank ones too, each with the time at which it came (monotonic)."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            body = None if value is None else json.dumps(value)
            more = {"Accept": "text/event-stream"} | ({"Content-Type": "application/json"} if body else {})
            connection.request(method, path, body, self.headers(more))
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for raw in response:
                yield time.monotonic(), raw.decode().rstrip("\n")
        finally:
            connection.close()
