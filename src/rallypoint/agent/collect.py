"""Collects what a node reports about its workers on request: off the agent's loop, in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rallypoint.agent.spec import Worker
from rallypoint.agent.steps import AddToReport, Collect, ReportStatus
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.protocol.messages import MAX_PART, CollectedPart, CollectKind, CollectRequested, NodeAnswer, NodeReport

if TYPE_CHECKING:
    from rallypoint.agent.controller import WorkerController
    from rallypoint.agent.hang_report import HangReporter
    from rallypoint.agent.incident_files import NodeFacts

log = get_logger(__name__)


def _stacks(request: CollectRequested, workers: WorkerController) -> Callable[[], bytes]:
    wanted = [each for each in workers.group.workers if request.rank in {-1, each.global_rank}]
    return partial(_stacks_of, wanted)


def _stacks_of(workers: Sequence[Worker]) -> bytes:
    from rallypoint.hangs.stacks import stacks_of

    return stacks_of({each.global_rank: each.id for each in workers if isinstance(each.id, int)})


def _bundle(_request: CollectRequested, workers: WorkerController) -> Callable[[], bytes]:
    from rallypoint.agent.incident_files import node_facts

    return partial(_bundle_of, node_facts(workers))


def _bundle_of(facts: NodeFacts) -> bytes:
    from rallypoint.agent.incident import demand
    from rallypoint.observe.bundle import encode_bundle

    return encode_bundle(demand(facts))


def _hang(_request: CollectRequested, workers: WorkerController) -> Callable[[], bytes]:
    from rallypoint.agent.hang_evidence import collect, examined_node

    local_ranks = {each.global_rank: each.local_rank for each in workers.group.workers}
    return partial(collect, examined_node(workers), workers.pcontext, local_ranks)


_COLLECTORS: Mapping[CollectKind, Callable[[CollectRequested, WorkerController], Callable[[], bytes]]] = {
    CollectKind.STACKS: _stacks,
    CollectKind.BUNDLE: _bundle,
    CollectKind.HANG: _hang,
}
"""Functions that look at the workers on the loop's thread, and return the function that is then run off it."""


def _collect(request: CollectRequested, gather: Callable[[], bytes], send: Callable[[CollectedPart], None]) -> None:
    try:
        data = gather()
    except Exception:
        log.exception("the data that rallyctl asked for could not be collected")
        data = b""
    cuts = range(0, max(1, len(data)), MAX_PART)
    for at in cuts:
        send(CollectedPart(request.number, data[at : at + MAX_PART], at + MAX_PART >= len(data)))


class StatusReporter:
    """Answers watchers of the workers of one node, and requests to investigate a hang. Nothing here waits.

    Reports are completed with information that only log files have, which may be on a disk that hangs.

    Args:
        workers: of this node.
        send: takes reports and the collected parts, from any thread.
    """

    def __init__(self, workers: WorkerController, send: Callable[[NodeAnswer], None]) -> None:
        self._workers = workers
        self._send = send
        self._thread: threading.Thread | None = None
        self._hang: HangReporter | None = None

    def carry_out(self, step: ReportStatus | Collect | AddToReport, round_: int) -> None:
        """Begin what the step says, which belongs to this round."""
        if isinstance(step, AddToReport):
            if self._hang is None:
                from rallypoint.agent.hang_report import HangReporter

                self._hang = HangReporter(self._send)
            self._hang.add(step.message)
        elif isinstance(step, Collect):
            gather = _COLLECTORS[step.request.kind](step.request, self._workers)
            threading.Thread(
                target=_collect, args=(step.request, gather, self._send), name="collect", daemon=True
            ).start()
        else:
            self._report(self._workers.report(round_))

    def _report(self, report: NodeReport) -> None:
        """Send a report; without the ages of outputs while the last query of those has not returned."""
        if self._thread is not None and self._thread.is_alive():
            self._send(report)
            return

        output_ages = self._workers.output_ages()

        def complete() -> None:
            self._send(report._replace(output_ages=output_ages()))

        self._thread = threading.Thread(target=complete, name="report", daemon=True)
        self._thread.start()
