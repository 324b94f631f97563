"""`rallyctl logs`, `events` and `wait`: a job's output, its events, and how it ends."""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.cli.exit import OutputError, print_answer, print_error
from rallypoint.cli.following import Follower, Lines
from rallypoint.cli.job_verbs import (
    collect,
    ended_here,
    followed,
    follower,
    receive,
    unnamed,
    with_session,
)
from rallypoint.control.protocol.messages import CollectedPart, CollectKind
from rallypoint.observe.watching.client import UnreachableError, WatcherSession, operator_name
from rallypoint.observe.watching.messages import CollectCommand, CommandReply, JobList, Snapshot, WatchRequest

if TYPE_CHECKING:
    from rallypoint.features.local_jobs import EndedJob

_RANKS = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_MOST_RANKS = 1024
_MOST_NOTES = 1000
"""How many notes to remember, so that none is printed twice."""
_LAST_WORDS = 5.0
"""Seconds in which the nodes of an ended job can still send output."""
_LOOK_AGAIN = 0.05
UNREACHABLE = 69
"""The exit code of `wait` if the job cannot be reached: EX_UNAVAILABLE in sysexits.h. All other codes are the job's."""


def logs(options: argparse.Namespace) -> int:
    ranks = _take_operands(options)
    if options.lines < 0:
        raise UsageError(f"--lines={options.lines} is negative; set it to 0 or more")
    show = _LogLines(labelled=len(ranks) != 1)
    if options.follow:
        follows = _LogFollower(options, ranks, show.add)
        seen = asyncio.run(follows.run())
        if follows.refusal:
            raise RallypointError(follows.refusal)
        if isinstance(seen, JobList):
            raise unnamed(seen)
        _say_end(seen)
        if isinstance(seen, Snapshot):
            print_error(f"rallyctl: {seen.detail}")
        return 0

    async def show_once(session: WatcherSession) -> int:
        session.send(CollectCommand(operator_name(), CollectKind.LOGS, ranks, options.lines))
        reply = await collect(session, show.add)
        if not reply.done:
            raise RallypointError(reply.detail)
        return 0

    return with_session(options, show_once)


def _take_operands(options: argparse.Namespace) -> tuple[int, ...]:
    """The ranks among the operands. Any other operand is the endpoint."""
    options.endpoint = ""
    ranks: dict[int, None] = {}
    for operand in options.operands:
        if match := _RANKS.fullmatch(operand):
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise UsageError(f"{operand!r} is descending; write FIRST-LAST, such as 8-15")
            if last >= first + _MOST_RANKS:
                raise UsageError(f"{operand!r} has more than {_MOST_RANKS} ranks; use a smaller range")
            ranks |= dict.fromkeys(range(first, last + 1))
        elif options.endpoint:
            raise UsageError(
                f"{operand!r} is not a rank, and the endpoint is {options.endpoint!r} already; write ranks as 0 or 8-15"
            )
        else:
            options.endpoint = operand
    if len(ranks) > _MOST_RANKS:
        raise UsageError(f"{len(ranks)} ranks are too many; list at most {_MOST_RANKS}, or none to show all")
    return tuple(ranks)


class _LogLines:
    """Prints the logs that nodes send."""

    def __init__(self, *, labelled: bool) -> None:
        self._labelled = labelled
        self._told: set[str] = set()

    def add(self, node: str, data: bytes) -> None:
        from rallypoint.observe.worker_logs import decode_logs, log_lines

        try:
            node_logs = decode_logs(data)
        except ValueError as error:
            print_error(f"rallyctl: the answer from {node} contains no logs: {error}")
            return
        for note in node_logs.notes:
            if note not in self._told:
                if len(self._told) == _MOST_NOTES:
                    self._told.clear()
                self._told.add(note)
                print_error(f"rallyctl: {note}")
        if lines := list(log_lines(node_logs, node, labelled=self._labelled)):
            print_answer("\n".join(lines))


class _Notes(Lines):
    """A display that shows only notes, on standard error."""

    def __init__(self) -> None:
        super().__init__(lambda text: print_error(f"rallyctl: {text}"))

    def show(self, snapshot: Snapshot) -> None: ...


class _LogFollower(Follower):
    """Follows the workers' output until the job ends. Asks a node again when its last answer has been read."""

    def __init__(self, options: argparse.Namespace, ranks: tuple[int, ...], take: Callable[[str, bytes], None]) -> None:
        super().__init__(*followed(options), _Notes())
        self.refusal = ""
        """Why the job's logs cannot be followed; empty if they can."""
        cursor = 1 + secrets.randbelow(2**39)
        self._command = CollectCommand(operator_name(), CollectKind.LOGS, ranks, options.lines, cursor)
        self._take = take

    async def _listen(self, session: WatcherSession) -> Snapshot | JobList:
        session.send(self._command)
        ended: Snapshot | None = None
        parts: dict[str, bytearray] = {}
        try:
            async with asyncio.timeout(None) as limit:
                while True:
                    seen = await session.receive()
                    match seen:
                        case CollectedPart():
                            self._add(parts, seen)
                        case Snapshot():
                            self.show(seen)
                            if seen.detail and ended is None:
                                ended = seen
                                limit.reschedule(asyncio.get_running_loop().time() + _LAST_WORDS)
                            elif not seen.detail:
                                session.send(WatchRequest(after=seen.changes))
                        case JobList():
                            return seen
                        case CommandReply():
                            if not seen.done:
                                self.refusal = seen.detail
                            if ended is not None or self.refusal:
                                return ended or JobList(())
        except (UnreachableError, TimeoutError):
            if ended is None:
                raise
            return ended

    def _add(self, parts: dict[str, bytearray], part: CollectedPart) -> None:
        parts.setdefault(part.node, bytearray()).extend(part.data)
        if part.is_last:
            self._take(part.node, bytes(parts.pop(part.node)))


def _say_end(seen: Snapshot | EndedJob) -> None:
    """Say how a job ended, if its control plane is gone too."""
    if not isinstance(seen, Snapshot):
        from rallypoint.cli.local_jobs import sentence_of

        print_error(f"rallyctl: {sentence_of(seen)}")


def events(options: argparse.Namespace) -> int:
    display = _EventLines(as_json=options.json)
    if options.follow:
        seen = asyncio.run(follower(options, display).run())
        if isinstance(seen, JobList):
            raise unnamed(seen)
        _say_end(seen)
        return 0

    async def show_once(session: WatcherSession) -> int:
        session.send(WatchRequest())
        display.show(await receive(session, Snapshot))
        return 0

    return with_session(options, show_once)


class _EventLines(_Notes):
    """Prints a line per event of the job, starting with the oldest known event."""

    def __init__(self, *, as_json: bool) -> None:
        from rallypoint.observe.status import NewEvents

        super().__init__()
        self._as_json = as_json
        self._events = NewEvents()

    def show(self, snapshot: Snapshot) -> None:
        if lines := list(self._lines(snapshot)):
            print_answer("\n".join(lines))

    def _lines(self, snapshot: Snapshot) -> Iterator[str]:
        from rallypoint.observe.status import event_json

        now = time.time()
        for event in self._events.new_in(snapshot):
            at = time.localtime(now - event.seconds_ago)
            yield event_json(event, now) if self._as_json else f"{time.strftime('%Y-%m-%d %H:%M:%S', at)} {event.text}"


def _ended_soon(options: argparse.Namespace) -> EndedJob | None:
    """How the job ended on this machine. Waits for its agent, which may not have recorded it yet."""
    from rallypoint.features.local_jobs import local_jobs

    until = time.monotonic() + _LAST_WORDS
    while (past := ended_here(options)) is None and options.found in list(local_jobs()) and time.monotonic() < until:
        time.sleep(_LOOK_AGAIN)
    return past


def wait(options: argparse.Namespace) -> int:
    from rallypoint.cli.local_jobs import NoJobError, sentence_of
    from rallypoint.cli.verdict import CODES
    from rallypoint.failures.cause import Ending
    from rallypoint.features.local_jobs import EndedJob
    from rallypoint.observe.watching.messages import JobPhase

    try:
        seen = asyncio.run(follower(options, _Notes()).run())
        if isinstance(seen, JobList):
            raise unnamed(seen)
    except RallypointError as error:
        if isinstance(error, UserError | OutputError):
            raise
        past = _ended_soon(options) if isinstance(error, NoJobError | UnreachableError) else None
        if past is None:
            print_error(f"rallyctl: error: {error}")
            return UNREACHABLE
        seen = past
    if isinstance(seen, EndedJob):
        print_answer(sentence_of(seen))
        return 0 if seen.outcome == "succeeded" else CODES[Ending[seen.ending or "PROGRAM"]]
    print_answer(seen.detail)
    return 0 if seen.phase is JobPhase.SUCCEEDED else CODES[seen.ending or Ending.PROGRAM]
