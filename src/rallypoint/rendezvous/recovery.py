"""How a new arbiter is filled by what the nodes of a running job hold. Pure: data in, data out.

The control plane was lost and is back, with nothing in its memory. Each node says what it holds (`Holding`): its place
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

from rallypoint.rendezvous.effects import end_round
from rallypoint.rendezvous.messages import Holding, Notice, Placed, RoundEnded
from rallypoint.rendezvous.placement import placements
from rallypoint.rendezvous.state import Member, NodeId, Participant, Reason, RoundEnd, Settings, State

_NOBODY = Member("", 0, "", 0)
_LEASES, _CONNECT = 3, 5.0


def patience(settings: Settings) -> float:
    """Seconds for which a new arbiter waits for the nodes of a job that it was told of.

    So many leases, in which they notice that the former one is gone, and so many seconds, in which they find the new.
    """
    return _LEASES * settings.lease + _CONNECT


def recovered(state: State, node: NodeId, holding: Holding, settings: Settings) -> State:
    """The state once `node` has said what it holds. Unchanged if it tells nothing new."""
    if holding.round < 0 and state.round == 0 and not state.complete:
        return state._replace(hold=patience(settings))
    possible = holding.round >= 0 and 0 <= holding.group_rank < holding.group_world_size <= settings.max_nodes
    if state.closed or not possible:
        return state
    state = state._replace(
        ledger=state.ledger._replace(failures=max(state.ledger.failures, holding.failures)),
        max_restarts=holding.member.max_restarts if state.max_restarts < 0 else state.max_restarts,
    )
    if holding.round > state.round or (holding.round == state.round and not state.complete):
        return _adopted(state, node, holding, settings)
    if holding.origin != state.origin:
        return state  # another round, which happens to have the same number
    if holding.round == state.round:
        return _joined_by(state, node, holding)
    if holding.round == state.round - 1 and not state.complete:
        return _seat_kept(state, node, holding)
    return state


def seated_before(state: State, node: NodeId, holding: Holding) -> NodeId | None:
    """Who `node` is in the state already, if what it says was heard in an earlier session of the same process."""
    absent = NodeId.absent(holding.group_rank)
    if absent in state.participants or absent in state.former:
        return None  # nobody has spoken for this seat yet: found so, thousands of nodes come back in linear time
    seats = state.participants.items()
    ranks = {each: seat.rank if state.complete else seat.former for each, seat in seats} | dict(state.former)
    if (holding.origin, holding.round) != (state.origin, state.round if state.complete else state.round - 1):
        return None
    same = (each for each, rank in ranks.items() if rank == holding.group_rank)
    return next((each for each in same if each[:2] == node[:2]), None)


def passed_over(state: State, holding: Holding) -> State:
    """The state of an arbiter with rounds of its own, once a node has said what it holds of rounds before its time."""
    return state._replace(
        next_round=max(state.next_round, holding.round + 1, holding.past + 1),
        ledger=state.ledger._replace(failures=max(state.ledger.failures, holding.failures)),
    )


def news(state: State, node: NodeId, holding: Holding) -> list[Notice]:
    """What `node` has missed of a job that goes on, judged by what it holds."""
    if node in state.participants and state.complete:
        return [Placed(placements(state)[node])] if state.round > holding.round else []
    if node in state.succeeded and state.round == holding.round:
        return []
    if not holding.over:
        return [RoundEnded(end_of(state, holding.round))]
    last = state.round - 1
    waits = node in state.participants or node in state.wait_list or node in state.redundancy_list
    if holding.joining and last > max(holding.round, holding.past) and not waits:
        # A place that it was given is lost again, and the worker store that it brought may have been used there.
        return [RoundEnded(end_of(state, last))]
    return []


def end_of(state: State, round_: int) -> RoundEnd:
    """How a round ended that ran before the state was as it is, as far as that is known."""
    ended = state.ended
    return ended if ended is not None and ended.round == round_ else RoundEnd(round_, Reason.FORGOTTEN, "")


def _adopted(state: State, node: NodeId, holding: Holding, settings: Settings) -> State:
    """The first to speak of its round: all seats of that round are taken, those who came before wait."""
    ranks = range(holding.group_world_size)
    held = {(node if rank == holding.group_rank else NodeId.absent(rank)): rank for rank in ranks}
    forming = {} if state.complete else state.participants
    newcomers = {each: participant.member for each, participant in forming.items()} | dict(state.wait_list)
    seats = max(0, settings.max_nodes - len(held))
    wait_list = {each: newcomers[each] for each in sorted(newcomers)[:seats]}
    spares = {each: newcomers[each] for each in sorted(newcomers)[seats:]}
    running = state._replace(
        round=holding.round,
        origin=holding.origin,
        restarts=holding.failures,
        complete=True,
        last_call=0,
        hold=0.0,
        participants={
            each: Participant(holding.member if each == node else _NOBODY, rank) for each, rank in held.items()
        },
        wait_list=wait_list,
        redundancy_list={**state.redundancy_list, **spares},
        former={},
        succeeded=frozenset(),
    )
    host = NodeId.absent(holding.control_rank)
    if host in held:
        lost = RoundEnd(holding.round, Reason.LOST, str(host), detail="it hosted the control plane")
        return end_round(_without(running, host), lost)
    if holding.over:
        return end_round(running, RoundEnd(holding.round, Reason.FORGOTTEN, ""))
    return running


def _joined_by(state: State, node: NodeId, holding: Holding) -> State:
    """One more node of the round that runs."""
    absent = NodeId.absent(holding.group_rank)
    if absent not in state.participants:
        return state
    participants = dict(state.participants)
    del participants[absent]
    participants[node] = Participant(holding.member, holding.group_rank)
    after = state._replace(participants=participants)
    if holding.over:
        return end_round(after, RoundEnd(holding.round, Reason.FORGOTTEN, ""))
    return after


def _seat_kept(state: State, node: NodeId, holding: Holding) -> State:
    """One more node of the round that is over."""
    absent = NodeId.absent(holding.group_rank)
    if absent not in state.former:
        return state
    former = dict(state.former)
    former[node] = former.pop(absent)
    return state._replace(former=former)


def _without(state: State, node: NodeId) -> State:
    return state._replace(participants={each: held for each, held in state.participants.items() if each != node})
