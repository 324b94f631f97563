"""Makes the report of a hang, on one node, from what all nodes have reported about their workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.log import get_logger
from rallypoint.protocol.messages import CollectedPart, CollectionEnded, HangReport

log = get_logger(__name__)

_MAX_TOTAL = 64 * 1024 * 1024
"""Bytes of the nodes' reports that are kept."""


class HangReporter:
    """Gathers the parts, and makes the report in a thread of its own.

    Args:
        send: takes the report, from any thread.
    """

    def __init__(self, send: Callable[[HangReport], None]) -> None:
        self._send = send
        self._number = -1
        self._told: dict[str, list[bytes]] = {}
        """The received parts by node, in order of arrival."""
        self._complete: set[str] = set()
        self._size = 0

    def add(self, message: CollectedPart | CollectionEnded) -> None:
        """Add what a node has reported, or note that nothing more will arrive; then the report is made and sent."""
        if message.number != self._number:
            self._number, self._told, self._complete, self._size = message.number, {}, set(), 0
        if isinstance(message, CollectionEnded):
            args = (message, self._told, self._complete)
            threading.Thread(target=self._report, args=args, name="hang-report", daemon=True).start()
            self._number = -1
            return
        self._size += len(message.data)
        parts = self._told.setdefault(message.node, [])
        if self._size <= _MAX_TOTAL:
            parts.append(message.data)
            if message.is_last:
                self._complete.add(message.node)

    def _report(self, end: CollectionEnded, told: dict[str, list[bytes]], complete: set[str]) -> None:
        whole = {node: b"".join(parts) if node in complete else b"" for node, parts in told.items()}
        silent = [each for each in end.silent if each not in whole]
        try:
            text = render_report(whole, silent)
        except Exception:
            log.exception("the report of a hang could not be shown")
            text = "what the workers are doing could not be shown; see the log of the node that hosts the coordinator"
        self._send(HangReport(end.number, end.round, text))


def render_report(told: Mapping[str, bytes], silent: Sequence[str]) -> str:
    """The report as text.

    Args:
        told: the data of each node, as `CollectedPart`s carry it.
        silent: the nodes that have not answered.
    """
    from rallypoint.hangs.messages import decode_evidence
    from rallypoint.hangs.report import report_lines

    found, missing = [], list(silent)
    for node, data in sorted(told.items()):
        try:
            found.append(decode_evidence(data))
        except ValueError:  # nothing could be collected there, or these bytes are invalid
            missing.append(node)
    return "\n".join(["what the workers are doing:", *report_lines(found, missing)])
