"""Rules that few jobs need: repeated failures, hangs, abandoned rendezvous, resizing. Pure; imported late.

A round hangs while all its participants are quiet. Each node times its own workers on its own clock, and reports when
it becomes quiet and when that ends. Laws:

1. If one node is not quiet, or reports nothing, the round does not hang.
2. The quiet nodes are stored only for the running round.
3. A node whose workers succeeded is timed like any other, from their end, so it cannot hide a hang on other nodes.
4. A preempted job does not hang: the deadline for saving ends it anyway, and until then other nodes might wait for a
   lost one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from rallypoint.control.membership.mappings import tally
from rallypoint.control.membership.state import (
    AbandonedRendezvous,
    FailureStreak,
    NodeId,
    NodeRange,
    Participant,
    Settings,
    State,
    hint_of,
    join_names,
    name_of,
    names_of,
)
from rallypoint.failures.cause import Cause
from rallypoint.failures.kinds import is_consequence, signature

_BLOCK = 128
"""Ranks per block."""


def failure_streak_after(state: State, cause: Cause, ran: float | None, settings: Settings) -> FailureStreak:
    """The streak after `cause` ended the running round of `state`, which ran for `ran` seconds (None: unknown).

    Progress ends the streak. A consequence of another failure does not count: it neither repeats nor replaces the last
    failure.
    """
    last, line = state.failure_streak, signature(cause)
    if _made_progress(state, ran, settings):
        return FailureStreak(line="" if is_consequence(cause) else line)
    if is_consequence(cause):
        return last._replace(failures=last.failures + 1)
    return FailureStreak(last.failures + 1, last.repeats + 1 if last.line == line else 0, line)


def _made_progress(state: State, ran: float | None, settings: Settings) -> bool:
    """Whether the running round made more progress than any before; without reports, whether it ran long enough."""
    if state.progress.reported:
        return state.progress.round == state.round
    return ran is not None and ran >= settings.min_healthy_time


def restarts_allowed(state: State, now: float, failures_at: Collection[float], settings: Settings) -> int:
    """How many failures the job can survive, as known now: those so far, plus the rest of the budget.

    Args:
        state: the state of the running round.
        now: the time on the observer's clock.
        failures_at: when the observer saw each of the last failures.
        settings: the settings of a job with a restart window.
    """
    recent = sum(1 for at in failures_at if now - at < settings.restart_window)
    return state.ledger.failures + max(0, settings.restarts_in_window - recent)


def is_hung(state: State) -> bool:
    """Whether all ranks of all nodes of the running round are quiet."""
    if not state.complete or state.closed or state.is_preempted or not 0 < len(state.participants) <= len(state.quiet):
        return False
    return all(node in state.quiet for node in state.participants)


def hang_began(before: State, after: State) -> bool:
    """Whether the round of `after` hangs and did not hang before."""
    return is_hung(after) and not (after.round == before.round and is_hung(before))


def abandoned_rendezvous(
    state: State, node: NodeId, seconds: float, joined: int, settings: Settings
) -> AbandonedRendezvous:
    """The state of the rendezvous that `node` gave up after `seconds`."""
    return AbandonedRendezvous(
        state.abandoned.number + 1,
        name_of(state, node),
        seconds,
        joined,
        hosts_of(state.participants),
        missing(state, settings),
    )


def hosts_of(nodes: Collection[NodeId], most: int = 8) -> tuple[str, ...]:
    """Hosts of some nodes, at most `most`, with pids if several nodes share a host."""
    few = list(itertools.islice(nodes, most))
    hosts = [str(node) for node in few]
    twins = {host for host in hosts if hosts.count(host) > 1}
    names = [f"{host} pid {node.pid}" if host in twins else host for host, node in zip(hosts, few, strict=True)]
    return tuple(names) if len(nodes) <= most else (*names, f"{len(nodes) - most} more")


def missing(state: State, settings: Settings, most: int = 4) -> tuple[str, ...]:
    """A few of the nodes still expected, if known: survivors or, with fixed ranks, the missing ranks."""
    if state.complete or not settings.fixed_ranks:
        return names_of(state, state.survivors, most)
    names = [f"node rank {rank}" for rank in itertools.islice(_missing_ranks(state, settings), most)]
    more = settings.max_nodes - len(state.participants) - len(names)
    return (*names, f"{more} more") if more > 0 else tuple(names)


def _missing_ranks(state: State, settings: Settings) -> Iterator[int]:
    """Fixed ranks without a participant. Skips complete blocks of ranks as a whole."""
    present, in_blocks = tally(state.participants, hint_of), tally(state.participants, _block_of)
    for block in range(0, settings.max_nodes, _BLOCK):
        if in_blocks.get(block, 0) < _BLOCK:
            ranks = range(block, min(block + _BLOCK, settings.max_nodes))
            yield from (rank for rank in ranks if rank not in present)


def _block_of(node: NodeId, participant: Participant) -> int:
    hint = hint_of(node, participant)
    return -1 if hint is None else hint - hint % _BLOCK


def drain_detail(state: State, name: str) -> str:
    """Why the round is drained with the consent of the node `name`."""
    if state.preempted is not None:
        return f"{name_of(state, state.preempted.node)} {state.preempted.why or 'is being preempted'}"
    if not state.wait_list:
        return f"{name} asks for another"
    who = join_names(names_of(state, state.wait_list))
    return f"the new node {who} joins" if len(state.wait_list) == 1 else f"the new nodes {who} join"


def with_ended_workers(state: State, node: NodeId) -> State:
    """The state that records that all workers of a departed node ended with 0."""
    removed = tuple(gone._replace(ended_with_0=gone.ended_with_0 or gone.node == node) for gone in state.removed)
    return state._replace(removed=removed)


def resized(state: State, size: NodeRange, number: int, *, has_segments: bool) -> State:
    """The state after an operator resized the job; `number` nodes could be in a round now.

    A node that loses its place waits as a spare, with segments only from the next round on. A forming round that now
    has enough nodes begins its last call.
    """
    least, most = size
    after = state._replace(size=size)
    if not has_segments:
        after = _without_excess(after, most)
    if after.complete or (after.last_call and least <= number):
        return after
    if number < least:
        return after._replace(last_call=0)
    return after._replace(last_call=after.last_calls + 1, last_calls=after.last_calls + 1)


def _without_excess(state: State, most: int) -> State:
    """Let at most `most` nodes keep their places in the forming or next round; the others become spares."""
    # Nodes with a place in the previous round take precedence.
    in_order = sorted(state.participants, key=lambda node: state.participants[node].previous_rank is None)
    out = () if state.complete else in_order[most:]
    room = most - len(state.participants) + len(out) - len(state.survivors)
    wait = list(state.wait_list)[max(0, room) :]
    if not out and not wait:
        return state
    spares = {node: state.participants[node].node_info for node in out} | {node: state.wait_list[node] for node in wait}
    return state._replace(
        participants={node: participant for node, participant in state.participants.items() if node not in spares},
        wait_list={node: node_info for node, node_info in state.wait_list.items() if node not in spares},
        redundancy_list={**state.redundancy_list, **spares},
    )
