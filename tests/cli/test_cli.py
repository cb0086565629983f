"""The command line against a real server: each command for people and with `--json`, exit codes, errors with hints."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pandastack import Client, Sandbox

from harness.cli import Cli
from harness.guest import sh
from harness.paths import binary
from harness.poll import until
from harness.server import Server


@pytest.fixture(scope="module")
def cli(server: Server) -> Cli:
    return Cli(server)


@pytest.fixture
def children(server: Server) -> Iterator[Callable[[str], list[str]]]:
    """Ids of the children of a sandbox; they are deleted when the test is over."""
    wire = server.wire()

    def of(parent: str) -> list[str]:
        rows = wire.json("GET", "/v1/sandboxes").json()
        return [row["id"] for row in rows if row["metadata"].get("fork_parent_id") == parent]

    before = server.ids()
    yield of
    for id in server.ids() - before:
        wire.json("DELETE", f"/v1/sandboxes/{id}")


def test_create_get_list_and_rm(cli: Cli, server: Server) -> None:
    id = cli.ok("sandbox", "create", "base", "--ttl", "900", "-m", "task=a b", "--quiet").strip()
    assert id in server.ids()
    row = cli.json("sandbox", "get", id)
    assert (row["id"], row["status"], row["ttl_seconds"], row["metadata"]["task"]) == (id, "running", 900, "a b")
    assert "deleted after 15 m idle" in cli.ok("sandbox", "ttl", id)
    changed = cli.json("sandbox", "ttl", id, "--ttl", "800", "--on-ttl", "hibernate")
    assert (changed["ttl_seconds"], changed["on_ttl"], changed["persistent"]) == (800, "hibernate", False)
    assert cli.json("sandbox", "get", id)["on_ttl"] == "hibernate"
    assert id in {one["id"] for one in cli.json("sandbox", "list")}
    table = cli.ok("sandbox", "ls")
    assert id in table and "running" in table and "\x1b" not in table
    assert id in cli.ok("sandbox", "list", "--quiet").split()
    assert "a b" in cli.ok("sandbox", "get", id[:8])
    made = cli.json("sandbox", "create", "base")
    assert made["boot_ms"] > 0
    human = cli.run("sandbox", "create", "base")
    # Standard output is the id alone, so that a script can take it.
    third = human.out.strip()
    assert human.code == 0 and re.search(r"ready after \d", human.err) and f"{third}\n" == human.out
    assert cli.json("sandbox", "rm", id[:13], made["id"], third)["deleted"] == [id, made["id"], third]
    assert server.ids() & {id, made["id"], third} == set()


def test_rm_of_a_mistyped_id_deletes_nothing(cli: Cli, server: Server, sandbox: Sandbox) -> None:
    done = cli.run("sandbox", "rm", sandbox.id[:13], "ffffffff-nope")
    assert done.code == 1 and "no sandbox has an id that begins with" in done.err and "hint:" in done.err
    assert sandbox.id in server.ids()


def test_exec_gives_the_commands_output_and_exit_code(cli: Cli, shared: Sandbox) -> None:
    done = cli.run("sandbox", "exec", shared.id, "echo out; echo err >&2; exit 7")
    assert (done.out, done.err, done.code) == ("out\n", "err\n", 7)
    # Several words are a program and its arguments.
    assert cli.ok("sandbox", "exec", shared.id, "--", "printf", "%s|", "a b", "$HOME", "it's") == "a b|$HOME|it's|"
    assert (
        cli.ok("sandbox", "exec", shared.id[:13], "cat", stdin="from standard input é\n") == "from standard input é\n"
    )
    assert cli.ok(
        "sandbox", "exec", "-w", "/usr", "-e", "A=b c", "-u", "nobody", shared.id, 'pwd; echo "$A"; id -un'
    ) == ("/usr\nb c\nnobody\n")
    reply = cli.run("--json", "sandbox", "exec", shared.id, "echo out; exit 3")
    assert reply.code == 3 and reply.json()["stdout"] == "out\n" and reply.json()["exit_code"] == 3
    done = cli.run("sandbox", "exec", "-t", "1", shared.id, "sleep 20")
    assert done.code == 124 and "timeout" in done.err.lower()


def test_exec_streams(cli: Cli, shared: Sandbox) -> None:
    command = [str(binary()), "sandbox", "exec", "--no-stdin", shared.id, "echo first; sleep 3; echo second"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=cli.env) as process:
        assert process.stdout is not None
        started = time.monotonic()
        assert process.stdout.readline() == "first\n"
        assert time.monotonic() - started < 2.5
        assert process.stdout.read() == "second\n"
    assert process.returncode == 0


def test_interrupting_exec_kills_the_command(cli: Cli, shared: Sandbox) -> None:
    command = [str(binary()), "sandbox", "exec", "--no-stdin", shared.id, "sleep 74.5"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=cli.env) as process:
        until("it runs", lambda: shared.exec("pgrep -f 'sleep 7[4].5'").exit_code == 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    until("it is killed", lambda: shared.exec("pgrep -f 'sleep 7[4].5'").exit_code == 1, 15)


def test_logs(cli: Cli, shared: Sandbox) -> None:
    sh(shared, "echo one-for-the-log >/dev/console")
    until("it is there", lambda: "one-for-the-log" in cli.ok("sandbox", "logs", shared.id), 10)
    assert "one-for-the-log" in cli.json("sandbox", "logs", shared.id)["log"]
    assert len(cli.ok("sandbox", "logs", "-n", "1", shared.id).splitlines()) == 1


def test_cp_both_ways(cli: Cli, shared: Sandbox, tmp_path: Path) -> None:
    content = os.urandom(300_000)
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "a b").write_bytes(content)
    (tmp_path / "tree" / "sub" / "c").write_text("é")
    assert cli.json("sandbox", "cp", str(tmp_path / "tree"), f"{shared.id}:/root/copied")["files"] == 2
    assert "copied 1 file" in cli.ok("sandbox", "cp", f"{shared.id[:13]}:/root/copied/a b", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == content
    cli.ok("sandbox", "cp", f"{shared.id}:/root/copied", str(tmp_path / "tree2"))
    assert (tmp_path / "tree2" / "sub" / "c").read_text() == "é"
    assert cli.ok("sandbox", "cp", f"{shared.id}:/root/copied/sub/c", "-") == "é"
    cli.ok("sandbox", "cp", "-", f"{shared.id}:/root/piped", stdin="piped")
    assert sh(shared, "cat /root/piped") == "piped"
    done = cli.run("sandbox", "cp", f"{shared.id}:/root/none", str(tmp_path / "x"))
    assert done.code == 1 and "/root/none" in done.err and not (tmp_path / "x").exists()
    assert cli.run("sandbox", "cp", "a", "b").code == 2


def test_hibernate_and_wake(cli: Cli, sandbox: Sandbox) -> None:
    assert cli.json("sandbox", "hibernate", sandbox.id)["status"] == "hibernated"
    assert cli.json("sandbox", "get", sandbox.id)["status"] == "hibernated"
    assert "hibernated" in cli.ok("sandbox", "list")
    assert cli.json("sandbox", "wake", sandbox.id)["status"] == "running"
    assert "hibernated" in cli.ok("sandbox", "hibernate", sandbox.id)
    assert cli.ok("sandbox", "exec", sandbox.id, "echo on") == "on\n"
    assert cli.json("sandbox", "get", sandbox.id)["status"] == "running"


def test_pause_and_resume(cli: Cli, sandbox: Sandbox) -> None:
    assert cli.json("sandbox", "pause", sandbox.id)["status"] == "paused"
    done = cli.run("sandbox", "exec", sandbox.id, "true")
    assert done.code == 1 and "paused" in done.err and "hint: resume it first" in done.err
    assert cli.json("sandbox", "resume", sandbox.id)["status"] == "running"
    assert "paused" in cli.ok("sandbox", "pause", sandbox.id)
    cli.ok("sandbox", "resume", sandbox.id)
    assert cli.ok("sandbox", "exec", sandbox.id, "echo on") == "on\n"


def test_snapshots(cli: Cli, sandbox: Sandbox, delete_after: Callable[[str], None]) -> None:
    sh(sandbox, "echo kept >/dev/shm/x")
    first = cli.json("sandbox", "snapshot", sandbox.id)["id"]
    human = cli.ok("sandbox", "snapshot", sandbox.id)
    second = human.split()[0]
    assert "coppice sandbox create --from-snapshot" in human
    rows = [row["id"] for row in cli.json("snapshot", "list", "--sandbox", sandbox.id[:13])]
    assert rows == [second, first]
    assert first in cli.ok("snapshot", "ls") and second in cli.ok("snapshot", "get", second[:13])
    copy = cli.json("sandbox", "create", "--from-snapshot", first[:13])["id"]
    delete_after(copy)
    assert cli.ok("sandbox", "exec", copy, "cat /dev/shm/x") == "kept\n"
    assert cli.json("snapshot", "rm", first, second)["deleted"] == [first, second]
    assert cli.json("snapshot", "list") == []
    assert "no snapshots" in cli.ok("snapshot", "list")


def test_fork_tree_and_fork_say_in_one_line_what_children_have(
    cli: Cli, sandbox: Sandbox, children: Callable[[str], list[str]]
) -> None:
    sh(sandbox, "echo memory >/dev/shm/x; echo disk >/root/x")
    tree = cli.json("fork-tree", sandbox.id, "-n", "2", "--ttl", "300", "--on-ttl", "hibernate", "-m", "k=v")
    assert {child["on_ttl"] for child in tree["children"]} == {"hibernate"}
    ids = [child["id"] for child in tree["children"]]
    assert ids == children(sandbox.id) and {child["ttl_seconds"] for child in tree["children"]} == {300}
    for id in ids:
        assert cli.ok("sandbox", "exec", id, "cat /dev/shm/x /root/x") == "memory\ndisk\n"
    human = cli.ok("fork-tree", sandbox.id[:13])
    (live,) = [
        line for line in human.splitlines() if "memory" in line and "does not" in line.replace("do not", "does not")
    ]
    assert "running processes" in live
    human = cli.ok("fork", sandbox.id, "-n", "1")
    (plain,) = [line for line in human.splitlines() if "does not have" in line]
    assert "running processes" in plain.split("does not have")[1]
    plain_child = (set(children(sandbox.id)) - set(ids)).pop()
    assert any(id in human or id[:8] in human for id in children(sandbox.id)), (human, plain_child)


def test_tree_draws_the_lineage(cli: Cli, sandbox: Sandbox, children: Callable[[str], list[str]]) -> None:
    first = cli.json("fork-tree", sandbox.id, "-n", "2")["children"][0]["id"]
    grandchild = cli.json("fork-tree", first)["children"][0]["id"]
    lines = [line for line in cli.ok("tree").splitlines() if line.strip()]
    at = next(number for number, line in enumerate(lines) if line.startswith(sandbox.id[:8]))
    expected = [("├─ ", children(sandbox.id)[0]), ("└─ ", children(sandbox.id)[1])]
    below = ("│  └─ ", grandchild) if first == expected[0][1] else ("   └─ ", grandchild)
    expected.insert(1 + [id for _, id in expected].index(first), below)
    drawn = lines[at + 1 : at + 4]
    assert all(line.startswith(head + id[:8]) for line, (head, id) in zip(drawn, expected, strict=True)), drawn
    (root,) = [node for node in cli.json("tree") if node["id"] == sandbox.id]
    assert [child["id"] for child in root["children"]] == children(sandbox.id)
    assert root["children"][0]["children"][0]["id"] == grandchild


def test_promote(cli: Cli, sandbox: Sandbox, children: Callable[[str], list[str]]) -> None:
    cli.ok("fork-tree", sandbox.id, "-n", "3")
    winner, *losers = children(sandbox.id)
    assert "promoted" in cli.ok("promote", winner, "--keep-siblings")
    assert sorted(cli.json("promote", winner)["deleted"]) == sorted(losers)
    assert children(sandbox.id) == [winner]
    done = cli.run("promote", sandbox.id)
    assert done.code == 1 and "not a child" in done.err


TRIES = ["--try", "bad=exit 1", "--try", "good=touch /root/mine; echo fine", "--try", "slow=sleep 20"]


def test_explore_promotes_the_winner_and_losers_die(
    cli: Cli, sandbox: Sandbox, children: Callable[[str], list[str]]
) -> None:
    sh(sandbox, "echo memory >/dev/shm/x")
    outcome = cli.json("explore", sandbox.id, *TRIES, "--timeout", "2")
    assert (outcome["winner"], outcome["promoted"], len(outcome["deleted"])) == ("good", True, 2)
    assert children(sandbox.id) == [outcome["winner_id"]]
    branches = {branch["label"]: branch for branch in outcome["branches"]}
    assert branches["bad"]["exit_code"] == 1 and branches["slow"]["timed_out"] is True
    assert branches["good"]["files_changed"] == ["/root/mine"] and branches["good"]["stdout_tail"] == "fine\n"
    assert cli.ok("sandbox", "exec", outcome["winner_id"], "cat /dev/shm/x; ls /root/mine") == "memory\n/root/mine\n"
    assert cli.run("sandbox", "exec", sandbox.id, "ls /root/mine").code == 2


def test_explore_for_people_is_a_table_and_scores_decide(
    cli: Cli, sandbox: Sandbox, children: Callable[[str], list[str]]
) -> None:
    tries = ["--try", "one=echo 1 >/root/s", "--try", "nine=echo 9 >/root/s", "--try", "five=echo 5 >/root/s"]
    done = cli.run("explore", sandbox.id[:13], *tries, "--score", "cat /root/s")
    assert done.code == 0, done
    assert "winner: nine" in done.out and "deleted 2 branches" in done.out and "runs on" in done.out
    for word in ("label", "exit", "score", "time", "files changed"):
        assert word in done.out.lower()
    assert len(children(sandbox.id)) == 1


def test_explore_without_a_winner_fails_and_leaves_nothing(cli: Cli, server: Server, sandbox: Sandbox) -> None:
    before = server.ids()
    done = cli.run("explore", sandbox.id, "--try", "a=false", "--try", "b=exit 9")
    assert done.code == 1 and "no branch succeeded" in done.err
    assert server.ids() == before


def test_interrupting_explore_deletes_its_branches(cli: Cli, server: Server, sandbox: Sandbox) -> None:
    before = server.ids()
    command = [str(binary()), "explore", sandbox.id, "--try", "a=sleep 50", "--try", "b=sleep 50"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=cli.env) as process:
        until("the branches are there", lambda: len(server.ids()) == len(before) + 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    until("the branches are gone", lambda: server.ids() == before, 15)


def test_templates(cli: Cli, client: Client) -> None:
    names = {row["name"] for row in cli.json("template", "list")}
    assert names == {template.name for template in client.templates.list()}
    assert "base" in cli.ok("template", "list")
    assert cli.json("template", "show", "base")["name"] == "base"
    assert "base" in cli.ok("template", "show", "base")
    done = cli.run("template", "show", "none")
    assert done.code == 1 and "none" in done.err


def test_version(cli: Cli, server: Server) -> None:
    told = cli.json("version")
    assert told["version"] and told["server"]["url"] == server.api and "qemu" in told["server"]["engine"]
    assert "qemu" in cli.ok("version")
    assert cli.ok("--version").startswith("coppice ")


def test_doctor_says_what_this_host_can_do(cli: Cli) -> None:
    done = cli.run("doctor")
    assert done.code == 0, done
    for word in ("qemu", "reflink", "kvm"):
        assert word in done.out.lower()
    told = cli.run("--json", "doctor")
    assert told.code == 0 and told.json()


def test_doctor_names_what_is_missing_with_a_hint_and_makes_nothing(cli: Cli, tmp_path: Path) -> None:
    done = cli.run("doctor", "--data-dir", str(tmp_path / "none"))
    lines = done.out.splitlines()
    at = next(number for number, line in enumerate(lines) if f"{tmp_path}/none does not exist" in line)
    assert lines[at].startswith("warn") and "→" in lines[at + 1] and "coppice setup" in lines[at + 1]
    done = cli.run("doctor", COPPICE_QEMU="/nonexistent/qemu")
    assert done.code == 1 and "/nonexistent/qemu" in done.out + done.err and "→" in done.out
    assert list(tmp_path.iterdir()) == []


def test_errors_have_codes_hints_and_exit_codes(cli: Cli, shared: Sandbox) -> None:
    done = cli.run("sandbox", "get", "00000000-0000-0000-0000-000000000000")
    assert done.code == 1 and done.err.startswith("error: ") and done.out == ""
    done = cli.run("--json", "sandbox", "get", "00000000-0000-0000-0000-000000000000")
    error = json.loads(done.err)
    assert error["code"] == "sandbox_not_found" and error["status"] == 404 and done.out == ""
    done = cli.run("--json", "sandbox", "rm", "zzzz")
    assert done.code == 1 and json.loads(done.err)["hint"]
    assert cli.run("sandbox", "create", "no-such").code == 1
    for wrong in (
        ["nonsense"],
        ["fork-tree", shared.id, "-n", "17"],
        ["explore", shared.id],
        ["explore", shared.id, "--try", "x"],
    ):
        assert cli.run(*wrong).code == 2, wrong
    assert json.loads(cli.run("--json", "fork-tree", shared.id, "-n", "0").err)["code"] == "usage"


def test_without_a_server_the_error_says_what_to_do(cli: Cli, tmp_path: Path) -> None:
    done = cli.run("sandbox", "list", COPPICE_DATA_DIR=str(tmp_path))
    assert done.code == 1 and "coppice up" in done.err
    done = cli.run("--api", "http://127.0.0.1:9", "--api-key", "k", "sandbox", "list")
    assert done.code == 1 and "127.0.0.1:9" in done.err
    done = cli.run("--api-key", "pds_00000000000000000000000000000000", "sandbox", "list")
    assert done.code == 1 and "token" in done.err


def test_ambiguous_beginnings_of_ids_are_refused(cli: Cli, client: Client, delete_after: Callable[[str], None]) -> None:
    # 17 ids share one of 16 first letters at least once.
    made = [client.sandboxes.create(template="base")]
    delete_after(made[0].id)
    while len({one.id[0] for one in made}) == len(made):
        made.append(client.sandboxes.create(template="base"))
        delete_after(made[-1].id)
    done = cli.run("sandbox", "rm", made[-1].id[0])
    assert done.code == 1 and "is the beginning of" in done.err and "give more of the id" in done.err


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_a_create_leaves_nothing(cli: Cli, server: Server, signal_number: int) -> None:
    before, files = server.ids(), sorted(server.left_overs())
    command = [str(binary()), "sandbox", "create", "base"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=cli.env) as process:
        until("it has begun", lambda: sorted(server.left_overs()) != files, 10, 0.002)
        process.send_signal(signal_number)
        code = process.wait(20)
        out = process.stdout.read() if process.stdout else b""
    if code == 0:
        # It was quicker than the signal.
        cli.ok("sandbox", "rm", out.split()[0].decode())
    until("nothing of it is left", lambda: server.ids() == before and sorted(server.left_overs()) == files, 30, 0.1)


def test_one_command_line_many_at_once(cli: Cli, shared: Sandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda n: cli.ok("sandbox", "exec", shared.id, f"echo {n}"), range(8)))
    assert outputs == [f"{n}\n" for n in range(8)]
