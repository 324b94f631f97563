"""Endpoints: `host:port` as users write them, and what they mean on this machine.

Parsing follows section 4.3 of the torchrun contract, the question whether an endpoint is this machine section 4.4.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from rallypoint.base.errors import UserError
from rallypoint.base.log import printable

_HOST = re.compile(r"[\w.:-]+", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)


class Endpoint(NamedTuple):
    """Where something listens: a host name or address without brackets, and a TCP port (0 = the kernel picks)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str | None, default_port: int | None) -> Endpoint:
    """Read `host`, `host:port`, `[::1]` or `[::1]:port`; spaces around it are dropped, empty means localhost.

    Args:
        text: what the user wrote.
        default_port: the port where none is written; None if the user must write one.

    Raises:
        UserError: the host or the port cannot be one.
    """
    endpoint = (text or "").strip()
    host, port_text = _split(endpoint) if endpoint else ("localhost", None)
    if port_text is None and default_port is None:
        raise UserError(f"endpoint {endpoint!r} has no port; write it as host:port")
    port = default_port if port_text is None else _port(port_text, endpoint)
    if not _HOST.fullmatch(host) or not _has_labels(host):
        raise UserError(
            f"endpoint {endpoint!r} has the host {host!r}, which is no host name or address; write it as host:port"
        )
    assert port is not None
    return Endpoint(host, port)


def _split(endpoint: str) -> tuple[str, str | None]:
    if endpoint.startswith("["):
        host, bracket, rest = endpoint[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UserError(f"endpoint {endpoint!r} has an unfinished IPv6 address; write it as [address]:port")
        return host, rest[1:] if rest else None
    host, colon, port = endpoint.rpartition(":")
    return (host, port) if colon else (endpoint, None)


def _has_labels(host: str) -> bool:
    """Whether each part between dots has 1 to 63 characters; a dot at the end is allowed (RFC 1035)."""
    return all(0 < len(label) < 64 for label in host.removesuffix(".").split("."))


def _port(text: str, endpoint: str) -> int:
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise UserError(f"endpoint {endpoint!r} has the port {text!r}; a port is a number from 0 to 65535")
    return int(text)


def resolve(host: str, port: int = 0) -> list[str]:
    """Numeric addresses of `host`, in the resolver's order but for `::1`, which comes last; each once.

    Raises:
        OSError: the name cannot be resolved (now; it may be later).
    """
    found = _look_up(host, port, socket.SOCK_STREAM)
    return list(dict.fromkeys(str(target[0]) for _, _, _, target in found))


def _look_up(host: str, port: int, kind: int, flags: int = 0) -> list[tuple[int, int, int, tuple[Any, ...]]]:
    """Family, kind, protocol and address of each place that `host` names; OSError whatever is wrong with it."""
    try:
        found = socket.getaddrinfo(host, port, type=kind, flags=flags)
    except UnicodeError as error:  # from the codec for names, before anybody is asked
        raise OSError(errno.EINVAL, f"{host!r} is no host name: {error}") from None
    places = [(family, kind, protocol, target) for family, kind, protocol, _, target in found]
    return sorted(places, key=lambda place: place[3][0] == "::1")


def host_name() -> str:
    """What people call this machine. For them to read, and never to connect to."""
    return printable(socket.gethostname(), 64)


def is_loopback(address: str) -> bool:
    """Whether a numeric address can be reached from this machine only."""
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def usable_address(address: str) -> str:
    """A numeric address of this machine as others of this machine should be told of it: for `::1` it is `127.0.0.1`.

    Many a script writes `tcp://ADDRESS:PORT`, which has no place for colons, and many an /etc/hosts names `::1` first.
    Whatever listens on all interfaces is reached by either. Where there is no IPv4, `::1` stays.
    """
    return _IPV4_LOOPBACK if address == "::1" and _is_own(_IPV4_LOOPBACK) else address


_IPV4_LOOPBACK = "127.0.0.1"


def unmapped_address(address: str) -> str:
    """A numeric IPv4 address without the dress that a dual-stack socket puts on it; others as they are."""
    return address.removeprefix("::ffff:") if "." in address else address


def is_this_machine(host: str, *, ask: bool = True) -> bool:
    """Whether `host` names the machine that asks; without `ask`, as far as that is known without looking a name up.

    An address is ours when the kernel would send from it: that counts every interface, aliases included, where
    comparing names would miss them. A name that does not resolve is not ours (yet).
    """
    if host in {"localhost", socket.gethostname()}:
        return True
    try:
        found = _look_up(host, 0, socket.SOCK_STREAM, 0 if ask else socket.AI_NUMERICHOST)
    except OSError:
        return False
    return any(is_local_address(str(target[0])) for _, _, _, target in found)


def is_local_address(address: str) -> bool:
    """Whether a numeric address leads to this machine: a loopback, or one of its interfaces."""
    return is_loopback(address) or _is_own(address)


def _is_own(address: str) -> bool:
    """Whether a numeric address is one of this machine's interfaces, or all of them. Sends nothing.

    That a socket can be bound to it proves nothing where `ip_nonlocal_bind` is set; to find a route (all that
    connecting a UDP socket does) from the address to itself proves it. Over IPv4 the socket must be bound first: left
    free, the kernel sends from an interface's first address to its others. Over IPv6 it must be free: the kernel then
    sends from the address itself, if that is ours, while it routes from any address that a socket is bound to.
    """
    address = unmapped_address(address)
    if address in _ALL:
        return True
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            if family == socket.AF_INET:
                probe.bind((address, 0))
            probe.connect((address, 1))
            return bool(probe.getsockname()[0] == address)
    except OSError:
        return False


def source_address(endpoint: Endpoint) -> str:
    """The address that this machine really uses towards `endpoint`: what others there see of us. Sends nothing.

    Of the two loopbacks it is IPv4's, where there is one (`usable_address`).

    Raises:
        OSError: the name cannot be resolved, or there is no route.
    """
    found = _look_up(endpoint.host, endpoint.port or 1, socket.SOCK_DGRAM)
    error: OSError | None = None
    for family, kind, protocol, target in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)  # for UDP this only looks up the route
                return usable_address(str(probe.getsockname()[0]))
            except OSError as failure:
                error = failure
    raise error or OSError(f"no address for {endpoint.host!r}")


def own_address(endpoint: Endpoint) -> str:
    """As `source_address`, but the loopback where there is no way to `endpoint`: then nobody else can come either."""
    try:
        return source_address(endpoint)
    except OSError:
        return usable_address("::1")


def outward_address() -> str:
    """The address by which other machines are likely to reach this one, where no endpoint shows it. Sends nothing.

    The one that it uses towards the rest of the world, over IPv4 if it can; in a network without a way out, the one
    that its own name stands for; else the loopback.
    """
    for host in (*_ANYWHERE, socket.gethostname()):
        address = own_address(Endpoint(host, 9))
        if not is_loopback(address):
            return address
    return address


_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that are kept for documentation (RFC 5737, RFC 3849)."""


def listening_addresses(host: str, *, only_here: bool) -> list[str]:
    """Where to listen so that others reach this machine at `host`: addresses of it, or none for all that it has.

    None where its own may not do: `host` is not (only) this machine, as behind a translated or virtual address, or
    cannot be looked up, or stands for the loopback here while others may come from elsewhere.

    Args:
        host: a name or an address by which others know this machine.
        only_here: whether all others are on this machine.
    """
    try:
        addresses = resolve(host)
    except OSError:
        return []
    found = [each for each in addresses if not is_loopback(each) or _is_own(each)]  # there may be no IPv6 here
    fit = all(each not in _ALL and _is_own(each) and (only_here or not is_loopback(each)) for each in found)
    return found if fit else []


_ALL = ("0.0.0.0", "::")


def listening_address(host: str, *, only_here: bool) -> str:
    """As `listening_addresses`, for who listens at one address or, where the string is empty, at all."""
    found = listening_addresses(host, only_here=only_here)
    return found[0] if len(found) == 1 or (found and all(map(is_loopback, found))) else ""


def listening_sockets(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Sockets as by `listening_socket` at those of the addresses that this machine has, all on one port.

    Args:
        addresses: where to listen; none for all interfaces.
        port: 0 lets the kernel choose.

    Raises:
        OSError: the port is taken at one of them, or none of them is of this machine.
    """
    for _ in range(_ATTEMPTS if port == 0 else 0):
        try:
            return _listening_sockets(addresses, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise  # else the port that the kernel chose at the first of them is taken at another
    return _listening_sockets(addresses, port)


_ATTEMPTS = 8


def _listening_sockets(addresses: Sequence[str], port: int) -> list[socket.socket]:
    with contextlib.ExitStack() as made:
        found: list[socket.socket] = []
        elsewhere: OSError | None = None
        for address in addresses or [""]:
            try:
                found.append(made.enter_context(listening_socket(address, port)))
            except OSError as error:
                if error.errno not in _NOT_LOCAL:
                    raise
                elsewhere = error
            else:
                port = found[-1].getsockname()[1]
        if not found and elsewhere is not None:
            raise elsewhere
        made.pop_all()
    return found


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound, listening, non-blocking TCP socket.

    Args:
        host: an address or name to bind (the first of its addresses that can be bound), or empty for all interfaces
            (IPv6 and IPv4 on one socket where it can be).
        port: 0 lets the kernel choose.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    if not host:
        try:
            made = _listen(socket.AF_INET6, ("::", port), dual=True)
        except OSError as error:
            if error.errno not in _NOT_LOCAL:
                raise
            made = _listen(socket.AF_INET, ("", port), dual=False)
        return made
    places = _look_up(host, port, socket.SOCK_STREAM, socket.AI_PASSIVE)
    for family, _, _, target in places[:-1]:
        try:
            return _listen(family, target, dual=False)
        except OSError as error:
            if error.errno not in _NOT_LOCAL:
                raise
    return _listen(places[-1][0], places[-1][3], dual=False)


_NOT_LOCAL = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
"""The address is another machine's, or of a family that the kernel does not have, or that is switched off."""


def _listen(family: int, address: tuple[Any, ...], dual: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(address)
        made.listen(4096)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
"""Of linux/tcp.h; the socket module does not name them."""


def shorten_retransmission(sock: socket.socket) -> None:
    """Have lost packets of a connection with few of them sent again every moment, not after ever longer pauses.

    A link that was down for a second must be in use again well within the next: left alone, the kernel doubles the
    pause each time. Does nothing where the kernel cannot.
    """
    wanted = ((socket.TCP_NODELAY, 1), (_TCP_THIN_LINEAR_TIMEOUTS, 1), (_TCP_RTO_MAX_MS, 1000))
    for option, value in wanted:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def free_port() -> int:
    """A port that was free a moment ago. Prefer a listening socket: between this and its use another may take it."""
    with listening_socket("", 0) as probe:
        return int(probe.getsockname()[1])
