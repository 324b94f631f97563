"""Reports about the workers of a node, on request: what takes time is collected off the loop, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rallypoint.agent.spec import Worker
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.light_typing import TYPE_CHECKING, TypeAlias
from rallypoint.base.log import get_logger
from rallypoint.control.protocol.messages import (
    MAX_PART,
    CollectedPart,
    CollectionEnded,
    CollectKind,
    CollectRequested,
    NodeAnswer,
    NodeReport,
    ReportRequested,
)

if TYPE_CHECKING:
    from rallypoint.agent.features.hangs import HangReporter
    from rallypoint.agent.workers import WorkerController

log = get_logger(__name__)

Request: TypeAlias = "ReportRequested | CollectRequested | CollectedPart | CollectionEnded"


def _stacks(request: CollectRequested, workers: WorkerController) -> Callable[[], bytes]:
    wanted = [each for each in workers.group.workers if request.rank in {-1, each.global_rank}]
    return partial(_stacks_of, wanted)


def _stacks_of(workers: Sequence[Worker]) -> bytes:
    from rallypoint.observe.hangs.evidence import stacks_of

    return stacks_of({each.global_rank: each.id for each in workers if isinstance(each.id, int)})


def _bundle(_request: CollectRequested, workers: WorkerController) -> Callable[[], bytes]:
    from rallypoint.agent.features.incidents import demand, incident_facts
    from rallypoint.observe.bundle import encode_bundle

    facts = incident_facts(workers)
    return lambda: encode_bundle(demand(facts))


def _hang(_request: CollectRequested, workers: WorkerController) -> Callable[[], bytes]:
    from rallypoint.agent.features.hangs import collect

    return partial(collect, workers.look(), workers.pcontext, workers.group.spec.features.hangs.reaction)


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


class Reporter:
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

    def take(self, request: Request, round_: int) -> None:
        """Begin what is requested, in this round."""
        if isinstance(request, ReportRequested):
            self._report(self._present(round_))
        elif isinstance(request, CollectRequested):
            gather = _COLLECTORS[request.kind](request, self._workers)
            threading.Thread(target=_collect, args=(request, gather, self._send), name="collect", daemon=True).start()
        else:
            if self._hang is None:
                from rallypoint.agent.features.hangs import HangReporter

                self._hang = HangReporter(self._send)
            self._hang.add(request)

    def _present(self, round_: int) -> NodeReport:
        pids = tuple(each.id if isinstance(each.id, int) else 0 for each in self._workers.group.workers)
        folder, now = self._workers.folder, SYSTEM_CLOCK.monotonic()
        folder.look()
        place = self._workers.group.spec.in_place_of
        report = NodeReport(round_, pids, steps=folder.steps(), in_place_of=place, step_before=folder.step_before)
        if (latest := folder.latest()) is not None:
            report = report._replace(progress=latest.step, progress_age=max(0.0, now - latest.at))
        if (began := folder.began()) is not None:
            report = report._replace(first_step=began.first, first_step_age=max(0.0, now - began.first_at))
        return report

    def _report(self, report: NodeReport) -> None:
        """Send a report; without the ages of outputs while the last query of those has not returned."""
        if self._thread is not None and self._thread.is_alive():
            self._send(report)
            return

        context = self._workers.pcontext
        output_ages = tuple if context is None else context.output_ages()

        def complete() -> None:
            self._send(report._replace(output_ages=output_ages()))

        self._thread = threading.Thread(target=complete, name="report", daemon=True)
        self._thread.start()
