"""Endpoints as users write them, and addresses of this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base import netlink as interfaces
from rallypoint.base.endpoint import (
    Endpoint,
    free_port,
    is_acknowledged,
    is_local_address,
    is_loopback,
    is_this_machine,
    listening_address,
    listening_addresses,
    listening_socket,
    listening_sockets,
    own_address,
    parse_endpoint,
    resolve,
    source_address,
)
from rallypoint.base.errors import UserError
from rallypoint.base.netlink import interface_addresses
from tests.processes import completed
from tests.waiting import until

GOOD = [
    (None, Endpoint("localhost", 29400)),
    ("", Endpoint("localhost", 29400)),
    ("  ", Endpoint("localhost", 29400)),
    ("node-1.example.com", Endpoint("node-1.example.com", 29400)),
    ("1.2.3.4", Endpoint("1.2.3.4", 29400)),
    ("node_1:0", Endpoint("node_1", 0)),
    (" host:65535 ", Endpoint("host", 65535)),
    ("[::1]", Endpoint("::1", 29400)),
    ("[::1]:123", Endpoint("::1", 123)),
    (f"{'a' * 63}.example.:1", Endpoint(f"{'a' * 63}.example.", 1)),
]


@pytest.mark.parametrize(("text", "endpoint"), GOOD)
def test_parse_endpoint(text: str | None, endpoint: Endpoint) -> None:
    assert parse_endpoint(text, 29400) == endpoint


BAD = ["host:65536", "host:a", "host:", "host:-1", "ho st:1", "host:123456", ":1", "[::1", "[::1]1", "a/b", "ä:1"]
BAD_LABELS = ["a..b", ".a:1", f"{'a' * 64}.example:1", f"a.{'b' * 64}", ".", "a.."]


@pytest.mark.parametrize("text", [*BAD, *BAD_LABELS])
def test_invalid_endpoints(text: str) -> None:
    with pytest.raises(UserError, match="endpoint"):
        parse_endpoint(text, 29400)
    with pytest.raises(UserError, match="'host' has no port; write it as host:port"):
        parse_endpoint("host", None)


@given(st.text(max_size=30))
def test_any_text_is_an_endpoint_or_an_error(text: str) -> None:
    try:
        endpoint = parse_endpoint(text, 1)
    except UserError:
        return
    assert 0 <= endpoint.port < 65536
    assert parse_endpoint(str(endpoint), None) == endpoint


def test_this_machine() -> None:
    ours = ["localhost", "127.0.0.1", "127.8.8.8", "::1", socket.gethostname()]
    assert [*filter(is_this_machine, [*ours, "192.0.2.1", "no-such-host.invalid"])] == ours
    loopback = ["127.0.0.1", "::1", "::ffff:127.0.0.1"]
    assert [*filter(is_loopback, [*loopback, "10.0.0.1"])] == loopback


def test_source_address() -> None:
    assert source_address(Endpoint("127.0.0.1", 80)) == "127.0.0.1"
    assert resolve("127.0.0.1") == ["127.0.0.1"]
    with pytest.raises(OSError, match=r".+"):
        source_address(Endpoint("no-such-host.invalid", 80))


def test_listening_socket() -> None:
    with listening_socket("", 0) as server:
        port = server.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=5).close()
        with pytest.raises(OSError, match="in use"):
            listening_socket("", port)
    with listening_socket("127.0.0.1", 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    assert 0 < free_port() < 65536


@pytest.mark.parametrize(
    ("host", "only_here", "found"),
    [
        ("127.0.0.1", True, ["127.0.0.1"]),
        ("127.0.0.1", False, []),
        ("localhost", False, []),
        ("192.0.2.1", True, []),
        ("no-such-host.invalid", True, []),
        ("0.0.0.0", True, []),
        ("::", True, []),
    ],
)
def test_listening_addresses(host: str, only_here: bool, found: list[str]) -> None:
    assert listening_addresses(host, only_here=only_here) == found
    assert listening_address(host, only_here=only_here) == "".join(found)


def test_listening_sockets_share_a_port() -> None:
    found = listening_addresses("localhost", only_here=True)
    assert found
    assert all(map(is_loopback, found))
    sockets = listening_sockets(["127.0.0.1", "::1", "192.0.2.1"], 0)
    assert [made.getsockname()[0] for made in sockets] == ["127.0.0.1", "::1"], "without another machine's address"
    (port,) = {made.getsockname()[1] for made in sockets}
    with pytest.raises(OSError, match="in use"):
        listening_sockets(["127.0.0.2", "::1"], port)
    listening_sockets(["127.0.0.2"], port)[0].close()  # the failed attempt left nothing open
    with pytest.raises(OSError, match="in use"):
        listening_sockets([], port)
    for made in sockets:
        made.close()
    with pytest.raises(OSError, match="assign"):
        listening_sockets(["192.0.2.1"], 0)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_invalid_labels_are_an_os_error(host: str) -> None:
    with pytest.raises(OSError, match="is not a valid host name"):
        resolve(host)
    with pytest.raises(OSError, match="is not a valid host name"):
        source_address(Endpoint(host, 80))
    with pytest.raises(OSError, match="is not a valid host name"):
        listening_socket(host, 0)
    assert not is_this_machine(host)


def test_own_address() -> None:
    assert own_address(Endpoint("127.0.0.1", 80)) == "127.0.0.1"
    assert own_address(Endpoint("127.8.8.8", 80)).startswith("127.")
    assert own_address(Endpoint("no-such-host.invalid", 80)) == "127.0.0.1"
    assert own_address(Endpoint("a..b", 80)) == "127.0.0.1"


A_HOST = """
ip link set lo up
ip link add v0 type veth peer name v1
ip addr add 10.9.0.1/24 dev v0
ip addr add 10.9.0.2/24 dev v0
ip addr add fd00::1/64 dev v0 nodad
ip addr add fd00::2/64 dev v0 nodad
ip link set v0 up
ip link set v1 up
ip route add default dev v0
ip -6 route add default dev v0
echo {nonlocal_bind} > /proc/sys/net/ipv4/ip_nonlocal_bind
echo {nonlocal_bind} > /proc/sys/net/ipv6/ip_nonlocal_bind
exec "$0" -c 'import sys; from rallypoint.base.endpoint import is_this_machine
print(*filter(is_this_machine, sys.argv[1:]))' "$@"
"""
OURS = ["10.9.0.1", "10.9.0.2", "fd00::1", "fd00::2", "::ffff:10.9.0.2", "127.0.0.1", "0.0.0.0", "::"]
OTHERS = ["10.9.0.77", "10.9.0.255", "192.0.2.1", "fd00::77", "2001:db8::1", "::ffff:192.0.2.1"]


def isolated(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in its own network and mount namespaces."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("needs ip and unshare (Debian: iproute2, util-linux), for a network and a hosts file of its own")
    tried = completed(["unshare", "-n", "-m", "true"])
    if tried.returncode:
        pytest.skip(f"the kernel or container does not allow `unshare -n -m`: {tried.stderr.strip()}")
    return completed(["unshare", "-n", "-m", "sh", "-c", script, sys.executable, *arguments])


@pytest.mark.parametrize("nonlocal_bind", [0, 1])
@pytest.mark.process
@pytest.mark.root
def test_addresses_of_all_interfaces_are_this_machine(nonlocal_bind: int) -> None:
    done = isolated(A_HOST.format(nonlocal_bind=nonlocal_bind), *OURS, *OTHERS)
    assert done.stdout.split() == OURS, done.stderr


LOOPBACKS = """
mount --bind {hosts} /etc/hosts
ip link set lo up
ip addr {change} 127.0.0.1/8 dev lo 2> {errors}
exec "$0" -c 'from rallypoint.base.endpoint import *
from rallypoint.compat.helpers import get_socket_with_port
print(*[source_address(Endpoint(host, 80)) for host in ("localhost", "six")],
      own_address(Endpoint("none.invalid", 80)), outward_address(), get_socket_with_port().getsockname()[0],
      is_this_machine("localhost"), resolve("localhost")[0])'
"""
SIX_FIRST = "::1 localhost ip6-localhost six\n127.0.0.1 localhost\n127.0.0.1 {name}\n"
"""As on Debian; getaddrinfo then returns `::1` first, in any order of the lines."""


@pytest.mark.parametrize(("change", "address"), [("replace", "127.0.0.1"), ("del", "::1")])
@pytest.mark.process
@pytest.mark.root
def test_ipv4_addresses_are_preferred(change: str, address: str, tmp_path: Path) -> None:
    """`tcp://ADDRESS:PORT` has no place for colons. Without IPv4, IPv6 is used."""
    hosts = tmp_path / "hosts"
    hosts.write_text(SIX_FIRST.format(name=socket.gethostname()))
    done = isolated(LOOPBACKS.format(hosts=hosts, change=change, errors=tmp_path / "errors"))
    *addresses, listening, ours, first = done.stdout.split()
    assert addresses == [address] * 4, done.stderr
    assert listening == "::", "the port is free on all addresses (contract section 8)"
    assert ours == "True"
    assert first == "127.0.0.1", "a list has all addresses"


OUTWARD = """
ip link set lo up
ip link add v0 type veth peer name v1
ip link set v0 up
ip link set v1 up
ip addr add {address} dev v0 {nodad}
mount --bind {hosts} /etc/hosts
{route}
exec "$0" -c 'from rallypoint.base.endpoint import outward_address; print(outward_address())'
"""


@pytest.mark.parametrize(
    ("address", "nodad", "route"),
    [
        ("10.9.0.1/24", "", "ip route add default dev v0"),
        ("fd00::1/64", "nodad", "ip -6 route add default dev v0"),
        ("10.9.0.1/24", "", ""),
        ("fd00::1/64", "nodad", ""),
    ],
)
@pytest.mark.process
@pytest.mark.root
def test_outward_address(address: str, nodad: str, route: str, tmp_path: Path) -> None:
    own = address.partition("/")[0]
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{own} {socket.gethostname()}\n")
    done = isolated(OUTWARD.format(address=address, nodad=nodad, route=route, hosts=hosts))
    assert done.stdout.strip() == own, done.stderr


def test_is_acknowledged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as node:
        assert is_acknowledged(node), "nothing was written"
        node.sendall(b"hello")
        until(lambda: is_acknowledged(node))  # its kernel has it, although the connection is not accepted yet
        node.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                node.send(bytes(1 << 20))
        assert not is_acknowledged(node)
    assert not is_acknowledged(node), "closed"


@pytest.mark.process
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs `ip` (Debian: apt-get install iproute2)")
def test_interface_addresses_match_ip() -> None:
    links = json.loads(completed(["ip", "-j", "address"], check=True).stdout)
    expected = {
        f"{address['local']}/64" if address.get("temporary") else address["local"]
        for link in links
        if "UP" in link["flags"]
        for address in link["addr_info"]
        if not address["local"].startswith("127.")
        and address["local"] != "::1"
        and not (address["family"] == "inet6" and address["scope"] == "link")
    }
    found = interface_addresses()
    assert found is not None
    assert set(found) == expected
    assert all(is_local_address(address.partition("/")[0]) for address in found)


def test_unknown_interface_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_arguments: object) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(interfaces, "MAX_ADDRESSES", -1)
        assert interface_addresses() is None
    monkeypatch.setattr(socket, "socket", denied)
    assert interface_addresses() is None
