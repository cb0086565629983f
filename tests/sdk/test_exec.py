"""Checklist C: commands, with the published Python client. Long waits are in `test_slow_waits.py`."""

import base64
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pandastack import BadRequestError, Client, CommandFailed, NotFoundError, Sandbox, SandboxTimeout

from harness.guest import sh
from harness.poll import until
from harness.recorder import recorded
from harness.wire import Wire


def running(sandbox: Sandbox, pattern: str) -> bool:
    """Whether a process with this in its command line runs. The question itself is no match."""
    return sandbox.exec(f"pgrep -f '[{pattern[0]}]{pattern[1:]}'").exit_code == 0


def test_31_output_and_exit_code(shared: Sandbox) -> None:
    result = shared.exec("echo hi")
    assert (result.stdout, result.stderr, result.exit_code) == ("hi\n", "", 0)
    assert type(result.duration_ms) is int and result.duration_ms >= 0


def test_31_duration_is_always_there(wire: Wire, shared: Sandbox) -> None:
    body = wire.json("POST", f"/v1/sandboxes/{shared.id}/exec", {"cmd": "sleep 0.3"}).json()
    assert set(body) == {"stdout", "stderr", "exit_code", "duration_ms"}
    assert 300 <= body["duration_ms"] < 5000


def test_32_a_failing_command_is_a_result(shared: Sandbox) -> None:
    result = shared.exec("echo e >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "e\n", 7)


def test_33_check_raises(shared: Sandbox) -> None:
    with pytest.raises(CommandFailed) as failed:
        shared.exec("false", check=True)
    assert failed.value.exit_code == 1


def test_34_an_unknown_command_is_127(shared: Sandbox) -> None:
    assert shared.exec("no-such-cmd").exit_code == 127
    assert shared.exec("kill -9 $$").exit_code == 128 + 9


@pytest.mark.parametrize("command", ["sleep 35.5", "sleep 35.5 & sleep 35.5", "trap '' TERM; sleep 35.5; sleep 35.5"])
def test_35_36_a_timeout_kills_the_whole_group_and_asks_once(shared: Sandbox, command: str) -> None:
    started = time.monotonic()
    with recorded() as sent, pytest.raises(SandboxTimeout):
        shared.exec(command, timeout_seconds=2)
    assert time.monotonic() - started < 10
    assert len(sent) == 1
    until("its processes are gone", lambda: not running(shared, "sleep 35.5"), 5)


def test_37_a_detached_child_holds_nothing_up(shared: Sandbox) -> None:
    started = time.monotonic()
    assert shared.exec("setsid sleep 67 </dev/null >/dev/null 2>&1 & echo launched").stdout == "launched\n"
    # A child that keeps standard output open neither.
    assert shared.exec("sleep 68 & echo launched").stdout == "launched\n"
    assert time.monotonic() - started < 10
    assert running(shared, "sleep 67")
    sh(shared, "pkill -f 'sleep 6[78]'")


@pytest.mark.parametrize("command", ["", "   "])
def test_38_an_empty_command_is_refused(shared: Sandbox, command: str) -> None:
    with pytest.raises(BadRequestError, match="cmd required"):
        shared.exec(command)


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("printf 'a\\nb\\n' | wc -l", "2\n"),
        ("""printf '%s|' "a b" 'c"d' e\\'f""", "a b|c\"d|e'f|"),
        ("cat <<'END'\n$HOME `x` \\\nEND", "$HOME `x` \\\n"),
        ("X=1; Y=$((X+1)); echo $Y\necho two", "2\ntwo\n"),
        ("printf 'é ✓ \u2028 \u2029 \u0085 😀'", "é ✓ \u2028 \u2029 \u0085 😀"),
        ("printf '\\001\\033[31m\\177'", "\x01\x1b[31m\x7f"),
    ],
)
def test_39_commands_and_output_are_not_touched(shared: Sandbox, command: str, output: str) -> None:
    result = shared.exec(command)
    assert (result.stdout, result.exit_code) == (output, 0)


def test_40_output_that_is_no_utf8_is_still_text(shared: Sandbox) -> None:
    assert shared.exec("printf 'a\\377b'").stdout == "a\ufffdb"
    assert shared.exec("printf '\\377' >&2").stderr == "\ufffd"


@pytest.mark.parametrize("size", [1 << 20, 5 << 20])
def test_41_large_output_is_whole(shared: Sandbox, size: int) -> None:
    code = f"import hashlib, os, sys, base64; t = base64.b64encode(os.urandom({size * 3 // 4}))"
    tell = "sys.stdout.buffer.write(t); print(hashlib.sha256(t).hexdigest(), file=sys.stderr)"
    result = shared.exec(f"python3 -c '{code}; {tell}'")
    assert len(result.stdout) == size
    assert hashlib.sha256(result.stdout.encode()).hexdigest() == result.stderr.strip()


def test_41_output_beyond_the_limit_is_refused_by_name(wire: Wire, shared: Sandbox) -> None:
    reply = wire.json("POST", f"/v1/sandboxes/{shared.id}/exec", {"cmd": "head -c 20M /dev/zero"})
    assert reply.status == 413 and "16777216" in reply.json()["error"]
    assert shared.exec("echo on").stdout == "on\n"


def test_41_fifty_commands_at_once(shared: Sandbox) -> None:
    with ThreadPoolExecutor(50) as pool:
        results = list(pool.map(lambda n: shared.exec(f"sleep 0.5; echo {n}; exit {n}"), range(50)))
    assert [(result.stdout, result.exit_code) for result in results] == [(f"{n}\n", n) for n in range(50)]


def test_41_a_slow_command_blocks_no_other(shared: Sandbox) -> None:
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(shared.exec, "sleep 3; echo slow")
        started = time.monotonic()
        assert shared.exec("echo quick").stdout == "quick\n"
        assert time.monotonic() - started < 2
        assert slow.result().stdout == "slow\n"


def test_43_a_deleted_sandbox_is_not_found(client: Client) -> None:
    sandbox = client.sandboxes.create(template="base")
    sandbox.kill()
    with pytest.raises(NotFoundError):
        sandbox.exec("true")


def test_44_run_code(shared: Sandbox) -> None:
    assert shared.run_code("print(2+2)").stdout == "4\n"
    assert shared.run_code("echo $BASH_VERSION | grep -c .", language="bash").stdout == "1\n"
    assert shared.run_code("print('''it's\n\"quoted\"''')").stdout == 'it\'s\n"quoted"\n'
    with recorded() as sent, pytest.raises(ValueError):
        shared.run_code("1", language="js")
    assert sent == []


def test_45_commands_run_passes_the_timeout_on(shared: Sandbox) -> None:
    assert shared.commands.run("echo x", timeout=5).stdout == "x\n"
    with pytest.raises(SandboxTimeout):
        shared.commands.run("sleep 20", timeout=1)


def test_46_the_first_exec_after_create_works_at_once(client: Client) -> None:
    with client.sandboxes.create(template="base") as sandbox, recorded() as sent:
        assert sandbox.exec("echo first").stdout == "first\n"
        assert len(sent) == 1


def test_more_fields_env_cwd_user_and_stdin(wire: Wire, shared: Sandbox) -> None:
    def run(cmd: str, **more: object) -> dict:
        reply = wire.json("POST", f"/v1/sandboxes/{shared.id}/exec", {"cmd": cmd} | more)
        assert reply.status == 200, reply
        return reply.json()

    assert run("echo $A-$B", env={"A": "x y", "B": "é'\""})["stdout"] == "x y-é'\"\n"
    assert run("pwd", cwd="/usr/bin")["stdout"] == "/usr/bin\n"
    assert run("id -un", user="nobody")["stdout"] == "nobody\n"
    assert run("id -u", user="0")["stdout"] == "0\n"
    text = base64.b64encode(bytes(range(256)) * 1000).decode()
    assert run("wc -c", stdin=text)["stdout"].strip() == str(len(text))
    assert run("cat; echo end")["stdout"] == "end\n"
    assert run("sleep 0.2; echo $?", timeout_seconds=1.5)["stdout"] == "0\n"


def test_a_command_knows_its_sandbox(shared: Sandbox) -> None:
    assert shared.id in sh(shared, "cat /run/coppice/identity.json")
    assert sh(shared, "hostname").strip() == sh(shared, "cat /etc/hostname").strip() != ""
