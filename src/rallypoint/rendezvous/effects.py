"""What each action does to the state: the second of the two functions of `core`, where their laws stand.

    apply(action, state, node, settings) -> State

Nothing is decided here, but what follows by necessity: a round that has max nodes is complete, and a round whose last
running node has succeeded ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from rallypoint.failures.cause import Restarts
from rallypoint.ranks.assign import assign_group_ranks
from rallypoint.rendezvous.operations import Act, Action
from rallypoint.rendezvous.state import (
    Abandoned,
    Gone,
    Ledger,
    Member,
    NodeId,
    Outcome,
    Participant,
    Preemption,
    Reason,
    RoundEnd,
    Settings,
    State,
    Verdict,
    hosts_of,
    in_words,
    known_to,
    missing,
    name_of,
    names_of,
)
from rallypoint.rendezvous.streaks import hold_for

V = TypeVar("V")

_MOST_GONE = 4
"""How many of those who are gone are kept in mind."""
_MOST_ROLES = 16
"""Of how many roles it is known what they run."""


def apply(action: Action, state: State, node: NodeId, settings: Settings) -> State:
    """The state after `action` of `node`. Acts that end an operation, and SYNC, leave it as it is."""
    effect = _EFFECTS.get(action.act)
    if effect is None:
        return state
    after = effect(action, state, node, settings)
    if settings.counts_beats and after.knows(node):
        return after._replace(beats={**after.beats, node: after.beats.get(node, 0) + 1})
    return after._replace(beats=_without(after.beats, node)) if node in after.beats else after


def _keep(_action: Action, state: State, _node: NodeId, _settings: Settings) -> State:
    return state


def _add_to_participants(action: Action, state: State, node: NodeId, settings: Settings) -> State:
    assert action.member is not None
    entered = Participant(action.member, former=state.former.get(node))
    if state.begins:
        state = state._replace(gone=(), max_restarts=-1, programs={})
    participants = {**state.participants, node: entered}
    after = state._replace(
        participants=participants,
        wait_list=_without(state.wait_list, node),
        former=_without(state.former, node),
        gone=_replaced(state.gone, node) if entered.former is None else state.gone,
        max_restarts=action.member.max_restarts if state.max_restarts < 0 else state.max_restarts,
        programs=_with_program(state.programs, action.member),
    )
    if len(participants) == settings.min_nodes:
        after = after._replace(last_call=state.last_calls + 1, last_calls=state.last_calls + 1)
    return _complete(after, settings) if len(participants) == settings.max_nodes and not state.hold else after


def _with_program(programs: Mapping[str, str], member: Member) -> Mapping[str, str]:
    if not member.program or member.role in programs or len(programs) >= _MOST_ROLES:
        return programs
    return {**programs, member.role: member.program}


def _add_to_wait_list(action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    assert action.member is not None
    return state._replace(
        wait_list={**state.wait_list, node: action.member},
        redundancy_list=_without(state.redundancy_list, node),
    )


def _add_to_redundancy_list(action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    assert action.member is not None
    return state._replace(redundancy_list={**state.redundancy_list, node: action.member})


def _remove_from_participants(action: Action, state: State, node: NodeId, settings: Settings) -> State:
    after = state._replace(participants=_without(state.participants, node))
    if state.closed:
        return after
    if state.complete and node in state.succeeded and after.participants:
        return _end_job_if_all_succeeded(after)
    after = after._replace(gone=_joined_by(state, node, action.reason))
    if not state.complete:
        return after._replace(last_call=0) if len(after.participants) < settings.min_nodes else after
    return _end_round(action, after, name_of(state, node), settings)


def _remove_from_wait_list(_action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    after = state._replace(wait_list=_without(state.wait_list, node))
    # What the others were asked to agree to is no longer wanted.
    return after if after.wait_list or after.preempted else after._replace(consents=frozenset())


def _remove_from_redundancy_list(_action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    return state._replace(redundancy_list=_without(state.redundancy_list, node))


def _remove_from_former(action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    return state._replace(former=_without(state.former, node), gone=_joined_by(state, node, action.reason))


def _joined_by(state: State, node: NodeId, reason: Reason) -> tuple[Gone, ...]:
    """Those who are gone, and one more."""
    if len(state.gone) >= _MOST_GONE:
        return state.gone
    return (*state.gone, Gone(node, name_of(state, node), reason))


def _replaced(gone: tuple[Gone, ...], node: NodeId) -> tuple[Gone, ...]:
    """Those whose place is still free once a node has come: it takes its own again, or that of the first."""
    return tuple(each for each in gone if each.node != node) if node in {each.node for each in gone} else gone[1:]


def _abandon(action: Action, state: State, node: NodeId, settings: Settings) -> State:
    return state._replace(
        participants={},
        wait_list={},
        redundancy_list={},
        former={},
        beats={},
        last_call=0,
        hold=0.0,
        abandoned=Abandoned(
            state.abandoned.number + 1,
            name_of(state, node),
            action.seconds,
            len(state.participants),
            hosts_of(state.participants),
            missing(state, settings),
        ),
    )


def _mark_complete(_action: Action, state: State, _node: NodeId, settings: Settings) -> State:
    return _complete(state, settings)


def _mark_closed(_action: Action, state: State, _node: NodeId, _settings: Settings) -> State:
    return state._replace(closed=True, verdict=state.verdict or Verdict(Outcome.STOPPED))


def _mark_succeeded(_action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    return _end_job_if_all_succeeded(state._replace(succeeded=state.succeeded | {node}))


def _mark_consent(_action: Action, state: State, node: NodeId, settings: Settings) -> State:
    after = state._replace(consents=state.consents | {node})
    if len(after.consents) < len(after.participants) or not after.consents.issuperset(after.participants):
        return after
    return _end_round(Action(Act.END_ROUND, reason=Reason.DRAINED), after, name_of(after, node), settings)


def _mark_preempted(action: Action, state: State, node: NodeId, _settings: Settings) -> State:
    return state._replace(preempted=Preemption(node, action.seconds))


def _mark_job_failed(action: Action, state: State, _node: NodeId, _settings: Settings) -> State:
    ledger = state.ledger._replace(failures=state.ledger.failures + 1)
    restarts = Restarts(state.ledger.failures, action.max_restarts)
    verdict = Verdict(Outcome.FAILED, action.cause, action.detail, restarts)
    return state._replace(closed=True, ledger=ledger, verdict=verdict)


def _mark_round_ended(action: Action, state: State, node: NodeId, settings: Settings) -> State:
    return _end_round(action, state, name_of(state, node), settings)


def _complete(state: State, settings: Settings) -> State:
    nodes = sorted(state.participants)
    former = {node: each.former for node, each in state.participants.items() if each.former is not None}
    hints = {
        node: each.member.rank_hint for node, each in state.participants.items() if each.member.rank_hint is not None
    }
    ranks = assign_group_ranks(nodes, None if settings.fixed_ranks else former, hints)
    return state._replace(
        complete=True,
        restarts=state.ledger.failures,
        origin="",
        last_call=0,
        hold=0.0,
        former={},
        gone=(),
        participants={node: state.participants[node]._replace(rank=ranks[node]) for node in nodes},
    )


def _end_round(action: Action, state: State, name: str, settings: Settings) -> State:
    """End a complete round by an action of who is called so; `state` no longer holds those who go."""
    detail = _why_drained(state, name) if action.reason is Reason.DRAINED else action.detail
    short = max(0, settings.min_nodes - len(known_to(state)))
    end = RoundEnd(state.round, action.reason, name, action.cause, detail, short)
    if action.reason is not Reason.FAILURE:
        return end_round(state, end)
    restarts = Restarts(state.ledger.failures + 1, action.max_restarts)
    after = end_round(state, end._replace(restarts=restarts))
    return after._replace(streak=action.streak, hold=hold_for(action.streak, settings))


def _why_drained(state: State, name: str) -> str:
    if state.preempted is not None:
        return f"{name_of(state, state.preempted.node)} will be taken away"
    if not state.wait_list:
        return f"{name} asks for another"
    who = in_words(names_of(state, state.wait_list))
    return f"the newcomer {who} is taken in" if len(state.wait_list) == 1 else f"the newcomers {who} are taken in"


def end_round(state: State, end: RoundEnd) -> State:
    """The state once the round that it holds is over: those who were in it keep their seats until they come back."""
    return state._replace(
        round=max(state.round + 1, state.next_round),
        complete=False,
        participants={},
        former={each: participant.rank for each, participant in state.participants.items()},
        succeeded=frozenset(),
        consents=frozenset(),
        preempted=None,
        hold=0.0,
        ledger=_entered(state.ledger, end.reason),
        ended=end,
    )


def _end_job_if_all_succeeded(state: State) -> State:
    # Who has succeeded and gone still stands among the succeeded: nobody is taken in for it.
    if len(state.succeeded) < len(state.participants) or not state.succeeded.issuperset(state.participants):
        return state
    return state._replace(closed=True, verdict=Verdict(Outcome.SUCCEEDED))


def _entered(ledger: Ledger, reason: Reason) -> Ledger:
    match reason:
        case Reason.FAILURE:
            return ledger._replace(failures=ledger.failures + 1)
        case Reason.LOST:
            return ledger._replace(lost=ledger.lost + 1)
        case Reason.DEPARTED:
            return ledger._replace(departed=ledger.departed + 1)
        case Reason.DRAINED:
            return ledger._replace(drained=ledger.drained + 1)
        case Reason.GAVE_UP | Reason.FORGOTTEN:
            return ledger


def _without(mapping: Mapping[NodeId, V], node: NodeId) -> Mapping[NodeId, V]:
    if node not in mapping:
        return mapping
    rest = dict(mapping)  # copy and delete: a comprehension would make a thousand nodes' joins quadratic in Python
    del rest[node]
    return rest


_EFFECTS: dict[Act, Callable[[Action, State, NodeId, Settings], State]] = {
    Act.KEEP_ALIVE: _keep,
    Act.ADD_TO_PARTICIPANTS: _add_to_participants,
    Act.ADD_TO_WAIT_LIST: _add_to_wait_list,
    Act.ADD_TO_REDUNDANCY_LIST: _add_to_redundancy_list,
    Act.REMOVE_FROM_PARTICIPANTS: _remove_from_participants,
    Act.REMOVE_FROM_WAIT_LIST: _remove_from_wait_list,
    Act.REMOVE_FROM_REDUNDANCY_LIST: _remove_from_redundancy_list,
    Act.REMOVE_FROM_FORMER: _remove_from_former,
    Act.MARK_RENDEZVOUS_COMPLETE: _mark_complete,
    Act.MARK_RENDEZVOUS_CLOSED: _mark_closed,
    Act.MARK_SUCCEEDED: _mark_succeeded,
    Act.MARK_CONSENT: _mark_consent,
    Act.MARK_PREEMPTED: _mark_preempted,
    Act.MARK_JOB_FAILED: _mark_job_failed,
    Act.END_ROUND: _mark_round_ended,
    Act.ABANDON: _abandon,
}
"""Every other act leaves the state as it is."""
