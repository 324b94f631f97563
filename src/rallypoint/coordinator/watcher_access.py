"""The access of watchers: which job they see, and whether they may give commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.coordinator.dispatcher import Dispatcher
from rallypoint.coordinator.peer_access import COMMAND_REFUSED
from rallypoint.coordinator.sessions import SessionRecord
from rallypoint.membership.state import Settings
from rallypoint.protocol.handshake import HandshakeError, Hello, Welcome

if TYPE_CHECKING:
    from rallypoint.coordinator.job_directory import JobDirectory


def watched_dispatcher(jobs: JobDirectory, hello: Hello) -> Dispatcher | None:
    """The dispatcher of the job that a watcher names; None if it names none and there are several, or none.

    Raises:
        HandshakeError: there is no such job.
    """
    dispatcher = jobs.find(hello.job)
    if dispatcher is None and hello.job:
        raise HandshakeError(f"it has no job {hello.job!r}; leave --rdzv-id out for a list of its jobs")
    return dispatcher


def welcome_watcher(record: SessionRecord, dispatcher: Dispatcher | None) -> Welcome:
    """The first message to an accepted watcher."""
    lease = Settings("", 1, 1).lease if dispatcher is None else dispatcher.settings.lease
    return Welcome(record.node, lease, "" if dispatcher is None else dispatcher.incarnation)


def command_refusal(record: SessionRecord, trusted: bool) -> str:
    """Why a watcher may not give commands; empty if it may.

    Args:
        record: the record of its session.
        trusted: whether it has proved to hold the job's secret, or commands are accepted from everywhere.
    """
    return "" if trusted or record.is_own_user else COMMAND_REFUSED
