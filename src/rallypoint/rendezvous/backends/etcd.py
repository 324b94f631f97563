"""`etcd`: etcd (the v3 API) elects the agent that coordinates, and stores its journal.

`etcd-v2` is an alias for torchrun's command lines: our nodes do not need torch's keys in the v2 API.

No machine is special: if any is lost, the others continue. A round costs each node the same as with the embedded
server, and costs etcd a few writes, however many nodes there are (decision 18).
"""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint, is_loopback, own_address, parse_endpoint
from rallypoint.base.errors import UsageError, UserError
from rallypoint.base.log import get_logger
from rallypoint.base.secrets import ETCD_PASSWORD, etcd_password
from rallypoint.control.election.keys import ElectionKeys
from rallypoint.control.etcd.api import Credentials, EtcdTls
from rallypoint.control.protocol.messages import Deliver, Link
from rallypoint.rendezvous.backends.options import control_listeners, control_tls, rank_hint, settings_of, worker_stores
from rallypoint.rendezvous.elastic import ControlPlane, ElasticHandler, own_node
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.rendezvous.params import ETCD_PORT, RendezvousParameters

if TYPE_CHECKING:
    from rallypoint.control.coordinator.dispatcher import Dispatcher
    from rallypoint.control.election.shell import Candidate
    from rallypoint.control.etcd.client import EtcdClient


log = get_logger(__name__)

_TIMEOUT = 3.0
"""Seconds per request, over all members together."""


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler for `etcd` or `etcd-v2` parameters. Opens nothing before the first join.

    Raises:
        UserError: an option or an endpoint cannot work.
    """
    if params.backend == "etcd-v2":
        log.info("--rdzv-backend=etcd-v2 is another name for etcd: the v3 API of etcd is used")
    return ElasticHandler(params.backend, _EtcdControl(params), worker_stores(params))


class _EtcdControl(ControlPlane):
    """This node's side of the control plane: its candidacy in etcd, and the link to the coordinator."""

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(settings_of(params), f"on etcd at {params.endpoint}", rank_hint=rank_hint(params))
        self._endpoints = endpoints_of(params.endpoint)
        self._tls = tls_of(params)
        self._control_tls = control_tls(params.config)
        self._credentials = credentials_of(params)
        self._keys = ElectionKeys.for_job(prefix_of(params), params.run_id)
        self._local_addr = params.local_addr
        self._listen = partial(control_listeners, params, port=0)
        self._candidate: Candidate | None = None

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        """Become a candidate, and connect to the elected coordinator; returns at once."""
        from rallypoint.control.client.tcp_link import TcpLink
        from rallypoint.control.election.leader_resolver import LeaderResolver
        from rallypoint.control.election.shell import Candidate

        own = own_node()
        leader = LeaderResolver(", ".join(str(endpoint) for endpoint in self._endpoints), self._control_tls)
        self._candidate = Candidate(
            self._connect, self._keys, self.settings, leader, self._addresses, self._listen, own
        )
        link = TcpLink(leader, self.settings, own, deliver, deadline)
        leader.on_move = link.recheck_endpoint
        self._candidate.start()
        return link

    def coordinator(self) -> Dispatcher | None:
        """The coordinator, if this agent is elected."""
        return None if self._candidate is None else self._candidate.coordinator

    def watch_endpoint(self) -> str | None:
        """The etcd endpoints, where the elected coordinator can be found."""
        return ",".join(map(str, self._endpoints))

    def hosts_coordinator(self) -> bool:
        """Whether this agent is elected."""
        return self._candidate is not None and self._candidate.is_leader

    def close(self) -> None:
        """Leave etcd. Idempotent."""
        if self._candidate is not None:
            self._candidate.close()

    def _addresses(self) -> list[str]:
        return candidate_addresses(self._endpoints, self._local_addr)

    def _connect(self) -> EtcdClient:
        from rallypoint.control.election.machine import LOOKS_LATE
        from rallypoint.control.etcd.client import EtcdClient

        size = self.settings.max_nodes
        idle = size / LOOKS_LATE if size > self._keys.seats else None  # together they ask as often as they look
        return EtcdClient(self._endpoints, self._tls, self._credentials, _TIMEOUT, idle_s=idle)


def candidate_addresses(endpoints: list[Endpoint], local_addr: str | None) -> list[str]:
    """Addresses at which other agents might reach this machine, the likeliest first: those used on the way to etcd.

    If this machine reaches etcd only on itself, each machine might have a member. Then the machine's name is added.
    """
    if local_addr:
        return [local_addr]
    addresses = list(dict.fromkeys(own_address(endpoint) for endpoint in endpoints))
    outside = [address for address in addresses if not is_loopback(address)]
    if outside:
        return outside
    return [*addresses, socket.gethostname()]


_DEFAULT_PREFIX = "/rallypoint"


def endpoints_of(text: str) -> list[Endpoint]:
    """Parse comma-separated endpoints; each may begin with a scheme.

    Raises:
        UserError: an endpoint is invalid.
    """
    parts = [part.strip() for part in text.split(",")]
    bare = [part.removeprefix("http://").removeprefix("https://") for part in parts]
    return list(dict.fromkeys(parse_endpoint(part, ETCD_PORT) for part in bare))


def tls_of(params: RendezvousParameters) -> EtcdTls | None:
    """Read the certificates from the options of either of torch's etcd backends; None for plain connections.

    Raises:
        UserError: the options do not match.
    """
    cacert = _file(params, "cacert", "ca_cert")
    cert = _file(params, "cert", "ssl_cert")
    key = _file(params, "key", "ssl_cert_key")
    has_files = cacert is not None or cert is not None or key is not None
    protocol = str(params.get("protocol", "https" if has_files else "http")).strip().lower()
    if protocol not in ("http", "https"):
        raise UserError(f"rendezvous option protocol={protocol!r} is not supported; choose http or https")
    if protocol == "http":
        if has_files:
            raise UsageError(
                "rendezvous option protocol=http uses no certificates; set protocol=https, or remove the certificates"
            )
        return None
    if key is not None and cert is None:
        raise UsageError(f"rendezvous option key={key!r} is set without its certificate; set cert too")
    return EtcdTls(cacert, cert, key)


def prefix_of(params: RendezvousParameters) -> str:
    """Prefix of all jobs' keys, from our option or torch's."""
    return str(params.get("prefix", params.get("etcd_prefix", _DEFAULT_PREFIX)))


def credentials_of(params: RendezvousParameters) -> Credentials | None:
    """Read user and password; None without a user. The password can be in `RALLYPOINT_ETCD_PASSWORD` or in a file,
    where other users of the machine cannot read it.

    Raises:
        UserError: a password is set without a user, user or password is not text, or the file cannot be used.
    """
    user, password = params.get("user"), params.get("password")
    if user is None:
        if password is not None:
            raise UsageError("rendezvous option password is set without a user; set user too")
        return None
    if password is not None:
        log.warning(
            "rendezvous option password=... is visible to all users of this machine in the process list; put the "
            "password into a file, and set %s_FILE to its path",
            ETCD_PASSWORD,
        )
    credentials = Credentials(str(user), etcd_password() if password is None else str(password))
    try:
        "".join(credentials).encode()
    except UnicodeEncodeError:
        raise UsageError("rendezvous options user and password must be UTF-8 text, but one of them is not") from None
    return credentials


def _file(params: RendezvousParameters, *names: str) -> str | None:
    values = (params.get(name) for name in names)
    return next((str(value) for value in values if value is not None), None)
