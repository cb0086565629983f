"""A DNS server that a test programs: its answers are a dictionary, what it was asked is a list. RFC 1035, by hand."""

import socketserver
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Any

A, CNAME, AAAA = 1, 5, 28
NXDOMAIN, REFUSED = 3, 5
#: Response, authoritative, recursion desired and available.
FLAGS = 0x8580


@dataclass(frozen=True)
class Record:
    """One answer. `value` is an address or, for a CNAME, a name."""

    value: str
    ttl: int = 60

    def encode(self) -> tuple[int, bytes]:
        """Type and data."""
        for kind, parse in ((A, IPv4Address), (AAAA, IPv6Address)):
            try:
                return kind, parse(self.value).packed
            except ValueError:
                continue
        return CNAME, encode_name(self.value)


def encode_name(name: str) -> bytes:
    """Labels with their lengths, not compressed."""
    labels = [label.encode("ascii") for label in name.rstrip(".").split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def decode_name(message: bytes, at: int) -> tuple[str, int]:
    """The name at an offset of a query (which has no compressed names), in lower case, and where it ends."""
    labels = []
    while (length := message[at]) != 0:
        if length > 63:
            raise ValueError("a compressed name in a question")
        labels.append(message[at + 1 : at + 1 + length].decode("ascii").lower())
        at += 1 + length
    return ".".join(labels), at + 1


@dataclass
class Zone:
    """What is answered. Names without a record do not exist."""

    records: dict[str, list[Record]] = field(default_factory=dict)
    #: Every question: name and type.
    asked: list[tuple[str, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, name: str, *values: str, ttl: int = 60) -> None:
        """Makes a name answer these addresses (or this other name), and nothing else."""
        with self.lock:
            self.records[name.lower()] = [Record(value, ttl) for value in values]

    def remove(self, name: str) -> None:
        """It does not exist any more."""
        with self.lock:
            self.records.pop(name.lower(), None)

    def count(self, name: str) -> int:
        """How often this name was asked for, whatever the type."""
        with self.lock:
            return sum(1 for asked, _ in self.asked if asked == name.lower())

    def answers(self, name: str, kind: int) -> list[tuple[str, int, Record, bytes]] | None:
        """Owner, type, record, data of each answer, along CNAMEs. None: there is no such name."""
        found: list[tuple[str, int, Record, bytes]] = []
        with self.lock:
            self.asked.append((name, kind))
            if name not in self.records:
                return None
            # Chains are followed as far as they are ours; a loop ends.
            for _ in range(8):
                aliases = []
                for record in self.records.get(name, []):
                    of, data = record.encode()
                    if of in (kind, CNAME):
                        found.append((name, of, record, data))
                    if of == CNAME and kind != CNAME:
                        aliases.append(record.value.lower())
                if not aliases:
                    break
                name = aliases[0]
        return found

    def reply(self, query: bytes) -> bytes:
        """The message that answers another."""
        id, _, questions = struct.unpack_from("!HHH", query)
        if questions != 1:
            return struct.pack("!HHHHHH", id, FLAGS | REFUSED, 0, 0, 0, 0)
        name, end = decode_name(query, 12)
        (kind,) = struct.unpack_from("!H", query, end)
        answers = self.answers(name, kind)
        body = b"".join(
            encode_name(owner) + struct.pack("!HHIH", of, 1, record.ttl, len(data)) + data
            for owner, of, record, data in answers or []
        )
        flags = FLAGS | (NXDOMAIN if answers is None else 0)
        return struct.pack("!HHHHHH", id, flags, 1, len(answers or []), 0, 0) + query[12 : end + 4] + body


def handlers(zone: Zone) -> tuple[type[socketserver.BaseRequestHandler], type[socketserver.BaseRequestHandler]]:
    """For `socketserver`: over UDP, and over TCP with its length prefix."""

    def answer(query: bytes, send: Callable[[bytes], Any]) -> None:
        try:
            reply = zone.reply(query)
        except (IndexError, ValueError, struct.error):
            # Not a query: a resolver that sends such a thing waits in vain.
            return
        send(reply)

    class Udp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            query, socket = self.request
            answer(query, lambda reply: socket.sendto(reply, self.client_address))

    class Tcp(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while len(prefix := self.rfile.read(2)) == 2:
                query = self.rfile.read(int.from_bytes(prefix, "big"))
                answer(query, lambda reply: self.wfile.write(len(reply).to_bytes(2, "big") + reply))

    return Udp, Tcp
