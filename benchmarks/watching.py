"""What those cost who watch a job of many nodes: one status of 1,024 nodes, and ten followers of 4,096.

The nodes are those of `scale`; they answer the request for a report as real ones do. A status is timed from before its
connection until all is decoded, with a report of every node. The server's share of a core is measured in turn, without
watchers and with ten, on the same server.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

from benchmarks.case import OURS, BenchError, Budget, Case, Row, Settings, Turns, in_turn, row, sample
from benchmarks.crowds import Meeting, followed, watching
from rallypoint.observe.watching.messages import Snapshot, WatchRequest

_STATUS_NODES, _FOLLOWED_NODES, _QUICK_NODES = 1024, 4096, 64
_ASKED = 5
_APART = 1.2  # seconds from one status to the next: more than a report counts as fresh
_WATCHERS = 10
_SECONDS, _QUICK_SECONDS = 10.0, 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of a core that the server needs for heartbeats."""

    alone: float
    watched: float


def _run(settings: Settings) -> list[Row]:
    few = _QUICK_NODES if settings.quick else _STATUS_NODES
    many = _QUICK_NODES if settings.quick else _FOLLOWED_NODES
    seconds = _QUICK_SECONDS if settings.quick else _SECONDS
    statuses = in_turn(f"status of {few} nodes", settings.rounds, {OURS: partial(status_seconds, few)})
    loads = in_turn(f"{many} nodes, watched", settings.rounds, {OURS: partial(watched_load, many, seconds)})
    alone = [each.alone * 100 for each in loads.results.get(OURS, [])]
    watched = Turns({OURS: [each.watched * 100 for each in loads.results.get(OURS, [])]}, loads.failures)
    figure = row(f"{many:,} nodes: server's share of a core, {_WATCHERS} follow", "%", watched)
    base = sample(alone)
    return [
        row(f"status of {few:,} nodes", "s", statuses, Budget(0.1, unit="s")),
        Row(figure.what, "%", figure.ours, base, base_name="nobody watches", remarks=figure.remarks),
    ]


def status_seconds(nodes: int) -> float:
    """The median time of a status."""
    with Meeting(nodes) as meeting:
        meeting.meet()
        found = sorted(asyncio.run(_statuses(meeting)))
    return found[len(found) // 2]


async def _statuses(meeting: Meeting) -> list[float]:
    heartbeats = asyncio.ensure_future(asyncio.to_thread(meeting.load, _ASKED * _APART + 2.0))
    found = []
    for _ in range(_ASKED):
        await asyncio.sleep(_APART)
        begin = time.perf_counter()
        async with watching(meeting.port) as session:
            session.send(WatchRequest())
            seen = await session.receive()
        found.append(time.perf_counter() - begin)
        if not isinstance(seen, Snapshot) or seen.totals.reported != meeting.nodes:
            raise BenchError(f"the status of {meeting.nodes} nodes is without some of their reports")
    await heartbeats
    return found


def watched_load(nodes: int, seconds: float) -> Load:
    """What heartbeats cost the server, without watchers and with ten that follow."""
    with Meeting(nodes) as meeting:
        meeting.meet()
        meeting.settle()
        alone = meeting.load(seconds)
        return Load(alone, asyncio.run(followed(meeting, _WATCHERS, seconds)))


CASE = Case("watching", "one status of 1,024 nodes, and ten followers of 4,096", _run)
