"""A program for guests that holds, all at once, what a fork may keep or lose; and what a machine says of itself."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pandastack import Sandbox

from .guest import sh
from .poll import until
from .wire import Wire

#: Where the program listens, on all addresses.
PORT = 8000
#: The seed of every generator, so that its next numbers are known.
SEED = 4711
#: How long the timers are set for when they are armed, seconds.
REST, TIME_OF_DAY = 6.0, 7.0

# Holds processes, files, timers, connections and generators, once it was told to; and tells over HTTP what became of
# them. Its main thread ticks, and notes when the machine's own clock stood still while the time of day went on.
PROBE = r"""
import ctypes, errno, hashlib, http.server, json, os, random, socket, struct, subprocess, sys, threading, time, uuid
ssl = numpy = None
if sys.argv[3:] != ['bare']:
    import ssl
    try:
        import numpy
    except ImportError:
        pass
SEED, PORT = int(sys.argv[1]), int(sys.argv[2])
REALTIME, ABSOLUTE = 0, 1
libc = ctypes.CDLL(None, use_errno=True)
secret = os.urandom(16).hex()
environment = {name: value for name, value in os.environ.items() if name.startswith('COPPICE_')}
state = {'ticks': 0, 'steps': [], 'late': 0.0}
held = None

def named(error):
    return errno.errorcode.get(getattr(error, 'errno', None), type(error).__name__)

def thread(run, *arguments):
    threading.Thread(target=run, args=arguments, daemon=True).start()

class Talk:
    # Says something all the time, and hears it back.
    def __init__(self, send, receive):
        self.told = {'count': 0, 'error': None, 'at': None}
        thread(self.run, send, receive)
    def run(self, send, receive):
        n = 0
        try:
            while True:
                n += 1
                send(b'%d\n' % n)
                if receive() != b'%d\n' % n:
                    raise EOFError
                self.told['count'] = n
                time.sleep(0.05)
        except (OSError, EOFError, ValueError) as error:
            self.told.update(error=named(error), at=time.time())

def waits(told, connection):
    # For a word that never comes.
    try:
        told.update(error='end of stream' if not connection.recv(1) else 'something came', at=time.time())
    except OSError as error:
        told.update(error=named(error), at=time.time())

def connected(address, port):
    connection = socket.create_connection((address, port), timeout=20)
    connection.settimeout(None)
    return connection, connection.makefile('rb')

def echoes(listener):
    connection, _ = listener.accept()
    while data := connection.recv(4096):
        connection.sendall(data)

def sleeps(told, seconds):
    time.sleep(seconds)
    told['sleep'] = time.time()

def waits_until(told, at):
    fd = libc.timerfd_create(REALTIME, 0)
    whole = int(at)
    spec = struct.pack('qqqq', 0, 0, whole, int((at - whole) * 1e9))
    if fd < 0 or libc.timerfd_settime(fd, ABSOLUTE, spec, None) != 0:
        raise OSError(ctypes.get_errno(), 'timerfd')
    os.read(fd, 8)
    told['time_of_day'] = time.time()

def seed():
    global own, own_numpy
    random.seed(SEED)
    own = random.Random(SEED)
    if numpy:
        numpy.random.seed(SEED)
        own_numpy = numpy.random.default_rng(SEED)
    # Its generator has a state in this process, too.
    ssl.RAND_bytes(16)

def draw():
    # Each with what it draws if nobody has touched it.
    drawn = {
        'random': [random.random(), random.Random(SEED).random()],
        'own': [own.random(), random.Random(SEED).random()],
    }
    if numpy:
        drawn['numpy'] = [numpy.random.random_sample(), numpy.random.RandomState(SEED).random_sample()]
        drawn['own_numpy'] = [own_numpy.random(), numpy.random.default_rng(SEED).random()]
    drawn['openssl'] = [ssl.RAND_bytes(16).hex()]
    drawn['kernel'] = [os.getrandom(16).hex(), uuid.uuid4().hex]
    return drawn

class Held:
    def __init__(self, address, port):
        self.files = {}
        for name in ('kept', 'deleted'):
            file = os.open('/root/' + name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.write(file, secret.encode())
            os.lseek(file, 5, os.SEEK_SET)
            self.files[name] = file
        os.unlink('/root/deleted')
        with open('/dev/shm/probe', 'w') as file:
            file.write(secret)
        outer, reader = connected(address, port)
        idle, greeting = connected(address, port)
        assert reader.readline().startswith(b'peer ') and greeting.readline().startswith(b'peer ')
        self.idle = {'error': None, 'at': None}
        thread(waits, self.idle, idle)
        listener = socket.create_server(('127.0.0.1', 0))
        thread(echoes, listener)
        inner, inner_reader = connected(*listener.getsockname())
        child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.talks = {
            'outer': Talk(outer.sendall, reader.readline),
            'inner': Talk(inner.sendall, inner_reader.readline),
            'child': Talk(child.stdin.write, child.stdout.readline),
        }
        self.kept = [outer, idle, listener, inner, child, greeting]
        seed()
        self.timers = {}

    def arm(self, rest, time_of_day):
        # Timers, and a file that is only in the page cache: nobody calls sync.
        now = time.time()
        self.timers = {'armed': now, 'rest': rest, 'at': now + time_of_day}
        thread(sleeps, self.timers, rest)
        thread(waits_until, self.timers, now + time_of_day)
        content = os.urandom(1 << 20)
        with open('/root/unflushed', 'wb') as file:
            file.write(content)
        return hashlib.sha256(content).hexdigest()

    def tell(self):
        def file(fd):
            at = os.lseek(fd, 0, os.SEEK_CUR)
            return {'offset': at, 'right': os.pread(fd, 64, at) == secret[at:].encode()}
        return {
            'files': {name: file(fd) for name, fd in self.files.items()},
            'idle': self.idle,
            'talks': {name: talk.told for name, talk in self.talks.items()},
            'timers': self.timers,
        }

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def reply(self, told):
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == '/clock':
            return self.reply(time.time())
        told = dict(state, pid=os.getpid(), secret=secret, environment=environment, numpy=bool(numpy))
        told.update(address=self.connection.getsockname()[0], **(held.tell() if held else {}))
        self.reply(told)
    def do_POST(self):
        global held
        order = json.loads(self.rfile.read(int(self.headers.get('Content-Length', 0))) or b'{}')
        if self.path == '/hold':
            held = Held(**order)
            self.reply(None)
        elif self.path == '/arm':
            self.reply(held.arm(**order))
        else:
            self.reply({'/seed': seed, '/draw': draw}[self.path]())
    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(('0.0.0.0', PORT), Handler)
thread(server.serve_forever)
wall, mono = time.time(), time.monotonic()
while True:
    # Many copies of this program run at once on few processors.
    time.sleep(0.02 if held else 0.25)
    wall_now, mono_now = time.time(), time.monotonic()
    stood = (wall_now - wall) - (mono_now - mono)
    if abs(stood) > 0.02:
        state['steps'].append({'before': wall, 'after': wall_now, 'stood': stood})
    state['late'] = max(state['late'], mono_now - mono)
    state['ticks'] += 1
    wall, mono = wall_now, mono_now
"""

# What a program that starts now sees of its machine.
FACTS = r"""
import hashlib, json, os, subprocess, sys, uuid
def read(path):
    try:
        with open(path, 'rb') as file:
            return file.read()
    except FileNotFoundError:
        return None
def text(path):
    content = read(path)
    return None if content is None else content.decode().strip()
def programs():
    for entry in os.listdir('/proc'):
        if entry.isdigit() and b'/root/probe.py' in (read(f'/proc/{entry}/cmdline') or b'').split(b'\0'):
            yield int(entry)
def address(link):
    (row,) = json.loads(subprocess.run(['ip', '-j', '-4', 'addr', 'show', link], capture_output=True).stdout)
    return row['addr_info'][0]['local']
unflushed = read('/root/unflushed')
print(json.dumps({
    'hostname': os.uname().nodename,
    'etc_hostname': text('/etc/hostname'),
    'machine_id': text('/etc/machine-id'),
    'boot_id': text('/proc/sys/kernel/random/boot_id'),
    'identity': json.loads(read('/run/coppice/identity.json')),
    'environment': {name: value for name, value in os.environ.items() if name.startswith('COPPICE_')},
    'unflushed': unflushed and hashlib.sha256(unflushed).hexdigest(),
    'tmpfs': text('/dev/shm/probe'),
    'programs': list(programs()),
    'address': address('eth0'),
    'mac': text('/sys/class/net/eth0/address'),
    'kernel': [os.getrandom(16).hex(), uuid.uuid4().hex],
}))
"""


def start_probe(sandbox: Sandbox, wire: Wire) -> dict[str, Any]:
    """Starts the program, holding nothing yet, and waits until it answers."""
    sandbox.filesystem.write("/root/probe.py", PROBE)
    sandbox.filesystem.write("/root/facts.py", FACTS)
    return _start(sandbox, wire)


def _start(sandbox: Sandbox, wire: Wire, how: str = "") -> dict[str, Any]:
    command = f"python3 /root/probe.py {SEED} {PORT} {how}"
    sh(sandbox, f"setsid {command} </dev/null >/root/probe.err 2>&1 & echo started")
    return until("the program in the guest answers", lambda: told(wire, sandbox.id), 60, 0.1)


def _call(wire: Wire, id: str, path: str) -> Any | None:
    reply = wire.request("GET", f"/v1/sandboxes/{id}/proxy/{PORT}/{path}")
    return reply.json() if reply.status == 200 else None


def told(wire: Wire, id: str) -> dict[str, Any] | None:
    """What the program says of itself; nothing where it does not run."""
    return _call(wire, id, "")


def _ordered(wire: Wire, id: str, path: str, order: object | None = None) -> Any:
    reply = wire.json("POST", f"/v1/sandboxes/{id}/proxy/{PORT}/{path}", order)
    assert reply.status == 200, f"the program in {id} did not {path}: {reply}"
    return reply.json()


def hold(wire: Wire, id: str, address: str, port: int) -> None:
    """Has it open and seed everything, with connections to there."""
    _ordered(wire, id, "hold", {"address": address, "port": port})


def seed(wire: Wire, id: str) -> None:
    """Has it seed its generators only."""
    _ordered(wire, id, "seed")


def arm(wire: Wire, id: str) -> str:
    """Has it set its timers and write a file, to be asked for right before a copy is made. Gives the file's hash."""
    return str(_ordered(wire, id, "arm", {"rest": REST, "time_of_day": TIME_OF_DAY}))


def draw(wire: Wire, id: str) -> dict[str, list[Any]]:
    """The next number of each generator, and the one that is due if nobody has touched it."""
    return dict(_ordered(wire, id, "draw"))


def facts(sandbox: Sandbox) -> dict[str, Any]:
    """What a program that starts now sees."""
    return dict(json.loads(sh(sandbox, "python3 /root/facts.py")))


@dataclass(frozen=True)
class Clock:
    """Between what a guest's clock is ahead of the host's, seconds."""

    low: float
    high: float

    @property
    def most(self) -> float:
        """It is not further off than this."""
        return max(abs(self.low), abs(self.high))

    @property
    def least(self) -> float:
        """It is at least so far off."""
        return 0.0 if self.low <= 0 <= self.high else min(abs(self.low), abs(self.high))


def clock(read: Callable[[], float], enough: float, patience: float = 20.0) -> Clock:
    """What all looks together leave possible: each reads the guest's clock between two looks at the host's.

    Ends when it is known whether the error is more than `enough`.
    """
    found, deadline = Clock(float("-inf"), float("inf")), time.monotonic() + patience
    while True:
        before = time.time()
        guest = read()
        after = time.time()
        found = Clock(max(found.low, guest - after), min(found.high, guest - before))
        if found.most <= enough or found.least > enough or time.monotonic() > deadline:
            return found


def reader(sandbox: Sandbox, wire: Wire) -> Callable[[], float]:
    """Reads its clock by the program, which is much quicker than a command. Where it was lost it is started again."""
    if told(wire, sandbox.id) is None:
        _start(sandbox, wire, "bare")
    return lambda: float(_call(wire, sandbox.id, "clock"))
