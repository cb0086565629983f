"""What a server makes on the host beside its files (namespace, link, rules, control groups), and whether it is gone."""

import json
import os
import subprocess
from pathlib import Path

from blake3 import blake3

CGROUPS = Path("/sys/fs/cgroup")


def instance(data_dir: Path) -> str:
    """How a server is named on its host: by its data directory."""
    return blake3(str(data_dir.resolve()).encode()).hexdigest()[:8]


def router(data_dir: Path) -> Path:
    """The namespace that all TAPs of a server are in."""
    return Path(f"/run/netns/coppice-{instance(data_dir)}")


def link(data_dir: Path) -> str:
    """The host's end of the way from there."""
    return f"cpc{instance(data_dir)}"


def tables() -> set[str]:
    """nftables tables of the host's own namespace."""
    done = subprocess.run(["nft", "-j", "list", "tables"], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return {row["table"]["name"] for row in json.loads(done.stdout)["nftables"] if "table" in row}


def cgroups(data_dir: Path) -> list[Path]:
    """Control groups of a server, in every hierarchy."""
    name = f"coppice-{instance(data_dir)}"
    # Not by a pattern of `Path.glob`, to which a group of another server that goes meanwhile is an error.
    return sorted(Path(folder, name) for folder, inner, _ in os.walk(CGROUPS) if name in inner)


def traces(data_dir: Path) -> list[str]:
    """All of these that are there."""
    found = [f"namespace {router(data_dir)}"] if router(data_dir).exists() else []
    found += [f"link {link(data_dir)}"] if Path(f"/sys/class/net/{link(data_dir)}").exists() else []
    found += [f"table {one}" for one in tables() if one == f"coppice_{instance(data_dir)}"]
    return found + [f"control group {one}" for one in cgroups(data_dir)]


def remove(data_dir: Path) -> None:
    """What a server that did not tidy up has left, after it was said."""
    commands = [["ip", "netns", "delete", router(data_dir).name]] if router(data_dir).exists() else []
    if Path(f"/sys/class/net/{link(data_dir)}").exists():
        commands.append(["ip", "link", "delete", link(data_dir)])
    if (table := f"coppice_{instance(data_dir)}") in tables():
        commands.append(["nft", "delete", "table", "inet", table])
    for command in commands:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    for group in cgroups(data_dir):
        for folder, _, _ in os.walk(group, topdown=False):
            try:
                Path(folder).rmdir()
            except OSError:
                # Somebody is still in it.
                continue
