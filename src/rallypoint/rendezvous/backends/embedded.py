"""`c10d`: the control server inside the agent that owns the endpoint.

The host is inferred as in the contract's section 4.4: the node on the machine that the endpoint names; if several
agents run there, the first to bind. A name's addresses can change, and might not exist yet when nodes start (as is
usual on Kubernetes), so this is checked before each attempt to connect.

`store_type=file` stores the state in a shared file instead (`shared_state`).
"""

from __future__ import annotations

import errno
import threading
from functools import partial

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import (
    Endpoint,
    host_name,
    is_loopback,
    is_this_machine,
    own_address,
    parse_endpoint,
)
from rallypoint.base.errors import UserError
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.control.coordinator.dispatcher import Dispatcher, LocalLink, TimerThread
from rallypoint.control.protocol.errors import RendezvousConnectionError
from rallypoint.control.protocol.messages import Deliver, Link
from rallypoint.rendezvous.backends.options import (
    accepted_keys,
    control_listeners,
    control_tls,
    endpoint_words,
    job_key,
    rank_hint,
    refuse_unknown_port,
    settings_of,
    worker_stores,
)
from rallypoint.rendezvous.elastic import ControlPlane, ElasticHandler, own_node, record_hosting
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.rendezvous.params import C10D_PORT, RendezvousParameters

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from rallypoint.control.coordinator.server import ControlServer
    from rallypoint.rendezvous.backends.command_server import CommandServer

log = get_logger(__name__)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler for `c10d` parameters. Opens nothing before the first join.

    Raises:
        UserError: an option or the endpoint cannot work.
    """
    store_type = str(params.get("store_type", "tcp")).strip().lower()
    if store_type == "file":
        from rallypoint.rendezvous import shared_state

        return shared_state.create_handler(params)
    if store_type != "tcp":
        raise UserError(f"rendezvous option store_type={store_type!r} is not supported; choose tcp or file")
    endpoint = parse_endpoint(params.endpoint, C10D_PORT)
    refuse_unknown_port(params, endpoint)
    # Other machines can neither know a port that the kernel will choose nor reach a loopback address.
    only_here = is_loopback(endpoint.host) or (endpoint.port == 0 and endpoint.host == "localhost")
    listeners = partial(control_listeners, params, [endpoint.host], endpoint.port, only_here=only_here)
    control = _EmbeddedControl(endpoint, params, listeners)
    return ElasticHandler(params.backend, control, worker_stores(params, only_here=only_here))


class _EmbeddedControl(ControlPlane):
    """This node's side of the control plane: the server if this node hosts it, and the link."""

    def __init__(
        self, endpoint: Endpoint, params: RendezvousParameters, listeners: Callable[[], list[socket.socket]]
    ) -> None:
        where = endpoint_words(endpoint, is_loopback(endpoint.host))
        super().__init__(settings_of(params), where, params.endpoint_flag, rank_hint(params))
        self._endpoint = endpoint
        self._is_host = params.get_as_bool("is_host")
        self._local_addr = params.local_addr
        self._tls = control_tls(params.config)
        self._listeners = listeners
        self._is_alone = self.settings.max_nodes == 1 and endpoint.port == 0
        """Whether no other node can join or know the port: then no socket is open, and no thread runs unless something
        is scheduled."""
        self._server: ControlServer | None = None
        self._dispatcher: Dispatcher | None = None
        """The dispatcher, if this agent hosts it."""
        self._timer_thread: TimerThread | None = None
        self._opening = threading.Lock()
        """Held while a server or socket for commands opens."""
        self._commands: CommandServer | None = None
        """The server for commands to a coordinator that is alone."""
        self._closed = False

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        """Host the server if this node is the host, and connect."""
        host = is_this_machine(self._endpoint.host) if self._is_host is None else self._is_host
        if host:
            link = self._try_to_host(deliver)
            if link is not None:
                return link
        from rallypoint.control.client.dialing import DialTarget, FixedEndpoint, InferredHost
        from rallypoint.control.client.tcp_link import TcpLink

        place = DialTarget(self._endpoint, job_key(self.settings.run_id), self._tls, self.endpoint_flag)
        where = FixedEndpoint(place) if self._is_host is False else InferredHost(place, self._host_if_unhosted)
        return TcpLink(where, self.settings, own_node(), deliver, deadline)

    def _host_if_unhosted(self, lost: bool) -> None:
        """Host the server on this machine, to which the endpoint leads, if none exists yet or it was lost."""
        if self._server is not None:
            return
        try:
            listeners = self._listeners()
        except OSError:  # another process is listening, perhaps the unreachable server
            return
        port = self._serve(Dispatcher(self.settings), listeners, has_local_nodes=True)
        if lost:
            log.warning(
                "the previous host of the control plane is gone, so this agent now hosts the control plane, on port %d",
                port,
            )
        else:
            log.info("the control plane listens on port %d: %s is now this machine", port, self._endpoint.host)
            record_hosting(self.settings.run_id)

    def hosts_coordinator(self) -> bool:
        """Whether this agent hosts the coordinator."""
        return self._dispatcher is not None

    def coordinator(self) -> Dispatcher | None:
        """The coordinator, if this agent hosts it."""
        return self._dispatcher

    def watch_endpoint(self) -> str | None:
        """The endpoint; empty if the coordinator is alone, before `open_to_commands`."""
        if self._is_alone:
            return "" if self._commands is None else self._commands.endpoint
        return str(self._endpoint if self._server is None else Endpoint(self._endpoint.host, self._server.port))

    def open_to_commands(self) -> socket.socket | None:
        """See `RendezvousClient.open_to_commands`."""
        with self._opening:
            if self._is_alone and self._dispatcher is not None and self._commands is None and not self._closed:
                from rallypoint.rendezvous.backends.command_server import CommandServer

                self._commands = CommandServer(self._dispatcher, self._tls, self._timer_thread)
        return None if self._commands is None else self._commands.listener

    def serve_commands(self) -> None:
        """See `RendezvousClient.serve_commands`."""
        self.open_to_commands()
        if self._commands is not None:
            self._commands.serve()

    def close(self) -> None:
        """End the server if this agent hosts it."""
        with self._opening:
            self._closed = True
        if self._timer_thread is not None:
            self._timer_thread.close()
        why = f"{host_name()}, which hosted it, left the job"
        if self._server is not None:
            self._server.close(why=why)
        if self._commands is not None:
            self._commands.close(why)

    def _try_to_host(self, deliver: Deliver) -> Link | None:
        """Open a server and return the link to it; None if another process, which might be the server, has the port."""
        address = self._local_addr or own_address(self._endpoint)
        if self._is_alone:
            self._dispatcher = dispatcher = Dispatcher(self.settings)
            self._timer_thread = TimerThread(dispatcher)
        else:
            try:
                listeners = self._listeners()
            except OSError as error:
                if self._is_host or error.errno != errno.EADDRINUSE:
                    free = ", or port 0 for a free one" if self.settings.max_nodes == 1 else ""
                    twice = (
                        "if another agent of this job already hosts it here, set is_host=false on this one; otherwise "
                    )
                    first = twice if self._is_host and error.errno == errno.EADDRINUSE else ""
                    raise RendezvousConnectionError(
                        f"the control plane cannot listen at {self._endpoint}: {error.strerror}; "
                        f"{first}choose another port for {self.endpoint_flag}{free}"
                    ) from None
                return None
            dispatcher = Dispatcher(self.settings)
            log.info("the control plane listens on port %d", self._serve(dispatcher, listeners))
        record_hosting(self.settings.run_id)
        return LocalLink(dispatcher, own_node(address), deliver, address, is_alone=self._is_alone)

    def _serve(self, dispatcher: Dispatcher, listeners: list[socket.socket], *, has_local_nodes: bool = False) -> int:
        """Open the server; returns its port."""
        from rallypoint.base.descriptors import allow_nodes
        from rallypoint.control.coordinator.server import ControlServer

        allow_nodes(self.settings.max_nodes)
        self._server = ControlServer(
            dispatcher, listeners, keys=accepted_keys(), tls=self._tls, has_local_nodes=has_local_nodes
        )
        self._dispatcher = dispatcher
        return self._server.port
