"""Many rounds of the same: nothing is lost, and nothing is left. `COPPICE_ROUNDS=full` does as many as are promised."""

import os

import pytest

from harness import host
from harness.footprint import assert_as_before, footprint
from harness.guest import ask_holder, clock_error, identity, sh, start_holder
from harness.server import Server

FULL = os.environ.get("COPPICE_ROUNDS") == "full"
HIBERNATIONS = 100 if FULL else 6
LIVES = 200 if FULL else 10
#: Rounds before the host is looked at: what a server makes once and keeps (threads, staging memory, spare slots).
WARM_UP = 10 if FULL else 3
#: Adds 256 KiB that no page had before, to a file on the disk and to one in memory, and says what they are then.
GROW = (
    "head -c 262144 /dev/urandom | tee -a /dev/shm/grown >>/root/grown;"
    " for f in /root/grown /dev/shm/grown; do stat -c %s $f; sha256sum <$f; done"
)
TELL = "for f in /root/grown /dev/shm/grown; do stat -c %s $f; sha256sum <$f; done"


@pytest.mark.timeout(3600 if FULL else 240)
def test_hibernate_and_wake_rounds_lose_nothing(own_server: Server) -> None:
    sandbox = own_server.client().sandboxes.create(template="base", persistent=True)
    who, told = identity(sandbox), start_holder(sandbox)
    before: dict[str, int] = {}
    for round in range(HIBERNATIONS):
        grown = sh(sandbox, GROW)
        assert grown.split()[0] == str((round + 1) * 262144)
        sandbox.hibernate()
        assert host.vmm_pids(own_server.data_dir) == {}
        sandbox.wake()
        assert clock_error(sandbox) < 0.1
        # From the page cache, and then from the disk.
        assert sh(sandbox, TELL) == grown
        assert sh(sandbox, f"sync; echo 3 >/proc/sys/vm/drop_caches; {TELL}") == grown
        after = ask_holder(sandbox)
        assert (after.pid, after.secret) == (told.pid, told.secret) and after.ticks > told.ticks
        told = after
        if round + 1 == WARM_UP:
            before = footprint(own_server)
    after = assert_as_before(own_server, before)
    print(f"{HIBERNATIONS} rounds: {before} -> {after}")
    now = identity(sandbox)
    assert (now.hostname, now.machine_id) == (who.hostname, who.machine_id) and now.generation != who.generation
    assert sh(sandbox, "dmesg | grep 'EXT4-fs error' || true") == ""


@pytest.mark.timeout(3600 if FULL else 240)
def test_create_and_delete_rounds_leave_nothing(own_server: Server) -> None:
    client = own_server.client()
    before: dict[str, int] = {}
    for round in range(LIVES):
        sandbox = client.sandboxes.create(template="base")
        assert sh(sandbox, "echo usable") == "usable\n"
        if round % 5 == 0:
            for child in sandbox.fork_tree(2):
                child.kill()
        sandbox.kill()
        if round + 1 == WARM_UP:
            own_server.settle()
            before = footprint(own_server)
    after = assert_as_before(own_server, before)
    print(f"{LIVES} rounds: {before} -> {after}")
