"""The `coppice` program as its users run it."""

import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

from .paths import binary
from .server import Server


@dataclass(frozen=True)
class Done:
    """One run of the program."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)


class Cli:
    """The program, talking to one server."""

    def __init__(self, server: Server) -> None:
        env = {name: text for name, text in os.environ.items() if not name.startswith(("PANDASTACK_", "COPPICE_"))}
        # By the credentials file of the data directory, as on an operator's machine.
        self.env = env | {"COPPICE_DATA_DIR": str(server.data_dir), "NO_COLOR": "1"}

    def run(self, *arguments: str, stdin: str | None = None, timeout: float = 120, **env: str) -> Done:
        """Runs it, whatever it ends with."""
        done = subprocess.run(
            [str(binary()), *arguments],
            input="" if stdin is None else stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.env | env,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def ok(self, *arguments: str, stdin: str | None = None) -> str:
        """Standard output of a run that succeeds."""
        done = self.run(*arguments, stdin=stdin)
        assert done.code == 0, f"coppice {' '.join(arguments)} ended with {done.code}\n{done.out}{done.err}"
        return done.out

    def json(self, *arguments: str) -> Any:
        """The same with `--json`, which prints JSON and nothing else."""
        return json.loads(self.ok("--json", *arguments))
