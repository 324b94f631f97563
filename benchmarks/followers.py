"""Watchers that follow a job of many nodes, and what they cost its control server."""

from __future__ import annotations

import asyncio

from benchmarks.crowds import RUN_ID, Meeting
from benchmarks.errors import BenchError
from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client.dialing import DialTarget
from rallypoint.control.client.watcher import WatcherSession
from rallypoint.control.protocol.observation import WatchRequest


async def followed(meeting: Meeting, watchers: int, seconds: float) -> float:
    """The server's share of a core for heartbeats while so many follow; what the first answer costs is not counted."""
    followers = [asyncio.ensure_future(_follow(meeting.port)) for _ in range(watchers)]
    try:
        await asyncio.to_thread(meeting.settle)
        return await asyncio.to_thread(meeting.load, seconds)
    finally:
        for each in followers:
            each.cancel()
        for end in await asyncio.gather(*followers, return_exceptions=True):
            if not isinstance(end, asyncio.CancelledError):
                raise BenchError(f"a follower has ended: {end!r}")


async def _follow(port: int) -> None:
    async with watching(port) as session:
        session.send(WatchRequest(follow=True))
        while True:
            await session.receive()


def watching(port: int) -> WatcherSession:
    """A watcher's session, which is not open yet."""
    return WatcherSession(DialTarget(Endpoint("127.0.0.1", port), None, None), RUN_ID)
