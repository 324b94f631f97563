"""The shell around the coordinator: one lock, one clock, and delivery in order with the lock released.

Laws:

1. The coordinator is only used with the lock held; notifications are delivered only with it released.
2. One thread delivers at a time, from one queue, so that a session is notified in the order of events.
3. A session to which a notification cannot be delivered is ended. Neither that nor a failed tick affects other
   sessions.
4. With a `JournalSink`, no notification is delivered before the state from which it follows is stored there. (The
   connections answer heartbeats themselves: these only show that we are alive.)
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from rallypoint.base.clock import BOOT_CLOCK, SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args
from rallypoint.base.log import get_logger
from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingNotification
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId, Reason, Settings, State
from rallypoint.control.protocol.messages import (
    ConfigDiffers,
    Deliver,
    JoinRefused,
    LinkLost,
    NodeAnswer,
    Notification,
    Progress,
    Request,
)

if TYPE_CHECKING:
    from rallypoint.control.coordinator.job_log import JobLog
    from rallypoint.control.coordinator.notifications import JobHistory
    from rallypoint.control.coordinator.operators import WatcherSessions
    from rallypoint.control.protocol.handshake import Hello
    from rallypoint.control.protocol.observation import JobList, Snapshot, WatcherNotification, WatcherRequest

log = get_logger(__name__)


_ANSWERS = get_args(NodeAnswer)
_PAUSE = 5.0
"""Seconds until a failed tick is tried again."""
MAX_WATCHERS = 64
"""Sessions that may watch a job at a time: each may ask for the whole state every second."""
_REPLACED_DETAIL = f"{MAX_WATCHERS} others watch this job, and it has said nothing for the longest time"


class JournalSink(Protocol):
    """Stores a coordinator's state so that another may take over."""

    def append(self, number: int, state: State, awaited: int) -> None:
        """Begin to store the newest state; when that is done, `Dispatcher.journal_written` is called with its number.

        Numbers grow. If called again meanwhile, only the newest state need be stored. A state may be stored a while
        later if its number is above `awaited`: nobody waits for it, and nodes would report again what is new in it.
        """


class LeaderLease:
    """Until when this process is certainly the only elected coordinator.

    etcd ends the lease of a leader that it has not heard from for the time to live, counted from when the last
    keep-alive arrived; counted from when that was sent, it ends no later. Suspended time counts.
    """

    def __init__(self, clock: Clock = BOOT_CLOCK) -> None:
        self._clock = clock
        self._until = -math.inf

    def now(self) -> float:
        """The time at which a keep-alive is about to be sent."""
        return self._clock.monotonic()

    def extend(self, sent_at: float, seconds: float) -> None:
        """A keep-alive of that time was granted for so many seconds."""
        self._until = max(self._until, sent_at + seconds)

    def end(self) -> None:
        """The lease was lost or given up."""
        self._until = -math.inf

    def remaining(self) -> float:
        """Seconds that are left; negative if it has ended."""
        return self._until - self._clock.monotonic()


class RestoredState(NamedTuple):
    """What a previous coordinator has left: its name and its state; and its history, if it was in this process."""

    incarnation: str
    state: State
    history: JobHistory | None = None


class _PendingNotification(NamedTuple):
    """A notification, and the state that must be stored before it may be delivered."""

    number: int
    session: int
    notification: Notification | WatcherNotification


class Dispatcher:
    """The coordinator of one job, for use from several threads."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock = SYSTEM_CLOCK,
        *,
        restored: RestoredState | None = None,
        journal: JournalSink | None = None,
        learns_settings: bool = False,
        logs_progress: bool = False,
        lead: LeaderLease | None = None,
    ) -> None:
        """Begin a job.

        Args:
            settings: the settings of the job's rendezvous.
            clock: the clock of all times.
            restored: the coordinator that this one succeeds, if there was one; perhaps only to report how its job has
                ended.
            journal: stores the state before notifications about it are delivered.
            learns_settings: see `Coordinator`.
            logs_progress: whether the progress of the rendezvous that one waiting node logs is also logged here.
            lead: if it is elected, until when; nodes are confirmed only for so long.
        """
        incarnation = os.urandom(8).hex() if restored is None else restored.incarnation
        self._coordinator = Coordinator(settings, incarnation, learns_settings=learns_settings)
        if restored is not None:
            self._coordinator.restore(restored.state, clock.monotonic(), restored.history)
        self._clock = clock
        self._journal = journal
        self._logs_progress = logs_progress
        self._lead = lead
        self._log: JobLog | None = None
        self._number = 0
        """The number of the newest state; each state has its own."""
        self._numbered = self._coordinator.state
        self._appended = (0, 0)
        self._awaited = 0
        """The newest state that somebody waits for, or that nodes would not report again."""
        self._written: float = math.inf if journal is None else 0
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._deliver: dict[int, Callable[[Any], None]] = {}
        self._disconnect: dict[int, Callable[[str], None]] = {}
        self._outbox: deque[_PendingNotification] = deque()
        self._sessions_after_end: set[int] = set()
        """Sessions that began after the end of the job."""
        self.remote_control = settings.remote_control
        """Whether commands from other machines are accepted if there is no secret."""
        self._watchers: WatcherSessions | None = None
        """The sessions that are not nodes, once there was one."""
        self._tick_again_at = float("-inf")
        self._delivering = threading.Lock()
        self.on_change: Callable[[], None] = do_nothing
        """Called after each event, from any thread: `wake_at` may have moved."""

    @property
    def settings(self) -> Settings:
        """The settings of the job's rendezvous."""
        return self._coordinator.settings

    @property
    def incarnation(self) -> str:
        """The name that distinguishes this coordinator from earlier or later ones at the same place."""
        return self._coordinator.incarnation

    @property
    def members(self) -> int:
        """The number of open sessions, without those that began after the end of the job."""
        watchers = 0 if self._watchers is None else len(self._watchers)
        return len(self._deliver) - len(self._sessions_after_end) - watchers

    @property
    def job(self) -> str | None:
        """The one job that nodes must be of: with `dispatcher_for`, this serves one job as `ManyJobs` serves many."""
        return self.settings.run_id

    def dispatcher_for(self, _hello: Hello, _peer: str) -> Dispatcher:
        """The dispatcher for a node with this greeting: this one."""
        return self

    def find(self, job: str) -> Dispatcher | None:
        """This one, if it serves that job; an empty `job` means any."""
        return self if job in {"", self.settings.run_id} else None

    def job_list(self) -> JobList:
        """The one job, as a list."""
        from rallypoint.control.coordinator.snapshots import summary_of
        from rallypoint.control.protocol.observation import JobList

        return JobList((summary_of(self.state, self.settings, self.history, self.now()),))

    @property
    def history(self) -> JobHistory:
        """What has happened in the job, for reading only."""
        return self._coordinator.history

    @property
    def state(self) -> State:
        """The state at this moment, for reading only."""
        return self._coordinator.state

    def now(self) -> float:
        """The dispatcher's time, in seconds on its clock."""
        return self._clock.monotonic()

    def attach(self, deliver: Deliver, session: SessionRecord, disconnect: Callable[[str], None] | None = None) -> int:
        """Open a session. Returns its number.

        Args:
            deliver: called with the session's notifications.
            session: the description of the session.
            disconnect: called, from any thread, with the reason, when it was ended from here.
        """
        with self._lock:
            number = next(self._numbers)
            self._deliver[number] = deliver
            if disconnect is not None:
                self._disconnect[number] = disconnect
            if self._coordinator.state.verdict is not None:
                self._sessions_after_end.add(number)
            self._coordinator.open(number, session, self._clock.monotonic())
        self.on_change()
        return number

    def attach_watcher(self, deliver: Callable[[WatcherNotification], None], disconnect: Callable[[str], None]) -> int:
        """Open the session of a watcher, which is not a node; returns its number."""
        replaced: list[Callable[[], None]] = []
        with self._lock:
            watchers = self._opened_watchers()
            if len(watchers) >= MAX_WATCHERS:
                quietest = watchers.remove_quietest()
                self._deliver.pop(quietest, None)
                replaced = [partial(self._disconnect.pop(quietest), _REPLACED_DETAIL)]
            session = next(self._numbers)
            self._deliver[session] = deliver
            self._disconnect[session] = disconnect
            watchers.open(session)
        for end in replaced:
            self._guarded_call(end)
        return session

    def receive_from_watcher(self, session: int, request: WatcherRequest, refusal: str = "") -> None:
        """A watcher has sent a message; `refusal` is why it may not give commands, if it may not."""
        with self._lock:
            now = self._clock.monotonic()
            self._opened_watchers().receive(session, request, now, refusal)
            self._enqueue(self._coordinator.tick(now))
            disconnects = self._pop_disconnects()
        self._flush(disconnects)

    def snapshot(self) -> Snapshot:
        """The state of the job, as far as it is known without asking the nodes."""
        return self.copy_of_job()()

    def copy_of_job(self) -> Callable[[], Snapshot]:
        """Copy what may change. Returns a function, for any thread, that makes the snapshot of this moment."""
        with self._lock:
            return self._opened_watchers().snapshot(self._clock.monotonic())

    @property
    def is_collecting(self) -> bool:
        return self._watchers is not None and self._watchers.is_collecting

    def _opened_watchers(self) -> WatcherSessions:
        if self._watchers is None:
            from rallypoint.control.coordinator.operators import WatcherSessions

            self._watchers = WatcherSessions(self._coordinator)
        return self._watchers

    def receive(self, session: int, request: Request) -> bool:
        """A session has sent a request. Returns whether the session still exists: a node that was silent for longer
        than its lease has been removed, and must come back as a new node.
        """
        with self._lock:
            self._note_lead()
            known = self._coordinator.sessions.get(session) is not None
            self._enqueue(self._coordinator.receive(session, request, self._clock.monotonic()))
            disconnects = self._pop_disconnects() if self._coordinator.ended else ()
        self._flush(disconnects)
        return known

    @property
    def is_leader(self) -> bool:
        """Whether this is certainly the job's only coordinator at the moment."""
        return self._lead is None or self._lead.remaining() > 0

    def lead_renewed(self) -> None:
        """The time of `lead` has been extended: nodes that wait for a confirmation may be answered."""
        with self._lock:
            self._note_lead()
            self._enqueue(self._coordinator.lead_renewed(self._clock.monotonic()))
        self._flush()

    def _note_lead(self) -> None:
        if self._lead is not None:
            self._coordinator.leads_for = self._lead.remaining()

    def heartbeat(self, session: int) -> bool:
        """Like `receive` of a heartbeat, for a caller that answers it itself. Causes no notifications."""
        with self._lock:
            return self._coordinator.heartbeat(session, self._clock.monotonic())

    @property
    def has_notifications(self) -> bool:
        """Whether some are still to be delivered, or another thread delivers some now."""
        return bool(self._outbox) or self._delivering.locked()

    def detach(self, session: int, reason: Reason = Reason.LOST, detail: str = "") -> None:
        """A session has ended, in the way that `detail` says."""
        with self._lock:
            self._deliver.pop(session, None)
            self._disconnect.pop(session, None)
            self._sessions_after_end.discard(session)
            if self._watchers is None or not self._watchers.close(session):
                self._enqueue(self._coordinator.close(session, self._clock.monotonic(), reason, detail))
        self._flush()

    def nodes_lost(self, numbers: Collection[int], detail: str = "") -> None:
        """The nodes of these numbers are lost according to others, as `detail` says. See `Coordinator.nodes_lost`."""
        with self._lock:
            self._enqueue(self._coordinator.nodes_lost(numbers, self._clock.monotonic(), detail))
        self._flush()

    def journal_written(self, number: int) -> None:
        """The journal has stored the state of that number: notifications that follow from it may be delivered."""
        self._written = max(self._written, number)
        self._flush()

    def tick(self) -> None:
        """Time has passed."""
        with self._lock:
            now = self._clock.monotonic()
            try:
                self._enqueue(self._coordinator.tick(now))
            except Exception:
                log.exception("job %r: a scheduled action failed and is retried", self.settings.run_id)
                self._tick_again_at = now + _PAUSE
            disconnects = self._pop_disconnects()
        self._flush(disconnects)

    def wake_at(self) -> float:
        """When `tick` should be called next, on the clock's monotonic time; infinity for never."""
        with self._lock:
            return max(self._coordinator.wake_at(), self._tick_again_at)

    def _pop_disconnects(self) -> list[Callable[[], None]]:
        ended, self._coordinator.ended = self._coordinator.ended, []
        for session, _ in ended:
            self._deliver.pop(session, None)
            self._sessions_after_end.discard(session)
        return [partial(self._disconnect.pop(session), why) for session, why in ended if session in self._disconnect]

    def _enqueue(self, sends: Iterable[OutgoingNotification]) -> None:
        """Queue notifications until the state that they follow from is stored. With the lock held."""
        if self._coordinator.state is not self._numbered:
            self._numbered = self._coordinator.state
            self._number += 1
        self._outbox += [_PendingNotification(self._number, *send) for send in sends]  # nodes come first
        if self._watchers is not None:
            self._outbox += [_PendingNotification(self._number, *send) for send in self._watchers.pop_sends()]
        if self._outbox or self._numbered.complete:
            self._awaited = self._number

    def _flush(self, disconnects: Sequence[Callable[[], None]] = ()) -> None:
        for disconnect in disconnects:
            self._guarded_call(disconnect)
        if self._journal is not None:
            self._append_to(self._journal)
        # Whether it is empty may be asked without the lock: who adds to it comes here afterwards.
        while self._outbox and self._may_deliver() and self._delivering.acquire(blocking=False):
            try:
                while self._outbox and (due := self._take_due()):
                    for pending in due:
                        self._deliver_to(pending.session, pending.notification)
            finally:
                self._delivering.release()
        self.on_change()

    def _append_to(self, journal: JournalSink) -> None:
        with self._lock:
            number, state, awaited = self._number, self._numbered, self._awaited
            if (number, awaited) == self._appended:
                return
            self._appended = number, awaited
        journal.append(number, state, awaited)

    def _may_deliver(self) -> bool:
        """Whether the next notification may be delivered. With the lock:

        1. Thread A sees that the outbox has an entry.
        2. Thread B, which delivers, takes this entry.
        3. Thread A looks at the number of the first entry of an empty outbox: an IndexError, for which its node counted
           as lost.

        B may also have looked for the last time just before A queued its entry. So A looks again after B, or does not
        get `_delivering`, and B looks after it has released that.
        """
        with self._lock:
            return self._is_due()

    def _is_due(self) -> bool:
        return bool(self._outbox) and self._outbox[0].number <= self._written

    def _take_due(self) -> list[_PendingNotification]:
        """Take the notifications that may be delivered. For the thread that delivers."""
        due = []
        with self._lock:
            while self._is_due():
                due.append(self._outbox.popleft())
        return due

    def _deliver_to(self, session: int, notification: Notification | WatcherNotification) -> None:
        if isinstance(notification, ConfigDiffers):
            self._job_log().log_differences(notification)
        elif self._logs_progress and isinstance(notification, Progress | JoinRefused):
            self._job_log().log_progress(notification, self._clock.monotonic())
        deliver = self._deliver.get(session)
        if deliver is not None and not self._guarded_call(deliver, notification):
            disconnect = self._disconnect.get(session)
            if disconnect is not None:
                self._guarded_call(disconnect, "it could not be notified")

    def _job_log(self) -> JobLog:
        if self._log is None:
            from rallypoint.control.coordinator.job_log import JobLog

            self._log = JobLog(self.settings.run_id)
        return self._log

    def _guarded_call(self, call: Callable[..., None], *arguments: object) -> bool:
        """Call a function of one session; returns whether it succeeded."""
        try:
            call(*arguments)
        except Exception:
            log.exception("job %r: a node could not be notified; its session ends", self.settings.run_id)
            return False
        return True


def do_nothing() -> None:
    """The default callback."""


class TimerThread:
    """Ticks a dispatcher that has no server, on a thread of its own while there is something to wait for."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = False
        dispatcher.on_change = self._arm

    def close(self) -> None:
        """Stop ticking. Idempotent."""
        with self._lock:
            self._closed = True
            self._cancel()

    def _arm(self) -> None:
        at = self._dispatcher.wake_at()
        with self._lock:
            self._cancel()
            if self._closed or at == float("inf"):
                return
            self._timer = threading.Timer(max(0.0, at - self._dispatcher.now()), self._dispatcher.tick)
            self._timer.daemon = True
            self._timer.start()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LocalLink:
    """The link of the node that hosts the dispatcher: a session without a socket, which lives as long as the
    process."""

    def __init__(
        self, dispatcher: Dispatcher, node: NodeId, deliver: Deliver, address: str, *, is_alone: bool = False
    ) -> None:
        """Open the session. With `is_alone` no other node can ever be told what this one sends."""
        self._dispatcher = dispatcher
        self._is_alone = is_alone
        self._deliver = deliver
        self.address = address
        self._session = dispatcher.attach(
            deliver, SessionRecord(node, address, leased=False, in_this_process=True, local=True)
        )

    @property
    def lease(self) -> float:
        """See `Link.lease`."""
        return self._dispatcher.settings.lease

    @property
    def confirmed_at(self) -> float:
        """See `Link.confirmed_at`: both are one process."""
        return BOOT_CLOCK.monotonic()

    def send(self, request: Request) -> None:
        """Send a request to the dispatcher; notifications may be delivered before this returns."""
        if not self._is_alone or isinstance(request, _ANSWERS):  # then others must be able to receive it
            from rallypoint.control.protocol.validation import ValidationError, validated

            try:
                request = validated(request)
            except ValidationError as error:
                from rallypoint.control.protocol.codec import EXPENDABLE

                if isinstance(request, EXPENDABLE):
                    log.warning("a %s is dropped: it cannot be sent (%s)", type(request).__name__, error)
                else:
                    self._deliver(LinkLost(f"what this node had to send cannot be sent: {error}"))
                return
        self._dispatcher.receive(self._session, request)

    def close(self) -> None:
        """End the session. Idempotent."""
        self._dispatcher.detach(self._session, Reason.DEPARTED)
