"""Makes the table of what each fork keeps from real machines, and compares it with the one in the README."""

from collections.abc import Callable

from pandastack import Client, Sandbox

from harness.guest import ask_holder, sh, start_holder, try_holder
from harness.paths import REPO
from harness.wire import Wire

HEADER = ["", "disk fork (`fork`)", "live fork (`fork-tree`)"]


def column(client: Client, wire: Wire, parent: Sandbox, path: str, delete_after: Callable[[str], None]) -> list[str]:
    """What one kind of fork does, in the words of the table."""
    before = ask_holder(parent)
    sh(parent, "echo unflushed >/root/u; echo memory >/dev/shm/m")
    fork = wire.json("POST", f"/v1/sandboxes/{parent.id}/{path}", {"count": 1}).json()
    child = client.sandboxes.get(fork["children"][0]["id"])
    delete_after(child.id)
    disk = child.exec("cat /root/u").stdout == "unflushed\n"
    memory = child.exec("cat /dev/shm/m").stdout == "memory\n"
    told = try_holder(child)
    survives = told is not None and (told.pid, told.secret) == (before.pid, before.secret)
    refused = [
        count
        for count in (0, 17)
        if wire.json("POST", f"/v1/sandboxes/{parent.id}/{path}", {"count": count}).status == 400
    ]
    after = ask_holder(parent)
    running = parent.refresh().status == "running" and after.pid == before.pid and after.ticks > before.ticks
    inherits = {(True, False): "disk, including writes not yet flushed", (True, True): "disk and memory"}
    return [
        inherits.get((disk, memory), "something else"),
        "yes" if survives else "no",
        {"cold": "kernel + init boot", "snapshot": "snapshot restore"}[child.boot_mode],
        "1-16" if refused == [0, 17] else "other counts",
        f"running (paused only for the {'clone' if path == 'fork' else 'capture'})" if running else "not running",
    ]


def test_the_readmes_table_of_what_a_fork_keeps_is_true(
    client: Client, wire: Wire, sandbox: Sandbox, delete_after: Callable[[str], None]
) -> None:
    start_holder(sandbox)
    rows = zip(
        [
            "child inherits",
            "running processes survive",
            "how the child starts",
            "children per call",
            "parent afterwards",
        ],
        column(client, wire, sandbox, "fork", delete_after),
        column(client, wire, sandbox, "fork-tree", delete_after),
        strict=True,
    )
    made = ["|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in (HEADER, *rows)]
    written = (REPO / "README.md").read_text().splitlines()
    missing = [line for line in made if line not in written]
    assert not missing, "the README does not have these lines, which this machine shows:\n" + "\n".join(missing)
