"""Networks that a test makes: namespaces with a link to the host's own, and servers in them that tell who asked.

A namespace here has no name: descriptors of this process hold it, and its link ends with it. So nothing is left behind,
whatever this process dies of. Several test processes at once get different addresses.
"""

import ctypes
import fcntl
import itertools
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
#: "Outside" as sandboxes see it: TEST-NET-2, which is in no private range, and which nobody routes.
OUTSIDE = IPv4Network("198.51.100.0/24")
#: Ranges that no sandbox may reach, whoever is there. Of link-local the part that the product's own link isn't in.
PRIVATE = [
    IPv4Network("10.128.0.0/12"),
    IPv4Network("172.16.0.0/12"),
    IPv4Network("192.168.0.0/16"),
    IPv4Network("100.64.0.0/10"),
    IPv4Network("169.254.200.0/21"),
]
#: Held while free addresses are looked for and taken.
LOCK = Path("/run/coppice-test-net.lock")

libc = ctypes.CDLL(None, use_errno=True)
numbers = itertools.count()


def check(result: int, what: str) -> None:
    """Raises what a call of the C library failed with."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def on_thread(action: Callable[[], T]) -> T:
    """Runs it on a thread of its own, which may go into another namespace and never comes back."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(action())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def ip(*arguments: str) -> str:
    """`ip`, in the namespace of the calling thread."""
    done = subprocess.run(["ip", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Namespace:
    """A network namespace: empty at first, with `lo` up."""

    def __init__(self) -> None:
        def make() -> int:
            check(libc.unshare(CLONE_NEWNET), "unshare")
            ip("link", "set", "lo", "up")
            return os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        self.fd = on_thread(make)

    @classmethod
    def of(cls, path: str | Path) -> "Namespace":
        """One that is there already, as /proc or /run/netns names it."""
        made = cls.__new__(cls)
        made.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return made

    @property
    def path(self) -> str:
        """By which other processes find it, as long as it is open here."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def call(self, action: Callable[[], T]) -> T:
        """Runs something in it: the sockets and processes that it makes are in here."""

        def inside() -> T:
            check(libc.setns(self.fd, CLONE_NEWNET), "setns")
            return action()

        return on_thread(inside)

    def ip(self, *arguments: str) -> str:
        """`ip`, in it."""
        return self.call(lambda: ip(*arguments))

    def close(self) -> None:
        """It ends when nothing of it is open any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def host_addresses() -> list[str]:
    """Every IPv4 address of the host's own namespace."""
    found = [entry for link in json.loads(ip("-j", "-4", "addr")) for entry in link["addr_info"]]
    return [entry["local"] for entry in found]


def used() -> list[IPv4Network]:
    """What the host has or reaches directly; default routes don't count."""
    routes = [row["dst"] for row in json.loads(ip("-j", "-4", "route", "show", "table", "all")) if "dst" in row]
    return [IPv4Network(one, strict=False) for one in routes if one != "default"]


@contextmanager
def free(ranges: Sequence[IPv4Network], prefix: int) -> Iterator[list[IPv4Network]]:
    """A free subnet of each range. They must be taken before the block is left."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken, found = used(), []
        for one in ranges:
            # From the middle, as people take the first ones by hand.
            count = 1 << (prefix - one.prefixlen)
            size = 1 << (32 - prefix)
            base = int(one.network_address)
            for number in ((count // 2 + step) % count for step in range(count)):
                subnet = IPv4Network((base + number * size, prefix))
                if not any(subnet.overlaps(other) for other in taken):
                    found.append(subnet)
                    break
            else:
                raise OSError(f"no free /{prefix} in {one}")
        yield found


class Net:
    """A namespace that the host reaches by one link, with a subnet of each given range on it.

    The first address of a subnet is the host's end; all others are in the namespace, which has no route anywhere else:
    what is answered from there came from the host's own address.
    """

    def __init__(self, ranges: Sequence[IPv4Network], prefix: int) -> None:
        self.link = f"cpt{os.getpid()}x{next(numbers)}"
        self.namespace = Namespace()
        try:
            with free(ranges, prefix) as self.subnets:
                ip("link", "add", self.link, "type", "veth", "peer", "name", "up", "netns", self.namespace.path)
                for subnet in self.subnets:
                    host, *others = subnet.hosts()
                    ip("addr", "add", f"{host}/{prefix}", "dev", self.link)
                    for other in others:
                        self.namespace.ip("addr", "add", f"{other}/{prefix}", "dev", "up")
                self.namespace.ip("link", "set", "dev", "up", "up")
                ip("link", "set", "dev", self.link, "up")
        except BaseException:
            self.close()
            raise

    @property
    def host_addresses(self) -> list[str]:
        """The host's end of each subnet."""
        return [str(next(subnet.hosts())) for subnet in self.subnets]

    @property
    def addresses(self) -> list[str]:
        """Of the namespace, in the order of the subnets."""
        return [str(one) for subnet in self.subnets for one in list(subnet.hosts())[1:]]

    def interface(self, address: str) -> IPv4Interface:
        """An address with its prefix."""
        subnet = next(one for one in self.subnets if IPv4Address(address) in one)
        return IPv4Interface(f"{address}/{subnet.prefixlen}")

    def close(self) -> None:
        """Link and namespace go."""
        if Path(f"/sys/class/net/{self.link}").exists():
            ip("link", "delete", self.link)
        self.namespace.close()


class Sniffer:
    """Every IPv4 packet that a link carries, as (source, target, protocol, type of packet); ARP is not among them."""

    ETH_P_ALL, ETH_P_IP, ETH_P_IPV6 = 3, 0x0800, 0x86DD
    OUTGOING = 4

    def __init__(self, link: str, namespace: Namespace | None = None) -> None:
        def open_socket() -> socket.socket:
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(self.ETH_P_ALL))
            made.bind((link, self.ETH_P_ALL))
            made.settimeout(0.1)
            return made

        self.socket = namespace.call(open_socket) if namespace else open_socket()
        self.lock = threading.Lock()
        self.packets: list[tuple[str, str, int, int]] = []
        #: How many IPv6 packets there were.
        self.v6 = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        while not self.ended.is_set():
            try:
                frame, where = self.socket.recvfrom(65536)
            except TimeoutError:
                continue
            except OSError:
                # The link is gone.
                return
            kind = int.from_bytes(frame[12:14], "big")
            with self.lock:
                if kind == self.ETH_P_IPV6:
                    self.v6 += 1
                elif kind == self.ETH_P_IP and len(frame) >= 34:
                    source, target = IPv4Address(frame[26:30]), IPv4Address(frame[30:34])
                    self.packets.append((str(source), str(target), frame[23], where[2]))

    def count(self, protocol: int) -> int:
        """Packets of a protocol so far."""
        with self.lock:
            return sum(1 for packet in self.packets if packet[2] == protocol)

    def incoming(self) -> set[tuple[str, str]]:
        """Source and target of what came in over the link so far."""
        with self.lock:
            return {(source, target) for source, target, _, kind in self.packets if kind != self.OUTGOING}

    def __enter__(self) -> "Sniffer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        self.thread.join(5)
        self.socket.close()
