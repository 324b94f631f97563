"""Fills a new coordinator from the nodes of a running job. Pure: data in, data out.

The control plane was lost and is back without its state. Each node reports its place in the last round that it knows
(`ResumeRequest`). The first report determines the size of the round. A placeholder occupies the place of each node that
has not reported yet. Nodes that do not report in time are removed as lost.

Laws:

1. A running round continues once all its nodes have reported. No node is notified.
2. The newest round that any node reports is the job's. A node that reports an older round returns as a new node.
3. A node whose agent hosted the control plane is gone with it. This ends its round, unless the node had succeeded. A
   round's nodes know which nodes succeeded (`NodesSucceeded`), so this knowledge outlives the coordinator.
4. Only a coordinator that has not completed a round itself is filled. Any other skips the numbers of rounds and
   restarts that an earlier coordinator used.
5. A node that waited for a place cannot know whether a round is running. While only such nodes have reported, no round
   is completed until nodes of a running round had time to report.
6. A node that met another coordinator meanwhile gave up the join that it sent us (`resume_state`, law 1). It keeps its
   place, which waits for its next join: no round continues with the old join's data.
7. A node that keeps its place without a join (law 7 of `coordinator`) might not know that. It is notified of both its
   round's end and its new place, unless another coordinator has reached it meanwhile.
"""

from __future__ import annotations

from rallypoint.control.coordinator.notifications import preempted
from rallypoint.control.membership.mappings import with_entry, with_member, without, without_member
from rallypoint.control.membership.rules import end_round, number_fitting, with_consent, with_size
from rallypoint.control.membership.state import (
    NodeId,
    NodeInfo,
    Participant,
    Reason,
    RoundEnd,
    Settings,
    State,
    name_of,
    recovery_timeout,
)
from rallypoint.control.protocol.messages import Notification, ResumeRequest, RoundEnded, ranks_in

_UNKNOWN_NODE = NodeInfo("", 0, "", 0)
_GIVEN_UP_DETAIL = "it has since requested a place from another coordinator"
_HOST_DETAIL = "it hosted the control plane"


def recovered(state: State, node: NodeId, request: ResumeRequest, settings: Settings) -> State:
    """The state after the report of `node`; unchanged if the report brings nothing new.

    The caller has already checked that the job can have had this round (`may_have_been`).
    """
    if request.round < 0 and state.round == 0 and not state.complete:
        delay = recovery_timeout(settings)
        return state if state.restart_delay == delay else state._replace(restart_delay=delay)
    possible = request.round >= 0 and 0 <= request.group_rank < request.group_world_size
    if state.closed or not possible or node in state.participants or node in state.survivors:
        return state
    state = state._replace(
        ledger=state.ledger._replace(failures=max(state.ledger.failures, request.failures)),
        max_restarts=request.node_info.max_restarts if state.max_restarts < 0 else state.max_restarts,
    )
    if request.round > state.round or (request.round == state.round and not state.complete):
        return _adopt_round(_unlisted(state, node), node, request, settings)
    if request.origin != state.origin:
        return state  # a different round with the same number
    if request.round == state.round:
        return _add_participant(_unlisted(state, node), node, request, settings)
    if request.round == _last_complete(state) and not state.complete:
        return _add_survivor(_unlisted(state, node), node, request)
    return state


def _unlisted(state: State, node: NodeId) -> State:
    """The state without a waiting node, which now has a place from another coordinator."""
    if node not in state.wait_list and node not in state.redundancy_list:
        return state
    return state._replace(
        wait_list=without(state.wait_list, node), redundancy_list=without(state.redundancy_list, node)
    )


def may_have_been(request: ResumeRequest, settings: Settings) -> bool:
    """Whether the job can have had a round of that many nodes. An operator may have reduced it since."""
    return request.group_world_size <= settings.max_nodes or request.size is not None


def with_size_of(state: State, request: ResumeRequest, settings: Settings) -> State:
    """The state with the round's number of nodes, if an operator changed it and only the nodes know."""
    size = request.size
    if size is None or state.size is not None or size.min_nodes > size.max_nodes:
        return state
    return with_size(state, size, settings)


def with_later_rounds(state: State, request: ResumeRequest) -> State:
    """The state of a coordinator with its own rounds after a node reported another coordinator's rounds."""
    next_round = max(request.round, request.last_ended_round) + 1
    unused = max(state.next_round, state.round + 1) if state.complete else state.round
    if next_round <= unused and request.failures <= state.ledger.failures:
        return state
    return state._replace(
        round=state.round if state.complete else max(state.round, next_round),
        next_round=max(state.next_round, next_round),
        ledger=state.ledger._replace(failures=max(state.ledger.failures, request.failures)),
    )


def missed_notifications(state: State, node: NodeId, request: ResumeRequest) -> list[Notification]:
    """Notifications, besides its placement, that `node` missed according to its report."""
    if node in state.participants and state.complete:
        unaware = not request.round_over and request.round < state.round  # the node kept its place (law 7)
        ended = [RoundEnded(end_of(state, request.round), keeps_place=True)] if unaware else []
        must_save = state.is_preempted and node not in state.consents and node not in state.succeeded
        return [*ended, preempted(state)] if must_save else [*ended]
    if node in state.succeeded and state.round == request.round:
        return []
    if not request.round_over:
        return [RoundEnded(end_of(state, request.round))]
    last = state.round - 1 if state.complete else _last_complete(state)
    waits = node in state.participants or node in state.wait_list or node in state.redundancy_list
    if request.joining and last > max(request.round, request.last_ended_round) and not waits:
        # The node lost a place that it was given, and its worker store might have been used there.
        return [RoundEnded(end_of(state, last))]
    return []


def without_given_up_join(
    state: State, node: NodeId, request: ResumeRequest, settings: Settings, incarnation: str
) -> State:
    """The state after `node` returned to the coordinator `incarnation` and reported the join that it waits with (law
    6), unless it kept its place (law 7)."""
    place = state.participants.get(node)
    if place is None or (request.joining and request.node_info.store_port == place.node_info.store_port):
        return state
    if state.complete:
        unaware = not request.round_over and request.incarnation == incarnation and place.previous_rank is not None
        if state.round <= request.round or unaware:
            return state
        end = RoundEnd(state.round, Reason.LOST, name_of(state, node), detail=_GIVEN_UP_DETAIL)
        return _over_for(state, node, end, settings)
    after = state._replace(participants=without(state.participants, node))
    if number_fitting(after, settings) < settings.min_nodes:
        after = after._replace(last_call=0)
    if place.previous_rank is None:
        return after._replace(wait_list=with_entry(state.wait_list, node, place.node_info))
    return after._replace(survivors=with_entry(state.survivors, node, place.previous_rank))


def _last_complete(state: State) -> int:
    """Number of the running or last complete round; -1 for none. Numbers may be skipped."""
    if state.complete:
        return state.round
    return state.round - 1 if state.ended is None else state.ended.round


def end_of(state: State, round_: int) -> RoundEnd:
    """How an earlier round ended, as far as this state shows it."""
    ended = state.ended
    return ended if ended is not None and ended.round == round_ else RoundEnd(round_, Reason.FORGOTTEN, "")


def _adopt_round(state: State, node: NodeId, request: ResumeRequest, settings: Settings) -> State:
    """Adopt the round of the first node to report: its places are all taken, and earlier nodes wait."""
    ranks = range(request.group_world_size)
    rank_by_node = {(node if rank == request.group_rank else NodeId.placeholder(rank)): rank for rank in ranks}
    forming = {} if state.complete else state.participants
    new_nodes = {other: participant.node_info for other, participant in forming.items()} | dict(state.wait_list)
    places = max(0, settings.max_nodes - len(rank_by_node)) if settings.segment < 2 else 0
    wait_list = {other: new_nodes[other] for other in sorted(new_nodes)[:places]}
    spares = {other: new_nodes[other] for other in sorted(new_nodes)[places:]}
    running = state._replace(
        round=request.round,
        origin=request.origin,
        restarts=request.failures,
        complete=True,
        last_call=0,
        restart_delay=0.0,
        participants={
            member: Participant(request.node_info if member == node else _UNKNOWN_NODE, rank)
            for member, rank in rank_by_node.items()
        },
        wait_list=wait_list,
        redundancy_list={**state.redundancy_list, **spares},
        survivors={},
        succeeded=frozenset(),
        finished={},
        consents=frozenset(),
        preempted=state.preempted if state.is_preempted else None,
        quiet=frozenset(),
    )
    running = _with_successes(running, request)
    host, end = NodeId.placeholder(request.control_rank), RoundEnd(request.round, Reason.FORGOTTEN, "")
    over = request.round_over
    if host in rank_by_node:
        place, others = running.participants[host], without(running.participants, host)
        running = running._replace(participants=others)
        if host in running.succeeded:
            running = running._replace(finished=with_entry(running.finished, host, place))
        elif not running.is_preempted:
            over, end = True, RoundEnd(request.round, Reason.LOST, str(host), detail=_HOST_DETAIL)
    return _over_for(running, node, end, settings) if over else running


def _with_successes(state: State, request: ResumeRequest) -> State:
    """The state with unreported nodes' successes that a reporting node knows about.

    1. A succeeds and B is notified. A is done and stops, and with it the coordinator that it hosts.
    2. B reports to a new coordinator. A never does.
    3. If A were merely awaited, the round, and B's work, would end at A's deadline.
    """
    succeeded = state.succeeded
    for rank in ranks_in(request.succeeded, request.group_world_size):
        node = NodeId.placeholder(rank)
        if node in state.participants:
            succeeded = with_member(succeeded, node)
    return state if succeeded is state.succeeded else state._replace(succeeded=succeeded)


def _over_for(state: State, node: NodeId, end: RoundEnd, settings: Settings) -> State:
    """The state after a node's round ended. In a preempted job it continues for nodes that are still saving."""
    return with_consent(state, node, settings) if state.is_preempted else end_round(state, end)


def _add_participant(state: State, node: NodeId, request: ResumeRequest, settings: Settings) -> State:
    """Add another node of the running round."""
    placeholder = NodeId.placeholder(request.group_rank)
    if placeholder not in state.participants:
        return state
    others = without(state.participants, placeholder)
    place = Participant(request.node_info, request.group_rank)
    succeeded = without_member(state.succeeded, placeholder)  # the node reports its success itself right after this
    after = state._replace(participants=with_entry(others, node, place), succeeded=succeeded)
    after = _with_successes(after, request)
    if not request.round_over:
        return after
    return _over_for(after, node, RoundEnd(request.round, Reason.FORGOTTEN, ""), settings)


def _add_survivor(state: State, node: NodeId, request: ResumeRequest) -> State:
    """Add another node of the round that ended."""
    placeholder = NodeId.placeholder(request.group_rank)
    rank = state.survivors.get(placeholder)
    if rank is None:
        return state
    return state._replace(survivors=with_entry(without(state.survivors, placeholder), node, rank))
