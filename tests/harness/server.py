"""A real `coppice up`, with a data directory of its own on the prepared volume.

The prepared templates and kernels are hard-linked into it (published files never change), so a start costs nothing,
page cache is shared, and a server that somebody else runs on the prepared directory is not touched.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pandastack import Client, Sandbox

from . import host, traces
from .paths import PREPARED, binary
from .poll import until
from .wire import Wire

#: What a fresh server may take until it answers: it adopts and reclaims first.
START = 60.0
#: What it may take to end after SIGTERM.
STOP = 25.0
#: What a killed half and the other one after it may take to be gone: not before the disk has what they were writing.
DEAD = 20.0


class ServerFailed(AssertionError):
    """The server did not start, or ended."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on.

    None of those that the kernel gives to connections: one may have it as its own when a server that was killed starts
    again, even the very connection that looks whether the server is there.
    """
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe:
            port = random.SystemRandom().randrange(max(below - 10_000, 1024), below)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def link_tree(source: Path, target: Path) -> None:
    """The same files under another directory; copies (clones, where the file system can) across file systems."""
    target.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(source, target, copy_function=os.link, symlinks=True, dirs_exist_ok=True)
    except (OSError, shutil.Error):
        clone_tree(source, target)


def clone_tree(source: Path, target: Path) -> None:
    """Files of their own, which may be changed without harm to the source."""
    target.mkdir(parents=True, exist_ok=True)
    command = ["cp", "-a", "--remove-destination", "--reflink=auto", "--sparse=auto", f"{source}/.", str(target)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def make_data_dir(
    parent: Path, templates: Iterable[str] | None = None, *, own: bool = False, prepared: Path = PREPARED
) -> Path:
    """A data directory with everything that a create needs: these templates or all, as links or as files of its own."""
    data = parent / "d"
    data.mkdir(parents=True, mode=0o755)
    put = clone_tree if own else link_tree
    put(prepared / "kernels", data / "kernels")
    for name in prepared_templates() if templates is None else templates:
        put(prepared / "templates" / name, data / "templates" / name)
    return data


def remove_workspace(folder: Path) -> None:
    """Of one run; and what all runs share, after the last of them."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        # Another run is there.
        pass


def prepared_templates() -> list[str]:
    """Names of the templates that `make setup` made."""
    folder = PREPARED / "templates"
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


class Server:
    """One server. Not started by its constructor."""

    def __init__(self, data_dir: Path, arguments: Sequence[str] = (), program: Path | None = None) -> None:
        self.program = program or binary()
        self.data_dir = data_dir.resolve()
        self.log_path = data_dir.parent / "server.log"
        self.arguments = list(arguments)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        #: More for its environment.
        self.env: dict[str, str] = {}

    @property
    def api(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "Server":
        """Starts it and waits until it answers."""
        assert self.process is None, "it runs already"
        self.process = self.spawn()
        until("the server answers /healthz", self._answers, START, 0.02)
        return self

    def spawn(self) -> subprocess.Popen[bytes]:
        """Starts a process of it, which is the caller's."""
        command = [str(self.program), "up", "--data-dir", str(self.data_dir), "--listen", f"127.0.0.1:{self.port}"]
        command += ["--no-prepare", *self.arguments]
        # Neither the caller's server nor its token may be found by accident.
        env = {name: text for name, text in os.environ.items() if not name.startswith(("PANDASTACK_", "COPPICE_"))}
        env |= self.env
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            code, self.process = self.process.returncode, None
            raise ServerFailed(f"`coppice up` ended with {code}:\n{self.log_tail()}")
        try:
            return self.wire(key="").request("GET", "/healthz", timeout=5).status == 200
        except OSError:
            return False

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self.process is not None, "it does not run"
        return self.process.pid

    def kill9(self) -> None:
        """Ends it without a chance to tidy up: the process that was started. Its VMs run on.

        Its other half follows, and answers until then: it is waited for, so that nobody takes it for
        the next server.
        """
        assert self.process is not None, "it does not run"
        halves = host.children(self.process.pid)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEAD)
        self.process = None
        until("the other half of it is gone", lambda: not any(host.runs(half) for half in halves), DEAD, 0.01)

    def die(self, cause: Callable[[], object], within: float = 30.0) -> None:
        """Does what makes it end by itself, and waits until both halves are gone."""
        assert self.process is not None, "it does not run"
        halves = host.children(self.process.pid)
        cause()
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {within:g} s:\n{self.log_tail(10)}") from None
        self.process = None
        until("the other half is gone", lambda: not any(host.runs(half) for half in halves), DEAD, 0.01)

    def stop(self) -> int:
        """Ends it politely and gives its exit code. Its VMs run on."""
        assert self.process is not None, "it does not run"
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(DEAD)
            self.process = None
            raise ServerFailed(f"the server did not end within {STOP:g} s of SIGTERM:\n{self.log_tail()}") from None
        self.process = None
        return code

    def restart(self) -> None:
        """`kill -9`, and a new one on the same data and port."""
        self.kill9()
        self.start()

    def key(self) -> str:
        """The operator's token, from `credentials.env`."""
        for line in (self.data_dir / "credentials.env").read_text().splitlines():
            name, _, text = line.removeprefix("export ").partition("=")
            if name == "PANDASTACK_API_KEY":
                return text.strip('"')
        raise AssertionError("credentials.env has no PANDASTACK_API_KEY")

    def foreign_key(self, workspace: str, **more: Any) -> str:
        """A token of another workspace, which comes into being with its first one."""
        reply = self.wire().json("POST", f"/v1/workspaces/{workspace}/tokens", {"label": "test", **more})
        assert reply.status == 201, reply
        return str(reply.json()["token"])

    def client(self, **more: Any) -> Client:
        """The published client. It does not repeat refused creates unless told to: a refusal must be seen."""
        return Client(**({"api_url": self.api, "api_key": self.key(), "max_create_retry_seconds": 0} | more))

    def wire(self, key: str | None = None) -> Wire:
        """Plain HTTP with the operator's token, or another one; with none for an empty text."""
        return Wire(self.api, self.key() if key is None else key or None)

    def ids(self) -> set[str]:
        """Sandboxes, by the list."""
        return {row["id"] for row in self.wire().json("GET", "/v1/sandboxes").json()}

    def delete_all(self) -> None:
        """Sandboxes and kept snapshots. One that is gone by itself meanwhile is fine."""
        wire = self.wire()
        for kind in ("sandboxes", "snapshots"):
            for row in wire.json("GET", f"/v1/{kind}").json():
                reply = wire.json("DELETE", f"/v1/{kind}/{row['id']}")
                assert reply.status in (204, 404), reply

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series of /metrics; 0 when there is none."""
        text = self.wire(key="").request("GET", "/metrics").body.decode()
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            head, _, rest = series.partition("{")
            if head == name and wanted <= set(rest.rstrip("}").split(",")):
                return float(value)
        return 0.0

    def left_overs(self) -> list[str]:
        """See [`host.left_overs`]."""
        return host.left_overs(self.data_dir)

    def settle(self, timeout: float = 20.0) -> None:
        """Waits until nothing of any sandbox or snapshot is left."""
        until("nothing is left", lambda: not self.left_overs() or None, timeout, 0.1) if self.left_overs() else None

    def log_tail(self, lines: int = 60) -> str:
        """The end of what it wrote."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"

    def vmm(self, sandbox: Sandbox | str) -> int:
        """Process id of a sandbox's VMM."""
        return host.vmm_pid(self.data_dir, sandbox if isinstance(sandbox, str) else sandbox.id)

    def close(self) -> list[str]:
        """Deletes everything, ends the server, and tells what was left all the same; that is ended too."""
        left: list[str] = []
        try:
            if self.process is None or self.process.poll() is not None:
                self.process = None
                self.start()
            self.delete_all()
            deadline = time.monotonic() + 20
            while self.left_overs() and time.monotonic() < deadline:
                time.sleep(0.1)
            left += self.left_overs()
            self.stop()
            # A server without sandboxes takes everything with it.
            left += traces.traces(self.data_dir)
        except (AssertionError, OSError) as error:
            left.append(f"{type(error).__name__}: {error}")
        finally:
            if self.process is not None and self.process.poll() is None:
                self.kill9()
            for pid in host.vmm_pids(self.data_dir):
                host.kill(pid)
            traces.remove(self.data_dir)
            shutil.rmtree(self.data_dir, ignore_errors=True)
        return left

    def end(self) -> None:
        """Closes it. Nothing may be left of it."""
        left = self.close()
        assert left == [], f"left behind: {left}\n{self.log_tail()}"
