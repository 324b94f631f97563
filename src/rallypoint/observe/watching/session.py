"""The coordinator's side of a watcher's session, also for watchers in the coordinator's own process.

Call it in the coordinator's turns: a `JobWatch` does not request one.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint.control.coordinator.session import SessionOutput
from rallypoint.control.membership.state import Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.handshake import HandshakeError, Hello, Welcome
from rallypoint.observe.watching import WATCHERS
from rallypoint.observe.watching.messages import (
    JobList,
    ListRequest,
    Snapshot,
    WatcherNotification,
    WatcherRequest,
    decode_watcher_request,
    job_list_parts,
)
from rallypoint.observe.watching.snapshots import summary_of

if TYPE_CHECKING:
    from rallypoint.control.coordinator.dispatcher import Dispatcher
    from rallypoint.control.coordinator.jobs import ServedJobs
    from rallypoint.observe.watching.watchers import WatcherSessions

COMMAND_REFUSED = (
    "without a secret, commands are accepted only from the user of the control plane (or root) on its own machine; set "
    "RALLYPOINT_SECRET_FILE for the job (`rallyctl secret` creates one), or start its control plane with "
    "remote_control=true in --rdzv-conf"
)
MAX_WATCHERS = 64
"""Maximum number of watchers per job: each can request the whole state several times a second."""
_REPLACED_DETAIL = f"{MAX_WATCHERS} others watch this job, and this one was idle for the longest time"
_COPIED_WITHIN = 5.0
"""Seconds that a snapshot waits for a turn of the coordinator."""


class JobWatch:
    """One watcher's session with a job."""

    def __init__(
        self, job: Dispatcher, send: Callable[[WatcherNotification], None], disconnect: Callable[[str], None]
    ) -> None:
        """Open the session. If there are too many, close the one that has been silent longest.

        Args:
            job: the job to watch.
            send: called with each message for the watcher.
            disconnect: called with the reason when this side ends the session.
        """
        self._job = job
        self._watchers: WatcherSessions = job.extension(WATCHERS)
        if len(self._watchers) >= MAX_WATCHERS:
            job.end_guest(self._watchers.remove_quietest(), _REPLACED_DETAIL)
        self._number = job.attach_guest(send, disconnect, self._watchers.close)
        self._watchers.open(self._number)

    def receive(self, request: WatcherRequest, refusal: str = "") -> None:
        """Handle a watcher's message; `refusal` is why it may not send commands, empty if it may."""
        self._watchers.receive(self._number, request, self._job.now(), refusal)
        self._job.tick()

    def detach(self) -> None:
        """Release the session of a watcher that is gone."""
        self._job.detach(self._number)


class _WatcherConnection:
    """A watcher's connection. See `control.coordinator.session.GuestSession`."""

    def __init__(self, watch: JobWatch, refusal: str, list_jobs: Callable[[], None] | None) -> None:
        self._watch = watch
        self._refusal = refusal
        self._list_jobs = list_jobs

    def receive(self, payload: bytes) -> None:
        request = decode_watcher_request(payload)
        if not isinstance(request, ListRequest):
            self._watch.receive(request, self._refusal)
        elif self._list_jobs is None:  # it may have proved membership of only one job
            raise codec.CodecError("jobs are listed only for watchers that do not name one")
        else:
            self._list_jobs()

    def detach(self) -> None:
        self._watch.detach()


def open_session(
    jobs: ServedJobs, hello: Hello, output: SessionOutput, disconnect: Callable[[str], None], *, is_trusted: bool
) -> _WatcherConnection | None:
    """Open the session of a watcher with this greeting. If it names no job, and none or several exist, send the
    watcher a list of the jobs instead and return None.

    Args:
        jobs: the jobs on the server.
        output: the watcher's connection.
        disconnect: called with the reason when this side ends the session.
        is_trusted: whether the watcher proved a secret, or belongs to the control plane's own user.

    Raises:
        HandshakeError: no such job exists.
    """
    job = jobs.find(hello.job)
    if job is None and hello.job:
        raise HandshakeError(f"it has no job {hello.job!r}; remove --rdzv-id to list its jobs")

    def list_jobs() -> None:
        output.send(*map(codec.encode, job_list_parts(job_list(jobs))))

    lease = Settings("", 1, 1).lease if job is None else job.settings.lease
    output.send(codec.encode(Welcome(lease, "" if job is None else job.incarnation)))
    if job is None:
        list_jobs()
        return None
    refusal = "" if is_trusted or job.remote_control else COMMAND_REFUSED
    return _WatcherConnection(JobWatch(job, output.post, disconnect), refusal, None if hello.job else list_jobs)


def job_list(jobs: ServedJobs) -> JobList:
    """The jobs on a server, one line each, and those that ended last."""
    now = jobs.now()
    running, ended = (tuple(summary_of(*record, now) for record in records) for records in jobs.records())
    return JobList(running, ended)


def copy_of_job(job: Dispatcher) -> Callable[[], Snapshot]:
    """Copy what may change, in the coordinator's next turn; call on any thread. Returns a function that waits for the
    copy and creates a snapshot from it. Call it once, but not on the loop's thread. It raises `queue.Empty` if no turn
    came.
    """
    copied: queue.SimpleQueue[Callable[[], Snapshot]] = queue.SimpleQueue()

    def make_snapshot() -> Snapshot:
        return copied.get(timeout=_COPIED_WITHIN)()

    job.turns.call(lambda: copied.put(job.extension(WATCHERS).snapshot(job.now())))
    return make_snapshot
