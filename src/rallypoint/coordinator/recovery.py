"""How a new arbiter is filled by what the nodes of a running job hold. Pure: data in, data out.

The control plane was lost and is back, with nothing in its memory. Each node says what it holds (`ResumeRequest`):
its place
in the last round that it knows. From the first such word the size of the round is known; an absent stands for each node
that is yet to speak. Absents hold seats like anybody else; those who do not speak in time are taken out as lost.

Laws:

1. A round that was running runs on when all its nodes have spoken: nothing is told to anybody.
2. The newest round that anybody holds is the job's; who holds an older one comes back as a newcomer.
3. Who hosted the control plane inside its agent is gone with it: its round is over.
4. Only an arbiter that has completed no round of its own is filled. Another passes over the numbers, of
   rounds and of restarts, that were used before its time.
5. Who waited for a seat cannot know whether a round runs. Where only such nodes have spoken, no round is completed
   until those who run one have had the time to say so.
"""

from __future__ import annotations

from rallypoint.coordinator.placement import placements
from rallypoint.membership.state import NodeId, NodeInfo, Participant, Reason, RoundEnd, Settings, State
from rallypoint.membership.transitions import end_round
from rallypoint.protocol.messages import Notification, Placed, ResumeRequest, RoundEnded

_UNKNOWN_NODE = NodeInfo("", 0, "", 0)
_LEASES, _CONNECT = 3, 5.0


def recovery_timeout(settings: Settings) -> float:
    """Seconds for which a new arbiter waits for the nodes of a job that it was told of.

    So many leases, in which they notice that the former one is gone, and so many seconds, in which they find the new.
    """
    return _LEASES * settings.lease + _CONNECT


def recovered(state: State, node: NodeId, holding: ResumeRequest, settings: Settings) -> State:
    """The state once `node` has said what it holds. Unchanged if it tells nothing new."""
    if holding.round < 0 and state.round == 0 and not state.complete:
        return state._replace(restart_delay=recovery_timeout(settings))
    possible = holding.round >= 0 and 0 <= holding.group_rank < holding.group_world_size <= settings.max_nodes
    if state.closed or not possible:
        return state
    state = state._replace(
        ledger=state.ledger._replace(failures=max(state.ledger.failures, holding.failures)),
        max_restarts=holding.node_info.max_restarts if state.max_restarts < 0 else state.max_restarts,
    )
    if holding.round > state.round or (holding.round == state.round and not state.complete):
        return _adopt_round(state, node, holding, settings)
    if holding.origin != state.origin:
        return state  # another round, which happens to have the same number
    if holding.round == state.round:
        return _add_participant(state, node, holding)
    if holding.round == state.round - 1 and not state.complete:
        return _add_survivor(state, node, holding)
    return state


def earlier_identity(state: State, node: NodeId, holding: ResumeRequest) -> NodeId | None:
    """Who `node` is in the state already, if what it says was heard in an earlier session of the same process."""
    absent = NodeId.placeholder(holding.group_rank)
    if absent in state.participants or absent in state.survivors:
        return None  # nobody has spoken for this seat yet: found so, thousands of nodes come back in linear time
    seats = state.participants.items()
    ranks = {each: seat.rank if state.complete else seat.previous_rank for each, seat in seats} | dict(state.survivors)
    if (holding.origin, holding.round) != (state.origin, state.round if state.complete else state.round - 1):
        return None
    same = (each for each, rank in ranks.items() if rank == holding.group_rank)
    return next((each for each in same if each[:2] == node[:2]), None)


def with_later_rounds(state: State, holding: ResumeRequest) -> State:
    """The state of an arbiter with rounds of its own, once a node has said what it holds of rounds before its time."""
    return state._replace(
        next_round=max(state.next_round, holding.round + 1, holding.last_ended_round + 1),
        ledger=state.ledger._replace(failures=max(state.ledger.failures, holding.failures)),
    )


def missed_notifications(state: State, node: NodeId, holding: ResumeRequest) -> list[Notification]:
    """What `node` has missed of a job that goes on, judged by what it holds."""
    if node in state.participants and state.complete:
        return [Placed(placements(state)[node])] if state.round > holding.round else []
    if node in state.succeeded and state.round == holding.round:
        return []
    if not holding.round_over:
        return [RoundEnded(end_of(state, holding.round))]
    last = state.round - 1
    waits = node in state.participants or node in state.wait_list or node in state.redundancy_list
    if holding.joining and last > max(holding.round, holding.last_ended_round) and not waits:
        # A place that it was given is lost again, and the worker store that it brought may have been used there.
        return [RoundEnded(end_of(state, last))]
    return []


def end_of(state: State, round_: int) -> RoundEnd:
    """How a round ended that ran before the state was as it is, as far as that is known."""
    ended = state.ended
    return ended if ended is not None and ended.round == round_ else RoundEnd(round_, Reason.FORGOTTEN, "")


def _adopt_round(state: State, node: NodeId, holding: ResumeRequest, settings: Settings) -> State:
    """The first to speak of its round: all seats of that round are taken, those who came before wait."""
    ranks = range(holding.group_world_size)
    held = {(node if rank == holding.group_rank else NodeId.placeholder(rank)): rank for rank in ranks}
    forming = {} if state.complete else state.participants
    newcomers = {each: participant.node_info for each, participant in forming.items()} | dict(state.wait_list)
    seats = max(0, settings.max_nodes - len(held))
    wait_list = {each: newcomers[each] for each in sorted(newcomers)[:seats]}
    spares = {each: newcomers[each] for each in sorted(newcomers)[seats:]}
    running = state._replace(
        round=holding.round,
        origin=holding.origin,
        restarts=holding.failures,
        complete=True,
        last_call=0,
        restart_delay=0.0,
        participants={
            each: Participant(holding.node_info if each == node else _UNKNOWN_NODE, rank) for each, rank in held.items()
        },
        wait_list=wait_list,
        redundancy_list={**state.redundancy_list, **spares},
        survivors={},
        succeeded=frozenset(),
    )
    host = NodeId.placeholder(holding.control_rank)
    if host in held:
        lost = RoundEnd(holding.round, Reason.LOST, str(host), detail="it hosted the control plane")
        return end_round(_without(running, host), lost)
    if holding.round_over:
        return end_round(running, RoundEnd(holding.round, Reason.FORGOTTEN, ""))
    return running


def _add_participant(state: State, node: NodeId, holding: ResumeRequest) -> State:
    """One more node of the round that runs."""
    absent = NodeId.placeholder(holding.group_rank)
    if absent not in state.participants:
        return state
    participants = dict(state.participants)
    del participants[absent]
    participants[node] = Participant(holding.node_info, holding.group_rank)
    after = state._replace(participants=participants)
    if holding.round_over:
        return end_round(after, RoundEnd(holding.round, Reason.FORGOTTEN, ""))
    return after


def _add_survivor(state: State, node: NodeId, holding: ResumeRequest) -> State:
    """One more node of the round that is over."""
    absent = NodeId.placeholder(holding.group_rank)
    if absent not in state.survivors:
        return state
    former = dict(state.survivors)
    former[node] = former.pop(absent)
    return state._replace(survivors=former)


def _without(state: State, node: NodeId) -> State:
    return state._replace(participants={each: held for each, held in state.participants.items() if each != node})
