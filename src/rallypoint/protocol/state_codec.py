"""The state as bytes for shared backends: MessagePack by `msgspec`, typed, versioned, bounded. No pickle."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rallypoint.membership.state import (
    AbandonedRendezvous,
    FailureStreak,
    Ledger,
    NodeId,
    NodeInfo,
    Participant,
    Preemption,
    RemovedNode,
    RoundEnd,
    State,
    Verdict,
    known_to,
)
from rallypoint.protocol.errors import RendezvousStateError
from rallypoint.protocol.validation import ValidationError, validated

_VERSION = b"rallypoint-state-5:"
_MAX_STATE = 8 * 1024 * 1024
_MAX_NAME = 255


@dataclass(frozen=True, slots=True)
class _EncodedState:
    """`State` with its maps as lists of pairs: keys of maps in MessagePack are not typed."""

    round: int
    complete: bool
    last_call: int
    last_calls: int
    closed: bool
    participants: list[tuple[NodeId, Participant]]
    wait_list: list[tuple[NodeId, NodeInfo]]
    redundancy_list: list[tuple[NodeId, NodeInfo]]
    survivors: list[tuple[NodeId, int]]
    succeeded: list[NodeId]
    heartbeats: list[tuple[NodeId, int]]
    ledger: Ledger
    consents: list[NodeId]
    preempted: Preemption | None
    failure_streak: FailureStreak
    restart_delay: float
    restarts: int
    origin: str
    next_round: int
    ended: RoundEnd | None
    verdict: Verdict | None
    removed: tuple[RemovedNode, ...]
    abandoned: AbandonedRendezvous
    max_restarts: int
    programs: list[tuple[str, str]]


_decoder = msgspec.msgpack.Decoder(_EncodedState)


def encode_state(state: State) -> bytes:
    """The bytes of a state; equal states give equal bytes."""
    blob = _EncodedState(
        state.round,
        state.complete,
        state.last_call,
        state.last_calls,
        state.closed,
        sorted(state.participants.items(), key=lambda entry: entry[0]),
        sorted(state.wait_list.items(), key=lambda entry: entry[0]),
        sorted(state.redundancy_list.items(), key=lambda entry: entry[0]),
        sorted(state.survivors.items()),
        sorted(state.succeeded),
        sorted(state.heartbeats.items()),
        state.ledger,
        sorted(state.consents),
        state.preempted,
        state.failure_streak,
        state.restart_delay,
        state.restarts,
        state.origin,
        state.next_round,
        state.ended,
        state.verdict,
        state.removed,
        state.abandoned,
        state.max_restarts,
        sorted(state.programs.items()),
    )
    return _VERSION + msgspec.msgpack.encode(blob)


def decode_state(data: bytes) -> State:
    """The state that the bytes hold.

    Raises:
        RendezvousStateError: they hold none, or one of another version.
    """
    if not data.startswith(_VERSION):
        raise RendezvousStateError(
            f"the shared rendezvous state starts with {data[:24]!r}, which this version of Rallypoint did not write; "
            "use the same version on all nodes, and a place and --rdzv-id of its own for each job"
        )
    if len(data) > _MAX_STATE:
        raise RendezvousStateError(f"the shared rendezvous state has {len(data)} bytes, more than it may have")
    try:
        blob = _decoder.decode(data[len(_VERSION) :])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # a bad string is a ValueError
        raise RendezvousStateError(
            f"the shared rendezvous state is damaged ({error}); remove it, or use another --rdzv-id"
        ) from None
    found = State(
        blob.round,
        blob.complete,
        blob.last_call,
        blob.last_calls,
        blob.closed,
        dict(blob.participants),
        dict(blob.wait_list),
        dict(blob.redundancy_list),
        dict(blob.survivors),
        frozenset(blob.succeeded),
        dict(blob.heartbeats),
        blob.ledger,
        frozenset(blob.consents),
        blob.preempted,
        blob.failure_streak,
        blob.restart_delay,
        blob.restarts,
        blob.origin,
        blob.next_round,
        blob.ended,
        blob.verdict,
        blob.removed,
        blob.abandoned,
        blob.max_restarts,
        dict(blob.programs),
    )
    try:
        state = validated(found)  # it comes from another machine, as messages do
        for nodes in (found.participants, found.wait_list, found.redundancy_list):
            for node, held in nodes.items():
                if not node.is_placeholder:
                    validated(held)
    except ValidationError as error:
        raise RendezvousStateError(f"the shared rendezvous state cannot be: {error}; use another --rdzv-id") from None
    if not all(_with_printable_names(each) for each in known_to(state)):
        raise RendezvousStateError("the shared rendezvous state names nodes by what is no text; use another --rdzv-id")
    return state


def _with_printable_names(node: NodeId) -> bool:
    return max(len(node.addr), len(node.host)) <= _MAX_NAME and node.addr.isprintable() and node.host.isprintable()
