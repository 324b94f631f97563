"""Bugs of the kinds that this simulator is there to find, each planted into the production code for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

from rallypoint.election import farewell, leadership, takeover
from rallypoint.election.machine import Election
from rallypoint.election.steps import Changed, Fence, Procedure, Watched
from rallypoint.election.takeover import Takeover
from rallypoint.etcd import api
from rallypoint.rendezvous import core, holding
from rallypoint.rendezvous.arbiter import Arbiter, Send
from rallypoint.rendezvous.core import Sight
from rallypoint.rendezvous.holding import Held
from rallypoint.rendezvous.hub import Hub
from rallypoint.rendezvous.messages import JoinRequest, Leave, Notice, Placed, Request, RoundEnded
from rallypoint.rendezvous.operations import FINISH, Act, Action, Close, Fail
from rallypoint.rendezvous.state import NodeId, Reason, Settings, State
from tests.sim import job, link
from tests.sim.job import run
from tests.sim.scenario import generate
from tests.sim.stores import Stores


class Bug(NamedTuple):
    """What is wrong, and how to plant it."""

    what: str
    plant: Callable[[], AbstractContextManager[object]]


class Found(NamedTuple):
    """How a bug was found: after how many seeds, by which, and which rule it broke."""

    seeds: int
    seed: int
    rule: str


def hunt(bug: Bug, start: int, most: int) -> Found | None:
    """Run seeds until one breaks a rule with the bug and none without it; None if there is none among `most`."""
    for count in range(1, most + 1):
        scenario = generate(start + count - 1)
        with bug.plant():
            violation = run(scenario).violation
        if violation is not None and run(scenario).violation is None:
            return Found(count, scenario.seed, violation[0])
    return None


def _departure_closes() -> AbstractContextManager[object]:
    def on_leave(self: Arbiter, _session: int, speaker: object, _request: Leave, now: float) -> None:
        speaker = self.roster.get(_session)
        assert speaker is not None
        node = speaker.node
        self._change(now, self._run, node, Close(), now)

    return patch.dict(Arbiter._RECEIVE, {Leave: on_leave})


def _wall_clock() -> AbstractContextManager[object]:
    """The lease counts from when the node says that it spoke, on its own wall clock."""
    receive = Arbiter.receive

    def bad(self: Arbiter, session: int, request: Request, now: float) -> list[Send]:
        sends = receive(self, session, request, now)
        speaker, running = self.roster.get(session), job.running()
        heard = self.roster.liveness._heard
        if speaker is not None and session in heard:
            sender = running.agents[int(speaker.node.addr.rpartition(".")[2])]
            heard[session] = now - (running.world.now - sender.wall_clock())
        return sends

    return patch.object(Arbiter, "receive", bad)


def _without_round() -> AbstractContextManager[object]:
    """Nothing that is said names its round: the link cannot tell when that is over, the arbiter not what is meant."""

    def runs(state: State, node: NodeId, _round: int) -> bool:
        return state.complete and not state.closed and node in state.participants

    def after_request(held: Held, request: Request, now: float) -> Held:
        after = holding.after_request(held, request, now)
        return after._replace(said=held.said) if isinstance(request, JoinRequest) else after

    def after_notice(held: Held, notice: Notice) -> Held:
        after = holding.after_notice(held, notice)
        return after._replace(said=held.said) if isinstance(notice, RoundEnded | Placed) else after

    stack = ExitStack()
    stack.enter_context(patch.object(core, "_runs", runs))
    stack.enter_context(patch.object(link, "after_request", after_request))
    stack.enter_context(patch.object(link, "after_notice", after_notice))
    return stack


def _one_store() -> AbstractContextManager[object]:
    """What was prepared for a round serves the next one too, with all the keys of the first."""
    return patch.object(Stores, "discard", lambda self: None)


def _counted_twice() -> AbstractContextManager[object]:
    """A failure that is reported when its round has just ended, by another's failure, is counted as well."""
    fail = core._fail

    def bad(operation: Fail, state: State, node: NodeId, sight: Sight, settings: Settings) -> Action:
        action = fail(operation, state, node, sight, settings)
        ended = state.ended
        if action is FINISH and node in state.former and ended is not None and ended.round == operation.round:
            return Action(Act.END_ROUND, reason=Reason.FAILURE, cause=operation.cause)
        return action

    return patch.object(core, "_fail", bad)


def _dead_node() -> AbstractContextManager[object]:
    """A node that is lost while a round forms keeps its place in it."""
    end = Arbiter._end

    def bad(self: Arbiter, session: int, now: float, reason: Reason, detail: str = "") -> None:
        gone = self.roster.get(session)
        if gone is not None and not self.state.complete and gone.node in self.state.participants:
            self.roster.close(session)
            self._pending.pop(gone.node, None)
            return
        end(self, session, now, reason, detail)

    return patch.object(Arbiter, "_end", bad)


def _over_for_all() -> AbstractContextManager[object]:
    """The time of any node ends the rendezvous of all, be the others enough or not."""
    return patch.object(core, "needs_all", lambda state, _settings: not state.complete)


def _told_before_kept() -> AbstractContextManager[object]:
    return patch.object(Hub, "_is_ripe", lambda self: bool(self._outbox))


def _without_fence() -> AbstractContextManager[object]:
    """A comparison that always holds."""
    return patch.object(Fence, "holds", lambda _self: api.Compare(b"/nowhere", "create_revision", "==", 0))


def _no_patience() -> AbstractContextManager[object]:
    """Who has lost its key while etcd was out of reach for all is lost at once."""
    return patch.object(takeover, "patience", lambda _settings: 0.0)


def _leads_out_of_turn() -> AbstractContextManager[object]:
    """Who has registered leads, whoever is older."""
    face = Election._face
    return patch.object(Election, "_face", lambda self, rival: face(self, rival._replace(kv=None)))


def _forgets() -> AbstractContextManager[object]:
    """Who is elected begins with nothing."""
    taken_over = takeover.taken_over

    def bad(*given: Any) -> Takeover:
        return taken_over(*given)._replace(state=State())

    return patch.object(leadership, "taken_over", bad)


def _leaves_all() -> AbstractContextManager[object]:
    """Who goes last takes nothing with it."""

    def bad(*_given: object) -> Procedure[None]:
        yield from ()

    return patch.object(farewell, "_leave_nothing", bad)


def _deaf_to_rivals() -> AbstractContextManager[object]:
    """Who waits does not hear that the one before it is gone."""
    changed = Election._on_changed

    def bad(self: Election, event: Changed) -> None:
        if self._context.watched(event.watch) is not Watched.RIVAL:
            changed(self, event)

    return patch.dict(Election._ON, {Changed: bad})


BUGS = (
    Bug("a departure closes the job", _departure_closes),
    Bug("the lease compares another host's wall clock", _wall_clock),
    Bug("a message is taken without its round", _without_round),
    Bug("keys are kept without their round", _one_store),
    Bug("a failure that two nodes report is counted twice", _counted_twice),
    Bug("a round completes with a dead node", _dead_node),
    Bug("one node's time is over for all", _over_for_all),
    Bug("a node is told of a state before it is kept", _told_before_kept),
    Bug("the state is written without a fence", _without_fence),
    Bug("a candidate leads out of its turn", _leads_out_of_turn),
    Bug("a new coordinator forgets what the one before knew", _forgets),
    Bug("who goes last leaves the job's state in etcd", _leaves_all),
    Bug("nobody takes the place of a coordinator that is gone", _deaf_to_rivals),
    Bug("nobody is waited for whose lease ended while etcd was away", _no_patience),
)
