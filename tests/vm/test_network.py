"""Who a sandbox is on the network, whom it reaches, and whom not: real packets, to networks that the test makes."""

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest
from pandastack import Client, Sandbox

from harness import traces
from harness.frames import ARP, IPV4, IPV6, UDP, VLAN, Tap, ethernet, is_at, udp, udp6
from harness.guest import sh
from harness.network import Namespace, Sniffer, host_addresses
from harness.outside import ECHO, HTTP, Listener, Servers, reaches
from harness.poll import until
from harness.probes import (
    PORT,
    Interface,
    Target,
    ask,
    connections,
    interface,
    probe,
    reached,
    start_connections,
)
from harness.server import Server
from harness.wire import Wire

POOL = IPv4Network("10.203.0.0/16")
GATEWAY = "10.203.0.1"
METADATA = "169.254.169.254"
CHILDREN = 16
#: How long an inherited connection may seem to live, and how far a guest's clock may be off.
SECOND, CLOCK = 1.0, 0.1


@pytest.fixture(scope="module")
def own(new_server: Callable[..., Server], outside: Servers, private: Servers) -> Iterator[Server]:
    """A server for this module, and nothing of it is left on the host."""
    server = new_server(templates=["base"]).start()
    yield server
    server.end()


@dataclass
class Family:
    """A parent with open connections, its 16 children, and somebody else."""

    parent: Sandbox
    other: Sandbox
    children: list[Sandbox]
    #: Of the parent, just before it.
    before: dict[str, dict[str, object]]

    @property
    def all(self) -> list[Sandbox]:
        """18 machines."""
        return [self.parent, self.other, *self.children]


@pytest.fixture(scope="module")
def family(own: Server, outside: Servers) -> Iterator[Family]:
    """Made once: sixteen machines take a while."""
    client = own.client()
    parent, other = (client.sandboxes.create(template="base") for _ in range(2))
    before = start_connections(parent, outside.address, ECHO)
    children = parent.fork_tree(CHILDREN)
    assert len(children) == CHILDREN
    yield Family(parent, other, children, before)
    own.delete_all()


def each(sandboxes: list[Sandbox], action: Callable[[Sandbox], object]) -> list[object]:
    """The same in several machines, a few at a time: the host has few cores."""
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(action, sandboxes))


def row(wire: Wire, sandbox: Sandbox) -> dict[str, object]:
    """A sandbox as the API shows it."""
    return wire.json("GET", f"/v1/sandboxes/{sandbox.id}").json()


def dropped(server: Server, reason: str) -> float:
    """Packets dropped so far."""
    return server.metric("coppice_network_dropped_packets_total", reason=reason)


def test_every_machine_has_an_address_and_a_mac_of_its_own_and_the_api_tells_them(own: Server, family: Family) -> None:
    interfaces = dict(zip([one.id for one in family.all], each(family.all, interface), strict=True))
    assert len({one.address for one in interfaces.values()}) == len(family.all)
    assert len({one.mac for one in interfaces.values()}) == len(family.all)
    for sandbox in family.all:
        seen: Interface = interfaces[sandbox.id]
        assert row(own.wire(), sandbox)["guest_ip"] == seen.address
        assert IPv4Address(seen.address) in POOL and (seen.prefix, seen.gateway) == (32, GATEWAY)
        # A unicast address that no manufacturer gave out.
        assert int(seen.mac[:2], 16) & 3 == 2
        assert sh(sandbox, "cat /etc/resolv.conf").split().count(GATEWAY) == 1


def test_all_reach_the_outside_and_are_seen_there_as_the_host(family: Family, outside: Servers) -> None:
    (host,) = outside.net.host_addresses
    targets = [Target("tcp", outside.address, ECHO), Target("udp", outside.addresses[1], ECHO)]
    targets += [Target("http", outside.addresses[2], HTTP)]
    for told in each(family.all, lambda one: probe(one, targets)):
        tcp, udp, http = told.values()
        assert tcp.startswith(f"peer {host} ") and udp.startswith(f"peer {host} ") and http.startswith("HTTP/1.1 200")
    # Nobody out there has ever seen an address from inside.
    assert outside.visits.peers() == {host}


def test_none_reaches_another_the_host_the_metadata_address_or_a_private_range(
    own: Server, family: Family, outside: Servers, private: Servers
) -> None:
    addresses = {one.id: str(row(own.wire(), one)["guest_ip"]) for one in family.all}
    router = Namespace.of(traces.router(own.data_dir))
    visits = len(private.visits.rows)
    with Listener() as on_host, Listener(router) as in_router, Sniffer(traces.link(own.data_dir)) as sniffer:
        # They are really there: others get to them.
        (near,) = outside.net.host_addresses
        assert reaches(near, on_host.port, via=outside.net.namespace.call)
        assert reaches(GATEWAY, in_router.port, via=router.call)

        def targets(sandbox: Sandbox) -> list[Target]:
            made = [Target("tcp", address, PORT) for id, address in addresses.items() if id != sandbox.id]
            made += [Target(kind, address, ECHO) for kind in ("tcp", "udp") for address in private.addresses]
            for address in [*host_addresses(), GATEWAY]:
                if not address.startswith("127."):
                    made += [Target("tcp", address, port) for port in (on_host.port, own.port, in_router.port, 22)]
            made += [Target("http", METADATA, 80), Target("tcp", METADATA, 53), Target("tcp", "255.255.255.255", 80)]
            # The guest's own loopback, where nothing of the host is.
            made += [Target("tcp", "127.0.0.1", port) for port in (own.port, on_host.port)]
            return made

        got_through = {
            sandbox.id: reached(told)
            for sandbox, told in zip(family.all, each(family.all, lambda one: probe(one, targets(one))), strict=True)
        }
        assert {id: told for id, told in got_through.items() if told} == {}
        assert (len(on_host.visits.rows), len(in_router.visits.rows)) == (1, 1)
        # Not even the packets came out of the router, to whom they might have been.
        forbidden = [*(subnet for subnet in private.net.subnets), IPv4Network(f"{METADATA}/32"), POOL]
        assert [pair for pair in sniffer.incoming() if any(IPv4Address(pair[1]) in one for one in forbidden)] == [], (
            "packets for private addresses left the router"
        )
    router.close()
    assert len(private.visits.rows) == visits
    assert dropped(own, "refused") > 0


def test_there_is_no_ipv6(own: Server, family: Family) -> None:
    own_addresses = sh(family.other, "ip -j -6 addr show scope global")
    assert json.loads(own_addresses) in ([], [{}]) or not any(one.get("addr_info") for one in json.loads(own_addresses))
    with Listener(family=socket.AF_INET6) as listener:
        found = [
            entry["local"]
            for link in json.loads(subprocess.run(["ip", "-j", "-6", "addr"], capture_output=True, check=True).stdout)
            for entry in link["addr_info"]
            if entry["scope"] == "global"
        ]
        targets = [Target("tcp", address, listener.port) for address in [*found, "2001:db8::1", "fd00:ec2::254"]]
        assert reached(probe(family.other, targets)) == {}
        assert listener.visits.rows == []


def test_a_child_loses_its_parents_connections_within_a_second_and_the_parent_keeps_them(
    own: Server, family: Family
) -> None:
    def ended(sandbox: Sandbox) -> dict[str, Any] | None:
        told = connections(sandbox)
        return told if told and all(told[name]["error"] for name in ("active", "idle")) else None

    theirs = f"ss -Htn src {row(own.wire(), family.parent)['guest_ip']}"
    # No child's kernel has one when the fork is answered, however many children there are.
    for open_ in each(family.children, lambda one: sh(one, theirs)):
        assert open_ == "", "a child has connections of its parent's"
    assert len(sh(family.parent, theirs).splitlines()) >= 2
    for told in each(family.children, lambda one: until("both connections have ended", lambda: ended(one), 10)):
        assert isinstance(told, dict) and told["active"]["count"] >= family.before["active"]["count"]
    # That the program hears of it in a second can be asked of as many children as there are processors for them.
    pair = family.parent.fork_tree(2)
    answered = time.time()
    for sandbox in pair:
        told = until("both connections have ended", lambda one=sandbox: ended(one), 10)
        for name in ("active", "idle"):
            assert told[name]["at"] <= answered + SECOND + CLOCK, (name, told, answered)
        sandbox.kill()
    now = connections(family.parent)
    assert now is not None and now["active"]["error"] is None and now["idle"]["error"] is None, now
    assert now["active"]["count"] > family.before["active"]["count"]
    later = until(
        "the parent's connection is in use",
        lambda: (told := connections(family.parent)) and told["active"]["count"] > now["active"]["count"] and told,
        5,
    )
    assert later["pid"] == now["pid"] == family.before["pid"]


def test_what_listened_in_the_parent_listens_in_every_child_at_its_own_address(own: Server, family: Family) -> None:
    def fetch(sandbox: Sandbox) -> dict[str, object]:
        reply = own.wire().request("GET", f"/v1/sandboxes/{sandbox.id}/proxy/{PORT}/")
        assert reply.status == 200, reply
        return reply.json()

    for sandbox, told in zip(family.children, each(family.children, fetch), strict=True):
        assert isinstance(told, dict)
        assert told["address"] == row(own.wire(), sandbox)["guest_ip"]
        assert told["pid"] == family.before["pid"] and told["host"] != family.before["host"]


def test_children_reach_the_outside_anew(family: Family, outside: Servers) -> None:
    child = family.children[-1]
    told = start_again(child, outside)
    assert told["active"]["error"] is None and told["idle"]["error"] is None


def start_again(sandbox: Sandbox, outside: Servers) -> dict[str, dict[str, object]]:
    """Ends the program that came along and starts another."""
    sh(sandbox, "pkill -f [c]onnections.py")
    until("it ended", lambda: connections(sandbox) is None, 10)
    return start_connections(sandbox, outside.address, ECHO)


@pytest.fixture
def one(own: Server) -> Iterator[Sandbox]:
    """A sandbox whose network the test breaks."""
    sandbox = own.client().sandboxes.create(template="base")
    yield sandbox
    sandbox.kill()


def grown(server: Server, reason: str, before: float) -> float:
    """A counter that goes up."""
    return until(
        f"dropped packets are counted as {reason}", lambda: (now := dropped(server, reason)) > before and now, 10
    )


# An IPv4 packet of UDP with any source, as only root can send it.
FORGE = r"""
import socket, struct, sys
source, target, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
data = b'forged'
udp = struct.pack('!HHHH', 40000, port, 8 + len(data), 0) + data
addresses = socket.inet_aton(source) + socket.inet_aton(target)
head = struct.pack('!BBHHHBBH', 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0) + addresses
for _ in range(5):
    s.sendto(head + udp, (target, 0))
"""


def test_packets_with_anothers_source_address_are_dropped_and_counted(
    own: Server, one: Sandbox, outside: Servers
) -> None:
    client = own.client()
    victim = client.sandboxes.create(template="base")
    theirs = str(row(own.wire(), victim)["guest_ip"])
    card = interface(one)
    visits = len(outside.visits.rows)
    one.filesystem.write("/root/forge.py", FORGE)
    before = dropped(own, "spoofed")
    for source in (theirs, "8.8.8.8", GATEWAY, "10.203.255.254", outside.addresses[5]):
        sh(one, f"python3 /root/forge.py {source} {outside.address} {ECHO}")
        before = grown(own, "spoofed", before)
    # With the whole of its stack, not only single packets.
    sh(one, f"ip addr add {theirs}/32 dev {card.name}")
    told = probe(one, [Target(kind, outside.address, ECHO, theirs) for kind in ("tcp", "udp")])
    assert reached(told) == {}
    grown(own, "spoofed", before)
    assert len(outside.visits.rows) == visits
    # Who it pretended to be is not harmed, nor is itself under its own name.
    assert ask(victim, "tcp", outside.address, ECHO).startswith("peer ")
    sh(one, f"ip addr del {theirs}/32 dev {card.name}")
    assert ask(one, "tcp", outside.address, ECHO).startswith("peer ")
    victim.kill()


def test_packets_with_another_mac_are_dropped_and_counted(own: Server, one: Sandbox, outside: Servers) -> None:
    card = interface(one)

    def change(mac: str) -> None:
        sh(
            one,
            f"ip link set dev {card.name} down; ip link set dev {card.name} address {mac} && "
            f"ip link set dev {card.name} up && ip route replace {GATEWAY} dev {card.name} && "
            f"ip route replace default via {GATEWAY} dev {card.name} onlink",
        )

    before = dropped(own, "spoofed")
    change("02:63:00:00:00:01")
    assert reached(probe(one, [Target(kind, outside.address, ECHO) for kind in ("tcp", "udp")])) == {}
    grown(own, "spoofed", before)
    change(card.mac)
    assert ask(one, "tcp", outside.address, ECHO).startswith("peer ")


def test_ipv6_packets_are_dropped_and_counted(own: Server, one: Sandbox) -> None:
    card = interface(one)
    made = one.exec(
        f"sysctl -qw net.ipv6.conf.all.disable_ipv6=0 net.ipv6.conf.{card.name}.disable_ipv6=0;"
        f" ip -6 addr add 2001:db8::2/64 dev {card.name} nodad &&"
        f" ip -6 neigh replace 2001:db8::1 lladdr 02:00:00:00:00:01 dev {card.name}"
    )
    if made.exit_code != 0:
        # Its kernel has no IPv6: there is nothing to drop.
        assert "not supported" in made.stderr or "Permission denied" in made.stderr or "disabled" in made.stderr, made
        return
    before = dropped(own, "spoofed")
    assert reached(probe(one, [Target("udp", "2001:db8::1", ECHO), Target("tcp", "2001:db8::1", ECHO)])) == {}
    grown(own, "spoofed", before)


def test_frames_that_a_taken_over_vmm_makes_up_get_nowhere(own: Server, one: Sandbox, outside: Servers) -> None:
    victim = own.client().sandboxes.create(template="base")
    mine, theirs = interface(one), interface(victim)
    router = Namespace.of(traces.router(own.data_dir))
    with Tap(own.vmm(one)) as tap, Sniffer(outside.net.link) as sniffer, Sniffer(tap.name, router) as wire:
        router_mac = json.loads(router.ip("-j", "link", "show", tap.name))[0]["address"]

        def frame(packet: bytes, source: str = mine.mac, kind: int = IPV4) -> bytes:
            return ethernet(source, router_mac, kind, packet)

        # What is right arrives, so the others do not fail by how they are made.
        visits = len(outside.visits.rows)
        tap.send(frame(udp(mine.address, outside.address, ECHO)))
        until("the right frame arrives", lambda: len(outside.visits.rows) > visits, 5)
        time.sleep(0.5)
        visits, seen = len(outside.visits.rows), sniffer.count(UDP)
        right = udp(mine.address, outside.address, ECHO)
        forged = {
            "their address": frame(udp(theirs.address, outside.address, ECHO)),
            "their address and MAC": frame(udp(theirs.address, outside.address, ECHO), theirs.mac),
            "their MAC": frame(right, theirs.mac),
            "the router's MAC": frame(right, router_mac),
            "the gateway's address": frame(udp(GATEWAY, outside.address, ECHO)),
            "somebody's address": frame(udp("8.8.8.8", outside.address, ECHO)),
            "loopback": frame(udp("127.0.0.1", GATEWAY, 53)),
            "no address": frame(udp("0.0.0.0", outside.address, ECHO)),
            "IPv6": frame(udp6("20010db8" + "0" * 23 + "2", "20010db8" + "0" * 23 + "1", ECHO), kind=IPV6),
        }
        for what, bytes_ in forged.items():
            before = dropped(own, "spoofed")
            tap.send(bytes_)
            until(f"a frame with {what} is counted", lambda before=before: dropped(own, "spoofed") > before, 10)
        # Tagged, and addressed to the victim beside the router: not counted, and not delivered.
        tap.send(frame(b"\0\1\x08\0" + right, kind=VLAN))
        tap.send(frame(udp(mine.address, theirs.address, PORT)))
        # It takes nobody's place by saying so.
        for claimed in (theirs.address, GATEWAY):
            tap.send(ethernet(mine.mac, "ff:ff:ff:ff:ff:ff", ARP, is_at(claimed, mine.mac, GATEWAY)))
        time.sleep(0.5)
        assert (len(outside.visits.rows), sniffer.count(UDP)) == (visits, seen)
        visits = len(wire.packets)
        assert ask(victim, "tcp", outside.address, ECHO).startswith("peer ")
        # The victim's answers went to the victim.
        assert len(wire.packets) == visits
    router.close()
    assert ask(one, "tcp", outside.address, ECHO).startswith("peer ")
    victim.kill()


def test_networking_goes_on_without_the_server_and_with_the_next_one(own_server: Server, outside: Servers) -> None:
    client = own_server.client()
    sandbox = client.sandboxes.create(template="base")
    address = row(own_server.wire(), sandbox)["guest_ip"]
    before = start_connections(sandbox, outside.address, ECHO)
    own_server.kill9()
    time.sleep(1)
    own_server.start()
    sandbox = own_server.client().sandboxes.get(sandbox.id)
    told = until("the program answers", lambda: connections(sandbox), 10)
    # It did not lose a connection, and counted on all the while.
    assert told["active"]["error"] is None and told["idle"]["error"] is None, told
    assert told["active"]["count"] > before["active"]["count"] + 10
    assert row(own_server.wire(), sandbox)["guest_ip"] == address == interface(sandbox).address
    assert ask(sandbox, "tcp", outside.address, ECHO).startswith("peer ")
    reply = own_server.wire().request("GET", f"/v1/sandboxes/{sandbox.id}/proxy/{PORT}/")
    assert reply.status == 200 and reply.json()["address"] == address
    # Its slot is not given to anyone else, and a new one works beside it.
    another = own_server.client().sandboxes.create(template="base")
    assert row(own_server.wire(), another)["guest_ip"] != address
    assert ask(another, "tcp", outside.address, ECHO).startswith("peer ")
    assert reached(probe(another, [Target("tcp", str(address), PORT)])) == {}
    (child,) = sandbox.fork_tree(1)
    assert ask(child, "udp", outside.address, ECHO).startswith("peer ")


def test_an_address_comes_back_with_another_mac_and_without_its_past(own_server: Server, outside: Servers) -> None:
    client: Client = own_server.client()
    seen: dict[str, set[str]] = {}
    for _ in range(3):
        sandbox = client.sandboxes.create(template="base")
        card = interface(sandbox)
        assert card.mac not in seen.setdefault(card.address, set())
        seen[card.address].add(card.mac)
        assert ask(sandbox, "tcp", outside.address, ECHO).startswith("peer ")
        sandbox.kill()


def test_an_operator_can_limit_the_bandwidth_of_each_sandbox(
    new_server: Callable[..., Server], outside: Servers
) -> None:
    server = new_server(["--bandwidth", "16"], templates=["base"]).start()
    size, limit = 8 << 20, 2_000_000
    try:
        sandbox = server.client().sandboxes.create(template="base")
        down = f"http://{outside.address}/bytes/{size}"
        up = f"-X POST --data-binary @/dev/shm/zeros -H Expect: http://{outside.address}/"
        sh(sandbox, f"head -c {size} /dev/zero >/dev/shm/zeros")
        for what in (down, up):
            seconds = float(sh(sandbox, f"curl -s -f -o /dev/null -w '%{{time_total}}' {what}", timeout_seconds=100))
            # A burst is let through first; after that a policer makes TCP slower than the limit, but not much slower.
            assert limit / 8 < size / seconds < limit * 1.5, (what, seconds)
    finally:
        left = server.close()
    assert left == [], left


def test_a_host_without_a_free_slot_says_so_and_how_many_there_are(new_server: Callable[..., Server]) -> None:
    server = new_server(["--max-sandboxes", "2"], templates=["base"]).start()
    try:
        client = server.client()
        first, second = (client.sandboxes.create(template="base") for _ in range(2))
        for method, path, body in [
            ("POST", "/v1/sandboxes", {"template": "base"}),
            ("POST", f"/v1/sandboxes/{first.id}/fork-tree", {"count": 1}),
        ]:
            reply = server.wire().json(method, path, body)
            assert reply.status == 507 and "2" in reply.json()["error"] and reply.json()["code"], reply
        second.kill()
        assert server.wire().json("POST", "/v1/sandboxes", {"template": "base"}).status == 201
    finally:
        left = server.close()
    assert left == [], left


def test_a_server_that_ends_without_sandboxes_leaves_nothing_on_the_host(new_server: Callable[..., Server]) -> None:
    def everything() -> dict[str, list[str]]:
        """Names only: of what other servers and tests have, some may come and go."""
        links = [one["ifname"] for one in json.loads(subprocess.check_output(["ip", "-j", "link"]))]
        netns = [one.name for one in traces.router(server.data_dir).parent.glob("coppice-*")]
        return {"links": links, "netns": netns, "tables": sorted(traces.tables())}

    server = new_server(templates=["base"])
    before = everything()
    assert traces.traces(server.data_dir) == []
    server.start()
    sandbox = server.client().sandboxes.create(template="base")
    sandbox.fork_tree(2)
    during = traces.traces(server.data_dir)
    assert any(one.startswith("namespace ") for one in during), during
    assert any(one.startswith("link ") for one in during) and any(one.startswith("table ") for one in during), during
    # After a crash, too.
    server.restart()
    assert server.close() == []
    assert traces.traces(server.data_dir) == []
    ours = traces.instance(server.data_dir)
    after = everything()
    assert [one for kind in after for one in after[kind] if ours in one] == []
    # Other servers (`cpc…`) and networks of other tests (`cpt…`) come and go at the same time.
    left = [one for one in set(after["links"]) - set(before["links"]) if not one.startswith(("cpc", "cpt"))]
    assert left == [], "links are left"
