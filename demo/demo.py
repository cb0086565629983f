#!/usr/bin/env python3
"""The demo: fork a live machine three ways, keep the way that works.

Starts `coppice up`, drives it with the published PandaStack Python SDK (unmodified, from PyPI), explains what it does,
prints what it timed, and leaves nothing behind. Run it with `make demo`. Ends with 0 only when every check held.
"""

import argparse
import importlib.metadata
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

SDK = "pandastack"
SDK_VERSION = "0.10.0"
REPO = pathlib.Path(__file__).resolve().parent.parent
# Set in the process that runs inside the venv, so that a broken venv can't make it start itself for ever.
INSIDE = "COPPICE_DEMO_INSIDE"


# ---------------------------------------------------------------------------------------------------------------------
# What runs in the sandbox
# ---------------------------------------------------------------------------------------------------------------------

# A process whose state is nowhere but in its memory.
COUNTER = r'''
import os, secrets, socket

token = secrets.token_hex(8)      # random, made once, never written to any file
counter = 0
path = "/run/counter.sock"
if os.path.exists(path):
    os.unlink(path)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen(16)
while True:
    conn, _ = server.accept()
    if conn.recv(64).strip() == b"bump":
        counter += 1
    conn.sendall(f"{token} {counter} {os.getpid()}".encode())
    conn.close()
'''

ASK = r'''
import socket, sys

for word in sys.argv[1:]:
    conn = socket.socket(socket.AF_UNIX)
    conn.connect("/run/counter.sock")
    conn.sendall(word.encode())
    answer = conn.recv(200).decode()
    conn.close()
print(answer)
'''

BUGGY = '''def median(values):
    """The middle value; of an even number of values, the mean of the two in the middle."""
    middle = len(values) // 2
    return values[middle]
'''

TEST = '''from median import median

def check(values, expected):
    got = median(values)
    assert got == expected, f"median({values}) is {got}, not {expected}"

check([3], 3)
check([9, 1, 5], 5)
check([4, 1, 3, 2], 2.5)
print("all tests pass")
'''

PATCHES = {
    "sort-first": '''def median(values):
    values = sorted(values)
    return values[len(values) // 2]
''',
    "mean-of-two": '''def median(values):
    middle = len(values) // 2
    if len(values) % 2:
        return values[middle]
    return (values[middle - 1] + values[middle]) / 2
''',
    "sort-and-mean": '''def median(values):
    values = sorted(values)
    middle = len(values) // 2
    if len(values) % 2:
        return values[middle]
    return (values[middle - 1] + values[middle]) / 2
''',
}
GOOD = "sort-and-mean"
BUMPS = 41


class Failed(Exception):
    """A check did not hold, or something needed is missing. The text is for people."""


# ---------------------------------------------------------------------------------------------------------------------
# Talking to the person who watches
# ---------------------------------------------------------------------------------------------------------------------

TTY = sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def paint(code, text):
    return f"\033[{code}m{text}\033[0m" if TTY else text


def head(text):
    print(f"\n{paint('1', text)}", flush=True)


def say(text):
    print(f"  {text}", flush=True)


def good(text):
    say(f"{paint('32', 'ok')}  {text}")


def check(condition, held, broken):
    if not condition:
        raise Failed(broken)
    good(held)


def seconds(value):
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


# ---------------------------------------------------------------------------------------------------------------------
# The SDK in a virtual environment
# ---------------------------------------------------------------------------------------------------------------------


def have_sdk():
    try:
        return importlib.metadata.version(SDK) == SDK_VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


def enter_venv(cache):
    """Goes on inside a virtual environment that has the SDK; makes it when it is missing."""
    if have_sdk():
        return
    if os.environ.get(INSIDE):
        raise Failed(f"{SDK}=={SDK_VERSION} is not in {sys.prefix}: remove that directory and run the demo again")
    venv = pathlib.Path(cache) / "venv"
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(venv.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        venv = REPO / "target" / "demo-venv"
    python = venv / "bin" / "python"
    wanted = f"{SDK}=={SDK_VERSION}"
    probe = f"import importlib.metadata as m; assert m.version({SDK!r}) == {SDK_VERSION!r}"
    ready = python.exists() and subprocess.run([python, "-c", probe], stderr=subprocess.DEVNULL).returncode == 0
    if not ready:
        say(f"installing {wanted} from PyPI into {venv} (once)")
        for command in ([sys.executable, "-m", "venv", "--clear", venv], [python, "-m", "pip", "install", "-q", wanted]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise Failed(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}\n"
                             "On Debian the module is in the package python3-venv.")
    os.environ[INSIDE] = "1"
    os.execv(python, [str(python), __file__, *sys.argv[1:]])


# ---------------------------------------------------------------------------------------------------------------------
# The server
# ---------------------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`coppice up` in the background, in its own process group, so that Ctrl-C here doesn't reach it first."""

    def __init__(self, binary, data_dir, extra):
        self.machines_before = machines()
        self.log = tempfile.NamedTemporaryFile("w", prefix="coppice-demo-", suffix=".log", delete=False)
        command = [str(binary), "up", "--data-dir", str(data_dir), "--listen", f"127.0.0.1:{free_port()}", *extra]
        say(" ".join(command))
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True)
        self.ready = False
        self.exports = {}
        self.readers = [threading.Thread(target=self._stderr, daemon=True), threading.Thread(target=self._stdout, daemon=True)]
        for reader in self.readers:
            reader.start()

    def _stderr(self):
        for line in self.process.stderr:
            self.log.write(line)
            self.log.flush()
            # For people: progress and warnings. The rest of the log is in the file.
            if not self.ready and not re.match(r"(\x1b\[\d+m)*\d{4}-\d\d-\d\dT\S+ +(\x1b\[\d+m)*(INFO|DEBUG|TRACE)", line):
                print(f"  {paint('2', '| ' + line.rstrip())}", flush=True)

    def _stdout(self):
        for line in self.process.stdout:
            found = re.match(r"export (\w+)=(\S+)", line)
            if found:
                self.exports[found[1]] = found[2]

    def wait(self, limit):
        """Until it prints how to reach it."""
        start = time.monotonic()
        while not {"PANDASTACK_API", "PANDASTACK_API_KEY"} <= self.exports.keys():
            if self.process.poll() is not None:
                self.readers[0].join(2)
                raise Failed(f"`coppice up` ended with code {self.process.returncode} before it was ready")
            if time.monotonic() - start > limit:
                raise Failed(f"`coppice up` was not ready after {limit} seconds")
            time.sleep(0.02)
        self.ready = True
        return time.monotonic() - start

    def tail(self):
        text = pathlib.Path(self.log.name).read_text(errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in text[-40:])

    def stop(self):
        """Ends it; gives what went wrong, if anything."""
        trouble = None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                trouble = "the server did not stop within 30 seconds and was killed"
                self.process.kill()
                self.process.wait(10)
        if trouble is None and self.ready and self.process.returncode not in (0, -signal.SIGTERM, 128 + signal.SIGTERM, 130):
            trouble = f"the server ended with code {self.process.returncode}"
        for reader in self.readers:
            reader.join(2)
        self.log.close()
        return trouble


def machines():
    """Process ids of virtual machines on this host."""
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                program = (entry / "cmdline").read_bytes().split(b"\0")[0]
            except OSError:
                continue
            if b"qemu-system" in program:
                found.add(int(entry.name))
    return found


class Wire:
    """Listens in on the SDK's requests, to time them: the SDK itself is not changed."""

    def __init__(self, client):
        self.seen = []
        client.session.hooks["response"].append(self._hook)

    def _hook(self, response, *_args, **_kwargs):
        end = time.monotonic()
        path = response.request.path_url
        start = end - response.elapsed.total_seconds()
        body = response.json() if path.endswith("/fork-tree") and response.ok else None
        self.seen.append((response.request.method, path, start, end, body))

    def fork(self):
        """Of the fork-tree: seconds to its answer, seconds from request to the first exec's answer per child, answer."""
        _, _, start, end, body = next(row for row in self.seen if row[1].endswith("/fork-tree"))
        first = {}
        for child in (child["id"] for child in body["children"]):
            ends = [row[3] for row in self.seen if row[1].endswith(f"/{child}/exec")]
            first[child] = min(ends) - start
        return end - start, first, body


# ---------------------------------------------------------------------------------------------------------------------
# The story
# ---------------------------------------------------------------------------------------------------------------------


def run(sandbox, command):
    done = sandbox.exec(command, timeout_seconds=25)
    if done.exit_code != 0:
        raise Failed(f"in the sandbox, {command!r} ended with {done.exit_code}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def prepare(sandbox):
    """The live process, the program with a bug, and its test."""
    head("3. Something lives in it")
    for path, text in {"counter.py": COUNTER, "ask.py": ASK, "median.py": BUGGY, "test_median.py": TEST}.items():
        sandbox.filesystem.write(f"/work/{path}", text)
    run(sandbox, "cd /work && { setsid python3 counter.py </dev/null >/tmp/counter.log 2>&1 & }; "
                 "i=0; while [ ! -S /run/counter.sock ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done; "
                 f"python3 ask.py {'bump ' * BUMPS}")
    token, counter, pid = run(sandbox, "cd /work && python3 ask.py read").split()
    say("A Python process runs in the sandbox. It holds a random token and a counter, in memory only, in no file:")
    say(f"    token {token}   counter {counter}   process {pid}")
    failing = sandbox.exec("cd /work && python3 test_median.py", timeout_seconds=25)
    check(failing.exit_code != 0, "and there is a program with a bug; its test fails: "
          + (failing.stderr.strip().splitlines() or ["?"])[-1], "the test of the buggy program passes")
    return token, counter, pid


def candidates(sdk):
    """Each asks the live process, makes its own mark on it, patches the program, and runs the test."""
    made = []
    for number, (label, patch) in enumerate(PATCHES.items(), start=1):
        made.append(sdk.Candidate.shell(label, (
            f"cd /work || exit 9\necho inherited: $(python3 ask.py read)\n"
            f"echo diverged: $(python3 ask.py {'bump ' * number})\n"
            f"cat > median.py <<'PATCH'\n{patch}PATCH\nrm -rf __pycache__\npython3 test_median.py"), timeout_s=25))
    return made


def explore(sdk, wire, sandbox, state):
    head("4. Three patches are tried, each in its own copy of the running machine")
    say("explore() of the SDK forks the sandbox three ways: memory, processes and disk, all from one instant.")
    start = time.monotonic()
    result = sdk.explore(sandbox, candidates(sdk), max_concurrency=3, ttl_seconds=120)
    took = time.monotonic() - start
    if result.errors:
        raise Failed("explore reported: " + "; ".join(result.errors))
    outcomes = {outcome.label: outcome for outcome in result.outcomes}
    for label in PATCHES:
        if label not in outcomes:
            raise Failed(f"there is no outcome for {label}")
        outcome = outcomes[label]
        last = (outcome.stderr_tail.strip() or outcome.stdout_tail.strip() or "?").splitlines()[-1]
        verdict = paint("32", "green") if outcome.exit_code == 0 else paint("31", "red  ")
        say(f"{verdict}  {label:<14} exit {outcome.exit_code}   {last}")
    for number, label in enumerate(PATCHES, start=1):
        said = dict(line.split(": ", 1) for line in outcomes[label].stdout_tail.splitlines() if ": " in line)
        here = said.get("inherited", "").split()
        if here != list(state):
            raise Failed(f"branch {label} did not inherit the live process: it says {here}, the parent said {list(state)}")
        if said.get("diverged", "").split()[1:2] != [str(int(state[1]) + number)]:
            raise Failed(f"branch {label}'s counter did not go its own way: {said.get('diverged')}")
    good("in every branch the process was still running, with the same token, counter and process id")
    good("then each branch counted on by itself: copies, not one shared machine")
    green = [label for label in PATCHES if outcomes[label].exit_code == 0]
    check(green == [GOOD], f"exactly one patch is green: {GOOD}", f"green are {green}, and should be only {GOOD}")
    return result, took


def promoted(client, sandbox, result, state):
    head("5. The green one is promoted, the others are gone")
    winner = result.winner
    if winner is None:
        raise Failed("explore promoted no winner")
    token, counter, _ = run(winner, "cd /work && python3 ask.py read").split()
    expected = int(state[1]) + 1 + list(PATCHES).index(GOOD)
    check(token == state[0] and int(counter) == expected, f"the winner goes on with its memory: counter {counter}",
          f"the winner's state is {token} {counter}")
    check(run(winner, "cd /work && python3 test_median.py").endswith("all tests pass"), "and its test passes", "its test fails")
    token, counter, _ = run(sandbox, "cd /work && python3 ask.py read").split()
    check((token, counter) == state[:2], f"the parent was not touched: counter {counter}, and still the bug",
          f"the parent's state changed: {token} {counter}")
    left = {row.id for row in client.sandboxes.list()} & {outcome.sandbox_id for outcome in result.outcomes}
    check(left == {winner.id}, "the losers are deleted", f"branches that are left: {left}")


def report(started, created, sandbox, wire, explored, total):
    head("What it took")
    say("(One run on this machine; `make bench` measures with many.)")
    answered, first, body = wire.fork()
    rows = [
        ("server start to ready (image checks included)", seconds(started)),
        (f"create a sandbox ({sandbox.template}, restored from its baked snapshot)", seconds(created)),
        (f"fork-tree, {len(first)} children: request to answer", seconds(answered)),
    ]
    rows += [(f"    child {number}: request to the answer of its first command", seconds(value))
             for number, value in enumerate(first.values())]
    rows += [
        ("    of which the parent was paused", f"{body['parent_paused_ms']:.1f} ms"),
        ("    guest memory copied", f"{body['memory_bytes'] / 2**20:.1f} MiB, disk by {body['disk_clone']}"),
        ("explore: fork, three patches and tests, promote", seconds(explored)),
        ("the whole demo", seconds(total)),
    ]
    for what, value in rows:
        say(f"{what:<72} {value}")
    print(textwrap.fill(f"In the server's words: {body['inherited']}", 100, initial_indent="  ", subsequent_indent="  "))


def story(server, made, start):
    """All steps; what must be deleted goes into `made` as soon as it exists."""
    import pandastack as sdk

    started = server.wait(limit=1800)
    good(f"ready after {seconds(started)}")
    client = sdk.Client(api_url=server.exports["PANDASTACK_API"], api_key=server.exports["PANDASTACK_API_KEY"])
    wire = Wire(client)
    made["client"] = client

    head("2. A sandbox: a virtual machine of its own")
    begin = time.monotonic()
    sandbox = client.sandboxes.create(template="code-interpreter", ttl_seconds=600, metadata={"demo": "coppice"})
    created = time.monotonic() - begin
    made["parent"] = sandbox.id
    good(f"{sandbox.id} answers after {seconds(created)}: kernel {run(sandbox, 'uname -r')}")

    state = prepare(sandbox)
    result, explored = explore(sdk, wire, sandbox, state)
    promoted(client, sandbox, result, state)
    return lambda: report(started, created, sandbox, wire, explored, time.monotonic() - start)


def is_ours(row, parent):
    """Made by this demo (or by one that was killed). The data directory may hold other people's sandboxes too."""
    return row.metadata.get("demo") == "coppice" or (parent and parent in (row.id, row.metadata.get("fork_parent_id")))


def clean_up(server, made):
    """Deletes what the demo made and stops the server; gives the troubles."""
    head("6. Cleaning up")
    troubles = []
    client = made.get("client")
    if client is not None and server.process.poll() is None:
        try:
            mine = [row for row in client.sandboxes.list() if is_ours(row, made.get("parent"))]
            for row in mine:
                row.kill()
            left = [row.id for row in client.sandboxes.list() if is_ours(row, made.get("parent"))]
            if left:
                troubles.append(f"sandboxes are left: {left}")
        except Exception as error:  # noqa: BLE001: whatever it is, the server is stopped all the same
            troubles.append(f"could not delete the demo's sandboxes: {error}")
    trouble = server.stop()
    if trouble:
        troubles.append(trouble)
    deadline = time.monotonic() + 10
    while machines() - server.machines_before and time.monotonic() < deadline:
        time.sleep(0.1)
    left = machines() - server.machines_before
    if left:
        troubles.append(f"virtual machines are left, as processes {sorted(left)}")
    if not troubles:
        good("sandboxes deleted, server stopped, no process left")
    return troubles


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or REPO / "target")
    parser.add_argument("--coppice", type=pathlib.Path, default=target / "release" / "coppice", help="the binary")
    parser.add_argument("--data-dir", default=os.environ.get("COPPICE_DATA_DIR") or "/var/lib/coppice")
    parser.add_argument("--cache-dir", default="/var/cache/coppice")
    parser.add_argument("up_options", nargs="*", help="after --: more options for `coppice up`")
    return parser.parse_args()


def main():
    options = parse()
    start = time.monotonic()
    try:
        enter_venv(options.cache_dir)
        if not options.coppice.exists():
            raise Failed(f"{options.coppice} does not exist: run `make demo`, which builds it")
        if os.geteuid() != 0:
            raise Failed("starting virtual machines on this host needs root: run `sudo make demo`")
    except Failed as failure:
        print(f"{paint('31', 'demo failed:')} {failure}", file=sys.stderr)
        return 1
    print(paint("1", "Coppice: fork a live machine, try three fixes at once, keep the one that works"))
    head("1. The server")
    server = Server(options.coppice, options.data_dir, ["--cache-dir", options.cache_dir, *options.up_options])
    made, failure, finish = {}, None, None
    try:
        finish = story(server, made, start)
    except KeyboardInterrupt:
        failure = "interrupted"
    except Failed as error:
        failure = str(error)
    except Exception as error:  # noqa: BLE001: the SDK has many, and each is told with the server's log
        failure = f"{type(error).__name__}: {error}"
    troubles = clean_up(server, made)
    if failure or troubles:
        for text in [failure, *troubles]:
            if text:
                print(f"\n{paint('31', 'demo failed:')} {text}", file=sys.stderr)
        print(f"\nThe end of the server's log ({server.log.name}):\n{server.tail()}", file=sys.stderr)
        return 1
    os.unlink(server.log.name)
    finish()
    print(f"\n{paint('32', 'The demo held.')} Next: `coppice up`, and `coppice --help`.")
    return 0


if __name__ == "__main__":
    # A service manager's or CI's SIGTERM cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
