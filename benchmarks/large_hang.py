"""What the evidence of a hang of very many nodes costs: on the way, at the coordinator, and where the report is made.

There are no sockets. Each node has eight ranks in the same collective of 32 frames, one of all in another place, and a
flight recorder of two process groups: of all ranks, and of every thousandth. Figures are processor time and bytes.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

from benchmarks.case import OURS, THEIRS, Budget, Case, Row, Settings, in_turn, row
from rallypoint.control.membership.state import NodeId, NodeInfo, Participant, State
from rallypoint.control.protocol.messages import CollectedPart, CollectionEnded, CollectRequested, Notification, Taken
from rallypoint.features.hangs.evidence import render_report
from rallypoint.observe.hangs.messages import (
    Collective,
    GroupRecord,
    NodeEvidence,
    RankEvidence,
    RankRange,
    RankRecord,
    encode_evidence,
)
from rallypoint.observe.stacks import Frame
from rallypoint.observe.watching.hang import HangInvestigation

_NODES, _FEW, _QUICK = 12_500, 1024, 128
_WORKERS, _FRAMES = 8, 30
_PACKAGES = "/opt/env/lib/python3.12/site-packages/torch"
_ELSEWHERE = 777


def _evidence(node: int, nodes: int) -> bytes:
    frames = [Frame("all_reduce", f"{_PACKAGES}/distributed/distributed_c10d.py", 3252)]
    frames += [Frame(f"call_{at}", f"{_PACKAGES}/module_{at}.py", at) for at in range(_FRAMES)]
    waiting = (*frames, Frame("<module>", "/home/me/job/train.py", 41))
    loading = (Frame("load", "/home/me/job/data.py", 12), Frame("<module>", "/home/me/job/train.py", 38))
    last = tuple(Collective(at, "all_reduce", at < 7, "train.py:41") for at in range(8))
    world, ranks = _WORKERS * nodes, range(_WORKERS * node, _WORKERS * (node + 1))
    return encode_evidence(
        NodeEvidence(
            f"node-{node:05}.cluster.example.org",
            tuple(RankEvidence(each, "sleeping", frames=loading if each == _ELSEWHERE else waiting) for each in ranks),
            f"/var/log/job/attempt_0/{node}/hang.0.txt",
            tuple(
                RankRecord(
                    each,
                    (
                        GroupRecord(
                            "0", "default_pg", (RankRange(0, world),), last[:-1] if each == _ELSEWHERE else last
                        ),
                        GroupRecord("1", "dp", (RankRange(each % 1000, max(1, world // 1000), 1000),), last),
                    ),
                )
                for each in ranks
            ),
        )
    )


@cache
def _sent(nodes: int) -> dict[str, bytes]:
    return {f"node-{node:05} (rank {node})": _evidence(node, nodes) for node in range(nodes)}


def _bytes(nodes: int) -> float:
    return max(map(len, _sent(nodes).values()))


def _passed_on(nodes: int) -> float:
    """Seconds in which the coordinator asks all and passes all on, to a node that reads at once."""
    sent = list(_sent(nodes).values())
    asked: deque[NodeId] = deque()
    over: list[CollectionEnded] = []

    def tell(to: Iterable[NodeId], message: Notification) -> None:
        if isinstance(message, CollectRequested):
            asked.extend(to)
        elif isinstance(message, CollectionEnded):
            over.append(message)

    members: Sequence[NodeId] = [NodeId(f"10.0.{node >> 8}.{node & 255}", 1, node) for node in range(nodes)]
    info = NodeInfo("default", _WORKERS, "", 7000)
    state = State(complete=True, participants={each: Participant(info, each.number) for each in members})
    begin = time.process_time()
    hang = HangInvestigation(tell, itertools.count(1), str)
    hang.check_hang(state, state._replace(quiet=frozenset(members)), lambda _: True, 0.0)
    while not over:
        node = asked.popleft()
        hang.on_answer(node, CollectedPart(1, sent[node.number], True), 1.0)
        hang.on_answer(members[0], Taken(1), 1.0)
    return time.process_time() - begin


def _reported(nodes: int) -> float:
    sent = _sent(nodes)
    begin = time.process_time()
    render_report(sent, (), 0)
    return time.process_time() - begin


_STEPS: tuple[tuple[str, str, Callable[[int], float], Budget | None], ...] = (
    ("most that a node sends", "bytes", _bytes, Budget(4096, unit="bytes")),
    ("all asked, and passed on by the coordinator", "s", _passed_on, None),
    ("the report", "s", _reported, None),
)


def _run(settings: Settings) -> list[Row]:
    many, few = (2 * _QUICK, _QUICK) if settings.quick else (_NODES, _FEW)
    rows: list[Row] = []
    for what, unit, measure, budget in _STEPS:
        name = f"hang of {many:,} nodes: {what}"
        made = row(
            name, unit, in_turn(name, settings.rounds, {OURS: partial(measure, many), THEIRS: partial(measure, few)})
        )
        rows.append(Row(name, unit, made.ours, made.base, budget, f"{few:,} nodes", remarks=made.remarks))
    return rows


CASE = Case("large-hang", "the evidence of a hang of 12,500 nodes, as processor time and bytes", _run)
