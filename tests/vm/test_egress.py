"""What a sandbox may reach, by its policy: by address, by port, by name; changed while it runs, and inherited."""

import shlex
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from typing import Any

import pytest
from pandastack import Sandbox

from harness.guest import sh
from harness.outside import DNS, ECHO, ECHO_TOO, HTTP, Servers
from harness.poll import holds, until
from harness.probes import Target, ask, connections, probe, reached, start_connections
from harness.server import Server
from harness.wire import Reply, Wire

GATEWAY = "10.203.0.1"
#: Answers are good for at least so long, however short they say they are; and it may take a moment more.
GRACE = 15.0


@pytest.fixture(scope="module")
def own(new_server: Callable[..., Server], outside: Servers) -> Iterator[Server]:
    """A server that asks the test's DNS."""
    server = new_server(["--dns", outside.address], templates=["base"]).start()
    yield server
    server.end()


@pytest.fixture(scope="module")
def api(own: Server) -> Wire:
    """Plain HTTP to it."""
    return own.wire()


@pytest.fixture
def boxed(own: Server, api: Wire) -> Iterator[Callable[[Any], Sandbox]]:
    """Makes sandboxes with a policy; they end with the test."""

    def make(egress: Any) -> Sandbox:
        reply = api.json("POST", "/v1/sandboxes", {"template": "base", "network": {"egress": egress}})
        assert reply.status == 201, reply
        assert reply.json()["network"]["egress"] == egress
        return own.client().sandboxes.get(reply.json()["id"])

    before = own.ids()
    yield make
    for id in own.ids() - before:
        assert api.json("DELETE", f"/v1/sandboxes/{id}").status in (204, 404)


def change(api: Wire, sandbox: Sandbox, egress: Any) -> Reply:
    """Another policy."""
    return api.json("PATCH", f"/v1/sandboxes/{sandbox.id}/network", {"egress": egress})


def policy(api: Wire, sandbox: Sandbox) -> Any:
    """The one that it has, and shows as its own everywhere."""
    told = api.json("GET", f"/v1/sandboxes/{sandbox.id}/network").json()["egress"]
    assert api.json("GET", f"/v1/sandboxes/{sandbox.id}").json()["network"]["egress"] == told
    return told


def is_open(sandbox: Sandbox, address: str, port: int = ECHO, kind: str = "tcp") -> bool:
    """Whether it gets there, by address or by name."""
    return "peer " in ask(sandbox, kind, address, port)


def resolve(sandbox: Sandbox, name: str) -> list[str]:
    """IPv4 addresses of a name, as the guest's own resolver finds them."""
    code = (
        "import socket, sys\n"
        "try: print(' '.join(sorted({row[4][0] for row in socket.getaddrinfo(sys.argv[1], 1, socket.AF_INET)})))\n"
        "except socket.gaierror: pass"
    )
    return sh(sandbox, f"python3 -c {shlex.quote(code)} {name}").split()


def test_none_reaches_nothing_and_can_be_used_all_the_same(
    own: Server, api: Wire, boxed: Callable[[Any], Sandbox], outside: Servers
) -> None:
    outside.zone.set("none.example", outside.addresses[1])
    sandbox = boxed("none")
    visits = len(outside.visits.rows)
    targets = [Target(kind, address, ECHO) for kind in ("tcp", "udp") for address in outside.addresses[:3]]
    targets += [Target("http", outside.address, HTTP), Target("udp", outside.address, DNS)]
    assert reached(probe(sandbox, targets)) == {}
    assert len(outside.visits.rows) == visits
    assert resolve(sandbox, "none.example") == [] and outside.zone.count("none.example") == 0
    sandbox.filesystem.write("/root/f", "files and commands need no network")
    assert sh(sandbox, "cat /root/f").startswith("files")
    assert policy(api, sandbox) == "none"
    # Neither have its children.
    (child,) = sandbox.fork_tree(1)
    assert policy(api, child) == "none" and reached(probe(child, targets)) == {}


def test_addresses_and_ports_on_the_list_are_open_and_no_others(
    boxed: Callable[[Any], Sandbox], api: Wire, outside: Servers
) -> None:
    a = outside.addresses
    block = IPv4Network((a[7], 30), strict=False)
    inside = [one for one in a if one in {str(host) for host in block}]
    allow = [a[0], f"{a[1]}:{ECHO_TOO}", str(block), f"{a[12]}:{HTTP}"]
    sandbox = boxed({"allow": allow})
    expected = {Target(kind, a[0], ECHO) for kind in ("tcp", "udp")} | {Target("tcp", a[0], ECHO_TOO)}
    expected |= {Target("tcp", a[1], ECHO_TOO), Target("http", a[12], HTTP)}
    expected |= {Target(kind, one, ECHO) for kind in ("tcp", "udp") for one in inside}
    refused = {Target(kind, a[1], ECHO) for kind in ("tcp", "udp")} | {Target("tcp", a[12], ECHO)}
    refused |= {Target("tcp", a[2], port) for port in (ECHO, ECHO_TOO)} | {Target("udp", a[0], DNS)}
    refused -= {Target("udp", a[0], DNS)}
    told = probe(sandbox, [*expected, *refused])
    assert set(reached(told)) == expected, told
    assert policy(api, sandbox) == {"allow": allow}


def test_names_on_the_list_are_open_and_no_other_name_or_address(
    boxed: Callable[[Any], Sandbox], outside: Servers
) -> None:
    a, zone = outside.addresses, outside.zone
    zone.set("allowed.example", a[1])
    zone.set("ported.example", a[2])
    zone.set("www.wild.example", a[3])
    zone.set("a.b.wild.example", a[4])
    zone.set("wild.example", a[5])
    zone.set("other.example", a[6])
    zone.set("notallowed.example", a[6])
    sandbox = boxed({"allow": ["allowed.example", f"ported.example:{ECHO_TOO}", "*.wild.example"]})
    # Nothing is open before its name was asked for.
    assert reached(probe(sandbox, [Target("tcp", one, ECHO) for one in a])) == {}
    told = probe(
        sandbox,
        [
            Target("tcp", "allowed.example", ECHO),
            Target("udp", "ALLOWED.example", ECHO),
            Target("tcp", "www.wild.example", ECHO),
            Target("tcp", "a.b.wild.example", ECHO),
            Target("tcp", "ported.example", ECHO_TOO),
        ],
    )
    assert set(reached(told)) == set(told), told
    # The port of a name, other names, names that only look alike, and raw addresses that no allowed name led to.
    told = probe(
        sandbox,
        [
            Target("tcp", "ported.example", ECHO),
            Target("tcp", "wild.example", ECHO),
            Target("tcp", "other.example", ECHO),
            Target("tcp", "notallowed.example", ECHO),
            Target("tcp", "allowed.example.other.example", ECHO),
            *(Target("tcp", one, ECHO) for one in (a[0], a[5], a[6], a[7])),
            Target("tcp", a[2], ECHO),
            # Another resolver than the host's.
            Target("udp", outside.address, DNS),
            Target("tcp", outside.address, DNS),
        ],
    )
    assert reached(told) == {}
    # No name that is not allowed was ever carried out.
    for name in ("other.example", "notallowed.example", "wild.example", "allowed.example.other.example"):
        assert zone.count(name) == 0
    # What an allowed name led to can be used by its address, too: that is what a program does after it has asked.
    assert is_open(sandbox, a[1]) and is_open(sandbox, a[3])


def test_aliases_and_several_addresses_are_followed(boxed: Callable[[Any], Sandbox], outside: Servers) -> None:
    a, zone = outside.addresses, outside.zone
    zone.set("alias.example", "cdn.example.net")
    zone.set("cdn.example.net", "edge.cdn.example.net")
    zone.set("edge.cdn.example.net", a[8], a[9])
    sandbox = boxed({"allow": ["alias.example"]})
    assert resolve(sandbox, "alias.example") == sorted([a[8], a[9]])
    assert is_open(sandbox, a[8]) and is_open(sandbox, a[9]) and not is_open(sandbox, a[10])
    # The alias' own name is not on the list.
    assert resolve(sandbox, "edge.cdn.example.net") == []


def test_a_name_that_turns_to_a_private_address_opens_nothing(
    own: Server, boxed: Callable[[Any], Sandbox], outside: Servers, private: Servers
) -> None:
    zone = outside.zone
    listed, free = boxed({"allow": ["rebind.example", "mixed.example"]}), boxed("open")
    victim = own.wire().json("GET", f"/v1/sandboxes/{free.id}").json()["guest_ip"]
    # At first it is what it says.
    zone.set("rebind.example", outside.addresses[1], ttl=1)
    assert is_open(listed, "rebind.example")
    visits = len(private.visits.rows)
    inside = [*private.addresses, "127.0.0.1", "169.254.169.254", "0.0.0.0", victim, GATEWAY]
    for address in inside:
        zone.set("rebind.example", address, ttl=1)
        for sandbox in (listed, free):
            assert resolve(sandbox, "rebind.example") == [], address
    # Nor were any of them opened in passing.
    for sandbox in (listed, free):
        targets = [Target("tcp", one, ECHO) for one in ("rebind.example", *inside)]
        assert reached(probe(sandbox, targets)) == {}
    # Of a mixed answer only the public part is told.
    zone.set("mixed.example", private.addresses[0], outside.addresses[2])
    for sandbox in (listed, free):
        assert resolve(sandbox, "mixed.example") == [outside.addresses[2]]
        assert is_open(sandbox, "mixed.example")
    assert len(private.visits.rows) == visits


def test_what_a_name_opened_closes_with_its_ttl_for_new_connections_only(
    boxed: Callable[[Any], Sandbox], outside: Servers
) -> None:
    address = outside.addresses[3]
    outside.zone.set("short.example", address, ttl=3)
    sandbox = boxed({"allow": ["short.example"]})
    start_connections(sandbox, "short.example", ECHO)
    closed = until("the address is closed again", lambda: not is_open(sandbox, address), GRACE + 60, 0.5)
    assert closed
    # The connection that is there goes on.
    before = connections(sandbox)
    time.sleep(1)
    after = connections(sandbox)
    assert before and after and after["active"]["count"] > before["active"]["count"], (before, after)
    assert after["active"]["error"] is None
    # Asking again opens it again.
    assert is_open(sandbox, "short.example")


def test_a_policy_is_changed_while_the_machine_runs(
    api: Wire, boxed: Callable[[Any], Sandbox], outside: Servers
) -> None:
    a = outside.addresses
    outside.zone.set("changed.example", a[1])
    sandbox = boxed("open")
    start_connections(sandbox, a[0], ECHO)
    assert is_open(sandbox, a[1])
    assert change(api, sandbox, "none").status == 200 and policy(api, sandbox) == "none"
    # What was open is cut, too.
    cut = connections(sandbox)
    assert cut is not None
    holds(
        "nothing comes through the old connection",
        lambda: (now := connections(sandbox)) and now["active"]["count"] <= cut["active"]["count"] + 1,
        1.5,
    )
    assert not is_open(sandbox, a[1]) and resolve(sandbox, "changed.example") == []
    allow = {"allow": ["changed.example", f"{a[2]}:{ECHO}"]}
    assert change(api, sandbox, allow).json()["egress"] == allow
    assert is_open(sandbox, "changed.example") and is_open(sandbox, a[2])
    assert not is_open(sandbox, a[2], ECHO_TOO) and not is_open(sandbox, a[3])
    # A name that is taken off takes what it opened with it.
    assert change(api, sandbox, {"allow": [f"{a[2]}:{ECHO}"]}).status == 200
    assert not is_open(sandbox, a[1]) and is_open(sandbox, a[2])
    assert change(api, sandbox, "open").status == 200
    assert is_open(sandbox, a[3]) and is_open(sandbox, "changed.example")
    # An empty change changes nothing.
    assert api.json("PATCH", f"/v1/sandboxes/{sandbox.id}/network", {}).json()["egress"] == "open"


def test_children_inherit_the_policy_and_change_it_for_themselves_only(
    api: Wire, boxed: Callable[[Any], Sandbox], outside: Servers
) -> None:
    a = outside.addresses
    outside.zone.set("inherited.example", a[1])
    allow = {"allow": ["inherited.example", a[2]]}
    parent = boxed(allow)
    assert is_open(parent, "inherited.example")
    children = [*parent.fork_tree(2), parent.fork()]
    for child in children:
        assert policy(api, child) == allow
        assert is_open(child, a[2]) and not is_open(child, a[3])
        assert is_open(child, "inherited.example")
    assert change(api, children[0], "none").status == 200
    assert not is_open(children[0], a[2])
    assert is_open(parent, a[2]) and is_open(children[1], a[2])
    assert policy(api, parent) == policy(api, children[1]) == allow


def test_a_policy_outlives_the_server(own_server: Server, outside: Servers) -> None:
    a = outside.addresses
    server, wire = own_server, own_server.wire()
    made = wire.json("POST", "/v1/sandboxes", {"template": "base", "network": {"egress": {"allow": [a[1]]}}}).json()
    closed = wire.json("POST", "/v1/sandboxes", {"template": "base", "network": {"egress": "none"}}).json()
    server.restart()
    for id, opened in ((made["id"], {a[1]}), (closed["id"], set())):
        sandbox = server.client().sandboxes.get(id)
        told = probe(sandbox, [Target("tcp", one, ECHO) for one in a[:4]])
        assert {target.address for target in reached(told)} == opened
    assert policy(server.wire(), server.client().sandboxes.get(made["id"])) == {"allow": [a[1]]}
    assert change(server.wire(), server.client().sandboxes.get(closed["id"]), "open").status == 200
    assert is_open(server.client().sandboxes.get(closed["id"]), a[3])


BAD = "bad_network"
PRIVATE = "private_network"
#: What is wrong with a policy, and how it is called.
WRONG: dict[str, tuple[Any, str | None]] = {
    "prefix": ({"allow": ["198.51.100.0/33"]}, BAD),
    "host bits": ({"allow": ["198.51.100.300"]}, BAD),
    "port 0": ({"allow": ["198.51.100.1:0"]}, BAD),
    "port": ({"allow": ["example.org:65536"]}, BAD),
    "a word": ({"allow": ["example.org:http"]}, BAD),
    "empty": ({"allow": [""]}, BAD),
    "a star in the middle": ({"allow": ["www.*.example.org"]}, BAD),
    "a star alone": ({"allow": ["*"]}, BAD),
    "spaces": ({"allow": ["example .org"]}, BAD),
    "a long label": ({"allow": ["x" * 64 + ".org"]}, BAD),
    "a URL": ({"allow": ["https://example.org/"]}, BAD),
    "IPv6": ({"allow": ["2001:db8::1"]}, BAD),
    "too many": ({"allow": [f"198.51.100.{number}" for number in range(65)]}, BAD),
    "10/8": ({"allow": ["10.1.2.3"]}, PRIVATE),
    "172.16/12": ({"allow": ["172.20.0.0/16"]}, PRIVATE),
    "192.168/16": ({"allow": ["192.168.1.1:80"]}, PRIVATE),
    "metadata": ({"allow": ["169.254.169.254"]}, PRIVATE),
    "loopback": ({"allow": ["127.0.0.1:8080"]}, PRIVATE),
    "another word": ("closed", None),
    "a number": (1, None),
    "no list": ({"allow": "example.org"}, None),
    "another key": ({"deny": []}, None),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_policy_is_refused_and_nothing_changes(own: Server, api: Wire, busy: Sandbox, what: str) -> None:
    egress, code = WRONG[what]
    before = own.ids()
    for reply in (
        api.json("POST", "/v1/sandboxes", {"template": "base", "network": {"egress": egress}}),
        change(api, busy, egress),
    ):
        assert reply.status == 400, (what, reply)
        assert reply.json()["error"] and (code is None or reply.json()["code"] == code), (what, reply)
    assert own.ids() == before and policy(api, busy) == "open"


@pytest.fixture(scope="module")
def busy(own: Server) -> Iterator[Sandbox]:
    """One whose policy nobody manages to change."""
    sandbox = own.client().sandboxes.create(template="base")
    yield sandbox
    sandbox.kill()
