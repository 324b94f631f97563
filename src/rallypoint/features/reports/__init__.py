"""Reports about a node's workers on request; threads collect slow data, so that the loop does not wait."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile

from rallypoint.agent.facts import attempt_folder, worker_pid
from rallypoint.agent.feature import Agent, Feature
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger, printable
from rallypoint.base.secrets import job_secret
from rallypoint.base.side_thread import start_thread
from rallypoint.base.stderr import STDERR_LOCK
from rallypoint.control.protocol.messages import (
    CollectKind,
    CollectRequested,
    NodeAnswer,
    NodeReport,
    ReportRequested,
)
from rallypoint.features.collecting import start_collecting
from rallypoint.features.console import waiting_for_console
from rallypoint.rendezvous.params import ON_ETCD

if TYPE_CHECKING:
    from rallypoint.agent.workers import WorkerController
    from rallypoint.features.reports.worker_output import OutputReader

log = get_logger(__name__)

_PROGRAMS = {"rallyrun", "torchrun"}
_LONGEST_COMMAND, _LONGEST_FOLDER = 1000, 4096
_MOST_REMARKS = 16
_HERE = ("127.", "[::1]:")
"""Prefixes of endpoints that no other machine can reach; etcd controls access by itself."""


def _stacks(request: CollectRequested, workers: WorkerController) -> Callable[[], bytes]:
    known = {worker.global_rank: worker_pid(worker, workers.pcontext) for worker in workers.group.workers}
    found = {rank: pid for rank, pid in known.items() if pid}
    waiting = enumerate(workers.waiting_processes(), 1)  # they have no rank
    found |= {-number: process.pid for number, process in waiting}
    return partial(_stacks_of, {rank: pid for rank, pid in found.items() if not request.ranks or rank in request.ranks})


def _stacks_of(pids: Mapping[int, int]) -> bytes:
    from rallypoint.observe.hangs.evidence import stacks_of

    return stacks_of(pids)


def command_line(words: Sequence[str], program: Sequence[object], *, hides: bool) -> str:
    """The command that started an agent, with secrets masked.

    Args:
        words: the words of the command.
        program: the workers' program, with which our own command ends.
        hides: whether to omit the program's arguments, which might contain unrecognizable secrets.
    """
    from shlex import join

    from rallypoint.observe.bundle import mask_command

    is_ours = len(words) > 1 and os.path.basename(words[1]) in _PROGRAMS
    kept = len(words) if not hides else 2
    if hides and is_ours:
        same = takewhile(lambda both: both[0] == both[1], zip(reversed(words), reversed(program), strict=False))
        kept = max(2, len(words) - sum(1 for _ in same) + 1)  # the first word is the script, or -m
        kept += words[kept - 1] == "-m"
    words = [printable(word, len(word)) for word in ([os.path.basename(words[1]), *words[2:]] if is_ours else words)]
    shown = join(mask_command(words[: kept - is_ours]))
    return (f"{shown} ..." if kept - is_ours < len(words) else shown)[:_LONGEST_COMMAND]


class Reports(Feature):
    """Answers watchers about one node's workers. Never waits.

    Reports include information from log files, which might be on a hung disk.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._send: Callable[[NodeAnswer], None] = self.workers.rendezvous.send
        self._thread: threading.Thread | None = None
        self._outputs: OutputReader | None = None
        self._command: str | None = None

    def messages(self) -> Mapping[type, Callable[[Any], None]]:
        return {ReportRequested: self._on_report_requested, CollectRequested: self._collect}

    def on_workers_gone(self) -> None:
        """Send the rest of the output to followers."""
        if self._outputs is not None:
            self._outputs.close()

    def _on_report_requested(self, _request: ReportRequested) -> None:
        self._report(self._present())

    def _collect(self, request: CollectRequested) -> None:
        if request.kind is CollectKind.STACKS:
            start_collecting(request, _stacks(request, self.workers), self._send)
        elif request.kind is CollectKind.LOGS:
            if self._outputs is None:
                from rallypoint.features.reports.worker_output import OutputReader

                self._outputs = OutputReader(self.workers)
            if (thread := start_collecting(request, self._outputs.begin(request), self._send)) is not None:
                self._outputs.watch(thread)

    def _present(self) -> NodeReport:
        pids = tuple(worker_pid(worker, self.workers.pcontext) for worker in self.workers.group.workers)
        folder, now = self.workers.folder, SYSTEM_CLOCK.monotonic()
        folder.look()
        context, group, standby = self.workers.pcontext, self.workers.group, self.workers.waiting_processes()
        attempt = "" if context is None else attempt_folder(context.error_files.values())
        report = NodeReport(
            -1 if group.placement is None else group.placement.round,
            pids,
            steps=folder.steps(),
            in_place_of=group.spec.in_place_of,
            standby=tuple(process.pid for process in standby),
            standby_ready=sum(process.prepared for process in standby),
            log_folder=printable(os.path.dirname(os.path.abspath(attempt)), _LONGEST_FOLDER) if attempt else "",
            command="" if group.group_rank else self._shown_command(),
            step_before=folder.step_before,
            age=max(0.0, now - self.workers.began),
            watching=tuple(self.workers.watchers.seconds.items()),
            figures=tuple(figure for figures in self.workers.hooks.figures for figure in figures().items()),
            remarks=tuple(text for _, text in sorted(self.workers.remarks.items()))[:_MOST_REMARKS],
            console_blocked=max(STDERR_LOCK.blocked_for(), 0.0 if context is None else context.console_blocked_for()),
        )
        if context is not None:
            codes = sorted(context.exit_codes.items())
            ended = tuple((rank, code, max(0.0, now - context.ended_at(rank))) for rank, code in codes)
            waiters = waiting_for_console(context) if report.console_blocked else ()
            report = report._replace(console_waiters=waiters, ended=ended)
        if (latest := folder.latest()) is not None:
            report = report._replace(progress=latest.step, progress_age=max(0.0, now - latest.at))
        if (began := folder.began()) is not None:
            report = report._replace(first_step=began.first, first_step_age=max(0.0, now - began.first_at))
        return report

    def _shown_command(self) -> str:
        if self._command is None:
            job = self.workers.rendezvous.local_job()
            here = job is not None and (job.backend in ON_ETCD or job.endpoint.startswith(_HERE))
            hides = not here and job_secret() is None
            spec = self.workers.group.spec
            self._command = command_line(sys.orig_argv, (spec.entrypoint, *spec.args), hides=hides)
        return self._command

    def _report(self, report: NodeReport) -> None:
        """Send a report, without the ages of outputs while their last query has not returned."""
        if self._thread is not None and self._thread.is_alive():
            self._send(report)
            return

        context = self.workers.pcontext
        output_ages = tuple if context is None else context.output_ages()

        def complete() -> None:
            self._send(report._replace(output_ages=output_ages()))

        self._thread = start_thread(complete, "report")
        if self._thread is None:
            self._send(report)
