"""Ethernet frames by hand, put on the wire of a machine as its VMM could: by the TAP that it has open."""

import ctypes
import fcntl
import os
import struct
from ipaddress import IPv4Address

from . import host

libc = ctypes.CDLL(None, use_errno=True)
# x86-64 numbers (asm/unistd_64.h), and an ioctl of linux/if_tun.h.
PIDFD_OPEN, PIDFD_GETFD = 434, 438
TUNGETIFF, TUNGETVNETHDRSZ = 0x800454D2, 0x800454D7
IFF_VNET_HDR = 0x4000
IPV4, ARP, VLAN, IPV6 = 0x0800, 0x0806, 0x8100, 0x86DD
UDP = 17


def mac(text: str) -> bytes:
    """Six bytes of `02:63:…`."""
    return bytes.fromhex(text.replace(":", ""))


def checksum(data: bytes) -> int:
    """Of an IPv4 header."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ethernet(source: str, target: str, kind: int, payload: bytes) -> bytes:
    """A frame."""
    return mac(target) + mac(source) + kind.to_bytes(2, "big") + payload


def udp(source: str, target: str, port: int, data: bytes = b"forged") -> bytes:
    """A whole IPv4 packet with a datagram."""
    body = struct.pack("!HHHH", 40000, port, 8 + len(data), 0) + data
    addresses = IPv4Address(source).packed + IPv4Address(target).packed
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, 64, UDP, 0) + addresses
    return head[:10] + checksum(head).to_bytes(2, "big") + head[12:] + body


def is_at(address: str, card: str, asker: str) -> bytes:
    """An ARP answer that nobody asked for: this address is at this card."""
    sender = mac(card) + IPv4Address(address).packed
    return struct.pack("!HHBBH", 1, IPV4, 6, 4, 2) + sender + mac(card) + IPv4Address(asker).packed


def udp6(source: str, target: str, port: int) -> bytes:
    """An IPv6 packet with a datagram; whether its checksum is right doesn't matter here."""
    body = struct.pack("!HHHH", 40000, port, 14, 0xFFFF) + b"forged"
    ends = b"".join(bytes.fromhex(one) for one in (source, target))
    return struct.pack("!IHBB", 6 << 28, len(body), UDP, 64) + ends + body


class Tap:
    """The TAP of a running VMM. Frames that are written to it come out of the machine."""

    def __init__(self, pid: int) -> None:
        entries = [fd for fd, path in host.links(pid) if path.endswith("/net/tun")]
        assert len(entries) == 1, f"VMM {pid} has the TAPs {entries}"
        process = self._call(PIDFD_OPEN, pid, 0)
        try:
            self.fd = self._call(PIDFD_GETFD, process, entries[0], 0)
        finally:
            os.close(process)
        request = bytearray(40)
        fcntl.ioctl(self.fd, TUNGETIFF, request)
        self.name = request[:16].split(b"\0")[0].decode()
        (flags,) = struct.unpack_from("H", request, 16)
        size = bytearray(4)
        fcntl.ioctl(self.fd, TUNGETVNETHDRSZ, size)
        # No offloads: a header of zeros, if there is one.
        self.header = bytes(struct.unpack("i", size)[0] if flags & IFF_VNET_HDR else 0)

    @staticmethod
    def _call(number: int, *arguments: int) -> int:
        result = libc.syscall(number, *arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(result)

    def send(self, frame: bytes) -> None:
        """As if the guest's card had sent it."""
        padded = frame.ljust(60, b"\0")
        assert os.write(self.fd, self.header + padded) == len(self.header) + len(padded)

    def __enter__(self) -> "Tap":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
