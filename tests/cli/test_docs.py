"""Docs are tested: every command that they name exists, blocks marked `sh test` run, links lead somewhere."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from harness.cli import Cli
from harness.paths import REPO, binary
from harness.server import Server

PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A command line of ours in a page: `coppice WORDS…`, up to the first word that is no name.
COMMAND = re.compile(r"(?:^|[`\s(])coppice((?: [a-z][a-z-]*)+)", re.MULTILINE)


def page_id(value: object) -> str | None:
    """For the test's id."""
    return str(value.relative_to(REPO)) if isinstance(value, Path) else None


def help_of(*words: str) -> str | None:
    """The help of a subcommand, if there is one."""
    done = subprocess.run([str(binary()), *words, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def subcommands(*words: str) -> list[str]:
    """Names below a command, by its help."""
    text = help_of(*words) or ""
    _, found, rest = text.partition("Commands:\n")
    if not found:
        return []
    names = re.findall(r"^  ([a-z][a-z-]*)", rest.split("\n\n")[0], re.MULTILINE)
    return [name for name in names if name != "help"]


def test_every_command_has_a_help_that_says_what_it_does() -> None:
    seen = []

    def walk(*words: str) -> None:
        text = help_of(*words)
        assert text is not None, words
        first = text.strip().splitlines()[0]
        assert len(first) > 6 and not first.startswith("Usage"), (words, first)
        assert "Usage:" in text
        seen.append(" ".join(words))
        for name in subcommands(*words):
            walk(*words, name)

    walk()
    expected = {"up", "doctor", "setup", "fork", "fork-tree", "promote", "explore", "tree", "version"}
    sandbox = (
        "create",
        "list",
        "get",
        "exec",
        "logs",
        "cp",
        "rm",
        "pause",
        "resume",
        "hibernate",
        "wake",
        "snapshot",
        "network",
        "ttl",
    )
    expected |= {f"sandbox {name}" for name in sandbox}
    expected |= {f"template {name}" for name in ("build", "list", "show", "delete")}
    expected |= {f"ports {name}" for name in ("list", "open", "close")} | {"port-forward"}
    expected |= {f"preview {name}" for name in ("create", "list", "revoke")}
    expected |= {f"snapshot {name}" for name in ("list", "get", "rm")}
    expected |= {f"token {name}" for name in ("create", "list", "revoke")}
    expected |= {f"workspace {name}" for name in ("list", "show", "set-quota", "delete")} | {"audit", "host show"}
    assert expected - set(seen) == set()


def test_up_has_the_options_that_the_docs_promise() -> None:
    text = help_of("up") or ""
    for option in ("--data-dir", "--listen", "--engine", "--default-ttl", "--memory-overcommit", "--dns", "--json"):
        assert option in text
    assert "/var/lib/coppice" in text and "127.0.0.1:8080" in text and "COPPICE_DATA_DIR" in text


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    code = [body for _, body in FENCE.findall(page.read_text())] + re.findall(r"`([^`\n]+)`", page.read_text())
    top = subcommands()
    unknown = []
    for words in COMMAND.findall("\n".join(code)):
        first, *rest = words.split()
        if first not in top or ((below := subcommands(first)) and rest and rest[0] not in [*below, "ls", "delete"]):
            unknown.append(words)
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", FENCE.sub("", page.read_text()))
    gone = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert gone == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_and_make_targets_that_a_page_names_exist(page: Path) -> None:
    words = re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))
    make = (REPO / "Makefile").read_text()
    gone = []
    for word in words:
        if match := re.fullmatch(r"make ([a-z-]+)", word):
            gone += [] if re.search(rf"^{match[1]}:", make, re.MULTILINE) else [word]
        elif re.fullmatch(r"(?:tests|crates|benches|templates|docs|scripts|demo)/[\w./-]+", word):
            gone += [] if (REPO / word).exists() else [word]
    assert gone == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    gone = []
    for file, test in re.findall(r"`([\w.-]+/[\w./-]+)::(\w+)`", page.read_text()):
        path = REPO / file
        if not path.is_file() or not re.search(rf"\b(?:def|fn) {test}\b", path.read_text()):
            gone.append(f"{file}::{test}")
    assert gone == []


@pytest.mark.parametrize("page", ["SPECIFICATION.md", "docs/threat-model.md", "docs/hazards.md"])
def test_every_promise_and_everything_that_holds_names_its_test(page: str) -> None:
    rows = re.findall(r"^\|(.+)\|$", (REPO / page).read_text(), re.MULTILINE)
    tested, naked = False, []
    for cells in (row.split("|") for row in rows):
        last = cells[-1].strip()
        if last in ("test", "enforced by"):
            tested = True
        elif not set(last) <= set("- "):
            # A table without such a column names nothing that holds; its header is no row of the table before.
            tested = tested and len(cells) > 2
            if tested and not re.search(r"`(?:tests|crates)/[\w./-]+(?:::\w+)?`", last):
                naked.append(cells[0].strip())
    assert naked == []


BLOCKS = [
    pytest.param(page, body, id=f"{page.relative_to(REPO)}-{number}")
    for page in PAGES
    for number, (info, body) in enumerate(FENCE.findall(page.read_text()))
    if info.split() == ["sh", "test"]
]


@pytest.mark.parametrize(("page", "body"), BLOCKS)
def test_a_marked_block_runs(server: Server, page: Path, body: str) -> None:
    cli = Cli(server)
    env = cli.env | {"PATH": f"{binary().parent}:{os.environ['PATH']}", "PANDASTACK_API": server.api}
    env |= {"PANDASTACK_API_KEY": server.key()}
    before = server.ids()
    done = subprocess.run(
        ["sh", "-euc", body], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, env=env, cwd=REPO
    )
    for id in server.ids() - before:
        server.wire().json("DELETE", f"/v1/sandboxes/{id}")
    assert done.returncode == 0, f"{page}:\n{body}\n{done.stdout}{done.stderr}"
