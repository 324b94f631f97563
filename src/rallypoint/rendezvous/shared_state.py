"""The shared-state link: reads the blob, decides, applies, compares and sets; after a lost race, reads and decides
again.

It is a `Link` like the coordinator's, so handlers and agents see no difference. Its own thread talks to the backend,
and never waits for anything else.

Laws:

1. Nodes are notified of a change only after the backend stores it; notifications come from comparing the states before
   and after.
2. After a lost race, the decision is dropped, and made again on the current state.
3. A node counts as dead if its heartbeat counter has not changed for too long on our own clock. Its removal is an
   ordinary change that reaches all nodes.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import math
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count

from rallypoint.base.clock import SYSTEM_CLOCK, Clock, Deadline
from rallypoint.base.endpoint import outward_address
from rallypoint.base.errors import UserError
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger
from rallypoint.control.coordinator.notifications import (
    end_notifications,
    join_refusal,
    newly_complete,
    nodes_waiting,
    notification_diff,
    placeholders_in,
    placements,
    progress,
    standing_without,
)
from rallypoint.control.membership.observer import StateObserver
from rallypoint.control.membership.rules import renewed, step
from rallypoint.control.membership.state import (
    Exit,
    Join,
    KeepLeaseAlive,
    NoChange,
    NodeId,
    NodeInfo,
    Operation,
    Reason,
    Refusal,
    Settings,
    State,
    name_of,
    nodes_waiting_alike,
)
from rallypoint.control.protocol.codec import EXPENDABLE, decode_state, encode_state
from rallypoint.control.protocol.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from rallypoint.control.protocol.messages import (
    CauseClues,
    CauseSought,
    CollectedPart,
    ConfigDiffers,
    Confirmed,
    ConfirmRequest,
    Deliver,
    HangReport,
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    Link,
    LinkLost,
    NextStore,
    NodeReport,
    Notification,
    Placed,
    Progress,
    ProgressRequest,
    Request,
    ResumeRequest,
    Taken,
)
from rallypoint.control.protocol.validation import ValidationError, validated
from rallypoint.rendezvous.backends.options import rank_hint, settings_of, worker_stores
from rallypoint.rendezvous.elastic import ControlPlane, ElasticHandler, own_node
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.store.api import Store
from rallypoint.store.errors import StoreError
from rallypoint.store.filestore import FileStore

if TYPE_CHECKING:
    from rallypoint.observe.watching.hang import HangInvestigation


Token = Any
"""The fencing token: returned with a state, and required to replace it."""


class RendezvousBackend(ABC):
    """A place for the state (contract section 8, `RendezvousBackend`).

    A backend that can notice changes also provides `wait_for_change(timeout: float) -> bool`, which blocks until the
    state might have changed, at most `timeout` seconds; others are read once per second. An optional `cancel_waits()`
    ends current and later waits, from any thread.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in messages."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token; None if no state exists yet. Raises RendezvousConnectionError if the service
        cannot be reached, and RendezvousStateError if the blob is no state."""

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state if it still matches `token` (without a token: if no state exists yet).

        Returns:
            The resulting state, its token, and whether it is ours; None if unknown.

        Raises:
            RendezvousConnectionError: the service cannot be reached.
            RendezvousStateError: the stored value is no state.
        """


_NO_STATE = b"Y2FuaW1hZGFt"
"""Initial value of the key, so that reading never waits (contract section 4.4)."""


class StoreRendezvousBackend(RendezvousBackend):
    """The key `torch.rendezvous.<run_id>` of a store; the token is its current text."""

    def __init__(self, store: Store, run_id: str) -> None:
        """Ensure that the key exists.

        Args:
            store: any store with `compare_set`.
            run_id: the job's id.

        Raises:
            UserError: the run id is empty.
            RendezvousConnectionError: the store cannot be reached.
        """
        if not run_id:
            raise UserError("a rendezvous in a store needs a run id; set --rdzv-id")
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        self._compare_set(b"", _NO_STATE)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "c10d"

    def get_state(self) -> tuple[bytes, bytes] | None:
        try:
            text = self._store.get(self._key)
        except StoreError as error:
            raise self._connection_error(error) from error
        return self._decoded(text)

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, bytes, bool] | None:
        expected = _NO_STATE if token is None else token
        if not isinstance(expected, bytes):
            stored = self.get_state()
            return None if stored is None else (*stored, False)
        ours = base64.b64encode(state)
        there = self._compare_set(expected, ours)
        decoded = self._decoded(there)
        return None if decoded is None else (*decoded, there == ours)

    def _compare_set(self, expected: bytes, desired: bytes) -> bytes:
        try:
            return self._store.compare_set(self._key, expected, desired)
        except StoreError as error:
            raise self._connection_error(error) from error

    def _decoded(self, text: bytes) -> tuple[bytes, bytes] | None:
        if text == _NO_STATE:
            return None
        try:
            return base64.b64decode(text, validate=True), text
        except binascii.Error:
            raise RendezvousStateError(
                f"the key {self._key!r} contains {text[:24]!r}, which is not a rendezvous state; use a separate store "
                "and --rdzv-id for each job"
            ) from None

    def _connection_error(self, error: StoreError) -> RendezvousConnectionError:
        return RendezvousConnectionError(f"the rendezvous store cannot be reached: {error}")


log = get_logger(__name__)


_POLL_INTERVAL = 1.0
"""Seconds between reads of a backend that cannot notice changes."""
_CANCELLABLE_WAIT = 10.0
"""Seconds per wait for a change, if waits can be cancelled."""
_REPORTS_AFTER = 12.0
"""Seconds after a hang was found before a node may act on its own evidence: by then the other nodes have found it."""
_MAX_UNREACHABLE = 60.0
"""Seconds that the backend may be unreachable while a node in the job has a request for it."""


class SharedStateLink:
    """One node's link to a state that all nodes share. `settings.counts_heartbeats` must be set."""

    def __init__(
        self,
        backend: RendezvousBackend,
        settings: Settings,
        node: NodeId,
        address: str,
        deliver: Deliver,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start; returns at once.

        Args:
            backend: the backend of the state; from now on, only this link's thread uses it.
            settings: the job's settings.
            node: the name of this node.
            address: where others reach this node, if its node info has no address.
            deliver: called with every notification.
            clock: the clock of all times.
        """
        self._backend = backend
        self._settings = settings
        self._node = node
        self.address = address
        self._deliver = deliver
        self._clock = clock
        self._observer = StateObserver(settings)
        self._state = State()
        self._token: Token | None = None
        self._heartbeat_at: float | None = None
        self._pending: Join | None = None
        self._joined = False
        self._hangs: HangInvestigation | None = None
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self.broken: Exception | None = None
        """The error that ended the link, if any."""
        self._watcher = _BackendWatcher(backend, lambda: self._requests.put(Heartbeat()), self._ending)
        self._thread = threading.Thread(target=self._run, name="rallypoint-shared-state", daemon=True)
        self._thread.start()

    @property
    def lease(self) -> float:
        """See `Link.lease`."""
        return self._observer.allowance

    @property
    def confirmed_at(self) -> float:
        """See `Link.confirmed_at`: nobody answers."""
        return -math.inf

    def send(self, request: Request) -> None:
        """Queue a request; its results are delivered as notifications."""
        try:
            self._requests.put(validated(request))
        except ValidationError as error:
            if isinstance(request, EXPENDABLE):
                log.warning("a %s message was dropped because it could not be sent (%s)", type(request).__name__, error)
            else:
                self._deliver(LinkLost(f"a message of this node cannot be sent: {error}"))

    def close(self) -> None:
        """Leave the state, and end the thread. Idempotent."""
        if not self._ending.is_set():
            self._ending.set()
            self._requests.put(LeaveRequest())
            self._requests.put(None)
        self._watcher.stop()
        self._thread.join(timeout=self._settings.heartbeat_timeout + _POLL_INTERVAL)

    @property
    def is_busy(self) -> bool:
        """Whether requests are still pending although the link is closed."""
        return self._thread.is_alive()

    # On the thread

    def _run(self) -> None:
        while (request := self._next_request()) is not None:
            try:
                self._step_with_retries(request)
            except RendezvousError as error:
                self.broken = error
                self._deliver_if_open(LinkLost(str(error), error))
                break
            except Exception as error:  # the agent must not wait forever for a notification that cannot arrive
                self.broken = error
                log.error("the rendezvous over %s ended because its backend raised %r", self._backend.name, error)
                self._deliver_if_open(LinkLost(f"the rendezvous failed: {type(error).__name__}: {error}", error))
                break
        self._ending.set()  # the watcher must end when nobody uses its results
        self._watcher.stop()

    def _step_with_retries(self, request: Request) -> None:
        """Retry while the backend is unreachable, because no request may be lost. A damaged state stays damaged."""
        since = self._clock.monotonic()
        timeout = request.timeout if isinstance(request, JoinRequest) else _MAX_UNREACHABLE
        while True:
            try:
                self._step_request(request)
                return
            except RendezvousConnectionError as error:
                if self._ending.is_set() or self._clock.monotonic() - since > timeout:
                    raise
                log.warning("the rendezvous state cannot be reached: %s; trying again", error)
                self._ending.wait(_POLL_INTERVAL)

    def _next_request(self) -> Request | None:
        """The next request; a `Heartbeat` if none arrived for a while."""
        try:
            return self._requests.get(timeout=self._retry_timeout())
        except queue.Empty:
            return Heartbeat()

    def _retry_timeout(self) -> float:
        # Often enough to send our own heartbeats in time, and to notice a silent node.
        until = [min(_POLL_INTERVAL, self._settings.keep_alive_interval / 2)]
        if self._pending is not None and self._node not in self._state.redundancy_list:
            left = self._pending.deadline - self._clock.monotonic()
            until += [max(0.01, left)] if left > 0 else []  # after that, the round waits for something else
        return min(until)

    def _step_request(self, request: Request) -> None:
        """Read other nodes' changes, execute the request, and continue the join if possible."""
        self._read()
        self._remove_silent()
        match request:
            case JoinRequest(node_info=node_info, timeout=timeout, waited=waited):
                address = node_info.address or self.address
                now = self._clock.monotonic()
                node_info = node_info._replace(address=address)
                self._report_differences(node_info)
                self._pending = Join(node_info, now + timeout, now - waited, self._state.abandoned.number)
            case LeaveRequest(wants_reply=asks):
                self._pending = None
                self._step(self._node, Exit())
                self._heartbeat_at = None
                if asks:
                    self._deliver_if_open(
                        standing_without(self._state, self._node, self._settings, placeholders_in(self._state))
                    )
            case ProgressRequest():
                self._deliver_if_open(self._progress())
            case ConfirmRequest(number=number):  # newer notifications were delivered
                self._deliver_if_open(Confirmed(number))
            case NodeReport() | CollectedPart() | HangReport() | Taken():  # no coordinator, so no watchers
                if self._hangs is not None:
                    self._hangs.on_answer(self._node, request, self._clock.monotonic())
            # A blob is permanent, so nothing needs repeating, and each node joins by itself.
            case Heartbeat() | ResumeRequest() | NextStore() | CauseSought() | CauseClues():
                pass
            case operation:
                self._step(self._node, operation)
        if self._hangs is not None:
            self._hangs.tick(self._clock.monotonic())
        self._continue_join()
        if self._heartbeat_at is not None and self._state.knows(self._node):
            self._step(self._node, KeepLeaseAlive())

    def _remove_silent(self) -> None:
        """Remove nodes that were silent for too long."""
        for node in self._observer.silent(self._clock.monotonic()):
            if node != self._node:
                silent = f"it was silent for {self._observer.allowance:g} s"
                log.warning("%s is being removed from the rendezvous: %s", name_of(self._state, node), silent)
                self._step(node, Exit(Reason.LOST, silent))

    def _report_differences(self, node_info: NodeInfo) -> None:
        """Log differences between this node's settings and the job's, as far as the state shows them."""
        from rallypoint.control.coordinator.differences import differences

        differing = () if self._state.is_initial else differences(node_info, None, self._state, self._settings)
        if differing:
            self._deliver_if_open(ConfigDiffers(name_of(self._state, self._node), differing))

    def _progress(self) -> Progress:
        state, now = self._state, self._clock.monotonic()
        join = self._pending if self._node not in state.redundancy_list else None
        left = -1.0 if join is None else join.deadline - now
        reports = next(iter(nodes_waiting_alike(state, self._node))) == self._node
        return progress(
            state, self._node, self._settings, self._observer.clock_view(now), ends_in=left, reports=reports
        )

    def _continue_join(self) -> None:
        join = self._pending
        if join is None:
            return
        before = self._state
        end = self._step(self._node, join)
        if end is NoChange.WAIT:
            return
        self._pending = None
        if isinstance(end, Refusal):
            view = self._observer.clock_view(self._clock.monotonic())
            self._deliver_if_open(join_refusal(end, join, self._node, before, self._state, self._settings, view))

    def _step(self, node: NodeId, operation: Operation) -> NoChange | Refusal:
        """Take steps until the operation ends or must wait, deciding each on the current state."""
        while True:
            before, now = self._state, self._clock.monotonic()
            view = self._observer.clock_view(now, self._heartbeat_at)
            after = step(operation, before, node, view, self._settings)
            if not isinstance(after, State):
                if isinstance(operation, Join):
                    self._pending = operation
                return after
            if isinstance(operation, Join):
                operation = renewed(operation, before, after, node, now, self._settings)
            if self._write(after) and node == self._node:
                self._heartbeat_at = now

    def _read(self) -> None:
        stored = self._backend.get_state()
        if stored is not None:
            self._on_state(*stored)

    def _write(self, state: State) -> bool:
        """Try to write a state, and adopt the result. Returns whether the stored state is ours."""
        answer = self._backend.set_state(encode_state(state), self._token)
        ours = answer is not None and answer[2]
        if not ours and (longest := self._settings.cas_backoff_max_seconds):
            from random import uniform

            self._ending.wait(uniform(0, longest))
        if answer is None:
            self._read()
        else:
            self._on_state(*answer[:2])
        return ours

    def _on_state(self, data: bytes, token: Token) -> None:
        if token == self._token:
            self._observer.observe(self._state, self._clock.monotonic())
            return
        before, after = self._state, decode_state(data)
        self._state, self._token = after, token
        self._observer.observe(after, self._clock.monotonic())
        if not before.complete and self._node in before.participants and after.round > before.round:
            # That round might have used the join's data (a worker store): the node must join anew.
            self._pending = None
        self._joined = self._joined or after.knows(self._node)
        if after.verdict is not None and before.verdict is None:
            if self._joined:  # otherwise the job's end does not concern this node
                for_all, for_some = end_notifications(after, after.verdict)
                self._deliver_if_open(for_some.get(self._node, for_all))
            return
        for nodes, notification in notification_diff(before, after):
            if self._node in nodes:
                self._deliver_if_open(notification)
        if after.runs(self._node, before.round) and len(after.wait_list) != len(before.wait_list) and before.complete:
            self._deliver_if_open(nodes_waiting(after))
        if newly_complete(before, after) and self._node in after.participants:
            self._deliver_if_open(Placed(placements(after)[self._node]))
        if after.quiet:
            self._look_for_hang(before, after)

    def _look_for_hang(self, before: State, after: State) -> None:
        """Look for a hang. Without a coordinator to collect evidence, each node reports on its own workers."""
        if self._hangs is None:
            from rallypoint.observe.watching.hang import HangInvestigation

            self._hangs = HangInvestigation(
                lambda _nodes, notification: self._deliver_if_open(notification),
                count(1),
                lambda node: name_of(self._state, node),
                _REPORTS_AFTER,
            )
        self._hangs.check_hang(before, after, lambda node: node == self._node, self._clock.monotonic())

    def _deliver_if_open(self, notification: Notification) -> None:
        if not self._ending.is_set():
            self._deliver(notification)


class _BackendWatcher:
    """Calls `poke` whenever the backend might have changed; does nothing if the backend cannot notice changes."""

    def __init__(self, backend: RendezvousBackend, poke: Callable[[], None], ending: threading.Event) -> None:
        self._wait = getattr(backend, "wait_for_change", None)
        self._cancel = getattr(backend, "cancel_waits", None)
        self._on_change = poke
        self._ending = ending
        self._thread: threading.Thread | None = None
        if self._wait is not None:
            self._thread = threading.Thread(target=self._run, name="rallypoint-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        assert self._wait is not None
        interval = _POLL_INTERVAL if self._cancel is None else _CANCELLABLE_WAIT
        while not self._ending.is_set():
            if self._wait(interval):
                self._on_change()

    def stop(self) -> None:
        """Wait for the thread to end, at most one wait after the request. Idempotent."""
        if self._cancel is not None:
            self._cancel()
        if self._thread is not None:
            self._thread.join(timeout=2 * _POLL_INTERVAL)


# `c10d` with `store_type=file`: the state is in a file shared by all nodes (contract section 4.4).


_LOOK_INTERVAL = 0.05
"""Seconds between checks of the file's size. On a network disk, no kernel reports changes."""


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler for `c10d` parameters with `store_type=file`; the endpoint is the file's path.

    Without an endpoint, the file is private and temporary, for a job with one node.

    Raises:
        UserError: an option cannot work.
    """
    return ElasticHandler(params.backend, _StateInFile(params), worker_stores(params))


class _StateInFile(ControlPlane):
    """The file, and this node's link to its state."""

    def __init__(self, params: RendezvousParameters) -> None:
        where = f"in {params.endpoint}" if params.endpoint else ""
        settings = settings_of(params, counts_heartbeats=True)
        super().__init__(settings, where, params.endpoint_flag, rank_hint(params))
        self._path = params.endpoint
        self._local_addr = params.local_addr
        self._private = not params.endpoint

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        """Open the file and start the link."""
        if self._private:
            from tempfile import mkstemp

            handle, self._path = mkstemp(prefix="rallypoint_rendezvous_")
            os.close(handle)
        address = self._local_addr or outward_address()
        try:
            backend = FileBackend(self._path, self.settings.run_id)
        except StoreError as error:
            raise RendezvousConnectionError(f"--rdzv-endpoint: {error} that all nodes share") from None
        node = own_node(address)
        return SharedStateLink(backend, self.settings, node, address, deliver)

    def close(self) -> None:
        """Remove a temporary file. A file named by the user stays: other nodes might still have to read how the job
        ended."""
        if self._private and self._path and os.path.exists(self._path):
            os.unlink(self._path)


_COMPACT_ABOVE = 4 * 1024 * 1024
"""Size in bytes above which the file is rewritten: each heartbeat of each node appends the whole state."""


class FileBackend(StoreRendezvousBackend):
    """The state in a file store, which grows with every change, so that its size shows changes."""

    def __init__(self, path: str, run_id: str) -> None:
        super().__init__(FileStore(path, compact_above=_COMPACT_ABOVE), run_id)
        self._path = path
        self._seen = (0, 0)

    def wait_for_change(self, timeout: float) -> bool:
        """Wait until the size of the file changes, at most `timeout` seconds; returns whether it did."""
        deadline = Deadline.after(timeout)
        while not deadline.expired:
            seen = (0, 0)
            with contextlib.suppress(FileNotFoundError):
                file = os.stat(self._path)
                seen = file.st_ino, file.st_size
            if seen != self._seen:
                self._seen = seen
                return True
            time.sleep(min(_LOOK_INTERVAL, deadline.remaining()))
        return False
