"""`static`: ranks given by hand, and the workers' store at the endpoint itself (contract section 4.9).

The node of rank 0 listens at `master_addr:master_port`. Workers speak the TCPStore protocol there, as they expect;
agents speak the control protocol on the same port and so learn of failures, which torch's static agents never do. The
first byte of a connection distinguishes the two. Each round has a new store behind the same port.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.base.descriptors import allow_nodes
from rallypoint.base.endpoint import (
    Endpoint,
    host_name,
    is_local_address,
    is_loopback,
    is_this_machine,
    parse_endpoint,
    source_address,
)
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.loop import shared_loop
from rallypoint.client.dialing import RETRYABLE, Dialer, DialTarget, FixedEndpoint, error_words
from rallypoint.coordinator.dispatcher import Dispatcher, LocalLink
from rallypoint.coordinator.server import ControlServer
from rallypoint.membership.state import Settings
from rallypoint.protocol.errors import RendezvousConnectionError
from rallypoint.protocol.handshake import HandshakeError
from rallypoint.protocol.messages import Deliver, Link, LinkLost
from rallypoint.rendezvous.backends.options import (
    accepted_keys,
    control_listeners,
    control_tls,
    endpoint_words,
    job_key,
    rank_hint,
    settings_of,
    store_peers,
)
from rallypoint.rendezvous.control_plane import ControlPlane, local_id, own_node
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.worker_stores import StoreAccess, WorkerStoreSupply, allow_connections, own_addresses
from rallypoint.store.guard import StoreGuard
from rallypoint.store.rounds import RoundStores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rallypoint.coordinator.dispatcher import Dispatcher
    from rallypoint.protocol.messages import Deliver, StorePeers
    from rallypoint.protocol.observation import Snapshot

log = get_logger(__name__)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for `static` parameters; always waits for `max_nodes`. Nothing is opened before the first join.

    Raises:
        UserError: no rank, a rank beyond the number of nodes, no port, or an option that cannot work.
    """
    endpoint = parse_endpoint(params.endpoint, None)
    rank = rank_hint(params)
    if rank is None:
        raise UserError("a static rendezvous needs this node's rank; give --node-rank (rdzv option rank)")
    if rank >= params.max_nodes:
        raise UserError(
            f"--node-rank {rank} is not a rank where --nnodes is {params.max_nodes}; "
            f"it must be from 0 to {params.max_nodes - 1}"
        )
    everyone = RendezvousParameters(
        params.backend, params.endpoint, params.run_id, params.max_nodes, params.max_nodes, **params.config
    )
    settings = settings_of(everyone, join_timeout_key="timeout", fixed_ranks=True)
    master = _StaticEndpoint(params, endpoint, settings, rank)
    return ElasticHandler(params.backend, master, master)


class _StaticEndpoint(ControlPlane, WorkerStoreSupply):
    """The endpoint of a static job: on rank 0 the server of both protocols, elsewhere only an address."""

    def __init__(self, params: RendezvousParameters, endpoint: Endpoint, settings: Settings, rank: int) -> None:
        # The default is an address that is each machine's own, and says nothing of where the others come from.
        only_here = is_loopback(endpoint.host) and params.endpoint_given
        super().__init__(settings, endpoint_words(endpoint, only_here), params.endpoint_flag, rank)
        self._endpoint = endpoint
        self._rank = rank
        self._tls = control_tls(params.config)
        self._listeners = partial(control_listeners, params, [endpoint.host], endpoint.port, only_here=only_here)
        peers = store_peers(params, only_here=only_here or params.max_nodes == 1)
        self._access = None if peers is None else StoreAccess(peers)
        self._endpoint_check: EndpointCheck | None = None
        self._stores: RoundStores | None = None
        self._server: ControlServer | None = None
        self._dispatcher: Dispatcher | None = None

    # The control plane

    def snapshot(self) -> Snapshot | None:
        """The snapshot of the job, if this is rank 0."""
        return None if self._dispatcher is None else self._dispatcher.snapshot()

    def watch_endpoint(self) -> str:
        """The endpoint."""
        return str(self._endpoint)

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        """Serve the endpoint if this is rank 0, and connect."""
        if self._rank != 0:
            from rallypoint.client.tcp_link import TcpLink

            return TcpLink(
                RankZeroResolver(self._dial_target(), self._rank), self.settings, local_id(), deliver, deadline
            )
        try:
            listeners = self._listeners()
        except OSError as error:
            port = self.endpoint_flag.replace("addr", "port").replace("ADDR", "PORT")
            raise RendezvousConnectionError(
                f"node rank 0 cannot listen at {self._endpoint}: {error.strerror}; give {port} a free port, or, if "
                "rank 0 of this job runs on this machine already, give this node a --node-rank of its own"
            ) from None
        allow_nodes(self.settings.max_nodes)
        self._dispatcher = dispatcher = Dispatcher(self.settings)
        # No worker can connect before this node has been sent its placement and the peers.
        guarded = self._access is not None and self._access.guards
        own_user = self._access is None or guarded
        self._stores = RoundStores(StoreGuard(peers=()) if guarded else None, own_user=own_user)
        self._server = ControlServer(
            dispatcher, listeners, keys=accepted_keys(), tls=self._tls, fallback=self._stores.add_connection
        )
        self._endpoint = Endpoint(self._endpoint.host, self._server.port)
        if not is_this_machine(self._endpoint.host, ask=False):
            self._begin_check(dispatcher, deliver)
        return LocalLink(dispatcher, own_node(self._endpoint.host), deliver, self._endpoint.host)

    def _dial_target(self) -> DialTarget:
        return DialTarget(self._endpoint, job_key(self.settings.run_id), self._tls, self.endpoint_flag)

    def _begin_check(self, dispatcher: Dispatcher, deliver: Deliver) -> None:
        self._endpoint_check = EndpointCheck(self._dial_target(), dispatcher, deliver, local_id())
        shared_loop().call(self._endpoint_check.start)

    def hosts_coordinator(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def close(self) -> None:
        """Disconnect all workers, and end the server, if it is here."""
        if self._stores is not None:
            self._stores.close()
        if self._endpoint_check is not None:
            shared_loop().call(self._endpoint_check.stop)
        if self._server is not None:
            self._server.close(why=f"{host_name()}, which hosted it, has left the job")

    # The workers' store: see `worker_stores.WorkerStoreSupply`

    def own_addresses(self) -> tuple[str, ...] | None:
        """The addresses of this node, for rank 0."""
        return None if self._access is None else own_addresses()

    def set_peers(self, told: Sequence[StorePeers]) -> None:
        """The round is complete."""
        if self._stores is not None and self._access is not None:
            self._stores.set_peers(self._access.peers(told, self._endpoint.host))

    def prepare(self, address: str) -> tuple[str, int]:
        """The endpoint, as it was written: workers of a static job connect to just that."""
        return self._endpoint.host, self._endpoint.port

    def round_ended(self) -> None:
        """Put a new store behind the port before any node can be notified of the next round, which needs this node."""
        if self._stores is not None:
            self._stores.next_round()

    def begin_round(self, *, is_host: bool, clients: int) -> None:
        """The workers of the previous round are gone: disconnect remaining clients of its store."""
        if self._stores is not None:
            allow_connections(clients)
            self._stores.end_previous()


_TELL_AFTER, _UNKNOWN_AFTER = 0.8, 2.0
"""Seconds for the endpoint to lead here, and for its name to resolve."""
_REFUSE_AFTER = 2.0
"""Seconds for which another server of the job must have answered. One that has just been replaced may still end."""
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
_ATTEMPT_TIMEOUT = 0.5


def must_run_sentence(endpoint: Endpoint, addresses: list[str]) -> str:
    """`rank 0 must run on n1 (10.77.0.1); this is 10.77.0.2`.

    Args:
        endpoint: of the job. addresses: the addresses of its host; empty if they are not known.
    """
    where = endpoint.host
    if addresses and addresses != [endpoint.host]:
        where += f" ({', '.join(addresses)})"
    try:
        own = source_address(Endpoint(addresses[0], endpoint.port)) if addresses else host_name()
    except OSError:
        own = host_name()
    return f"rank 0 must run on {where}; this is {own}"


class RankZeroResolver(FixedEndpoint):
    """The endpoint of a static job, as a node of another rank looks for it."""

    def __init__(self, place: DialTarget, rank: int) -> None:
        super().__init__(place)
        self._rank = rank
        self._addresses: list[str] = []

    @property
    def advice(self) -> str:
        """What to do if no server is found there."""
        told = must_run_sentence(self.target.endpoint, self._addresses)
        return f"{told} with --node-rank {self._rank}; check {self.target.flag}, and that rank 0 has started"

    def resolved(self, addresses: list[str]) -> None:
        """Remember them for the sentence."""
        self._addresses = addresses


class _EndpointIsLocal(Exception):
    """The endpoint is on this machine, or is forwarded here."""


class EndpointCheck:
    """Looks, on rank 0, whether the endpoint leads here, until that is known or the first round is complete."""

    def __init__(self, place: DialTarget, dispatcher: Dispatcher, deliver: Deliver, local_id: int) -> None:
        """Nothing happens before `start`.

        Args:
            place: of the job's endpoint.
            dispatcher: the job's, which is served here.
            deliver: called with a `LinkLost` if the endpoint belongs to another job.
            local_id: the number of this handler in this process.
        """
        self._target = place
        self._dispatcher = dispatcher
        self._deliver = deliver
        self._dialer = Dialer(place, dispatcher.settings, local_id)
        self._addresses: list[str] = []
        self._answered_at: float | None = None
        """The time since which another server of the job has answered each attempt."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. On the loop's thread."""
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """End, if it has not. On the loop's thread."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._look()
        except _EndpointIsLocal:
            log.info("%s leads here", self._target.endpoint)
        except Exception:  # the job needs no check
            log.exception("whether %s leads here cannot be found out", self._target.endpoint)

    async def _look(self) -> None:
        began, delay, told = SYSTEM_CLOCK.monotonic(), _FIRST_DELAY, False
        while not self._dispatcher.state.complete:
            why = await self._attempt()
            now = SYSTEM_CLOCK.monotonic()
            if self._answered_at is not None and now - self._answered_at >= _REFUSE_AFTER:
                self._deliver(LinkLost(self._sentence(why)))
                return
            if not told and (self._answered_at is not None or now - began >= self._report_after()):
                told = True
                log.warning("%s", self._sentence(why))
            await asyncio.sleep(delay)
            delay = min(1.5 * delay, _LONGEST_DELAY)

    def _report_after(self) -> float:
        return _TELL_AFTER if self._addresses else _UNKNOWN_AFTER

    async def _attempt(self) -> str:
        """Go to the endpoint once. Returns what was found there; _EndpointIsLocal if that is us."""
        try:
            session = await self._dialer.dial(_ATTEMPT_TIMEOUT, resolved=self._resolved)
        except (*RETRYABLE, HandshakeError) as error:
            self._answered_at = None
            return error_words(error) or self._dialer.unfinished
        session.writer.close()
        if session.welcome.incarnation == self._dispatcher.incarnation:
            raise _EndpointIsLocal
        self._answered_at = self._answered_at or SYSTEM_CLOCK.monotonic()
        return "another node of this job has rank 0 there"

    def _resolved(self, addresses: list[str]) -> None:
        self._addresses = addresses
        if any(map(is_local_address, addresses)):
            raise _EndpointIsLocal

    def _sentence(self, why: str) -> str:
        endpoint, flag = self._target.endpoint, self._target.flag
        if not self._addresses:
            return f"{flag} names {endpoint.host!r}, which has no address here ({why}); name an address"
        told = f"{must_run_sentence(endpoint, self._addresses)}; give this node a --node-rank of its own"
        if self._answered_at is not None:
            return f"{told}: {why}"
        return f"{told}, or check {flag}: it does not lead here ({why}); behind NAT or a virtual address it may yet"
