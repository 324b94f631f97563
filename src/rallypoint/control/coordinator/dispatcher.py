"""The shell around the coordinator: its clock, the outputs of its sessions, and the journal that messages wait for.

Laws:

1. A coordinator runs only in its turns (`Turns`): on its server's loop thread or, without a server, on the caller's
   thread. So it needs no lock, and its messages go out in the order of its steps.
2. If a message cannot be sent to a session, that session ends. Neither such an end nor a failed tick affects other
   sessions.
3. With a `JournalSink`, no message is sent before the state that caused it is stored. Connections answer heartbeats
   themselves, because these answers only show that we are alive.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from rallypoint.base.clock import BOOT_CLOCK, SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args
from rallypoint.base.log import get_logger
from rallypoint.control.coordinator.coordinator import Coordinator, StepResult
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId, Reason, Settings, State
from rallypoint.control.protocol.messages import (
    Deliver,
    LinkLost,
    NodeAnswer,
    Request,
)

if TYPE_CHECKING:
    from rallypoint.base.loop import LoopThread
    from rallypoint.control.coordinator.leader_lease import LeaderLease
    from rallypoint.control.coordinator.notifications import JobHistory
    from rallypoint.control.protocol.handshake import Hello

log = get_logger(__name__)


_ANSWERS = get_args(NodeAnswer)
_PAUSE = 5.0
"""Seconds before a failed tick is retried."""


class JournalSink(Protocol):
    """Stores a coordinator's state, so that another can take over."""

    def append(self, number: int, state: State, awaited: int) -> None:
        """Begin to store the newest state; once it is stored, call `Dispatcher.journal_written` with its number.

        Numbers grow. After several calls, only the newest state must be stored. A state with a number above `awaited`
        can be stored later: nobody waits for it, and nodes would report its contents again.
        """


class JobRecord(NamedTuple):
    """One job in a list."""

    state: State
    settings: Settings
    history: JobHistory


class RestoredState(NamedTuple):
    """The name and the state of a previous coordinator, and its history if it was in this process."""

    incarnation: str
    state: State
    history: JobHistory | None = None


class Turns:
    """A coordinator's turns: runs functions from any thread one after the other.

    A coordinator without a server has no thread of its own, since a loop costs 40 ms of imports and 9 MB: each function
    runs at once on the caller's thread. With a server, all functions run on its loop's thread, in the order of the
    calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while a function runs on a caller's thread. The function must not request another turn."""
        self._loop: LoopThread | None = None

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in its turn; from any thread. Raises LoopError in a fork of the loop's process."""
        if self._loop is None:
            with self._lock:
                if self._loop is None:  # a server might have taken over while this thread waited
                    function()
                    return
        self._loop.call(function)

    def move_to(self, loop: LoopThread) -> None:
        """Run all functions on this loop from now on. Call it on the loop's thread."""
        with self._lock:
            self._loop = loop


class _Output(NamedTuple):
    """How a session's messages and its end reach the peer."""

    send: Callable[[Any], None]
    disconnect: Callable[[str], None]


class _HeldMessage(NamedTuple):
    """A message, and the number of the state that must be stored first."""

    number: int
    session: int
    message: Any


class Dispatcher:
    """Runs one job's coordinator and carries out its decisions. All calls are in its turns, except `settings`,
    `incarnation` and `now`, which any thread may read."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock = SYSTEM_CLOCK,
        *,
        restored: RestoredState | None = None,
        journal: JournalSink | None = None,
        learns_settings: bool = False,
        lead: LeaderLease | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Start a job.

        Args:
            settings: the settings of the job's rendezvous.
            clock: the clock of all times.
            restored: the coordinator that this one succeeds, if any, perhaps only to report how its job ended.
            journal: stores each state before notifications about it are delivered.
            learns_settings: see `Coordinator`.
            lead: the lease of an elected coordinator; nodes are confirmed only for its length.
            turns: the turns shared by all jobs of its server.
        """
        incarnation = os.urandom(8).hex() if restored is None else restored.incarnation
        self._coordinator = Coordinator(settings, incarnation, learns_settings=learns_settings)
        if restored is not None:
            self._coordinator.restore(restored.state, clock.monotonic(), restored.history)
        self.turns = turns or Turns()
        self._clock = clock
        self._journal = journal
        self._lead = lead
        self._number = 0
        """The number of the newest state."""
        self._numbered = self._coordinator.state
        self._appended = (0, 0)
        self._awaited = 0
        """Newest state that somebody waits for, or that nodes would not report again."""
        self._written = 0
        """Newest state that the journal stored."""
        self._held: deque[_HeldMessage] = deque()
        """Messages that wait for the journal, in order."""
        self._observing = self._coordinator.extensions.observing
        self._numbers = itertools.count(1)
        self._outputs: dict[int, _Output] = {}
        """Outputs of the open sessions, by number."""
        self._sessions_after_end: set[int] = set()
        """Sessions that began after the job ended."""
        self.remote_control = settings.remote_control
        """Whether to accept commands from other machines without a secret."""
        self._guests: dict[int, Callable[[], None]] = {}
        """Sessions without a node, with the callback for when the peer ends one."""
        self._tick_again_at = float("-inf")
        self.on_change: Callable[[], None] = do_nothing
        """Called at the end of each step: `wake_at` might have moved, and outputs might have messages."""

    @property
    def settings(self) -> Settings:
        """The settings of the job's rendezvous."""
        return self._coordinator.settings

    @property
    def incarnation(self) -> str:
        """The name that distinguishes this coordinator from earlier and later ones at the same address."""
        return self._coordinator.incarnation

    @property
    def members(self) -> int:
        """Number of nodes' open sessions, without those that began after the job ended."""
        return len(self._outputs) - len(self._sessions_after_end) - len(self._guests)

    @property
    def job(self) -> str | None:
        """The job that nodes must belong to. With `dispatcher_for`, this serves one job as `ManyJobs` serves many."""
        return self.settings.run_id

    def dispatcher_for(self, _hello: Hello, _peer: str) -> Dispatcher:
        """Return itself: it serves a single job."""
        return self

    def find(self, job: str) -> Dispatcher | None:
        """Return itself if it serves that job; an empty `job` means any."""
        return self if job in {"", self.settings.run_id} else None

    def records(self) -> tuple[list[JobRecord], list[JobRecord]]:
        """The one job as a running one, and no ended jobs."""
        return [self.record()], []

    def record(self) -> JobRecord:
        """The entry of this job in a list."""
        return JobRecord(self.state, self.settings, self.history)

    @property
    def history(self) -> JobHistory:
        """The job's history, read-only."""
        return self._coordinator.history

    @property
    def state(self) -> State:
        """The current state, read-only."""
        return self._coordinator.state

    def now(self) -> float:
        """The dispatcher's time, in seconds on its clock."""
        return self._clock.monotonic()

    def attach(self, deliver: Deliver, session: SessionRecord, disconnect: Callable[[str], None] | None = None) -> int:
        """Open a session. Returns its number.

        Args:
            deliver: called with the session's notifications.
            session: the description of the session.
            disconnect: called with the reason when this side ends the session.
        """
        number = next(self._numbers)
        self._outputs[number] = _Output(deliver, disconnect or (lambda _why: None))
        if self._coordinator.state.verdict is not None:
            self._sessions_after_end.add(number)
        self._coordinator.open(number, session, self._clock.monotonic())
        self.on_change()
        return number

    def attach_guest(
        self, send: Callable[[Any], None], disconnect: Callable[[str], None], on_end: Callable[[int], None]
    ) -> int:
        """Open a session that belongs to no node; returns its number.

        Args:
            send: called with each message for the session.
            disconnect: called with the reason when this side ends the session.
            on_end: called with its number when the peer ends it.
        """
        number = next(self._numbers)
        self._outputs[number] = _Output(send, disconnect)
        self._guests[number] = partial(on_end, number)
        return number

    def end_guest(self, session: int, why: str) -> None:
        """End a session that belongs to no node."""
        self._end_session(session, why)

    def extension(self, name: str) -> Any:
        """The extension of that name (`control.coordinator.extension`)."""
        return self._coordinator.extensions.find(name)

    @property
    def is_awaited(self) -> bool:
        """Whether the server must wait a moment for an extension before it ends."""
        return any(extension.is_awaited for extension in self._coordinator.extensions.loaded)

    def receive(self, session: int, request: Request) -> bool:
        """Handle a session's request. Returns whether the session still existed: a node that was silent for longer than
        its lease was removed, and must return as a new node."""
        is_open = session in self._outputs
        now = self._clock.monotonic() if self._lead is None else self._now_as_leader(self._lead)
        self._carry_out(self._coordinator.receive(session, request, now))
        return is_open

    @property
    def is_leader(self) -> bool:
        """Whether this is certainly the job's only coordinator."""
        return self._lead is None or self._lead.remaining() > 0

    def _now_as_leader(self, lead: LeaderLease) -> float:
        self._coordinator.leads_for = lead.remaining()
        return self._clock.monotonic()

    def heartbeat(self, session: int) -> bool:
        """Handle a heartbeat like `receive`, for a caller that answers it. Causes no notifications."""
        return self._coordinator.heartbeat(session, self._clock.monotonic())

    @property
    def holds_messages(self) -> bool:
        """Whether messages wait for the journal."""
        return bool(self._held)

    def detach(self, session: int, reason: Reason = Reason.LOST, detail: str = "") -> None:
        """End a session, which ended as `detail` describes."""
        self._outputs.pop(session, None)
        self._sessions_after_end.discard(session)
        if (on_end := self._guests.pop(session, None)) is not None:
            on_end()
            self.on_change()
        else:
            self._carry_out(self._coordinator.close(session, self._clock.monotonic(), reason, detail))

    def nodes_lost(self, numbers: Collection[int], detail: str = "") -> None:
        """Treat the nodes with these numbers as lost, as others report. See `Coordinator.nodes_lost`."""
        self._carry_out(self._coordinator.nodes_lost(numbers, self._clock.monotonic(), detail))

    def journal_written(self, number: int) -> None:
        """Send the messages that follow from the state with this number, which the journal has stored."""
        self._written = max(self._written, number)
        self._send_held()
        self.on_change()

    def tick(self) -> None:
        """Act on time that passed, on an extension that has something to send, or on an extended `lead`."""
        now = self._clock.monotonic() if self._lead is None else self._now_as_leader(self._lead)
        try:
            result = self._coordinator.tick(now)
        except Exception:
            log.exception("job %r: a scheduled action failed and will be retried", self.settings.run_id)
            self._tick_again_at = now + _PAUSE
            self.on_change()
            return
        self._carry_out(result)

    def wake_at(self) -> float:
        """When `tick` should be called next, on the clock's monotonic time; infinity for never."""
        return max(self._coordinator.wake_at(), self._tick_again_at)

    # Effects of a step

    def _carry_out(self, result: StepResult) -> None:
        for session, why in result.ended:
            self._end_session(session, why)
        if self._journal is None:
            for session, message in result.messages:
                self._send(session, message)
        else:
            self._hold(result, self._journal)
        self.on_change()

    def _end_session(self, session: int, why: str) -> None:
        self._sessions_after_end.discard(session)
        self._guests.pop(session, None)
        if (output := self._outputs.pop(session, None)) is not None:
            output.disconnect(why)

    def _send(self, session: int, message: Any) -> None:
        if type(message).__name__ in self._observing:
            try:
                self._coordinator.extensions.on_message(message, self._clock.monotonic())
            except Exception:
                log.exception("job %r: a message could not be inspected but will be sent anyway", self.settings.run_id)
        if (output := self._outputs.get(session)) is None:
            return
        try:
            output.send(message)
        except Exception:
            self._on_send_error(output)

    def _on_send_error(self, output: _Output) -> None:
        """Apply law 2, from within the exception handler."""
        log.exception("job %r: a node could not be notified, so its session is being ended", self.settings.run_id)
        output.disconnect("it could not be notified")

    def _hold(self, result: StepResult, journal: JournalSink) -> None:
        """Store the state, and hold back the messages that follow from it until it is stored (law 3)."""
        if result.state is not self._numbered:
            self._numbered = result.state
            self._number += 1
        self._held += [_HeldMessage(self._number, *message) for message in result.messages]
        if self._held or result.state.complete:
            self._awaited = self._number
        if (self._number, self._awaited) != self._appended:
            self._appended = self._number, self._awaited
            journal.append(self._number, result.state, self._awaited)
        self._send_held()

    def _send_held(self) -> None:
        while self._held and self._held[0].number <= self._written:
            held = self._held.popleft()
            self._send(held.session, held.message)


def do_nothing() -> None:
    """The default callback."""


class TimerThread:
    """Ticks a dispatcher without a server from a thread, while anything is scheduled."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._timer: threading.Timer | None = None
        self._timer_at = math.inf
        self._closed = False
        dispatcher.on_change = self._arm

    def close(self) -> None:
        """Stop ticking. Idempotent; from any thread."""
        self._dispatcher.turns.call(self._close)

    def _close(self) -> None:
        self._closed = True
        self._cancel()

    def _arm(self) -> None:
        at = self._dispatcher.wake_at()
        if at == self._timer_at and self._timer is not None:
            return
        self._cancel()
        if self._closed or at == math.inf:
            return
        self._timer_at = at
        tick = partial(self._dispatcher.turns.call, self._tick)
        self._timer = threading.Timer(max(0.0, at - self._dispatcher.now()), tick)
        self._timer.daemon = True
        self._timer.start()

    def _tick(self) -> None:
        self._timer = None
        self._dispatcher.tick()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LocalLink:
    """Link of the node that hosts the dispatcher: a session without a socket or a lease. From any thread."""

    def __init__(
        self, dispatcher: Dispatcher, node: NodeId, deliver: Deliver, address: str, *, is_alone: bool = False
    ) -> None:
        """Open the session. With `is_alone`, no other node can need a notification."""
        self._dispatcher = dispatcher
        self._is_alone = is_alone
        self._deliver = deliver
        self.address = address
        self._record = SessionRecord(node, address, leased=False, in_this_process=True, local=True)
        dispatcher.turns.call(self._open)

    def _open(self) -> None:
        self._dispatcher.attach(self._deliver, self._record)

    @property
    def lease(self) -> float:
        """See `Link.lease`."""
        return self._dispatcher.settings.lease

    @property
    def confirmed_at(self) -> float:
        """See `Link.confirmed_at`: both are in one process."""
        return BOOT_CLOCK.monotonic()

    def send(self, request: Request) -> None:
        """Send a request to the dispatcher; notifications may be delivered before this returns."""
        if not self._is_alone or isinstance(request, _ANSWERS):  # others must be able to receive the answer
            from rallypoint.control.protocol.validation import ValidationError, validated

            try:
                request = validated(request)
            except ValidationError as error:
                from rallypoint.control.protocol.codec import EXPENDABLE

                if isinstance(request, EXPENDABLE):
                    log.warning(
                        "a %s message was dropped because it could not be sent (%s)", type(request).__name__, error
                    )
                else:
                    self._deliver(LinkLost(f"a message of this node cannot be sent: {error}"))
                return
        self._dispatcher.turns.call(lambda: self._receive(request))

    def _receive(self, request: Request) -> None:
        self._dispatcher.receive(self._record.number, request)

    def close(self) -> None:
        """End the session. Idempotent."""
        self._dispatcher.turns.call(lambda: self._dispatcher.detach(self._record.number, Reason.DEPARTED))
