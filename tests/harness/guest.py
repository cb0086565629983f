"""Programs that run in guests to show what of them survives."""

import json
import shlex
import time
from dataclasses import dataclass
from typing import Any

from pandastack import Sandbox

from .poll import until


def sh(sandbox: Sandbox, command: str, **more: Any) -> str:
    """Standard output of a command that succeeds."""
    result = sandbox.exec(command, **more)
    assert result.exit_code == 0, f"{command!r} ended with {result.exit_code}: {result.stdout}{result.stderr}"
    return result.stdout


# Holds a secret that is nowhere but in its memory, and again in a file that has no name any more; counts; appends to a
# file that it never flushes to disk. Tells all of it, one line of JSON, to whoever reads the pipe.
HOLDER = r"""
import json, os, signal, sys, threading, time
secret = os.urandom(16).hex()
nameless = open('/root/nameless', 'w+'); os.unlink('/root/nameless')
nameless.write(secret); nameless.flush()
log = open('/root/holder.log', 'a', buffering=1)
state = {'ticks': 0}
def count():
    while True:
        state['ticks'] += 1
        log.write(f"{state['ticks']}\n")
        time.sleep(0.02)
threading.Thread(target=count, daemon=True).start()
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
os.mkfifo('/run/holder')
while True:
    try:
        with open('/run/holder', 'w') as out:
            nameless.seek(0)
            log_size = os.fstat(log.fileno()).st_size
            told = dict(state, pid=os.getpid(), secret=secret, nameless=nameless.read(), log=log_size)
            out.write(json.dumps(told) + '\n')
    except BrokenPipeError:
        # The reader before was slow to go, and took this for its writer; closing writes, too.
        pass
    time.sleep(0.01)
"""


#: What the program says. Once more when it took an earlier reader, who was slow to go, for this one.
ASK = 'for n in 1 2 3; do l=$(timeout 10 head -n1 /run/holder); test -n "$l" && break; done; echo "$l"'


@dataclass(frozen=True)
class Told:
    """What a holder says of itself."""

    pid: int
    secret: str
    nameless: str
    ticks: int
    log: int


def start_holder(sandbox: Sandbox) -> Told:
    """Starts the program in the background and waits until it answers."""
    sandbox.filesystem.write("/root/holder.py", HOLDER)
    sh(sandbox, "setsid python3 /root/holder.py </dev/null >/root/holder.err 2>&1 & echo started")
    return until("the program in the guest answers", lambda: try_holder(sandbox), 30)


def try_holder(sandbox: Sandbox) -> Told | None:
    """What the program says, or nothing when there is none."""
    result = sandbox.exec(f"test -p /run/holder && {ASK}", timeout_seconds=40)
    return Told(**json.loads(result.stdout)) if result.exit_code == 0 and result.stdout.strip() else None


def ask_holder(sandbox: Sandbox) -> Told:
    """What the program says; it must be there."""
    told = try_holder(sandbox)
    assert told is not None, "the program does not run here"
    return told


@dataclass(frozen=True)
class Identity:
    """What must differ between any two machines."""

    hostname: str
    machine_id: str
    random: str
    urandom: str
    generation: str
    sandbox_id: str


def identity(sandbox: Sandbox) -> Identity:
    """Who the guest believes to be, and the next numbers that its kernel draws."""
    code = (
        "import json, os; print(json.dumps({'identity': json.load(open('/run/coppice/identity.json')),"
        " 'hostname': os.uname().nodename, 'machine_id': open('/etc/machine-id').read().strip(),"
        " 'random': os.getrandom(32).hex(), 'urandom': open('/dev/urandom', 'rb').read(32).hex()}))"
    )
    told = json.loads(sh(sandbox, f"python3 -c {shlex.quote(code)}"))
    assert sh(sandbox, "cat /etc/hostname").strip() == told["hostname"]
    return Identity(
        told["hostname"],
        told["machine_id"],
        told["random"],
        told["urandom"],
        told["identity"]["generation"],
        told["identity"]["sandbox_id"],
    )


def clock_error(sandbox: Sandbox) -> float:
    """Seconds that the guest's clock is off at least: 0 when it lies between the host's before and after."""
    before = time.time()
    guest = float(sh(sandbox, "date +%s.%N"))
    after = time.time()
    return max(before - guest, guest - after, 0.0)
