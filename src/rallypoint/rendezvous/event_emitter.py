"""The events of a handler's rendezvous, with the names and texts of torch's (contract section 5.9).

Laws:

- nothing is created, or even imported, unless a handler for these events is configured (`observe.telemetry.lazy`);
- events are recorded on the thread of the caller, never on the link's, so that a slow event handler does not delay
  heartbeats;
- events are what a node knows about itself. The steps by which torch's nodes keep their shared state have no
  counterpart.
"""

from __future__ import annotations

import os
import socket
from itertools import count

from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.observe.telemetry.lazy import logging_errors, rendezvous_events_wanted

if TYPE_CHECKING:
    from rallypoint.control.membership.state import Verdict
    from rallypoint.control.protocol.messages import Placement

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
        """The node asks for a place in the next round, and gives up the one that it has."""
        previous, self._round, self._failed = self._round, -1, False
        self._record_event(_JOIN_SOURCE, f"attempts to join the next round of {self._rendezvous}.")
        if previous >= 0:
            self._record_event(
                _LEAVE_SOURCE, f"removed itself from the participants of round {previous} of {self._rendezvous}."
            )

    def placed(self, placement: Placement) -> None:
        """The node has a place."""
        rank, size = placement.group_rank, placement.group_world_size
        self._round = placement.round
        words = f"has joined round {self._round} of {self._rendezvous} as rank {rank} in a world of size {size}."
        self._record_event(
            _JOIN_SOURCE, words, rank=rank, master_endpoint=f"{placement.store_address}:{placement.store_port}"
        )

    def failed(self, error: BaseException) -> None:
        """The rendezvous has failed for this node; told once for each attempt."""
        if not self._failed and rendezvous_events_wanted():
            self._failed = True
            words = f"{type(error).__name__}: {error}"
            _record(
                _JOIN_SOURCE, "FAILED", self._run_id, words, local_id=self._round_number(), error_trace=_trace(error)
            )

    def closed(self, verdict: Verdict) -> None:
        """The job is over for this node."""
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
    """This process hosts the control plane of a job."""
    if rendezvous_events_wanted():
        words = f"Process {os.getpid()} hosts the control plane of the rendezvous {run_id!r}."
        _record(_HOST_SOURCE, "INIT", run_id, words)


def _record(name: str, state: str, run_id: str, message: str, **more: Any) -> None:
    from rallypoint.observe.telemetry.events import NodeState, RdzvEvent
    from rallypoint.observe.telemetry.handlers import record_rdzv_event

    event = RdzvEvent(name, run_id, message, socket.gethostname(), os.getpid(), NodeState[state], **more)
    logging_errors("events", lambda: record_rdzv_event(event))


def _trace(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))
