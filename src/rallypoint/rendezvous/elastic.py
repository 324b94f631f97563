"""The handler of all our rendezvous backends: one link to the control plane, one worker store per round.

An agent gets all notifications through `listen` and never blocks here; other callers can wait in `next_rendezvous`.
`listen`, `join`, `begin_round`, `info`, and `send` (for all other requests) extend torch's interface.

The events of a rendezvous use torch's names and texts (contract section 5.9). Their laws:

- nothing is created or even imported unless a handler for these events is configured (`observe.telemetry.lazy`);
- events are recorded on the caller's thread, never on the link's, so that a slow event handler cannot delay heartbeats;
- events describe what a node knows about itself. Nothing corresponds to the steps of torch's nodes on their shared
state.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.base.endpoint import host_name
from rallypoint.base.errors import RallypointError
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger
from rallypoint.control.membership.state import Close, Drain, NodeId, NodeInfo, Outcome, Settings, Verdict
from rallypoint.control.protocol.errors import RendezvousConnectionError, RendezvousStateError, error_of
from rallypoint.control.protocol.messages import (
    ConfigDiffers,
    Deliver,
    JobEnded,
    JoinRefused,
    JoinRequest,
    LeaveRequest,
    Link,
    LinkLost,
    LinkOpened,
    LinkUp,
    NextStore,
    NodesWaiting,
    Notification,
    Placed,
    Placement,
    Progress,
    ProgressRequest,
    ProgressText,
    Request,
    RoundEnded,
    StorePeers,
)
from rallypoint.observe.telemetry.lazy import rendezvous_events_wanted, to_handlers
from rallypoint.rendezvous.handler import (
    FIRST_PROGRESS_REQUEST,
    MAX_PROGRESS_INTERVAL,
    LocalJob,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from rallypoint.rendezvous.worker_stores import WorkerStoreSupply

if TYPE_CHECKING:
    from rallypoint.control.coordinator.dispatcher import Dispatcher
    from rallypoint.observe.rendezvous_log import ReportedProgress
    from rallypoint.observe.watching.messages import Snapshot
    from rallypoint.store.api import Store

log = get_logger(__name__)


class ControlPlane:
    """One node's end of the control plane. Opens nothing before `open`."""

    def __init__(
        self, settings: Settings, where: str = "", endpoint_flag: str = "endpoint", rank_hint: int | None = None
    ) -> None:
        """Store the user's values.

        Args:
            settings: the job's bounds and times.
            where: where the nodes meet, in words, as in `at host:port`.
            endpoint_flag: the flag that sets the endpoint, for messages.
            rank_hint: the group rank to request.
        """
        self.settings = settings
        self.where = where
        self.endpoint_flag = endpoint_flag
        self.rank_hint = rank_hint

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        """Create the link, once.

        Args:
            deliver: called with every notification.
            deadline: until when it may try to connect.
        """
        raise NotImplementedError

    def hosts_coordinator(self) -> bool:
        """Whether the coordinator is currently in this process."""
        return False

    def coordinator(self) -> Dispatcher | None:
        """The coordinator, if it is currently in this process."""
        return None

    def watch_endpoint(self) -> str | None:
        """The `--rdzv-endpoint` of the coordinator for commands on this machine; empty before `open_to_commands`, None
        if commands cannot reach it."""
        return None

    def open_to_commands(self) -> socket.socket | None:
        """See `RendezvousClient.open_to_commands`."""
        return None

    def serve_commands(self) -> None:
        """See `RendezvousClient.serve_commands`."""

    def close(self) -> None:
        """End this node's server or candidacy, after the link. Idempotent."""


def own_node(address: str = "") -> NodeId:
    """Create the identity of a handler that others reach at `address`; if empty, its link fills it in."""
    return NodeId(address, os.getpid(), int.from_bytes(os.urandom(8), "big") >> 2, host_name())


_JOIN_SOURCE = "dynamic_rendezvous.py:DynamicRendezvousHandler.next_rendezvous"
_LEAVE_SOURCE = "dynamic_rendezvous.py:_DistributedRendezvousOpExecutor._remove_from_participants"
_CLOSE_SOURCE = "dynamic_rendezvous.py:DynamicRendezvousHandler._close"
_HOST_SOURCE = "c10d_rendezvous_backend.py:_create_tcp_store"

_numbers = count()


class RendezvousEventEmitter:
    """The events of one handler.

    Args:
        run_id: the job.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._rendezvous = f"the rendezvous {run_id!r}"
        self._local_id: int | None = None
        self._round = -1
        self._failed = False

    def join_requested(self) -> None:
        """Record that the node requests a place in the next round, and gives up its current one."""
        previous, self._round, self._failed = self._round, -1, False
        self._record_event(_JOIN_SOURCE, f"attempts to join the next round of {self._rendezvous}.")
        if previous >= 0:
            self._record_event(
                _LEAVE_SOURCE, f"removed itself from the participants of round {previous} of {self._rendezvous}."
            )

    def record_placement(self, placement: Placement) -> None:
        """Record that the node has a place."""
        rank, size = placement.group_rank, placement.group_world_size
        self._round = placement.round
        words = f"has joined round {self._round} of {self._rendezvous} as rank {rank} in a world of size {size}."
        self._record_event(
            _JOIN_SOURCE, words, rank=rank, master_endpoint=f"{placement.store_address}:{placement.store_port}"
        )

    def record_failure(self, error: BaseException) -> None:
        """Record that the rendezvous failed for this node; call this once per attempt."""
        if not self._failed and rendezvous_events_wanted():
            self._failed = True
            words = f"{type(error).__name__}: {error}"
            _record(
                _JOIN_SOURCE, "FAILED", self._run_id, words, local_id=self._round_number(), error_trace=_trace(error)
            )

    def record_end(self, verdict: Verdict) -> None:
        """Record that the job ended for this node."""
        self._record_event(
            _CLOSE_SOURCE, f"has closed {self._rendezvous}: the job has {verdict.outcome.value}.", "SUCCEEDED"
        )

    def _record_event(self, name: str, what: str, state: str = "RUNNING", **more: Any) -> None:
        if rendezvous_events_wanted():
            number = self._round_number()
            words = f"The node '{socket.gethostname()}_{os.getpid()}_{number}' {what}"
            _record(name, state, self._run_id, words, local_id=number, **more)

    def _round_number(self) -> int:
        if self._local_id is None:
            self._local_id = next(_numbers)
        return self._local_id


def record_hosting(run_id: str) -> None:
    """Record that this process hosts a job's control plane."""
    if rendezvous_events_wanted():
        words = f"Process {os.getpid()} hosts the control plane of the rendezvous {run_id!r}."
        _record(_HOST_SOURCE, "INIT", run_id, words)


def _record(name: str, state: str, run_id: str, message: str, **more: Any) -> None:
    from rallypoint.observe.telemetry.agent_events import NodeState, RdzvEvent
    from rallypoint.observe.telemetry.handlers import record_rdzv_event

    event = RdzvEvent(
        name=name,
        run_id=run_id,
        message=message,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        node_state=NodeState[state],
        **more,
    )
    to_handlers("event", lambda: record_rdzv_event(event))


def _trace(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


_WantedPlace = tuple[NodeInfo, tuple[str, ...] | None, bool, float]
"""This node's info, without its worker store's address; its workers' addresses, if known; whether it keeps places; and
since when it has wanted this place, on its own clock."""


class ElasticHandler(RendezvousHandler):
    """One node's part in a job's rendezvous."""

    def __init__(
        self,
        backend: str,
        control: ControlPlane,
        stores: WorkerStoreSupply,
        clock: Callable[[], float] = SYSTEM_CLOCK.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Connect the parts; nothing happens before the first join.

        Args:
            backend: the name of the handler.
            control: this node's side of the control plane.
            stores: the source of worker stores.
            clock: measures, in seconds, how long a place has been wanted.
            wall_clock: the time of day for people, in seconds since 1970.
        """
        self._backend = backend
        self._control = control
        self._settings = control.settings
        self._stores = stores
        self._clock = clock
        self._wall_clock = wall_clock
        self._link: Link | None = None
        self._inbox: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        self._listener: Deliver | None = None
        self._joins = threading.Lock()
        self._wanted_place: _WantedPlace | None = None
        """The place to request once the control plane is reached. Protected by `_joins`."""
        self._placement: Placement | None = None
        self._waiting = 0
        self._verdict: Verdict | None = None
        self._delivered_placement: Placement | None = None
        self._peers: list[StorePeers] = []
        """The addresses of the next round's workers, if this node will host its store."""
        self._delivered_round = -1
        self._ended_round = -1
        self._begun_round = -1
        self._join_used_up = False
        self._store_told = False
        """Whether the prepared store's port was announced before its round: then no join may use it."""
        self._reported_progress: ReportedProgress = {}
        self._final_notification: Notification | None = None
        """The notification, if any, after which this node gets no more rounds."""
        self._event_emitter = RendezvousEventEmitter(self._settings.run_id)
        self.keeps_workers = True  # a join tells other nodes whether this node's workers can continue

    # The interface of torch's handlers

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        return self._stores.hosted_by_agent

    def get_run_id(self) -> str:
        return self._settings.run_id

    def is_closed(self) -> bool:
        """Whether the verdict is known."""
        return self._verdict is not None

    def set_closed(self) -> None:
        """End the job on all nodes, on request."""
        self.send(Close())

    def num_nodes_waiting(self) -> int:
        """How many nodes are waiting for the next round, as last notified; makes no request.

        Never 0 after this node's round ended, since then only the next round is left.

        Raises:
            RendezvousConnectionError: the control plane is lost permanently. Exception: the unchanged error of a third
                party's backend.
        """
        if isinstance(self._final_notification, LinkLost):
            raise self._final_notification.error or RendezvousConnectionError(self._final_notification.detail)
        return self._waiting or int(self._is_over)

    @property
    def _is_over(self) -> bool:
        if self._verdict is not None:
            return self._verdict.outcome is not Outcome.SUCCEEDED
        return self._ended_round >= self._delivered_round >= 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round and wait until it is complete. See `RendezvousHandler.next_rendezvous`.

        If an agent listens, its loop has already joined: then begin and return its round, once.
        """
        if self._listener is not None:
            placement = self._delivered_placement
            if placement is None or placement.round <= self._begun_round:
                raise RendezvousStateError(
                    f"the agent of job {self.get_run_id()!r} runs the rendezvous itself; request the next rendezvous "
                    "once in each call of its `_rendezvous`, instead of calling the base class's method, and nowhere "
                    "else"
                )
            self.begin_round(placement)
            return with_torch_store(self.info(placement))
        if self._placement is not None:
            self.send(Drain(self._placement.round))
        self.join(NodeInfo("default", 1, "", 0))
        for notification in incoming_notifications(self._inbox, lambda: self.send(ProgressRequest())):
            if isinstance(notification, Placed):
                self.begin_round(notification.placement)
                return with_torch_store(self.info(notification.placement))
            log_for_people(notification)
            if self._join_used_up:
                self.join(NodeInfo("default", 1, "", 0))
            error = error_of(notification)
            if error is not None:
                self._event_emitter.record_failure(error)
                raise error
        raise AssertionError("notifications keep arriving without end")

    def shutdown(self) -> bool:
        """Leave, and close this node's worker store and control server, if any. The job continues without this node."""
        if self._final_notification is not None and (error := error_of(self._final_notification)) is not None:
            self._event_emitter.record_failure(error)
        if self._verdict is not None:
            self._event_emitter.record_end(self._verdict)
        if self._link is not None:
            self._link.close()
        self._stores.close()
        self._control.close()
        return True

    # The interface of our agents

    def listen(self, deliver: Deliver | None) -> None:
        """Pass all notifications from now on to `deliver`, on the thread where they arrive; None ends this."""
        self._listener = deliver

    def join(self, member: NodeInfo, *, keeps_place: bool = False) -> None:
        """Request a place in the next round; the answer is a `Placed` or `JoinRefused` notification.

        `member` describes the node to others; this fills in its address, its store's port and its rank. This node's
        worker store listens before the request is sent, in case the node becomes group rank 0. If a missed round, or a
        round of a control plane that no longer exists, might have used the prepared store, another one is prepared.
        With `keeps_place`, later rounds might need no join.
        """
        if self._join_used_up or self._store_told or self._delivered_round > self._begun_round:
            self._join_used_up = self._store_told = False
            self._begun_round = self._delivered_round
            self._stores.discard_prepared()
        self._event_emitter.join_requested()
        try:
            node_info, addresses = member._replace(rank_hint=self._control.rank_hint), self._stores.own_addresses()
            with self._joins:
                self._wanted_place = node_info, addresses, keeps_place, self._clock()
            self._ensure_link()
            self._join_if_open()
        except RallypointError as error:
            self._event_emitter.record_failure(error)
            raise

    def _join_if_open(self) -> None:
        """Send the pending join, if any: only now is the address of this node's worker store known."""
        if self._link is None or self._link.address is None:
            return  # the opener of the link, or `LinkOpened`, calls this again
        with self._joins:
            wanted_place, self._wanted_place = self._wanted_place, None
        if wanted_place is not None:
            node_info, addresses, keeps_place, since = wanted_place
            host, port = self._stores.prepare(self._link.address)
            node_info = node_info._replace(address=host, store_port=port)
            waited = self._clock() - since
            timeout = max(0.0, self._settings.join_timeout - waited)
            self._link.send(JoinRequest(node_info, timeout, waited, addresses, keeps_place))

    def keep_place(self) -> None:
        """Keep this node's place for the next round: its round ended."""
        self._event_emitter.join_requested()

    def tell_next_store(self, round_: int) -> None:
        """Announce the port of the next round's store: this node serves the store of `round_`, which has begun."""
        if self._link is None or self._link.address is None or self._settings.counts_heartbeats:
            return  # without a coordinator, each node joins by itself
        if self._stores.hosted_by_agent:
            with contextlib.suppress(OSError):  # then all nodes join by themselves, and the join reports the error
                port = self._stores.prepare(self._link.address)[1]
                self._store_told = True
                self._link.send(NextStore(round_, port))

    def begin_round(self, placement: Placement) -> None:
        """Begin a round once the previous one's workers are gone: only now may its store end, and this one start."""
        self._placement = placement
        self._begun_round, self._store_told = placement.round, False
        clients = placement.ranks.world_size + placement.group_world_size
        clients += self._settings.max_nodes if self._control.hosts_coordinator() else 0
        self._stores.begin_round(is_host=placement.group_rank == 0, clients=clients)
        self._event_emitter.record_placement(placement)

    def info(self, placement: Placement) -> RendezvousInfo:
        """Convert a placement to torch's form."""

        def store() -> Store:
            from rallypoint.store.client import TCPStore
            from rallypoint.store.prefix import PrefixStore

            prefix = f"torch.rendezvous.{self._settings.run_id}.{placement.round}"
            return PrefixStore(prefix, TCPStore(placement.store_address, placement.store_port))

        return RendezvousInfo(
            store,
            placement.group_rank,
            placement.group_world_size,
            RendezvousStoreInfo(placement.store_address, placement.store_port),
        )

    def send(self, request: Request) -> None:
        """Send a request to the coordinator. A leaving node drops its join, and opens no link just to leave."""
        if not isinstance(request, LeaveRequest):
            self._ensure_link().send(request)
            return
        with self._joins:
            self._wanted_place = None
        if self._link is not None:
            self._link.send(request)

    @property
    def notice_timeout(self) -> float:
        """Seconds that workers have to acknowledge that the round will end; 0 if they are not notified."""
        return self._settings.notice_timeout

    @property
    def lease(self) -> float:
        """Seconds of silence after which this node counts as lost."""
        return self._settings.lease if self._link is None else self._link.lease

    @property
    def confirmed_at(self) -> float:
        """See `Link.confirmed_at`."""
        return -math.inf if self._link is None else self._link.confirmed_at

    @property
    def hosts_coordinator(self) -> bool:
        """Whether the job's coordinator is currently in this agent."""
        return self._control.hosts_coordinator()

    def snapshot(self) -> Callable[[], Snapshot] | None:
        """See `RendezvousClient.snapshot`."""
        if (coordinator := self._control.coordinator()) is None:
            return None
        from rallypoint.observe.watching.session import copy_of_job

        return copy_of_job(coordinator)

    def local_job(self) -> LocalJob | None:
        """See `RendezvousClient.local_job`."""
        endpoint = self._control.watch_endpoint()
        return None if endpoint is None else LocalJob(os.getpid(), self.get_run_id(), self._backend, endpoint)

    def open_to_commands(self) -> socket.socket | None:
        """See `RendezvousClient.open_to_commands`."""
        return self._control.open_to_commands()

    def serve_commands(self) -> None:
        """See `RendezvousClient.serve_commands`."""
        self._control.serve_commands()

    # Internals

    def _ensure_link(self) -> Link:
        if self._link is None:
            self._link = self._control.open(self._on_notification, Deadline.after(self._settings.join_timeout))
        return self._link

    def _on_notification(self, notification: Notification) -> None:
        match notification:
            case LinkOpened():
                self._join_if_open()
                return
            case NodesWaiting(waiting=waiting):
                self._waiting = waiting
            case StorePeers(is_first_part=first):
                self._peers = [notification] if first else [*self._peers, notification]
                return
            case Placed(placement=placement):
                if placement.group_rank == 0:
                    self._stores.set_peers(self._peers)
                self._peers = []
                self._waiting = 0
                self._delivered_placement, self._delivered_round = placement, placement.round
            case RoundEnded(end=end):
                self._waiting = 0
                self._ended_round = end.round
                self._join_used_up = self._join_used_up or end.round > self._delivered_round
                self._stores.round_ended()
            case LinkUp(join_lost=True):
                self._join_used_up = True
            case JobEnded(verdict=verdict):
                self._verdict = verdict
            case LinkLost() if self._verdict is not None:
                return  # after the verdict, the server may end
            case Progress() | JoinRefused(progress=Progress()):
                from rallypoint.observe.rendezvous_log import RendezvousName, in_words

                name = RendezvousName(self._settings.run_id, self._control.where, self._control.endpoint_flag)
                now, wall = self._clock(), self._wall_clock()
                notification = in_words(notification, name, self._reported_progress, now, wall)
            case _:
                pass
        if isinstance(notification, JoinRefused | LinkLost):
            self._final_notification = notification
        listener = self._listener
        (self._inbox.put if listener is None else listener)(notification)


# For callers that poll a handler instead of listening like an agent


def incoming_notifications(
    inbox: queue.SimpleQueue[Notification], ask_progress: Callable[[], None]
) -> Iterator[Notification]:
    """Yield notifications endlessly while waiting for a round. If none arrives for long, request the progress."""
    interval = FIRST_PROGRESS_REQUEST
    ask_at = SYSTEM_CLOCK.monotonic() + interval
    while True:
        try:
            notification = inbox.get(timeout=max(0.0, ask_at - SYSTEM_CLOCK.monotonic()))
        except queue.Empty:
            interval = min(2 * interval, MAX_PROGRESS_INTERVAL)
            ask_at = SYSTEM_CLOCK.monotonic() + interval
            ask_progress()
        else:
            yield notification


def log_for_people(notification: Notification) -> None:
    """Log a notification for people, if no agent does."""
    if isinstance(notification, ProgressText):
        (log.warning if notification.warning else log.info)("%s", notification.text)
    if isinstance(notification, ConfigDiffers):
        for difference in notification.differences:
            log.warning("%s; use the same value on all nodes", difference.sentence("this node"))


def with_torch_store(info: RendezvousInfo) -> RendezvousInfo:
    """Convert the info for a polling caller: if torch is imported, torch's functions accept its store."""

    def store() -> Store:
        from rallypoint.store.api import if_torch_is_imported

        store_of_torch: Store = if_torch_is_imported(info.store)
        return store_of_torch

    return RendezvousInfo(store, info.rank, info.world_size, info.bootstrap_store_info)
