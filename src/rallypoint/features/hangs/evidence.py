"""Evidence of a hang: this node's collection from its workers, and one node's report about all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from rallypoint.agent.facts import NodeFacts
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.side_thread import start_thread
from rallypoint.control.protocol.messages import CollectedPart, CollectionEnded, HangReport, Taken
from rallypoint.features.hangs.rules import OnHang

if TYPE_CHECKING:
    from rallypoint.observe.hangs.messages import NodeEvidence
    from rallypoint.workers.context import PContext

log = get_logger(__name__)


Render = Callable[[Mapping[str, bytes], Sequence[str], int], str]
"""Creates the report from nodes' data by name, the names of nodes without data, and the number of remaining such nodes.
"""


def collect(facts: NodeFacts, context: PContext | None, on_hang: str) -> bytes:
    """Collect and encode this node's evidence. A worker whose stacks cannot be read writes them when it is ended, if
    all workers will be. Not on the loop's thread.

    Args:
        facts: the loop's facts.
        context: the node's workers.
        on_hang: the action that follows.
    """
    from rallypoint.features.hangs.living import notes_of
    from rallypoint.observe.hangs.dumps import recorder_of
    from rallypoint.observe.hangs.evidence import ExaminedNode, ExaminedWorker, collect_evidence
    from rallypoint.observe.hangs.messages import encode_evidence

    by_rank = {process.local_rank: process.rank for process in facts.processes}
    notes = {} if context is None else notes_of(context, by_rank, facts.running)
    workers = tuple(
        ExaminedWorker(
            process.rank,
            process.pid,
            process.exit_code,
            recorder_of(process.rank, {**os.environ, **process.added}),
            notes.get(process.rank, ""),
        )
        for process in facts.processes
    )
    ends_workers = on_hang in (OnHang.RESTART, OnHang.FAIL)
    evidence = collect_evidence(ExaminedNode(facts.host, workers, facts.attempt_folder, ends_workers))
    if context is not None and ends_workers:
        local_ranks = {process.rank: process.local_rank for process in facts.processes}
        context.without_stacks.update(local_ranks[found.rank] for found in evidence.ranks if found.why_none)
    return encode_evidence(evidence)


# Report, on one node


_NOT_SHOWN = "what the workers are doing could not be shown; see the log of the node that hosts the coordinator"

_MAX_TOTAL = 64 * 1024 * 1024
"""Maximum bytes stored of the nodes' reports."""


class HangReporter:
    """Gathers the parts, and creates the report on a separate thread.

    Args:
        send: called on any thread with the report, and with acknowledgements of nodes' parts.
        render: creates the report.
    """

    def __init__(self, send: Callable[[HangReport | Taken], None], render: Render | None = None) -> None:
        self._send = send
        self._render = render or render_report
        self._number = -1
        self._told: dict[str, list[bytes]] = {}
        """Received parts by node, in order of arrival."""
        self._complete: set[str] = set()
        self._size = 0

    def add(self, message: CollectedPart | CollectionEnded) -> None:
        """Add a node's part, or note the end of the collection and then create and send the report."""
        if message.number != self._number:
            self._number, self._told, self._complete, self._size = message.number, {}, set(), 0
        if isinstance(message, CollectionEnded):
            args = (message, self._told, self._complete)
            if start_thread(lambda: self._report(*args), "hang-report") is None:
                self._send(HangReport(message.number, message.round, _NOT_SHOWN))
            self._number = -1
            return
        parts = self._told.setdefault(message.node, [])
        if message.is_first:  # the node was asked again
            self._size -= sum(map(len, parts))
            parts.clear()
        self._size += len(message.data)
        if self._size <= _MAX_TOTAL:
            parts.append(message.data)
            if message.is_last:
                self._complete.add(message.node)
        if message.is_last:
            self._send(Taken(message.number))

    def _report(self, end: CollectionEnded, told: dict[str, list[bytes]], complete: set[str]) -> None:
        whole = {node: b"".join(parts) if node in complete else b"" for node, parts in told.items()}
        silent = [node for node in end.silent if node not in whole]
        try:
            text = self._render(whole, silent, end.more)
        except Exception:
            log.exception("the hang report could not be shown")
            text = _NOT_SHOWN
        self._send(HangReport(end.number, end.round, text))


def render_report(told: Mapping[str, bytes], silent: Sequence[str], more: int = 0) -> str:
    """Render the report as text.

    Args:
        told: each node's data, from its `CollectedPart`s.
        silent: the names of nodes without an answer.
        more: the number of remaining such nodes.
    """
    from rallypoint.observe.hangs.report import report_lines

    found, missing = _read(told, silent)
    return "\n".join(["what the workers are doing:", *report_lines(found, missing, more)])


def render_silence(seconds: float, job: str, told: Mapping[str, bytes], silent: Sequence[str], more: int = 0) -> str:
    """Render the report in one line, if nothing more is wanted; `seconds` is the length of the silence."""
    from rallypoint.observe.hangs.report import silence_line

    found, missing = _read(told, silent)
    return silence_line(found, seconds, job, len(missing) + more)


def _read(told: Mapping[str, bytes], silent: Sequence[str]) -> tuple[list[NodeEvidence], list[str]]:
    """The evidence of nodes, and the names of nodes without any."""
    from rallypoint.observe.hangs.messages import EvidenceReader

    reader, found, missing = EvidenceReader(), [], list(silent)
    for node, data in sorted(told.items()):
        try:
            found.append(reader.read(data))
        except ValueError:  # the node could not collect, or the bytes are invalid
            missing.append(node)
    return found, missing
