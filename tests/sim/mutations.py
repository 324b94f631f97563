"""Bugs of the kinds that this simulator must find, each planted into the production code for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

from rallypoint.agent import policy
from rallypoint.agent.policy import Decision, Phase, PolicyState
from rallypoint.agent.steps import DrainArrived
from rallypoint.control.coordinator import coordinator
from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.notifications import placements
from rallypoint.control.coordinator.sessions import SessionRecord, SessionRegistry
from rallypoint.control.election import journal, procedures
from rallypoint.control.election.machine import Election
from rallypoint.control.election.steps import Changed, Fence, Procedure, Takeover, Watched
from rallypoint.control.etcd import api
from rallypoint.control.membership import rules, segments
from rallypoint.control.membership.rules import ClockView, Step
from rallypoint.control.membership.segments import Claim
from rallypoint.control.membership.state import (
    Close,
    Fail,
    Join,
    NoChange,
    NodeId,
    Reason,
    RoundEnd,
    Settings,
    State,
    Verdict,
)
from rallypoint.control.protocol import resume_state
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRequest,
    LeaveRequest,
    Notification,
    Placed,
    Placement,
    Request,
    RoundEnded,
)
from rallypoint.control.protocol.resume_state import ResumeState
from rallypoint.failures.cause import Ending
from rallypoint.observe.watching import hang
from tests.sim import job, link
from tests.sim.job import run
from tests.sim.scenario import FIRST_WITH_DOMAINS, generate
from tests.sim.stores import Stores


class Mutation(NamedTuple):
    """What is wrong, how to plant it, and a seed that has found it, which is tried before all others."""

    what: str
    plant: Callable[[], AbstractContextManager[object]]
    found_by: int = 0


class Found(NamedTuple):
    """How a bug was found: after how many seeds, by which, and which rule it broke."""

    seeds: int
    seed: int
    rule: str


def find_mutation(bug: Mutation, start: int, most: int) -> Found | None:
    """Run seeds until one breaks a rule with the bug and none without it; None if there is none among `most`."""
    for count in range(1, most + 1):
        scenario = generate(start + count - 1)
        with bug.plant():
            violation = run(scenario).violation
        if violation is not None and run(scenario).violation is None:
            return Found(count, scenario.seed, violation[0])
    return None


def _departure_closes() -> AbstractContextManager[object]:
    def on_leave(self: Coordinator, speaker: SessionRecord, _request: LeaveRequest, now: float) -> None:
        self.operate(speaker.node, Close(), now)

    return patch.dict(Coordinator._RECEIVE, {LeaveRequest: on_leave})


def _wall_clock() -> AbstractContextManager[object]:
    """The lease counts from when the node says that it spoke, on its own wall clock."""
    hear = SessionRegistry.hear

    def bad(self: SessionRegistry, session: int, now: float) -> SessionRecord | None:
        speaker, running = hear(self, session, now), job.running()
        heard = self.liveness._heard
        if speaker is not None and session in heard:
            sender = running.agents[int(speaker.node.addr.rpartition(".")[2])]
            heard[session] = now - (running.world.now - sender.wall_clock())
        return speaker

    return patch.object(SessionRegistry, "hear", bad)


def _without_round() -> AbstractContextManager[object]:
    """No message names its round: the link cannot know when it is over, nor the coordinator which one is meant."""

    def runs(state: State, node: NodeId, _round: int) -> bool:
        return state.complete and not state.closed and node in state.participants

    def after_request(held: ResumeState, request: Request, now: float) -> ResumeState:
        after = resume_state.after_request(held, request, now)
        return after._replace(repeated_requests=held.repeated_requests) if isinstance(request, JoinRequest) else after

    def after_notice(held: ResumeState, notice: Notification, now: float) -> ResumeState:
        after = resume_state.after_notification(held, notice, now)
        return (
            after._replace(repeated_requests=held.repeated_requests)
            if isinstance(notice, RoundEnded | Placed)
            else after
        )

    stack = ExitStack()
    stack.enter_context(patch.object(State, "runs", runs))
    stack.enter_context(patch.object(link, "after_request", after_request))
    stack.enter_context(patch.object(link, "after_notification", after_notice))
    return stack


def _one_store() -> AbstractContextManager[object]:
    """What was prepared for a round serves the next one too, with all the keys of the first."""
    return patch.object(Stores, "discard_prepared", lambda self: None)


def _counted_twice() -> AbstractContextManager[object]:
    """A failure that is reported when its round has just ended, by another's failure, is counted as well."""
    fail = rules._fail

    def bad(operation: Fail, state: State, node: NodeId, view: ClockView, settings: Settings) -> Step:
        after = fail(operation, state, node, view, settings)
        ended = state.ended
        if after is NoChange.DONE and node in state.survivors and ended is not None and ended.round == operation.round:
            return rules.end_round(state, RoundEnd(state.round, Reason.FAILURE, "", operation.cause))
        return after

    return patch.dict(rules._RULES, {Fail: bad})


def _dead_node() -> AbstractContextManager[object]:
    """A node that is lost while a round forms keeps its place in it."""
    end = Coordinator._end

    def bad(self: Coordinator, sessions: Iterable[int], now: float, reason: Reason, detail: str = "") -> None:
        for session in sessions:
            gone = self.sessions.get(session)
            if gone is not None and not self.state.complete and gone.node in self.state.participants:
                self.sessions.close(session)
                self._pending.pop(gone.node, None)
            else:
                end(self, [session], now, reason, detail)

    return patch.object(Coordinator, "_end", bad)


def _over_for_all() -> AbstractContextManager[object]:
    """The time of any node ends the rendezvous of all, be the others enough or not."""
    return patch.object(rules, "needs_all", lambda state, _settings: not state.complete)


def _told_before_kept() -> AbstractContextManager[object]:
    def bad(self: Dispatcher) -> None:
        while self._held:
            held = self._held.popleft()
            self._send(held.session, held.message)

    return patch.object(Dispatcher, "_send_held", bad)


def _without_fence() -> AbstractContextManager[object]:
    """A comparison that always holds."""
    return patch.object(Fence, "comparison", lambda _self: api.Compare(b"/nowhere", "create_revision", "==", 0))


def _no_recovery_timeout() -> AbstractContextManager[object]:
    """Who has no session is lost as soon as there is another coordinator."""
    return patch.object(coordinator, "recovery_timeout", lambda _settings: 0.0)


def _no_absence() -> AbstractContextManager[object]:
    """Who has just lost its key is lost as soon as there is another coordinator."""
    return patch.object(procedures, "min_absence", lambda _settings: 0.0)


def _leads_out_of_turn() -> AbstractContextManager[object]:
    """Who has registered leads, whoever is older."""
    return patch.object(Election, "_predecessor", None)


def _forgets() -> AbstractContextManager[object]:
    """Who is elected begins with nothing."""
    taken_over = journal.takeover_from

    def bad(*given: Any) -> Takeover:
        return taken_over(*given)._replace(state=State())

    return patch.object(procedures, "takeover_from", bad)


def _leaves_all() -> AbstractContextManager[object]:
    """Who goes last takes nothing with it."""

    def bad(*_given: object) -> Procedure[None]:
        yield from ()

    return patch.object(procedures, "_delete_if_last", bad)


def _deaf_to_rivals() -> AbstractContextManager[object]:
    """Who waits does not hear that the one before it is gone."""
    changed = Election._on_changed

    def bad(self: Election, event: Changed) -> None:
        if self.is_leader or self._context.watched(event.watch) is not Watched.NODES:
            changed(self, event)

    return patch.object(Election, "_on_changed", bad)


def _restart_costs() -> AbstractContextManager[object]:
    """A restart on request uses up one of the budget."""
    return patch.dict(rules._LEDGER_FIELDS, {Reason.REQUESTED: "failures"})


def _drained_stays() -> AbstractContextManager[object]:
    """A node that is drained has its workers save, and forgets to leave."""

    def bad(status: PolicyState, event: DrainArrived) -> Decision:
        after, steps = policy._on_drain(status, event)
        return after._replace(leave_signal=0), steps

    return patch.dict(policy._RULES[Phase.RUNNING], {DrainArrived: bad})


def _all_survivors_stay() -> AbstractContextManager[object]:
    """Who was in the round before gets a place, however small the job was made."""

    def bad(operation: Join, state: State, node: NodeId, view: ClockView, settings: Settings) -> Step:
        if node in state.survivors and len(state.participants) >= settings.max_nodes:
            return rules._add_participant(state, node, operation.node_info, settings)
        return join(operation, state, node, view, settings)

    join = rules._join_forming_round
    return patch.object(rules, "_join_forming_round", bad)


def _segments_of_any_domain() -> AbstractContextManager[object]:
    """Nodes are in one segment whatever their domains are."""
    ranks = segments.segment_ranks

    def bad(claims: Mapping[NodeId, Claim], size: int, most: int) -> dict[NodeId, int]:
        return ranks({node: each._replace(domain="") for node, each in claims.items()}, size, most)

    return patch.object(segments, "segment_ranks", bad)


def _parts_count_as_segments() -> AbstractContextManager[object]:
    """A round begins with enough nodes, although they are not whole segments."""
    return patch.object(segments, "nodes_in_segments", lambda joined, settings: min(len(joined), settings.max_nodes))


def _failure_cuts_saving() -> AbstractContextManager[object]:
    """A failure ends the round though the other nodes of a preempted job still save."""
    fail = rules._fail

    def bad(operation: Fail, state: State, node: NodeId, view: ClockView, settings: Settings) -> Step:
        return fail(operation, state._replace(preempted=None), node, view, settings)

    return patch.dict(rules._RULES, {Fail: bad})


def _all_requeue() -> AbstractContextManager[object]:
    """Each node of a preempted job believes that it is the one which requeues it."""

    def bad(_state: State, verdict: Verdict) -> tuple[Notification, dict[NodeId, Notification]]:
        return JobEnded(verdict, is_delegate=verdict.ending is Ending.PREEMPTED), {}

    return patch.object(coordinator, "end_notifications", bad)


def _mixed_job_survives() -> AbstractContextManager[object]:
    def bad(state: State, *more: Any) -> dict[NodeId, Placement]:
        return {node: each._replace(restart_workers=False) for node, each in placements(state, *more).items()}

    return patch.object(coordinator, "placements", bad)


def _hangs_with_one_awake() -> AbstractContextManager[object]:
    def bad(before: State, after: State) -> bool:
        most = after.complete and 0 < len(after.participants) - 1 <= len(after.quiet & after.participants.keys())
        return most and before.quiet != after.quiet

    return patch.object(hang, "hang_began", bad)


def _deaf_to_hangs() -> AbstractContextManager[object]:
    return patch.object(hang.HangInvestigation, "check_hang", lambda *_args: False)


BUGS = (
    Mutation("a round hangs with one node that does not", _hangs_with_one_awake),
    Mutation("nobody is told of a hang", _deaf_to_hangs),
    Mutation("workers go on beside others that were started anew", _mixed_job_survives),
    Mutation("a failure ends the round of a preempted job", _failure_cuts_saving),
    Mutation("all nodes requeue a preempted job", _all_requeue),
    Mutation("a restart on request costs a restart", _restart_costs),
    Mutation("a drained node stays", _drained_stays, found_by=143),
    Mutation("a round is larger than the job was made", _all_survivors_stay, found_by=2299),
    Mutation("a segment has nodes of several domains", _segments_of_any_domain, found_by=FIRST_WITH_DOMAINS),
    Mutation("parts of segments count as nodes", _parts_count_as_segments, found_by=FIRST_WITH_DOMAINS + 15),
    Mutation("a departure closes the job", _departure_closes),
    Mutation("the lease compares another host's wall clock", _wall_clock, found_by=41),
    Mutation("a message is taken without its round", _without_round),
    Mutation("keys are kept without their round", _one_store),
    Mutation("a failure that two nodes report is counted twice", _counted_twice),
    Mutation("a round completes with a dead node", _dead_node),
    Mutation("one node's time is over for all", _over_for_all, found_by=466),
    Mutation("a node is told of a state before it is kept", _told_before_kept),
    Mutation("the state is written without a fence", _without_fence),
    Mutation("a candidate leads out of its turn", _leads_out_of_turn),
    Mutation("a new coordinator forgets what the one before knew", _forgets),
    Mutation("who goes last leaves the job's state in etcd", _leaves_all),
    Mutation("nobody takes the place of a coordinator that is gone", _deaf_to_rivals),
    Mutation("nobody is waited for who has no key", _no_recovery_timeout, found_by=225),
    Mutation("nobody is waited for who has just lost its key", _no_absence, found_by=234),
)
