"""What a node tells of its workers because somebody asks: off the agent's loop, in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rallypoint.agent.spec import Worker, WorkerGroup
from rallypoint.base.log import get_logger
from rallypoint.protocol.operator_messages import MAX_PART, CollectedPart, CollectRequested, NodeReport

log = get_logger(__name__)


def collect(request: CollectRequested, group: WorkerGroup, send: Callable[[CollectedPart], None]) -> None:
    """Begin to collect; returns at once.

    Args:
        request: what, and of which workers.
        group: the workers of this node.
        send: takes the parts of the answer, from a thread of their own.
    """
    workers = [each for each in group.workers if request.rank in {-1, each.global_rank}]
    thread = threading.Thread(target=_collect, args=(request, workers, send), name="collect", daemon=True)
    thread.start()


def _collect(request: CollectRequested, workers: Sequence[Worker], send: Callable[[CollectedPart], None]) -> None:
    try:
        from rallypoint.observe.stacks import stacks_of

        data = stacks_of({each.global_rank: each.id for each in workers if isinstance(each.id, int)})
    except Exception:
        log.exception("what an operator asked for could not be collected")
        data = b""
    cuts = range(0, max(1, len(data)), MAX_PART)
    for at in cuts:
        send(CollectedPart(request.number, data[at : at + MAX_PART], at + MAX_PART >= len(data)))


class StatusReporter:
    """Completes reports with what only log files show, which may be on a disk that hangs.

    Args:
        send: takes the reports, from any thread.
    """

    def __init__(self, send: Callable[[NodeReport], None]) -> None:
        self._send = send
        self._thread: threading.Thread | None = None

    def send(self, report: NodeReport, output_ages: Callable[[], tuple[float, ...]]) -> None:
        """Send a report; without the ages of outputs while the last look at those has not come back."""
        if self._thread is not None and self._thread.is_alive():
            self._send(report)
            return

        def complete() -> None:
            self._send(report._replace(output_ages=output_ages()))

        self._thread = threading.Thread(target=complete, name="report", daemon=True)
        self._thread.start()
