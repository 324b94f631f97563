"""Endpoints: `host:port` as users write them, and what they mean on this machine (contract sections 4.3 and 4.4)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import socket
import struct
from collections.abc import Sequence

from rallypoint.base.errors import UserError
from rallypoint.base.light_typing import Any, NamedTuple
from rallypoint.base.log import printable

_HOST = re.compile(r"[\w.:-]+", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)


class Endpoint(NamedTuple):
    """A host name or address without brackets, and a TCP port (0: the kernel chooses)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str | None, default_port: int | None) -> Endpoint:
    """Parse `host`, `host:port`, `[::1]` or `[::1]:port`; empty means localhost.

    `default_port` applies if the text has no port; None makes the port mandatory.

    Raises:
        UserError: the host or the port is invalid.
    """
    endpoint = (text or "").strip()
    host, port_text = _split(endpoint) if endpoint else ("localhost", None)
    if port_text is None and default_port is None:
        raise UserError(f"endpoint {endpoint!r} has no port; write it as host:port")
    if port_text is not None and (not _PORT.fullmatch(port_text) or int(port_text) > 65535):
        raise UserError(f"endpoint {endpoint!r} has the invalid port {port_text!r}; use a number from 0 to 65535")
    if not _is_plain(host):
        raise UserError(
            f"endpoint {endpoint!r} has the invalid host {host!r}; write a host name or address, as host:port"
        )
    return Endpoint(host, int(port_text or default_port or 0))


def _is_plain(host: str) -> bool:
    """Whether the host is an address, or an ASCII name whose labels have 1 to 63 characters (RFC 1035)."""
    return bool(_HOST.fullmatch(host)) and all(0 < len(label) < 64 for label in host.removesuffix(".").split("."))


def _split(endpoint: str) -> tuple[str, str | None]:
    if endpoint.startswith("["):
        host, bracket, rest = endpoint[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UserError(
                f"endpoint {endpoint!r} has an IPv6 address without a closing bracket; write it as [address]:port"
            )
        return host, rest[1:] if rest else None
    host, colon, port = endpoint.rpartition(":")
    return (host, port) if colon else (endpoint, None)


def resolve(host: str, port: int = 0) -> list[str]:
    """The numeric addresses of `host` without duplicates, in the resolver's order except that `::1` comes last. Raises
    OSError if the name cannot be resolved now; it may resolve later.
    """
    results = _look_up(host, port, socket.SOCK_STREAM)
    return list(dict.fromkeys(str(target[0]) for _, _, _, target in results))


def _look_up(host: str, port: int, kind: int, flags: int = 0) -> list[tuple[int, int, int, tuple[Any, ...]]]:
    """Look up a name. Every failure raises OSError."""
    try:
        # Use bytes if possible: for text, Python imports its codec for international names.
        name = host.encode() if _is_plain(host) else host
        answers = socket.getaddrinfo(name, port, type=kind, flags=flags)
    except UnicodeError as error:  # from the codec for international names
        raise OSError(errno.EINVAL, f"{host!r} is not a valid host name: {error}") from None
    results = [(family, kind, protocol, target) for family, kind, protocol, _, target in answers]
    return sorted(results, key=lambda result: result[3][0] == "::1")


def host_name() -> str:
    """This machine's name, for messages. Never connect to it."""
    return printable(socket.gethostname(), 64)


def is_loopback(address: str) -> bool:
    """Whether a numeric address is reachable only from this machine."""
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def usable_address(address: str) -> str:
    """This machine's numeric address in the form that its other processes should use: `127.0.0.1` for `::1`, if IPv4
    is available.

    Many scripts write `tcp://ADDRESS:PORT`, which allows no colons, and many /etc/hosts files list `::1` first. A
    server that listens on all interfaces is reachable at both.
    """
    return _IPV4_LOOPBACK if address == "::1" and _is_own(_IPV4_LOOPBACK) else address


_IPV4_LOOPBACK = "127.0.0.1"


def unmapped_address(address: str) -> str:
    """A numeric IPv4 address without the prefix that a dual-stack socket adds; other addresses unchanged."""
    return address.removeprefix("::ffff:") if "." in address else address


def is_this_machine(host: str, *, ask: bool = True) -> bool:
    """Whether `host` names this machine. Without `ask`, do not look up names.

    An address is ours if the kernel would send from it. This covers every interface and alias; comparing names would
    miss some. A name that does not resolve (yet) is not ours.
    """
    if host in {"localhost", socket.gethostname()}:
        return True
    try:
        results = _look_up(host, 0, socket.SOCK_STREAM, 0 if ask else socket.AI_NUMERICHOST)
    except OSError:
        return False
    return any(is_local_address(str(target[0])) for _, _, _, target in results)


def is_own_unknown_name(host: str) -> bool:
    """Whether `host` is this machine's own name but does not resolve here, as in a container without an entry in
    /etc/hosts. Such a machine can reach itself only over the loopback. May wait for a name server.
    """
    if host != socket.gethostname():
        return False
    try:
        return not resolve(host)
    except OSError:
        return True


def is_local_address(address: str) -> bool:
    """Whether a numeric address is a loopback or belongs to one of this machine's interfaces."""
    return is_loopback(address) or _is_own(address)


def _is_own(address: str) -> bool:
    """Whether a numeric address belongs to one of this machine's interfaces, or is the wildcard. Sends nothing.

    Binding a socket to the address proves nothing if `ip_nonlocal_bind` is set. A route from the address to itself
    does; connecting a UDP socket looks it up. With IPv4, bind the socket first: otherwise the kernel uses an
    interface's first address to reach its other ones. With IPv6, do not bind it: an unbound socket sends from the
    address only if it is ours, while a bound one sends from any address.
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
    """The address of this machine that `endpoint` sees as the sender. Sends nothing.

    For a loopback endpoint, the IPv4 loopback if available (`usable_address`).

    Raises:
        OSError: the name cannot be resolved, or there is no route.
    """
    results = _look_up(endpoint.host, endpoint.port or 1, socket.SOCK_DGRAM)
    error: OSError | None = None
    for family, kind, protocol, target in results:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)  # for UDP, this only looks up the route
                return usable_address(str(probe.getsockname()[0]))
            except OSError as failure:
                error = failure
    raise error or OSError(f"no address found for {endpoint.host!r}")


def own_address(endpoint: Endpoint) -> str:
    """Like `source_address`, but the loopback if no route leads to `endpoint`: no other node has one then either."""
    try:
        return source_address(endpoint)
    except OSError:
        return usable_address("::1")


def outward_address() -> str:
    """The address at which others probably reach this machine, if no endpoint shows it. Sends nothing.

    It is the address of the default route, IPv4 first; otherwise that of the machine's name; otherwise the loopback.
    """
    for host in (*_ANYWHERE, socket.gethostname()):
        address = own_address(Endpoint(host, 9))
        if not is_loopback(address):
            return address
    return address


_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation (RFC 5737, RFC 3849)."""


def listening_addresses(host: str, *, only_here: bool) -> list[str]:
    """The addresses of `host` on which to listen so that others can reach this machine; empty for all interfaces.

    Empty if specific addresses might not be enough: `host` is translated, virtual or shared, cannot be resolved, or
    is the loopback here while other machines may connect (not `only_here`).
    """
    try:
        addresses = resolve(host)
    except OSError:
        return []
    # Without IPv6, this machine does not have the address `::1`.
    usable = [address for address in addresses if not is_loopback(address) or _is_own(address)]
    fit = all(
        address not in _ALL and _is_own(address) and (only_here or not is_loopback(address)) for address in usable
    )
    return usable if fit else []


_ALL = ("0.0.0.0", "::")


def listening_address(host: str, *, only_here: bool) -> str:
    """Like `listening_addresses`, for one address; empty for all interfaces."""
    addresses = listening_addresses(host, only_here=only_here)
    return addresses[0] if len(addresses) == 1 or (addresses and all(map(is_loopback, addresses))) else ""


def listening_sockets(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Like `listening_socket`, on each of the addresses that belongs to this machine (empty: all interfaces), with the
    same port. Raises OSError if the port is taken on any of them, or if none belongs to this machine.
    """
    for _ in range(_ATTEMPTS if port == 0 else 0):
        try:
            return _listening_sockets(addresses, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise  # EADDRINUSE: the kernel's port for the first address is taken on another
    return _listening_sockets(addresses, port)


_ATTEMPTS = 8


def _listening_sockets(addresses: Sequence[str], port: int) -> list[socket.socket]:
    with contextlib.ExitStack() as opened:
        listeners: list[socket.socket] = []
        elsewhere: OSError | None = None
        for address in addresses or [""]:
            try:
                listeners.append(opened.enter_context(listening_socket(address, port)))
            except OSError as error:
                if error.errno not in _NOT_LOCAL:
                    raise
                elsewhere = error
            else:
                port = listeners[-1].getsockname()[1]
        if not listeners and elsewhere is not None:
            raise elsewhere
        opened.pop_all()
    return listeners


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound, listening, non-blocking TCP socket.

    `host` is an address, a name (its first address that can be bound), or empty for all interfaces. These share one
    socket for IPv6 and IPv4 if possible. With port 0, the kernel chooses.

    Raises:
        OSError: the port is taken, or the address belongs to another machine.
    """
    candidates: list[tuple[int, tuple[Any, ...], bool]]
    if not host:
        candidates = [(socket.AF_INET6, ("::", port), True), (socket.AF_INET, ("", port), False)]
    else:
        results = _look_up(host, port, socket.SOCK_STREAM, socket.AI_PASSIVE)
        candidates = [(family, target, False) for family, _, _, target in results]
    for candidate in candidates[:-1]:
        try:
            return _listen(*candidate)
        except OSError as error:
            if error.errno not in _NOT_LOCAL:
                raise
    return _listen(*candidates[-1])


LISTEN_BACKLOG = 65535
"""The length of the accept queue. The kernel lowers it to its `somaxconn`, 4,096 by default."""

_NOT_LOCAL = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
"""Errors of an address that belongs to another machine, or to a family that the kernel lacks or has disabled."""


def _listen(family: int, address: tuple[Any, ...], dual: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        shorten_retransmission(listener)  # accepted sockets inherit the options
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
"""From linux/tcp.h; the socket module has no names for them."""


def shorten_retransmission(sock: socket.socket) -> None:
    """Make the kernel resend lost packets of a connection with little traffic at short, constant intervals.
    Connections accepted from a listening socket inherit this.

    After a link was down for a second, it must be in use again within another. Does nothing if the kernel lacks
    this.
    """
    options = ((socket.TCP_NODELAY, 1), (_TCP_THIN_LINEAR_TIMEOUTS, 1), (_TCP_RTO_MAX_MS, 1000))
    for option, value in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def keep_alive(connected: socket.socket) -> None:
    """Enable TCP keep-alive: a side that only receives would not notice that its peer is gone."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def is_acknowledged(connected: socket.socket) -> bool:
    """Whether the peer's kernel has received everything written to a connection. If so, the peer is reachable, even if
    its process is silent. False if this kernel cannot tell.
    """
    import termios

    try:
        (unacknowledged,) = _INT.unpack(fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(_INT.size)))
    except (OSError, ValueError):  # the socket is closed
        return False
    return int(unacknowledged) == 0


_INT = struct.Struct("i")


def free_port() -> int:
    """A port that was free a moment ago. Another process may take it, so prefer a listening socket."""
    with listening_socket("", 0) as probe:
        return int(probe.getsockname()[1])
