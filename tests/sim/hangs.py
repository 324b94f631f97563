"""Simulated signs of life of one node's workers, and its agent's reports of a hang.

Nodes fall silent for a while and give signs again, whatever else they do. This file knows the truth, and checks the
agents' reports against it:

1. A hang is reported only if all nodes of the round were silent at some recent moment.
2. If all nodes of a round stay silent and nothing else happens to them, all of them hear of a hang, except those that
   had succeeded and have been lost to the server since.
3. No report comes without a hang that was announced before.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from rallypoint.agent.policy import Phase
from rallypoint.control.membership.endings import is_hung
from rallypoint.control.membership.state import ReportQuiet, State
from rallypoint.control.protocol.messages import (
    CollectedPart,
    CollectionEnded,
    CollectKind,
    CollectRequested,
    HangFound,
    HangReport,
)
from tests.sim.ground_truth import RoundName, number_of
from tests.sim.world import Timer, Violation

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.job import Job

_LATEST = 3.0
"""Seconds that news may take in an undisturbed job."""
_SETTLED = 10.0
"""Seconds for which a server has been there that knows the round."""
_OLD = 60.0
"""Seconds for which a node that was silent may be taken to be so, in a job that is disturbed."""


class SimSigns:
    """When the workers of one agent's rounds are silent, and what it does when it is asked about a hang."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._rng = agent.job.scenario.stream(f"signs {agent.number}")
        self._falls_silent = agent.job.scenario.silences
        self._timer: Timer | None = None
        self.round = -1
        self.silent = False

    def begin(self, round_: int) -> None:
        """The workers of a round begin."""
        self.end()
        self.round = round_
        if self._falls_silent:
            self._timer = self._agent.process.later(self._rng.uniform(0.0, 5.0), self._turn)

    def end(self) -> None:
        """They are to be stopped."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._set(silent=False)
        self.round = -1

    def _turn(self) -> None:
        agent = self._agent
        if agent.fate is not None or agent.status.phase not in (Phase.RUNNING, Phase.FINISHED):
            return
        self._set(silent=not self.silent)
        agent.handler.send(ReportQuiet(self.round, self.silent))
        longest = 90.0 if self.silent else 2.0
        self._timer = agent.process.later(self._rng.uniform(0.1, longest), self._turn)

    def _set(self, *, silent: bool) -> None:
        if silent != self.silent:
            self.silent = silent
            self._agent.job.hangs.turned(self._agent, self.round)

    # What its agent does

    def collect(self, request: CollectRequested) -> None:
        """Answer, late or never."""
        if request.kind is CollectKind.HANG and self._rng.random() < 0.8:
            part = CollectedPart(request.number, b"evidence", True)
            self._agent.process.later(self._rng.uniform(0.0, 16.0), self._send, part)

    def add(self, end: CollectedPart | CollectionEnded) -> None:
        """Report once all is there, late or never."""
        if isinstance(end, CollectionEnded) and self._rng.random() < 0.8:
            report = HangReport(end.number, end.round, "a report")
            self._agent.process.later(self._rng.uniform(0.0, 16.0), self._send, report)

    def _send(self, answer: CollectedPart | HangReport) -> None:
        if self._agent.fate is None:
            self._agent.handler.send(answer)


class HangAudit:
    """What is true of hangs, and what agents were told."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._silent_at: dict[tuple[int, RoundName], float] = {}
        """When the workers of a node were last known to be silent in a round."""
        self._turns: dict[RoundName, int] = {}
        """How often anything has changed in a round."""
        self._told: dict[tuple[int, RoundName], float] = {}

    def turned(self, agent: Agent, round_: int) -> None:
        """The workers of a node have fallen silent, or are not any more."""
        name, now = self._job.audit.names.get((agent.number, round_)), self._job.world.now
        if name is None:
            return
        self._silent_at[agent.number, name] = now  # also where they give a sign: they were silent until then
        self._turns[name] = self._turns.get(name, 0) + 1
        members = self._members(name)
        if members and all(each.signs.silent for each in members):
            self._job.world.after(_LATEST, self._check_told, name, self._turns[name], now)

    def _members(self, name: RoundName) -> list[Agent]:
        """The agents of a round, if all of them are in it still."""
        agents = [self._job.agents[number] for number in self._job.audit.rounds[name].members]
        names = self._job.audit.names
        return agents if all(names.get((each.number, each.signs.round)) == name for each in agents) else []

    def _check_told(self, name: RoundName, turns: int, since: float) -> None:
        members, audit = self._members(name), self._job.audit
        if self._turns[name] != turns or not members or any(audit.excused(each.number) for each in members):
            return
        if audit.preempted:  # such a job does not hang
            return
        if self._job.server_up_for() < self._job.world.now - since + _SETTLED:
            return
        if self._job.world.now < self._job.cut_all_until + _SETTLED:  # nobody could be told
            return
        server = self._job.server
        assert server is not None, "no server has been up"
        counted = {number_of(node) for node in server.coordinator.state.participants}
        # One that had succeeded when the server lost it has left the round for good: it is back for the verdict only.
        concerned = [each.number for each in members if each.number in counted or each.status.phase is Phase.RUNNING]
        late = [number for number in concerned if self._told.get((number, name), -1.0) < since]
        if late:
            raise Violation("a hang was not told", f"round {name} is silent since {since:.3f}; nodes {late}")

    def hears(self, agent: Agent, event: HangFound | HangReport) -> None:
        """An agent is told of a hang, or of its report."""
        name, now = self._job.audit.names.get((agent.number, event.round)), self._job.world.now
        if name is None:
            raise Violation("a hang was told of a round that the node does not know", f"node {agent.number}: {event}")
        if isinstance(event, HangReport):
            there = event.round == agent.signs.round  # else it takes no notice of the report
            if there and (agent.number, name) not in self._told:
                raise Violation("a report was told without a hang", f"node {agent.number}: {event}")
            return
        self._told[agent.number, name] = now
        members = self._job.audit.rounds[name].members
        for number in members:
            other = self._job.agents[number]
            left = other.fate is not None or self._job.audit.names.get((number, other.signs.round)) != name
            if event.nodes < len(members) and other.status.phase is Phase.FINISHED:
                left = True  # for the server, which has lost it: it has nothing more to do in the round
            if not left and not other.signs.silent and now - self._silent_at.get((number, name), -_OLD) >= _OLD:
                raise Violation("a hang was told of a node that gives signs of life", f"node {number} in {name}")


def check_quiet(states: tuple[State, ...], node: int | None, request: object) -> None:
    """Who is quiet changes only by a node's own word, and a round that hangs has nobody else in it."""
    for before, after in pairwise(states):
        if before.round != after.round:
            if after.quiet:
                raise Violation("who is quiet outlives the round", f"{after.quiet}")
            continue
        changed = {number_of(each) for each in before.quiet ^ after.quiet}
        said = {node} if isinstance(request, ReportQuiet) and request.round == after.round else set()
        if changed - said:
            raise Violation("a node became quiet without its word", f"{changed} on {request}")
        all_quiet = after.complete and bool(after.participants) and not set(after.participants) - after.quiet
        if is_hung(after) != (all_quiet and not after.closed and not after.is_preempted):
            raise Violation("a round hangs with a node that is not quiet, or the other way round", f"{after}")
