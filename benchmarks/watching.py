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

from benchmarks.case import OURS, Case, Settings, row, sample
from benchmarks.children import Child, Children, program
from benchmarks.errors import BenchError
from benchmarks.messages import Gather, Gathered, Go, Serving, Sustain, Sustained, decode, encode
from benchmarks.table import Budget, Row
from benchmarks.turns import Turns, in_turn
from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client.dialing import DialTarget
from rallypoint.control.client.watcher import WatcherSession
from rallypoint.control.protocol.observation import Snapshot, WatchRequest

_RUN_ID = "bench"
_TIMEOUT = 300.0  # seconds for any one answer
_SETTLE = 3.0  # seconds of heartbeats before those that are measured
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
    with Children() as children:
        server, crowd, port = _gathered(children, nodes)
        crowd.tell(encode(Sustain(_ASKED * _APART + 2.0, server.pid)))
        found = sorted(asyncio.run(_statuses(port, nodes)))
        _answer(children, crowd, "heartbeats")
    return found[len(found) // 2]


async def _statuses(port: int, nodes: int) -> list[float]:
    found = []
    for _ in range(_ASKED):
        await asyncio.sleep(_APART)
        begin = time.perf_counter()
        async with WatcherSession(_place(port), _RUN_ID) as session:
            session.send(WatchRequest())
            seen = await session.receive()
        found.append(time.perf_counter() - begin)
        if not isinstance(seen, Snapshot) or seen.totals.reported != nodes:
            raise BenchError(f"the status of {nodes} nodes is without some of their reports")
    return found


def watched_load(nodes: int, seconds: float) -> Load:
    """What heartbeats cost the server, without watchers and with ten that follow."""
    with Children() as children:
        server, crowd, port = _gathered(children, nodes)
        _sustained(children, crowd, Sustain(_SETTLE, server.pid))
        alone = _sustained(children, crowd, Sustain(seconds, server.pid))
        watched = asyncio.run(_with_followers(children, crowd, port, Sustain(seconds, server.pid)))
    return Load(alone, watched)


async def _with_followers(children: Children, crowd: Child, port: int, order: Sustain) -> float:
    """The load while ten sessions follow; what the first answer to each costs is not counted."""
    followers = [asyncio.ensure_future(_follow(port)) for _ in range(_WATCHERS)]
    try:
        await asyncio.to_thread(_sustained, children, crowd, Sustain(_SETTLE, order.server_pid))
        return await asyncio.to_thread(_sustained, children, crowd, order)
    finally:
        for each in followers:
            each.cancel()
        ends = await asyncio.gather(*followers, return_exceptions=True)
        for end in ends:
            if not isinstance(end, asyncio.CancelledError):
                raise BenchError(f"a follower has ended: {end!r}")


async def _follow(port: int) -> None:
    async with WatcherSession(_place(port), _RUN_ID) as session:
        session.send(WatchRequest(follow=True))
        while True:
            await session.receive()


def _place(port: int) -> DialTarget:
    return DialTarget(Endpoint("127.0.0.1", port), None, None)


def _gathered(children: Children, nodes: int) -> tuple[Child, Child, int]:
    """A server, a crowd whose nodes run in a round, and the server's port."""
    server = children.start("control server", program("control_server", str(nodes), _RUN_ID))
    port = decode(_answer(children, server, "its port"), Serving).port
    crowd = children.start("crowd", program("crowd"))
    crowd.tell(encode(Gather(port, nodes, 0, nodes, _RUN_ID)))
    _answer(children, crowd, "being ready")
    crowd.tell(encode(Go(time.monotonic())))
    met = decode(_answer(children, crowd, f"the rendezvous of {nodes} nodes"), Gathered)
    if len(set(met.ranks)) != nodes:
        raise BenchError(f"the rendezvous of {nodes} nodes gave {len(set(met.ranks))} ranks")
    return server, crowd, port


def _sustained(children: Children, crowd: Child, order: Sustain) -> float:
    crowd.tell(encode(order))
    found = decode(_answer(children, crowd, "heartbeats"), Sustained)
    return found.server_seconds / found.seconds


def _answer(children: Children, child: Child, awaited: str) -> str:
    return children.one_line_each([child], time.monotonic() + _TIMEOUT, awaited)[child].text


CASE = Case("watching", "one status of 1,024 nodes, and ten followers of 4,096", _run)
