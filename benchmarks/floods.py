"""How long others wait while one connection sends one request as fast as it can, in a job of 1,000 nodes (law 17).

The server is one of many jobs (`rallyctl serve`), alone in its process; the nodes are plain sockets in another one.
The connection of the flood is one of a node of the job, of a watcher, or of a tenant: a node or a watcher of another
job, of which a node has said that it has as many nodes. Meanwhile another node of the job sends heartbeats, and
`rallyctl status` is asked again and again; both figures are the longest wait. Each request of the protocol has a server
of its own, since some of them end the job.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from tests.unit.coordinator.floods import OF_NODES, OF_WATCHERS

from benchmarks.case import OURS, BenchError, Budget, Case, Row, Settings, Turns, in_turn, row
from benchmarks.children import program
from benchmarks.crowds import LONG_LEASE, RUN_ID, Meeting, watching
from benchmarks.messages import Flood, Flooded, decode, encode
from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client.dialing import RETRYABLE, ClientSession, Dialer, DialTarget
from rallypoint.control.membership.state import NodeId, NodeInfo
from rallypoint.control.membership.state import Settings as JobSettings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, frame
from rallypoint.control.protocol.errors import FrameError
from rallypoint.control.protocol.handshake import ClientHandshake
from rallypoint.control.protocol.messages import Heartbeat, ResumeRequest
from rallypoint.observe.watching.client import UnreachableError
from rallypoint.observe.watching.messages import Snapshot, WatchRequest

_NODES, _QUICK_NODES = 1000, 64
_SECONDS, _QUICK_SECONDS = 3.0, 0.3
_APART = 0.005
"""Seconds from the answer of one heartbeat to the next one."""
_INFO = NodeInfo("default", 1, "127.0.0.1", 5000)
_HEARTBEAT, _STATUS = Budget(100.0, unit="ms"), Budget(2.0, unit="s")


class _Waits(NamedTuple):
    """The longest wait of a heartbeat and of a status, in seconds, and what the connection has sent."""

    heartbeat: float
    status: float
    flooded: Flooded


def _run(settings: Settings) -> list[Row]:
    nodes = _QUICK_NODES if settings.quick else _NODES
    seconds = _QUICK_SECONDS if settings.quick else _SECONDS
    floods: Mapping[tuple[str, str], Any] = {
        ("nobody", "nothing"): None,
        **{("node", name): each for name, each in OF_NODES.items()},
        **{("watcher", name): each for name, each in OF_WATCHERS.items()},
        **{("tenant's node", name): each for name, each in OF_NODES.items()},
        **{("tenant's watcher", name): each for name, each in OF_WATCHERS.items() if name != "ListRequest"},
    }
    rows = []
    for (who, name), message in floods.items():
        what = f"{who}: {name}"
        measure = partial(waits, nodes, seconds, who, message)
        turns = in_turn(f"floods, {what}", 1, {OURS: measure})
        found = turns.results.get(OURS, [])
        sent = tuple(f"{each.flooded.messages:,} sent{', cut off' * each.flooded.disconnected}" for each in found)
        beats = Turns({OURS: [1000 * each.heartbeat for each in found]}, turns.failures)
        rows.append(row(f"{what}: a heartbeat", "ms", beats, _HEARTBEAT, sent))
        rows.append(row(f"{what}: a status", "s", Turns({OURS: [each.status for each in found]}, {}), _STATUS))
    return rows


def waits(nodes: int, seconds: float, who: str, message: Any) -> _Waits:
    """One flood of a job in which so many nodes have met."""
    with Meeting(nodes, lease=LONG_LEASE, many_jobs=True) as meeting:
        meeting.meet()
        heartbeat, status, flooded = asyncio.run(_during(meeting, seconds, who, message))
    return _Waits(heartbeat, status, flooded)


async def _during(meeting: Meeting, seconds: float, who: str, message: Any) -> tuple[float, float, Flooded]:
    if message is None:
        return *await _both(meeting, seconds), Flooded(0, False)
    tenant = await _node(meeting, "mallory")
    try:
        if who.startswith("tenant"):
            tenant.send(codec.encode(_claim(meeting.nodes)))
        flood = meeting.start("flood", program("flood"))
        flood.tell(encode(_order(meeting, who, message, seconds)))
        await asyncio.to_thread(meeting.line_of, flood, "its session")
        longest = await _both(meeting, seconds)
        return *longest, decode(await asyncio.to_thread(meeting.line_of, flood, "its end"), Flooded)
    finally:
        tenant.writer.close()


def _order(meeting: Meeting, who: str, message: Any, seconds: float) -> Flood:
    tenant, is_watcher = who.startswith("tenant"), who.endswith("watcher")
    job, source = ("mallory", "127.0.0.2") if tenant else (RUN_ID, "127.0.0.1")
    greeting = MAGIC + frame(codec.encode(_hello(job, meeting.nodes, source, is_watcher)))
    return Flood(meeting.port, source, greeting.hex(), frame(codec.encode(message)).hex(), seconds)


def _claim(nodes: int) -> ResumeRequest:
    """What fills a new job with as many nodes, none of which has to come."""
    return ResumeRequest("before", _INFO, 0, 0, nodes, -1, 0, round_over=False)


def _hello(job: str, nodes: int, source: str, is_watcher: bool) -> object:
    settings = JobSettings(job, 1, nodes, lease=LONG_LEASE)
    node = NodeId(source, os.getpid(), int.from_bytes(os.urandom(7), "big"), "flood")
    return ClientHandshake(job, None, b"n" * 16, settings, is_watcher=is_watcher).hello(source, node)


async def _node(meeting: Meeting, job: str) -> ClientSession:
    """The session of one more node."""
    settings = JobSettings(job, 1, meeting.nodes, lease=LONG_LEASE)
    node = NodeId("127.0.0.1", 1, int.from_bytes(os.urandom(7), "big"), "prober")
    return await Dialer(DialTarget(Endpoint("127.0.0.1", meeting.port)), settings, node).dial(10.0)


async def _both(meeting: Meeting, seconds: float) -> tuple[float, float]:
    until = time.monotonic() + seconds
    beats, statuses = await asyncio.gather(_beat(meeting, until), _ask(meeting, until), return_exceptions=True)
    for each in (beats, statuses):
        if isinstance(each, BaseException):
            raise BenchError(f"no answer: {each!r}")
    assert isinstance(beats, float)
    assert isinstance(statuses, float)
    return beats, statuses


async def _beat(meeting: Meeting, until: float) -> float:
    """The longest that another node waits for the answer to a heartbeat; in a large job every second one has one."""
    session = await _node(meeting, RUN_ID)
    heartbeat, longest = codec.encode(Heartbeat()), 0.0
    try:
        while time.monotonic() < until:
            begun = time.monotonic()
            session.send(heartbeat)
            session.send(heartbeat)
            await session.receive()
            longest = max(longest, time.monotonic() - begun)
            await asyncio.sleep(_APART)
    except (OSError, FrameError):  # the flood has ended the job, and the server has forgotten it
        pass
    finally:
        session.writer.close()
    return longest


async def _ask(meeting: Meeting, until: float) -> float:
    """The longest that a status takes, its connection included."""
    longest = 0.0
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            async with watching(meeting.port) as session:
                session.send(WatchRequest())
                while not isinstance(await session.receive(), Snapshot):
                    pass
        except (UnreachableError, *RETRYABLE):  # it has as many watchers as it takes, or no such job any more
            await asyncio.sleep(_APART)
            continue
        longest = max(longest, time.monotonic() - begun)
    return longest


CASE = Case("floods", "what others wait while one connection sends one request as fast as it can", _run)
