"""Servers in a network that a test made: each tells who it believes to talk to, and remembers it."""

import http.server
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from . import dns
from .network import OUTSIDE, PRIVATE, Namespace, Net

#: TCP: a line `peer ADDRESS PORT`, then an echo. UDP: the same line in front of what was sent.
ECHO = 7000
#: A second one, for rules that name a port.
ECHO_TOO = 7001
HTTP = 80
DNS = 53
CHUNK = b"\0" * 65536


@dataclass
class Visits:
    """Who came."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, protocol: str, peer: str) -> None:
        """One more."""
        with self.lock:
            self.rows.append((protocol, peer))

    def peers(self) -> set[str]:
        """All addresses so far."""
        with self.lock:
            return {peer for _, peer in self.rows}


class TcpServer(socketserver.ThreadingTCPServer):
    """Many connections at once; none holds up the end."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is what some tests are about."""


class UdpServer(socketserver.ThreadingUDPServer):
    """The same for datagrams."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """As above; a forged source can't be answered."""


class HttpServer(http.server.ThreadingHTTPServer):
    """The same for HTTP."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """As above."""


def tcp_echo(visits: Visits) -> type[socketserver.BaseRequestHandler]:
    """Says who it talks to, and repeats what it hears."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            peer, port = self.client_address[:2]
            visits.add("tcp", peer)
            self.request.sendall(f"peer {peer} {port}\n".encode())
            while data := self.request.recv(65536):
                self.request.sendall(data)

    return Handler


def udp_echo(visits: Visits) -> type[socketserver.BaseRequestHandler]:
    """The same in one datagram."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data, sock = self.request
            peer, port = self.client_address[:2]
            visits.add("udp", peer)
            sock.sendto(f"peer {peer} {port}\n".encode() + data, self.client_address)

    return Handler


def http_handler(visits: Visits) -> type[http.server.BaseHTTPRequestHandler]:
    """`/bytes/N` sends so many; a POST is read and its length told; everything else tells who asked for what."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            visits.add("http", self.client_address[0])
            path = urlsplit(self.path).path
            if path.startswith("/bytes/"):
                left = int(path.removeprefix("/bytes/"))
                self.send_response(200)
                self.send_header("Content-Length", str(left))
                self.end_headers()
                while left > 0:
                    left -= self.wfile.write(CHUNK[:left])
                return
            told = {"peer": self.client_address[0], "host": self.headers.get("Host"), "path": self.path}
            self.reply(json.dumps(told).encode())

        def do_POST(self) -> None:
            visits.add("http", self.client_address[0])
            left = total = int(self.headers.get("Content-Length", 0))
            since = time.monotonic()
            while left > 0 and (data := self.rfile.read(min(left, 65536))):
                left -= len(data)
            self.reply(json.dumps({"bytes": total - left, "seconds": time.monotonic() - since}).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Tests ask `visits`."""

    return Handler


class Servers:
    """Echo over TCP (two ports) and UDP, and HTTP, on every address of a network; a DNS server on the first one."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.visits = Visits()
        self.zone = dns.Zone()
        self.running: list[socketserver.BaseServer] = []
        try:
            net.namespace.call(self._listen)
        except BaseException:
            self.close()
            raise
        for one in self.running:
            threading.Thread(target=one.serve_forever, args=(0.05,), daemon=True).start()

    def _listen(self) -> None:
        for port in (ECHO, ECHO_TOO):
            self.running.append(TcpServer(("0.0.0.0", port), tcp_echo(self.visits)))
        self.running.append(HttpServer(("0.0.0.0", HTTP), http_handler(self.visits)))
        # An address each: an answer must come from where the question went.
        for address in self.net.addresses:
            self.running.append(UdpServer((address, ECHO), udp_echo(self.visits)))
        udp, tcp = dns.handlers(self.zone)
        self.running.append(UdpServer((self.address, DNS), udp))
        self.running.append(TcpServer((self.address, DNS), tcp))

    @property
    def address(self) -> str:
        """The first one."""
        return self.net.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """All."""
        return self.net.addresses

    def close(self) -> None:
        """Listeners, then the network."""
        for one in self.running:
            one.shutdown()
            one.server_close()
        self.net.close()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def outside() -> Servers:
    """The internet, as far as sandboxes are concerned: 13 addresses of TEST-NET-2."""
    return Servers(Net([OUTSIDE], 28))


def private_hosts() -> Servers:
    """A neighbour of the host with an address in each range that sandboxes must not reach."""
    return Servers(Net(PRIVATE, 30))


class Listener:
    """Something that listens in the host's own namespace, on all its addresses, and counts who came."""

    def __init__(self, namespace: Namespace | None = None, family: socket.AddressFamily = socket.AF_INET) -> None:
        self.visits = Visits()

        class Server(TcpServer):
            address_family = family

        def make() -> TcpServer:
            return Server(("::" if family == socket.AF_INET6 else "0.0.0.0", 0), tcp_echo(self.visits))

        self.server = namespace.call(make) if namespace else make()
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server.server_address[1])

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()


def reaches(
    address: str, port: int, timeout: float = 2.0, via: Callable[[Callable[[], bool]], bool] | None = None
) -> bool:
    """Whether the host itself (or who `via` calls for) gets the greeting of an echo server there."""

    def attempt() -> bool:
        try:
            with socket.create_connection((address, port), timeout=timeout) as connection:
                connection.settimeout(timeout)
                return connection.recv(64).startswith(b"peer ")
        except OSError:
            return False

    return via(attempt) if via else attempt()
