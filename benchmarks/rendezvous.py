"""One rendezvous of many nodes: from a common start signal until the last node knows its rank.

The nodes are threads spread over a few processes, all on this machine, and meet at one server in a process of its own.
Their handlers are made before the signal: torch's connect then, ours only when they join.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle

from benchmarks.case import OURS, THEIRS, BenchError, Budget, Case, Row, Settings, in_turn, row
from benchmarks.children import Child, Children, program
from benchmarks.messages import Go, Meet, Met, Serving, decode, encode

_PROCESSES = 4
_RUN_ID = "bench"
_LEASE = 3.0  # seconds, the default of a job
_LEAD = 0.2  # seconds from the order until the common start: every process must have it by then
_TIMEOUT = 300.0  # seconds for any one answer
_TORCH_UP_TO = 256  # 10 s to minutes there, and minutes beyond
_SIZES: dict[int, Budget | None] = {8: None, 64: Budget(0.10), 256: Budget(0.02), 1024: None}
_ENOUGH = 60.0
"""Seconds that either side may take for all rounds of one size: torch's alone may take minutes for one of 256 nodes."""
_QUICK_SIZES = (8, 64)
_LINEAR = Budget(1.0)


def _run(settings: Settings) -> list[Row]:
    rows: dict[int, Row] = {}
    for nodes in _QUICK_SIZES if settings.quick else _SIZES:
        sides = [OURS, THEIRS] if nodes <= _TORCH_UP_TO else [OURS]
        measures = {side: partial(meet, side, nodes) for side in sides}
        turns = in_turn(f"rendezvous of {nodes} nodes", settings.rounds, measures, enough=_ENOUGH)
        rows[nodes] = row(f"rendezvous of {nodes:,} nodes", "s", turns, _SIZES[nodes])
    return [*rows.values(), *_linearity(rows)]


def _linearity(rows: dict[int, Row]) -> list[Row]:
    """Whether four times the nodes take no more than four times as long."""
    if 1024 not in rows or not (few := rows[256].ours):
        return []
    expected = few.times(4)
    return [Row("growth: 1,024 nodes", "s", rows[1024].ours, expected, _LINEAR, base_name="4 x ours of 256")]


def meet(side: str, nodes: int) -> float:
    with Children() as children:
        ours = program("control_server", str(nodes), _RUN_ID, str(_LEASE))
        server = children.start(f"{side} server", ours if side == OURS else program("store_server", side))
        port = decode(_answers(children, [server], "its port")[server], Serving).port
        return meet_at(children, side, [port], nodes)


def meet_at(children: Children, side: str, ports: Sequence[int], nodes: int) -> float:
    """Seconds from the signal until the last node knows its rank; the processes take the ports in turn."""
    groups = [children.start(f"{side} nodes {i}", program("nodes", side)) for i in range(_PROCESSES)]
    for group, port in zip(groups, cycle(ports), strict=False):
        group.tell(encode(Meet(port, nodes // _PROCESSES, nodes, _RUN_ID)))
    _answers(children, groups, "being ready")
    at = time.monotonic() + _LEAD
    for group in groups:
        group.tell(encode(Go(at)))
    met = [decode(text, Met) for text in _answers(children, groups, f"the rendezvous of {nodes} nodes").values()]
    _check(met, nodes)
    return max(moment for group in met for moment in group.returned) - at


def _answers(children: Children, asked: list[Child], awaited: str) -> dict[Child, str]:
    lines = children.one_line_each(asked, time.monotonic() + _TIMEOUT, awaited)
    return {child: line.text for child, line in lines.items()}


def _check(met: list[Met], nodes: int) -> None:
    """A rendezvous that gave wrong ranks has no time worth telling."""
    ranks = sorted(rank for group in met for rank in group.ranks)
    sizes = {size for group in met for size in group.world_sizes}
    if ranks != list(range(nodes)) or sizes != {nodes}:
        raise BenchError(f"the rendezvous of {nodes} nodes gave the ranks {ranks} and the world sizes {sizes}")


CASE = Case("rendezvous", "one rendezvous of 8, 64, 256 and 1,024 nodes", _run)
