"""One agent's part in a hang, and in a silence (which is only reported): looks for activity, and reports its workers'
state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.steps import StopWorkers, WorkersStarted
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.control.protocol.messages import CollectedPart, CollectionEnded, CollectKind, CollectRequested
from rallypoint.features.collecting import start_collecting
from rallypoint.features.hangs.rules import HangRules, OnHang

if TYPE_CHECKING:
    from rallypoint.agent.policy import PolicyState, Rules
    from rallypoint.agent.sources import Source
    from rallypoint.agent.steps import Event, Step
    from rallypoint.features.hangs.evidence import HangReporter
    from rallypoint.features.hangs.living import RaisedWorkers
    from rallypoint.features.hangs.watch import HangWatch


class Hangs(Feature):
    """One node's part. Without a timeout, the node never counts as quiet, and only reports."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._options = self.workers.group.spec.features.hangs
        self._watch: HangWatch | None = None
        self._raised: RaisedWorkers | None = None
        self._reporter: HangReporter | None = None
        timeout = self._options.hang_timeout or self._options.silence_timeout
        if timeout:
            from rallypoint.features.hangs.living import RaisedWorkers
            from rallypoint.features.hangs.watch import HangWatch

            self._watch = HangWatch(timeout, self.workers, reports_only=not self._options.hang_timeout)
            self._raised = RaisedWorkers(self.workers)
            self._watch.on_look = self._raised.look

    def watchers(self) -> Iterable[Source]:
        return () if self._watch is None else (self._watch,)

    def rules(self) -> Rules:
        return HangRules(self._options.hang_timeout, OnHang(self._options.reaction)).rules()

    def messages(self) -> Mapping[type, Callable[[Any], None]]:
        return {
            CollectRequested: self._collect,
            CollectedPart: self._add_part,
            CollectionEnded: self._add_part,
            WorkersStarted: self._on_workers_started,
        }

    def observe(self, before: PolicyState, event: Event | None, after: PolicyState, steps: tuple[Step, ...]) -> None:
        if self._watch is not None and any(isinstance(step, StopWorkers) for step in steps):
            self._watch.end_round()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _on_workers_started(self, event: WorkersStarted) -> None:
        if self._watch is not None and self._raised is not None:
            self._raised.begin_round()
            self._watch.begin_round(event.round)

    def _collect(self, request: CollectRequested) -> None:
        if request.kind is not CollectKind.HANG:
            return
        from rallypoint.features.hangs.evidence import collect

        gather = partial(collect, self.workers.look(), self.workers.pcontext, self._options.reaction)
        start_collecting(request, gather, self.workers.rendezvous.send)

    def _add_part(self, message: CollectedPart | CollectionEnded) -> None:
        if self._reporter is None:
            from rallypoint.features.hangs.evidence import HangReporter, render_silence

            render = None
            if not self._options.hang_timeout and self._options.silence_timeout:
                job = self.workers.group.spec.rdzv_handler.get_run_id()
                render = partial(render_silence, self._options.silence_timeout, job)
            self._reporter = HangReporter(self.workers.rendezvous.send, render)
        self._reporter.add(message)
