"""A smoke test with the published npm client: its defaults, an exec, a fork-tree, a promote, its command line."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.paths import CACHE
from harness.server import Server

PACKAGE = "@pandastack/sdk@0.9.0"

SCRIPT = r"""
const { Sandbox, Client } = require("@pandastack/sdk");
const assert = require("node:assert");
(async () => {
  const client = new Client({ apiUrl: process.env.PANDASTACK_API, apiKey: process.env.PANDASTACK_API_KEY });
  const box = await client.sandboxes.create({ metadata: { from: "node" } });
  const made = [box];
  try {
    assert.equal(box.info.status, "running");
    const hi = await box.exec("echo 'h\u00e9 \u2028'; exit 3");
    assert.deepEqual([hi.stdout, hi.exitCode ?? hi.exit_code], ["h\u00e9 \u2028\n", 3]);
    let streamed = "";
    const code = await box.execStream("printf 'a\\r\\nb'; exit 5", { onStdout: (text) => (streamed += text) });
    assert.deepEqual([streamed, code], ["a\r\nb", 5]);
    await box.filesystem.write("/root/f", "from node");
    await box.exec("echo memory >/dev/shm/x");
    const children = await box.forkTree({ count: 2, metadata: { k: "v" } });
    made.push(...children);
    assert.equal(children.length, 2);
    for (const child of children) {
      const told = await child.exec("cat /dev/shm/x /root/f");
      assert.equal(told.stdout, "memory\nfrom node");
      assert.equal(child.info.metadata.fork_parent_id, box.id);
    }
    const answer = await children[1].promote({ cleanupSiblings: true });
    assert.deepEqual(answer.deleted, [children[0].id]);
    made.splice(1, 1);
    console.log(JSON.stringify({ template: box.info.template, id: box.id }));
  } finally {
    for (const one of made) await one.kill();
  }
})().catch((error) => { console.error(error); process.exit(1); });
"""


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The package, installed once per version."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node and npm are not installed")
    folder = CACHE / f"npm-{PACKAGE.rsplit('@', 1)[1]}"
    if not (folder / "node_modules" / "@pandastack" / "sdk").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), PACKAGE]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            pytest.skip(f"npm could not install {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "node_modules"


@pytest.fixture
def env(server: Server, node_modules: Path) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PANDASTACK_")}
    home = {"HOME": "/nonexistent", "NODE_PATH": str(node_modules)}
    return clean | home | {"PANDASTACK_API": server.api, "PANDASTACK_API_KEY": server.key()}


def test_113_the_npm_client_creates_runs_forks_and_promotes(env: dict[str, str]) -> None:
    done = subprocess.run(
        ["node", "-e", SCRIPT], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90, env=env
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["template"] in ("base", "ubuntu-24.04")


def test_141_the_npm_command_line(env: dict[str, str], node_modules: Path, delete_after: Callable[[str], None]) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        program = node_modules / ".bin" / "pandastack"
        done = subprocess.run(
            [str(program), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, env=env
        )
        assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
        return done.stdout

    id = json.loads(run("sandbox", "create", "-t", "base"))["id"]
    delete_after(id)
    assert id in run("sandbox", "list")
    run("sandbox", "exec", id, "--", "exit 3", code=3)
    forked = run("sandbox", "fork-tree", id, "--count", "2")
    children = [row["id"] for row in json.loads(run("sandbox", "list")) if row["metadata"].get("fork_parent_id") == id]
    for child in children:
        delete_after(child)
    assert len(children) == 2 and all(child in forked for child in children)
    run("sandbox", "promote", children[0])
    assert "ttl_seconds" in run("sandbox", "lifecycle", id)
    run("sandbox", "set-ttl", id, "--ttl", "700")
    snapshot = run("sandbox", "snapshot", id)
    assert snapshot.strip()
    for row in json.loads(run("snapshot", "list")):
        run("snapshot", "delete", row["id"])
    run("sandbox", "kill", id)
    assert json.loads(run("me"))["user_id"]
