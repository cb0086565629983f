"""Ports of real machines: the list, the proxy, preview hosts, links, tunnels, `port-forward`."""

import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pandastack import Client, Sandbox

from harness.cli import Cli
from harness.guest import sh
from harness.paths import binary
from harness.poll import until
from harness.server import Server
from harness.wire import Wire

#: Answers every request with what it was asked, `/slow` in two pieces a second apart; port 3001 says everything twice;
#: port 3002 listens where nobody outside the guest gets; port 3003 shakes hands as a WebSocket server, then as 3001.
SERVICES = r"""
import base64, hashlib, http.server, json, socketserver, threading, time
class Web(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        if self.path == '/slow':
            self.send_response(200); self.send_header('Transfer-Encoding', 'chunked'); self.end_headers()
            for piece in (b'one', b'two'):
                self.wfile.write(b'3\r\n' + piece + b'\r\n'); self.wfile.flush(); time.sleep(1)
            self.wfile.write(b'0\r\n\r\n'); return
        if self.path == '/hash':
            body = hashlib.sha256(body).hexdigest().encode()
        else:
            told = {'path': self.path, 'method': self.command, 'headers': dict(self.headers.items())}
            body = json.dumps(told).encode()
        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers()
        self.wfile.write(body)
    do_POST = do_PUT = do_GET
    def log_message(self, *_): pass
class Twice(socketserver.BaseRequestHandler):
    def handle(self):
        while piece := self.request.recv(65536):
            self.request.sendall(piece * 2)
        self.request.sendall(b'bye')
class Socket(Twice):
    def handle(self):
        head = b''
        while not head.endswith(b'\r\n\r\n'):
            head += self.request.recv(1)
        key = [l.split(b': ')[1] for l in head.split(b'\r\n') if l.lower().startswith(b'sec-websocket-key')][0]
        accept = base64.b64encode(hashlib.sha1(key + b'258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest())
        self.request.sendall(b'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n'
                             b'Sec-WebSocket-Accept: ' + accept + b'\r\n\r\n')
        super().handle()
socketserver.ThreadingTCPServer.allow_reuse_address = True
def serve(kind, address):
    server = socketserver.ThreadingTCPServer(address, kind)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever).start()
serve(Web, ('0.0.0.0', 3000)); serve(Twice, ('0.0.0.0', 3001))
serve(Web, ('127.0.0.1', 3002)); serve(Socket, ('0.0.0.0', 3003))
"""


def start_services(sandbox: Sandbox) -> None:
    """Starts them, and waits until all listen."""
    sandbox.filesystem.write("/root/services.py", SERVICES)
    sh(sandbox, "setsid python3 /root/services.py </dev/null >/root/services.log 2>&1 & echo started")
    until("the services listen", lambda: {3000, 3001, 3002, 3003} <= sandbox.preview_urls().keys(), 60)


@pytest.fixture(scope="module")
def serving(shared: Sandbox) -> Sandbox:
    """A sandbox in which all of it listens."""
    start_services(shared)
    return shared


def proxied(sandbox: Sandbox, port: int, path: str = "/") -> str:
    return f"/v1/sandboxes/{sandbox.id}/proxy/{port}{path}"


def read_head(connection: socket.socket) -> str:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        assert byte, f"ended after {head!r}"
        head += byte
    return head.decode()


def read_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        assert piece, f"ended after {data!r}"
        data += piece
    return data


def upgrade(wire: Wire, path: str, **headers: str) -> socket.socket:
    """A connection that has left HTTP."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {wire.host}", "Connection: Upgrade"]
    lines += [f"{name}: {text}" for name, text in (wire.headers() | headers).items()]
    connection = socket.create_connection((wire.host, wire.port), timeout=30)
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    head = read_head(connection)
    assert head.startswith("HTTP/1.1 101 "), head
    return connection


def test_124_preview_urls_has_what_listens_and_not_ssh(serving: Sandbox, wire: Wire) -> None:
    urls = serving.preview_urls()
    assert urls[3000] == serving.preview_url(3000)
    assert 22 not in urls
    rows = {row["port"]: row for row in wire.json("GET", f"/v1/sandboxes/{serving.id}/ports").json()}
    assert rows[3000]["listening"] and rows[3000]["source"] == "detected" and not rows[3000]["loopback_only"]
    assert rows[3002]["loopback_only"]


def test_looking_at_ports_is_no_use_of_a_sandbox_and_a_connection_is(serving: Sandbox, wire: Wire) -> None:
    def idle() -> int:
        return int(wire.json("GET", f"/v1/sandboxes/{serving.id}/lifecycle").json()["idle_seconds"])

    until("it is idle", lambda: idle() >= 2, 10)
    serving.preview_urls()
    assert idle() >= 2
    assert wire.request("GET", proxied(serving, 3000)).status == 200
    assert idle() <= 1


def test_the_proxy_passes_requests_and_answers(serving: Sandbox, wire: Wire) -> None:
    reply = wire.request("PUT", proxied(serving, 3000, "/a%20b?c=d"), b"body", {"X-Pandastack-Broker-Auth": "Basic x"})
    told = reply.json()
    assert (reply.status, told["method"], told["path"]) == (200, "PUT", "/a%20b?c=d")
    headers = {name.lower(): text for name, text in told["headers"].items()}
    assert headers["authorization"] == "Basic x"
    assert headers["x-fcs-sandbox"] == serving.id
    assert headers["x-forwarded-proto"] == "http"
    assert str(wire.key) not in json.dumps(told)


def test_the_proxy_streams(serving: Sandbox, wire: Wire) -> None:
    with wire.begun("GET", proxied(serving, 3000, "/slow")) as connection:
        read_head(connection)
        assert read_exactly(connection, 8) == b"3\r\none\r\n"
        first = time.monotonic()
        assert read_exactly(connection, 8) == b"3\r\ntwo\r\n"
        assert time.monotonic() - first > 0.5
    body = os.urandom(8 << 20)
    reply = wire.request("POST", proxied(serving, 3000, "/hash"), body)
    assert reply.body.decode() == hashlib.sha256(body).hexdigest()


def test_what_can_not_be_reached_says_why(serving: Sandbox, wire: Wire) -> None:
    refused = wire.request("GET", proxied(serving, 3999))
    assert (refused.status, refused.json()["code"]) == (502, "port_refused")
    loopback = wire.request("GET", proxied(serving, 3002))
    assert (loopback.status, loopback.json()["code"]) == (502, "port_loopback_only")
    assert "0.0.0.0:3002" in loopback.json()["hint"]
    assert wire.request("GET", proxied(serving, 22)).status == 400


def test_a_paused_sandbox_is_503_and_serves_again_afterwards(sandbox: Sandbox, wire: Wire) -> None:
    start_services(sandbox)
    sandbox.pause()
    reply = wire.request("GET", proxied(sandbox, 3000))
    assert (reply.status, reply.json()["code"]) == (503, "sandbox_not_running")
    assert sandbox.preview_urls() == {}
    sandbox.resume()
    assert wire.request("GET", proxied(sandbox, 3000)).status == 200


def test_websockets_go_through(serving: Sandbox, wire: Wire) -> None:
    key = base64.b64encode(os.urandom(16)).decode()
    more = {"Upgrade": "websocket", "Sec-WebSocket-Key": key, "Sec-WebSocket-Version": "13"}
    with upgrade(wire, proxied(serving, 3003, "/ws"), **more) as connection:
        for number in range(3):
            connection.sendall(bytes([number]) * 3)
            assert read_exactly(connection, 6) == bytes([number]) * 6
            time.sleep(0.3)


def test_a_tunnel_is_the_services_connection(serving: Sandbox, wire: Wire) -> None:
    with upgrade(wire, f"/v1/sandboxes/{serving.id}/tunnel/3001", Upgrade="tcp") as connection:
        connection.sendall(b"\0\xff\r\n")
        assert read_exactly(connection, 8) == b"\0\xff\r\n" * 2
        connection.shutdown(socket.SHUT_WR)
        assert read_exactly(connection, 3) == b"bye"
        assert connection.recv(1) == b""


def test_a_connection_ends_with_its_machine(sandbox: Sandbox, wire: Wire) -> None:
    start_services(sandbox)
    with upgrade(wire, f"/v1/sandboxes/{sandbox.id}/tunnel/3001", Upgrade="tcp") as connection:
        connection.sendall(b"x")
        read_exactly(connection, 2)
        sandbox.kill()
        connection.settimeout(15)
        assert connection.recv(1) == b""


def test_children_serve_on_addresses_of_their_own(
    sandbox: Sandbox, wire: Wire, delete_after: Callable[[str], None]
) -> None:
    start_services(sandbox)
    sandbox.filesystem.write("/root/who", "parent")
    children = sandbox.fork_tree(2)
    for child in children:
        delete_after(child.id)
    for machine in [sandbox, *children]:
        told = wire.request("GET", proxied(machine, 3000)).json()
        headers = {name.lower(): text for name, text in told["headers"].items()}
        assert headers["x-fcs-sandbox"] == machine.id


def test_links_lead_to_their_paths_until_they_are_revoked(serving: Sandbox, wire: Wire) -> None:
    api = f"/v1/sandboxes/{serving.id}"
    body = {"port": 3000, "ttl_seconds": 600, "paths": ["/docs"]}
    link = wire.json("POST", f"{api}/preview-token", body).json()
    assert set(link) >= {"url", "token", "sandbox_id", "port", "paths", "expires_at"}
    nobody = wire.as_holder_of(None)

    def status(path: str) -> int:
        return nobody.request("GET", f"/v1/p/{link['token']}{path}").status

    assert nobody.request("GET", f"/v1/p/{link['token']}/docs/x").json()["path"] == "/docs/x"
    for path in ("/", "/docsx", "/docs/../admin", "/docs/%2e%2e/admin", "//docs"):
        assert status(path) == 403, path
    assert nobody.request("GET", f"/v1/p/x{link['token'][1:]}/docs").status in (400, 401)
    assert [row["id"] for row in wire.json("GET", f"{api}/previews").json()] == [link["id"]]
    assert wire.json("DELETE", f"{api}/previews/{link['id']}").status == 204
    assert status("/docs") == 401


def test_links_and_names_end_with_their_sandbox(sandbox: Sandbox, wire: Wire) -> None:
    link = wire.json("POST", f"/v1/sandboxes/{sandbox.id}/preview", {"port": 3000}).json()
    wire.json("POST", f"/v1/sandboxes/{sandbox.id}/ports", {"port": 3000})
    sandbox.kill()
    assert wire.as_holder_of(None).request("GET", f"/v1/p/{link['token']}/").status == 401
    assert wire.json("GET", f"/v1/sandboxes/{sandbox.id}/ports").status == 404


@pytest.fixture(scope="module")
def previews(new_server: Callable[..., Server]) -> Iterator[Server]:
    """A server with preview hosts."""
    server = new_server(["--preview-suffix", "preview.test"]).start()
    yield server
    assert server.close() == []


@pytest.fixture(scope="module")
def previewed(previews: Server) -> Iterator[Sandbox]:
    """A sandbox of it in which something listens."""
    sandbox = previews.client().sandboxes.create(template="base")
    start_services(sandbox)
    yield sandbox
    sandbox.kill()


def at(server: Server, sandbox: Sandbox, **more: Any) -> Any:
    """A request to the host that the published client names, with no token."""
    client: Client = server.client()
    client.preview_host = "preview.test"
    url = client.sandboxes.get(sandbox.id).preview_url(3000, scheme="http")
    host = url.removeprefix("http://")
    return server.wire(key="").request("GET", "/page?x", headers={"Host": host, **more})


def test_125_a_public_port_is_reached_by_its_host_without_authorization(previews: Server, previewed: Sandbox) -> None:
    assert at(previews, previewed).status == 401
    assert at(previews, previewed, Authorization=f"Bearer {previews.key()}").status == 200
    ports = f"/v1/sandboxes/{previewed.id}/ports"
    made = previews.wire().json("POST", ports, {"port": 3000, "label": "web", "public": True})
    assert made.status == 201 and made.json()["preview_url"].startswith(f"http://3000-{previewed.id}.preview.test")
    reply = at(previews, previewed)
    assert (reply.status, reply.json()["path"]) == (200, "/page?x")
    assert previews.wire().json("DELETE", f"{ports}/3000").status == 204
    assert at(previews, previewed).status == 401


def test_125_an_operator_can_make_every_port_public(new_server: Callable[..., Server]) -> None:
    server = new_server(["--preview-suffix", "preview.test", "--public-previews"]).start()
    sandbox = server.client().sandboxes.create(template="base")
    start_services(sandbox)
    assert at(server, sandbox).json()["path"] == "/page?x"
    key = base64.b64encode(os.urandom(16)).decode()
    more = {"Upgrade": "websocket", "Sec-WebSocket-Key": key, "Host": f"3003-{sandbox.id}.preview.test"}
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        lines = ["GET /ws HTTP/1.1", "Connection: Upgrade", *(f"{name}: {text}" for name, text in more.items()), "", ""]
        connection.sendall("\r\n".join(lines).encode())
        assert read_head(connection).startswith("HTTP/1.1 101 ")
        connection.sendall(b"ab")
        assert read_exactly(connection, 4) == b"abab"
    sandbox.kill()
    assert server.wire(key="").request("GET", "/", headers={"Host": f"3000-{sandbox.id}.preview.test"}).status == 404
    assert server.close() == []


def test_port_forward_leads_to_the_sandbox_until_it_is_interrupted(serving: Sandbox, server: Server) -> None:
    command = [str(binary()), "--json", "port-forward", serving.id, "0:3001", "0:3000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=Cli(server).env)
    assert process.stdout is not None
    text = ""
    while not text.endswith("\n}\n"):
        line = process.stdout.readline()
        assert line, text
        text += line
    (host, port), (_, web) = (forward["local"].split(":") for forward in json.loads(text)["forwards"])
    for number in range(4):
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(bytes([number]))
            assert read_exactly(connection, 2) == bytes([number, number])
            connection.shutdown(socket.SHUT_WR)
            assert read_exactly(connection, 3) == b"bye"
    assert Wire(f"http://127.0.0.1:{web}", None).request("GET", "/x").json()["path"] == "/x"
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 0
