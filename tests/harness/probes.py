"""Programs for guests that show what a machine reaches, and what becomes of its connections."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pandastack import Sandbox

from .guest import sh
from .poll import until

#: What one attempt may take inside the guest. What is dropped takes all of it; all are made at once.
PATIENCE = 2.0
#: Where the program with the connections listens.
PORT = 8000

# Targets from standard input; an answer for each: what the other side said, `connected` if nothing, or the error.
PROBE = r"""
import concurrent.futures, json, socket, sys
patience, targets = json.load(sys.stdin)
def attempt(target):
    kind, address, port, source = target
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM if kind == 'udp' else socket.SOCK_STREAM) as s:
            s.settimeout(patience)
            if source:
                s.bind((source, 0))
            s.connect((address, port))
            if kind == 'udp':
                s.send(b'x')
                return s.recv(100).decode()
            if kind == 'http':
                s.sendall(b'GET / HTTP/1.0\r\n\r\n')
            try:
                return s.recv(100).decode('latin-1') or 'connected'
            except OSError:
                return 'connected'
    except OSError as error:
        return 'error ' + type(error).__name__
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(json.dumps(list(pool.map(attempt, targets))))
"""

# Holds a connection that it uses all the time, and one on which it waits for a word that never comes; and tells over
# HTTP what became of them, and who it is.
CONNECTIONS = r"""
import http.server, json, os, socket, sys, threading, time
address, port, listen = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
state = {'active': {'count': 0, 'error': None, 'at': None}, 'idle': {'error': None, 'at': None}}
def opened():
    c = socket.create_connection((address, port), timeout=20)
    c.settimeout(None)
    f = c.makefile('rb')
    assert f.readline().startswith(b'peer ')
    return c, f
def ends(name, error):
    state[name].update(error=error, at=time.time())
def active(c, f):
    n = 0
    try:
        while True:
            n += 1
            c.sendall(b'%d\n' % n)
            if f.readline() != b'%d\n' % n:
                raise EOFError
            state['active']['count'] = n
            time.sleep(0.02)
    except (OSError, EOFError) as error:
        ends('active', type(error).__name__)
def idle(c, f):
    try:
        ends('idle', 'end of stream' if not c.recv(1) else 'something came')
    except OSError as error:
        ends('idle', type(error).__name__)
for run in (active, idle):
    threading.Thread(target=run, args=opened(), daemon=True).start()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        told = dict(state, address=self.connection.getsockname()[0], host=os.uname().nodename, pid=os.getpid())
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(('0.0.0.0', listen), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Target:
    """What to try: `tcp`, `udp` or `http` (which sends a request first), from an address or any."""

    kind: str
    address: str
    port: int
    source: str = ""


def probe(sandbox: Sandbox, targets: Sequence[Target], patience: float = PATIENCE) -> dict[Target, str]:
    """Tries all of them at once from inside, and gives what each said."""
    rows = [[one.kind, one.address, one.port, one.source] for one in targets]
    sandbox.filesystem.write("/run/probe.json", json.dumps([patience, rows]))
    sandbox.filesystem.write("/run/probe.py", PROBE)
    told = json.loads(sh(sandbox, "python3 /run/probe.py </run/probe.json"))
    return dict(zip(targets, told, strict=True))


def reached(told: dict[Target, str]) -> dict[Target, str]:
    """Those where somebody was."""
    return {target: said for target, said in told.items() if not said.startswith("error ")}


def ask(sandbox: Sandbox, kind: str, address: str, port: int) -> str:
    """One attempt."""
    (said,) = probe(sandbox, [Target(kind, address, port)]).values()
    return said


@dataclass(frozen=True)
class Interface:
    """Of a guest, as its kernel has it."""

    name: str
    mac: str
    address: str
    prefix: int
    gateway: str


def interface(sandbox: Sandbox) -> Interface:
    """The only one beside `lo`."""
    (link,) = [one for one in json.loads(sh(sandbox, "ip -j -4 addr")) if one["ifname"] != "lo"]
    (entry,) = link["addr_info"]
    (mac,) = [one["address"] for one in json.loads(sh(sandbox, "ip -j link")) if one["ifname"] == link["ifname"]]
    (route,) = json.loads(sh(sandbox, "ip -j -4 route show default"))
    return Interface(link["ifname"], mac, entry["local"], entry["prefixlen"], route["gateway"])


def start_connections(sandbox: Sandbox, address: str, port: int) -> dict[str, Any]:
    """Starts the program with the two connections and the server, and waits until it is there."""
    sandbox.filesystem.write("/root/connections.py", CONNECTIONS)
    command = f"python3 /root/connections.py {address} {port} {PORT}"
    sh(sandbox, f"setsid {command} </dev/null >/root/connections.err 2>&1 & echo started")
    return until("the connections are open", lambda: connections(sandbox), 30)


def connections(sandbox: Sandbox) -> dict[str, Any] | None:
    """What the program says, asked inside the machine."""
    told = sandbox.exec(f"curl -s --max-time 5 http://127.0.0.1:{PORT}/")
    return json.loads(told.stdout) if told.exit_code == 0 and told.stdout else None
