"""What a server and its machines hold on the host, before and after."""

from pathlib import Path

from . import host
from .poll import until
from .server import Server

#: What a half of the server may have more of in the end, MiB.
GROWTH = 16
#: Threads come and go with the load; they are bounded, not equal.
THREADS = 8


def halves(server: Server) -> dict[str, int]:
    """Both processes of a server."""
    ((other, _),) = host.children(server.pid)
    return {"root": server.pid, "user": other}


def connections(server: Server) -> int:
    """Between the halves: each has a thread in the one that is root, and a descriptor in both.

    They are made when more is asked for at once than ever before, and kept.
    """
    count = 0
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        try:
            count += (task / "comm").read_text() == "broker\n"
        except OSError:
            # It has ended.
            continue
    return count


def footprint(server: Server) -> dict[str, int]:
    """Counts; memory in MiB. Descriptors without those of connections between the halves."""
    seen = {"vmms": len(host.vmm_pids(server.data_dir))}
    connected = connections(server)
    for name, pid in halves(server).items():
        memory = host.memory(pid)
        seen[f"{name} descriptors"] = len(list(Path(f"/proc/{pid}/fd").iterdir())) - connected
        seen[f"{name} threads"] = len(list(Path(f"/proc/{pid}/task").iterdir()))
        seen[f"{name} memory"] = (memory["Private_Dirty"] + memory.get("Swap", 0)) >> 20
    folders = ("sandboxes", "snapshots", "run", "staging")
    seen["files"] = sum(1 for folder in folders for _ in (server.data_dir / folder).iterdir())
    seen["slots"] = int(server.metric("coppice_network_slots", state="taken"))
    seen["mounts and loops"] = len([one for one in host.mounts_and_loops() if str(server.data_dir) in one])
    return seen


def assert_as_before(server: Server, before: dict[str, int], restarted: bool = False) -> dict[str, int]:
    """Soon, what there is is what there was: exactly, but for memory and threads.

    A server that was started anew meanwhile has other descriptors.
    """

    def bound(name: str) -> int:
        if "memory" in name:
            return GROWTH
        if "threads" in name:
            return THREADS
        # Connections between the halves are made when they are needed, one per thread that waits at most.
        if restarted and "descriptors" in name:
            return 2 * THREADS
        return 0

    def fits(now: dict[str, int]) -> bool:
        return all(now[name] - count <= bound(name) for name, count in before.items())

    seen = [footprint(server)]

    def look() -> bool:
        seen[0] = footprint(server)
        return fits(seen[0])

    try:
        until("it is as it was", look, 30, 0.5)
    except AssertionError:
        raise AssertionError(f"before {before}, now {seen[0]}") from None
    return seen[0]
