"""What many nodes cost the control server: one rendezvous of up to 4,096 of them, and then their heartbeats.

The server is alone in its process; the nodes are plain sockets in another (`programs.crowd`), which say what real nodes
say and do nothing else. Time runs from a common start signal, connects included, until the last node has its place.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.case import OURS, Case, Settings, row, sample
from benchmarks.children import Child, Children, program
from benchmarks.errors import BenchError
from benchmarks.messages import Gather, Gathered, Go, Protected, Serving, Sustain, Sustained, decode, encode
from benchmarks.processor_time import ProcessClock
from benchmarks.table import Budget, Row
from benchmarks.turns import Turns, in_turn

_SIZES = (256, 1024, 4096)
_QUICK_SIZES = (64, 256)
_RUN_ID = "bench"
_OPEN = Protected()
_LEAD = 0.2  # seconds from the order until the start: every process must have it by then
_TIMEOUT = 300.0  # seconds for any one answer
_SETTLE = 3.0  # seconds of heartbeats before those that are measured
_SECONDS, _QUICK_SECONDS = 10.0, 1.0
_RSS = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Figures:
    """One rendezvous, and the heartbeats after it. All but the first and the last are for one node."""

    seconds: float
    messages: float
    bytes: float
    processor: float
    """Seconds of the server's."""
    memory: float
    """Bytes that the server has grown by."""
    heartbeat_load: float
    """Share of a core that the server needs for all heartbeats; nothing where they were not measured."""


def _run(settings: Settings) -> list[Row]:
    found: dict[int, Turns[Figures]] = {}
    sizes = _QUICK_SIZES if settings.quick else _SIZES
    for nodes in sizes:
        seconds = _QUICK_SECONDS if settings.quick else _SECONDS
        measure = partial(gather, nodes, seconds if nodes == max(sizes) else 0.0)
        found[nodes] = in_turn(f"scale, {nodes} nodes", settings.rounds, {OURS: measure})
    few, many = min(found), max(found)

    def figure(nodes: int, what: str, unit: str, pick: Callable[[Figures], float], budget: Budget | None = None) -> Row:
        return row(f"{nodes:,} nodes: {what}", unit, picked(found[nodes], pick), budget)

    def against(what: str, unit: str, pick: Callable[[Figures], float], times: int) -> Row:
        """The figure of the many nodes, which may be `times` that of the few."""
        base = sample(picked(found[few], pick).results.get(OURS, []))
        name = f"{times} x ours of {few}" if times > 1 else f"ours of {few}"
        ours = figure(many, what, unit, pick)
        scaled = base.times(times) if base else None
        return Row(ours.what, unit, ours.ours, scaled, Budget(1.0) if times > 1 else None, name, remarks=ours.remarks)

    return [
        *(
            figure(nodes, "first connect to last place", "s", lambda one: one.seconds)
            for nodes in found
            if nodes < many
        ),
        against("first connect to last place", "s", lambda one: one.seconds, many // few),
        against("messages a node", "", lambda one: one.messages, 1),
        against("bytes a node", "B", lambda one: one.bytes, 1),
        against("server's processor time a node", "µs", lambda one: one.processor * 1e6, 1),
        against("server's memory a node", "KB", lambda one: one.memory / 1e3, 1),
        figure(
            many,
            "server's share of a core for heartbeats",
            "%",
            lambda one: one.heartbeat_load * 100,
            Budget(5.0, unit="%"),
        ),
    ]


def picked(turns: Turns[Figures], pick: Callable[[Figures], float]) -> Turns[float]:
    """One figure of all rounds of all sides."""
    return Turns({side: [pick(one) for one in figures] for side, figures in turns.results.items()}, turns.failures)


def gather(nodes: int, seconds: float, protected: Protected = _OPEN) -> Figures:
    """Let nodes meet, and then send heartbeats for so many seconds, or not at all."""
    with Children() as children:
        argv = program("control_server", str(nodes), _RUN_ID, encode(protected).decode())
        server = children.start("control server", argv)
        port = decode(_answer(children, server, "its port"), Serving).port
        crowd = children.start("crowd", program("crowd"))
        crowd.tell(encode(Gather(port, nodes, 0, nodes, _RUN_ID, protected)))
        _answer(children, crowd, "being ready")
        clock, memory = ProcessClock(server.pid), _resident(server.pid)
        used, at = clock.seconds(), time.monotonic() + _LEAD
        crowd.tell(encode(Go(at)))
        met = decode(_answer(children, crowd, f"the rendezvous of {nodes} nodes"), Gathered)
        _check(met, nodes)
        used, memory = clock.seconds() - used, _resident(server.pid) - memory
        heartbeat_load = _measured_load(children, crowd, server.pid, seconds) if seconds else 0.0
    return Figures(
        seconds=met.returned - at,
        messages=met.messages / nodes,
        bytes=met.bytes / nodes,
        processor=used / nodes,
        memory=memory / nodes,
        heartbeat_load=heartbeat_load,
    )


def _measured_load(children: Children, crowd: Child, server_pid: int, seconds: float) -> float:
    """The share of a core that the server needs for heartbeats, once those that came while all met are answered."""
    crowd.tell(encode(Sustain(_SETTLE, server_pid)))
    _answer(children, crowd, "the first heartbeats")
    crowd.tell(encode(Sustain(seconds, server_pid)))
    sustained = decode(_answer(children, crowd, "heartbeats"), Sustained)
    return sustained.server_seconds / sustained.seconds


def _answer(children: Children, child: Child, awaited: str) -> str:
    return children.one_line_each([child], time.monotonic() + _TIMEOUT, awaited)[child].text


def _check(met: Gathered, nodes: int) -> None:
    if sorted(met.ranks) != list(range(nodes)) or met.world_sizes != [nodes]:
        raise BenchError(f"the rendezvous of {nodes} nodes gave {len(set(met.ranks))} ranks, sizes {met.world_sizes}")


def _resident(pid: int) -> float:
    """Resident memory of a process in bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        (size,) = _RSS.findall(status.read())
    return int(size) * 1024


CASE = Case("scale", "what 256 to 4,096 nodes cost the control server", _run)
