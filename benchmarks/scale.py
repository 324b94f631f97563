"""What many nodes cost the control server: they meet, one of them fails, all lose their sessions, and then heartbeats.

The server is alone in its process; the nodes are plain sockets in others (`crowds`), which say what real nodes say and
do nothing else. All costs are the server's processor time. Those of a node must not grow with the number of nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.case import OURS, Budget, Case, Row, Settings, Turns, in_turn, row, sample
from benchmarks.crowds import LONG_LEASE, Meeting, followed

_SIZES = (1024, 4096, 12500)
_QUICK_SIZES = (64, 256)
_SECONDS, _QUICK_SECONDS = 10.0, 1.0
_GROWTH = Budget(1.3)
"""Times the cost of a node among the fewest nodes that one may cost among the most."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One meeting of many nodes. All but the first and the last two are for one node."""

    seconds: float
    messages: float
    bytes: float
    processor: float
    """Seconds of the server's, from the connection to the place."""
    memory: float
    """Bytes that the server has grown by."""
    regroup: float = 0.0
    """Seconds of the server's from a failure until all have their place in the next round."""
    return_: float = 0.0
    """Seconds of the server's when all come back after a cut in which they missed their place."""
    heartbeat_load: float = 0.0
    """Share of a core that the server needs for all heartbeats; nothing where they were not measured."""
    followed_load: float = 0.0
    """The same with one watcher that follows."""


def _run(settings: Settings) -> list[Row]:
    found: dict[int, Turns[Figures]] = {}
    sizes = _QUICK_SIZES if settings.quick else _SIZES
    for nodes in sizes:
        seconds = _QUICK_SECONDS if settings.quick else _SECONDS
        measure = partial(measured, nodes, seconds if nodes == max(sizes) else 0.0)
        found[nodes] = in_turn(f"scale, {nodes} nodes", settings.rounds, {OURS: measure})
    few, many = min(found), max(found)

    def figure(nodes: int, what: str, unit: str, pick: Callable[[Figures], float], budget: Budget | None = None) -> Row:
        return row(f"{nodes:,} nodes: {what}", unit, _picked(found[nodes], pick), budget)

    def of_a_node(what: str, unit: str, pick: Callable[[Figures], float]) -> list[Row]:
        """What a node costs at each size; that among the most nodes beside that among the fewest."""
        base = sample(_picked(found[few], pick).results.get(OURS, []))
        last = figure(many, what, unit, pick)
        against = Row(last.what, unit, last.ours, base, _GROWTH, f"ours of {few:,}", remarks=last.remarks)
        return [*(figure(nodes, what, unit, pick) for nodes in found if nodes < many), against]

    return [
        *(figure(nodes, "first connect to last place", "s", lambda one: one.seconds) for nodes in found),
        *of_a_node("messages a node", "", lambda one: one.messages),
        *of_a_node("bytes a node", "B", lambda one: one.bytes),
        *of_a_node("server's memory a node", "KB", lambda one: one.memory / 1e3),
        *of_a_node("server's processor time a node", "µs", lambda one: one.processor * 1e6),
        *of_a_node("the same for a failure and the next round", "µs", lambda one: one.regroup * 1e6),
        *of_a_node("the same for coming back after a cut", "µs", lambda one: one.return_ * 1e6),
        figure(many, "server's share of a core for heartbeats", "%", lambda one: one.heartbeat_load * 100),
        figure(many, "the same with a watcher that follows", "%", lambda one: one.followed_load * 100),
    ]


def _picked(turns: Turns[Figures], pick: Callable[[Figures], float]) -> Turns[float]:
    """One figure of all rounds of all sides."""
    return Turns({side: [pick(one) for one in figures] for side, figures in turns.results.items()}, turns.failures)


def measured(nodes: int, seconds: float) -> Figures:
    """All that can happen to so many nodes; heartbeats for so many seconds, or not at all."""
    with Meeting(nodes, lease=LONG_LEASE) as meeting:
        met = _met(meeting)
        regroup, come_back = meeting.regroup() / nodes, meeting.come_back() / nodes
    if not seconds:
        return Figures(*met, regroup, come_back)
    with Meeting(nodes) as meeting:
        meeting.meet()
        meeting.settle()
        alone = meeting.load(seconds)
        return Figures(*met, regroup, come_back, alone, asyncio.run(followed(meeting, 1, seconds)))


def _met(meeting: Meeting) -> tuple[float, float, float, float, float]:
    """The figures of the first round."""
    nodes, memory = meeting.nodes, meeting.memory()
    used = meeting.meet()
    return (
        meeting.seconds,
        meeting.messages / nodes,
        meeting.bytes / nodes,
        used / nodes,
        (meeting.memory() - memory) / nodes,
    )


CASE = Case("scale", "what 1,024 to 12,500 nodes cost the control server", _run)
