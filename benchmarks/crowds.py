"""A control server alone in its process, and the crowds of nodes that load it: `programs.crowd`, in several processes.

Each crowd comes from an address of its own and has no more nodes than a process may have open files. A node's costs are
the server's processor time: walls are mostly those of the loaders, which work on the same cores.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection
from types import TracebackType

from benchmarks.case import BenchError
from benchmarks.children import Child, Children, program
from benchmarks.messages import ComeBack, Gather, Gathered, Go, Regroup, Serving, Sustain, decode, encode
from benchmarks.system import ProcessClock
from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client.dialing import DialTarget
from rallypoint.observe.watching.client import WatcherSession
from rallypoint.observe.watching.messages import WatchRequest

RUN_ID = "bench"
_LEAD = 0.2  # seconds from the order until the start: every process must have it by then
_TIMEOUT = 300.0  # seconds for any one answer
_OF_ONE = 16384  # nodes of one process; two on two cores would be what the heartbeats cost
LONG_LEASE = 240.0
"""Seconds of a lease in which no heartbeat falls into what else is measured."""
_LEASE = 3.0
_SETTLE = 3.0  # seconds of heartbeats before those that are measured
_RSS = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


class Meeting:
    """A server and its nodes, which have not connected yet; used as a context manager.

    The methods return the seconds of processor time that the server used meanwhile.
    """

    def __init__(self, nodes: int, lease: float = _LEASE, *, many_jobs: bool = False) -> None:
        """With `many_jobs` the server is one outside of all jobs, which takes other jobs too."""
        self.nodes = nodes
        self._more = ["many"] if many_jobs else []
        self._lease = lease
        self._children = Children()
        self._crowds: list[Child] = []
        self.port = 0
        self.seconds = 0.0
        """From the start signal until the last node had its place, the last time that all met."""
        self.messages = self.bytes = 0
        """Of all nodes so far, their handshakes included."""

    def __enter__(self) -> Meeting:
        try:
            self._start()
        except BaseException:
            self._children.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        argv = program("control_server", str(self.nodes), RUN_ID, str(self._lease), *self._more)
        self._server = self._children.start("control server", argv)
        self.port = decode(self._answers([self._server], "its port")[self._server], Serving).port
        self._clock = ProcessClock(self._server.pid)
        for at in range(0, self.nodes, _OF_ONE):
            own = min(_OF_ONE, self.nodes - at)
            source = f"127.0.0.{1 + len(self._crowds)}"
            crowd = self._children.start(f"crowd {len(self._crowds)}", program("crowd"))
            crowd.tell(encode(Gather(self.port, own, at, self.nodes, RUN_ID, source, self._lease)))
            self._crowds.append(crowd)
        self._answers(self._crowds, "being ready")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._children.__exit__(kind, error, trace)

    def start(self, name: str, argv: list[str]) -> Child:
        """Start a program beside the nodes, which ends with them."""
        return self._children.start(name, argv)

    def line_of(self, child: Child, awaited: str) -> str:
        """The next line of such a program."""
        return self._answers([child], awaited)[child]

    def meet(self) -> float:
        """All connect, join and are placed."""
        return self._gather([encode(Go(time.monotonic() + _LEAD))] * len(self._crowds), lead=_LEAD)

    def regroup(self) -> float:
        """A worker of one node fails, all are told, come together again and are placed."""
        return self._gather([encode(Regroup(fails=not at)) for at in range(len(self._crowds))])

    def come_back(self) -> float:
        """All sessions are cut, and all nodes come back without the place that they had been given."""
        return self._gather([encode(ComeBack())] * len(self._crowds))

    def settle(self) -> None:
        """Answer the heartbeats that came while all met."""
        self.load(_SETTLE)

    def load(self, seconds: float) -> float:
        """The share of a core that the server needs for the heartbeats of all nodes."""
        begun, used = time.monotonic(), self._clock.seconds()
        self._tell([encode(Sustain(seconds))] * len(self._crowds))
        self._answers(self._crowds, "heartbeats")
        return (self._clock.seconds() - used) / (time.monotonic() - begun)

    def memory(self) -> float:
        """Resident memory of the server in bytes."""
        with open(f"/proc/{self._server.pid}/status", encoding="ascii") as status:
            (size,) = _RSS.findall(status.read())
        return int(size) * 1024

    def _gather(self, orders: list[bytes], lead: float = 0.0) -> float:
        at, used = time.monotonic() + lead, self._clock.seconds()
        self._tell(orders)
        found = self._answers(self._crowds, f"the rendezvous of {self.nodes} nodes").values()
        used = self._clock.seconds() - used
        gathered = [decode(text, Gathered) for text in found]
        self._check(gathered)
        self.seconds = max(each.returned for each in gathered) - at
        self.messages = sum(each.messages for each in gathered)
        self.bytes = sum(each.bytes for each in gathered)
        return used

    def _check(self, gathered: list[Gathered]) -> None:
        ranks = sorted(rank for each in gathered for rank in each.ranks)
        sizes = {size for each in gathered for size in each.world_sizes}
        if ranks != list(range(self.nodes)) or sizes != {self.nodes}:
            raise BenchError(f"the rendezvous of {self.nodes} nodes gave {len(set(ranks))} ranks, sizes {sizes}")

    def _tell(self, orders: list[bytes]) -> None:
        for crowd, order in zip(self._crowds, orders, strict=True):
            crowd.tell(order)

    def _answers(self, asked: Collection[Child], awaited: str) -> dict[Child, str]:
        lines = self._children.one_line_each(asked, time.monotonic() + _TIMEOUT, awaited)
        return {child: line.text for child, line in lines.items()}


# Watchers that follow a job of many nodes, and what they cost its control server


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
        known = 0
        while True:
            known = (await session.snapshot(WatchRequest(after=known))).changes


def watching(port: int) -> WatcherSession:
    """A watcher's session, which is not open yet."""
    return WatcherSession(DialTarget(Endpoint("127.0.0.1", port), None, None), RUN_ID)
