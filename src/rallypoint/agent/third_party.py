"""Adapts third-party handlers, which cannot notify, to `RendezvousClient`, which can.

A thread polls, so the loop never waits. What such a handler cannot do is done here as torch does it: agents exchange
ranks over the round's store, have separate restart budgets, find new nodes by polling every monitor interval, and meet
at a barrier on the store at the end (contract sections 3.2, 5.2, 5.3, 5.5).

Unlike in torch, workers see the round's restart count: the same on all nodes, and greater than in every earlier round.
So workers that put it into their keys never share keys with an earlier round, even on a shared store.

Keys and values on the store follow the contract's sections 3.2 and 5.5, so that torch's agents can share the round. Our
own data has separate keys.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from rallypoint.agent.rendezvous_client import RendezvousClient
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.control.membership.rules import assign_worker_ranks
from rallypoint.control.membership.state import (
    Drain,
    Fail,
    NodeInfo,
    NodeRanks,
    Outcome,
    PreemptJob,
    Reason,
    ReportQuiet,
    RoundEnd,
    Succeed,
    Verdict,
)
from rallypoint.control.protocol import messages
from rallypoint.failures.cause import Cause, Ending, Restarts
from rallypoint.rendezvous.handler import RendezvousInfo, RendezvousStoreInfo
from rallypoint.store.api import Store

if TYPE_CHECKING:
    from rallypoint.agent.spec import WorkerSpec

log = get_logger(__name__)

_SHUTDOWN_TIMEOUT = 5.0
"""Seconds that a handler gets at the end to finish its current call before it is abandoned."""


class PollingRendezvousClient(RendezvousClient):
    """A client for any `RendezvousHandler`. Nobody can watch it, and only the handler knows which nodes it counts as
    lost.

    The polling thread executes all requests. Only this thread uses the handler (except for constants such as its run
    id) and the state here.
    """

    def __init__(self, spec: WorkerSpec, exit_barrier_timeout: float = 300) -> None:
        self._handler = spec.rdzv_handler
        self._local_addr = spec.local_addr
        self._interval = spec.monitor_interval
        self._exit_barrier_timeout = exit_barrier_timeout
        self._deliver: messages.Deliver | None = None
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._round = -1
        self._runs = False
        self._failures = 0
        self._restarts = 0
        self._info: RendezvousInfo | None = None
        """The info of the last round that the handler found."""
        self._begun: RendezvousInfo | None = None
        """The info of the last round that began: the next one may be found while its workers are being stopped."""
        self._preempted = ""
        """How this node learned that the job is being preempted; else empty."""

    def listen(self, deliver: messages.Deliver | None) -> None:
        self._deliver = deliver

    def join(self, member: NodeInfo, *, keeps_place: bool = False) -> None:
        """Join the next round. Such a handler cannot send anything about the node."""
        self._execute(lambda: self._next_rendezvous(member.role, member.local_world_size))

    def begin_round(self, placement: messages.Placement) -> None:
        self._begun = self._info

    def info(self, placement: messages.Placement) -> RendezvousInfo:
        """The handler's own info."""
        assert self._begun is not None
        return self._begun

    def send(self, request: messages.Request) -> None:
        """Carry out the request as far as possible without a coordinator.

        A failure uses up one restart of this agent's own budget, or ends the job here. Success waits for the others at
        the barrier. A drain ends the node's own part of the round; the others also find the new nodes by polling. Such
        a handler cannot notify the others of anything else, nor say how the job continues without this node.
        """
        match request:
            case Fail(round_, cause, max_restarts):
                self._execute(lambda: self._count_failure(round_, cause, max_restarts))
            case Succeed():
                self._execute(self._barrier)
            case PreemptJob(seconds, why):
                self._execute(lambda: self._preempt(seconds, why))
            case Drain(round_):
                self._execute(lambda: self._drain(round_))
            case ReportQuiet(quiet=True):
                log.warning(
                    "no rank on this node has shown a sign of life within --hang-timeout or --silence-timeout; the "
                    "rendezvous handler cannot query the other nodes, so the agent does nothing"
                )
            case messages.LeaveRequest(wants_reply=True):
                self._notify(messages.LeaveReply(False, 0))
            case _:
                pass

    def shutdown(self) -> bool:
        """Shut the handler down, unless it is busy for longer than a moment."""
        done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._execute(lambda: done.put(self._shut_down_handler()))
        self._requests.put(None)
        try:
            return done.get(timeout=_SHUTDOWN_TIMEOUT)
        except queue.Empty:
            log.warning(
                "the rendezvous handler %r is still busy, so the agent is exiting without shutting it down",
                self._handler.get_backend(),
            )
            return False

    # On the polling thread

    def _shut_down_handler(self) -> bool:
        try:
            return self._handler.shutdown()
        except Exception:
            log.exception("the rendezvous handler %r could not be shut down", self._handler.get_backend())
            return False

    def _preempt(self, seconds: float, why: str) -> None:
        """Preempt this node. No other node learns about it: each must receive the signal."""
        self._preempted = f"{socket.gethostname()} {why}"
        if not self._runs:
            self._end_preempted()

    def _drain(self, round_: int) -> None:
        if self._preempted:
            self._end_preempted()
        else:
            self._end_round(RoundEnd(round_, Reason.DRAINED, "new nodes"))

    def _end_preempted(self) -> None:
        self._runs = False
        verdict = Verdict(Outcome.STOPPED, detail=self._preempted, ending=Ending.PREEMPTED)
        delegate = self._info is None or self._info.rank == 0
        self._notify(messages.JobEnded(verdict, is_delegate=delegate))

    def _count_failure(self, round_: int, cause: Cause, max_restarts: int) -> None:
        if self._preempted:
            self._end_preempted()
            return
        if self._failures >= max_restarts:
            self._runs = False
            restarts = Restarts(self._failures, max_restarts)
            verdict = Verdict(Outcome.FAILED, cause, restarts=restarts, ending=cause.ending)
            self._notify(messages.JobEnded(verdict))
            return
        self._failures += 1
        restarts = Restarts(self._failures, max_restarts)
        self._end_round(RoundEnd(round_, Reason.FAILURE, cause.host, cause, restarts=restarts))

    def _end_round(self, end: RoundEnd) -> None:
        self._runs = False
        self._notify(messages.RoundEnded(end))

    def _next_rendezvous(self, role: str, local_world_size: int) -> None:
        try:
            info = self._handler.next_rendezvous()
            proposal = 0 if self._round < 0 else self._restarts + 1
            ranks, restarts = exchange(info.store, info.rank, info.world_size, role, local_world_size, proposal)
            where = info.bootstrap_store_info or RendezvousStoreInfo.build(info.rank, info.store, self._local_addr)
        except Exception as error:
            self._notify(_notification_of(error))
            return
        self._info = info
        self._round += 1
        self._restarts = restarts
        self._runs = True
        address, port = where.master_addr, where.master_port
        own = messages.Placement(self._round, info.rank, info.world_size, ranks, address, port, restarts)
        # Such a handler cannot tell whether workers of other nodes can continue in their processes.
        self._notify(messages.Placed(own._replace(restart_workers=True)))

    def _barrier(self) -> None:
        assert self._info is not None
        self._runs = False
        wait_at_exit_barrier(self._info.store, self._info.world_size, self._exit_barrier_timeout)
        self._notify(messages.JobEnded(Verdict(Outcome.SUCCEEDED)))

    def _poll_waiting_nodes(self) -> None:
        try:
            waiting = self._handler.num_nodes_waiting()
        except Exception as error:
            self._runs = False
            self._notify(_notification_of(error))
            return
        if waiting > 0:
            self._notify(messages.NodesWaiting(self._round, waiting))

    def _run(self) -> None:
        while True:
            try:
                work = self._requests.get(timeout=self._interval if self._runs else None)
            except queue.Empty:
                if self._runs:
                    self._poll_waiting_nodes()
                continue
            if work is None:
                return
            try:
                work()
            except BaseException as error:  # a thread that ends silently would make the agent wait forever
                log.error("the rendezvous handler %s raised %r", type(self._handler).__name__, error)
                self._runs = False
                self._notify(_notification_of(error))

    def _execute(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rallypoint-rendezvous", daemon=True)
            self._thread.start()
        self._requests.put(work)

    def _notify(self, notification: messages.Notification) -> None:
        if self._deliver is not None:
            self._deliver(notification)


def _notification_of(error: BaseException) -> messages.Notification:
    return messages.LinkLost(f"the rendezvous handler failed: {type(error).__name__}: {error}", error)


# Exchanges between agents over a round's store


_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED = "torchelastic/assigned_ranks/"
_TERMINAL = "torchelastic/agent/terminal_state"


_RESTARTS_PROPOSED = "rallypoint/restarts/proposed/"
_RESTARTS_AGREED = "rallypoint/restarts/agreed"


def exchange(
    store: Store, group_rank: int, group_world_size: int, role: str, local_world_size: int, restarts: int
) -> tuple[NodeRanks, int]:
    """Exchange ranks and restart counts. Returns this node's ranks, and the largest proposed restart count.

    Restart counts have our own keys: a proposal is written before the ranks are requested, and the answer before they
    are assigned. If one of torch's agents shares the round, or no exchange is needed, no answer exists, and the node's
    own proposal counts.

    Args:
        store: the round's own store.
        group_rank: this node's group rank.
        group_world_size: the number of nodes that take part.
        role: the role of this node's workers.
        local_world_size: the number of these workers.
        restarts: this node's proposal: greater than in any round that it knows.

    Raises:
        StoreTimeoutError: a node is missing after the store's timeout.
    """
    if _identical():
        return exchange_ranks(store, group_rank, group_world_size, role, local_world_size), restarts
    store.set(f"{_RESTARTS_PROPOSED}{group_rank}", str(restarts))
    agree = partial(_agree, store, group_world_size)
    ranks = exchange_ranks(store, group_rank, group_world_size, role, local_world_size, before_answering=agree)
    agreed = int(store.get(_RESTARTS_AGREED)) if store.check([_RESTARTS_AGREED]) else 0
    return ranks, max(agreed, restarts)  # a store used by earlier rounds might still contain their answer


def _agree(store: Store, group_world_size: int) -> None:
    keys = [f"{_RESTARTS_PROPOSED}{rank}" for rank in range(group_world_size)]
    store.set(_RESTARTS_AGREED, str(max(int(store.get(key)) for key in keys if store.check([key]))))


def _identical() -> bool:
    return os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1"


def exchange_ranks(
    store: Store,
    group_rank: int,
    group_world_size: int,
    role: str,
    local_world_size: int,
    before_answering: Callable[[], None] = lambda: None,
) -> NodeRanks:
    """Exchange only ranks; waits for every node's role and size. See `exchange`.

    Args:
        before_answering: called on group rank 0 once all roles and sizes are known, before it assigns ranks.
    """
    if _identical():
        return assign_worker_ranks([("", local_world_size)] * group_world_size)[group_rank]
    mine = {"role": role, "rank": group_rank, "local_world_size": local_world_size}
    store.set(f"{_ROLE_INFO}{group_rank}", json.dumps(mine))
    if group_rank == 0:
        keys = [f"{_ROLE_INFO}{rank}" for rank in range(group_world_size)]
        infos = [json.loads(info) for info in store.multi_get(keys)]
        assigned = assign_worker_ranks([(str(info["role"]), int(info["local_world_size"])) for info in infos])
        before_answering()
        store.multi_set(
            [f"{_ASSIGNED}{rank}" for rank in range(group_world_size)],
            [
                json.dumps([ranks.base_rank, ranks.world_size, ranks.base_role_rank, ranks.role_world_size])
                for ranks in assigned
            ],
        )
    base_rank, world_size, base_role_rank, role_world_size = json.loads(store.get(f"{_ASSIGNED}{group_rank}"))
    return NodeRanks(int(base_rank), int(world_size), int(base_role_rank), int(role_world_size))


def exit_barrier(store: Store, group_world_size: int, timeout: float) -> None:
    """Wait until all nodes arrive, or raise StoreTimeoutError after this many seconds."""
    if store.add(f"{_TERMINAL}/num_members", 1) == group_world_size:
        store.set(f"{_TERMINAL}/last_member", "<val_ignored>")
    store.wait([f"{_TERMINAL}/last_member"], timedelta(seconds=timeout))


def wait_at_exit_barrier(store: Store | None, group_world_size: int | None, timeout: float) -> None:
    """Wait at `exit_barrier` after success; a failure of the barrier is only logged."""
    if store is None or group_world_size is None:
        return
    try:
        exit_barrier(store, group_world_size, timeout)
    except Exception:
        log.exception("the other agents did not reach the exit barrier; all workers on this node had succeeded")
