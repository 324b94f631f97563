"""Encodes the state for shared backends: MessagePack by `msgspec`, typed, versioned, bounded. No pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from rallypoint.membership.state import NodeId, State, known_to
from rallypoint.protocol.errors import RendezvousStateError
from rallypoint.protocol.validation import ValidationError, validated

_VERSION = b"rallypoint-state-11:"
_MAX_STATE = 8 * 1024 * 1024
_MAX_NAME = 255


def _field_type(kind: Any) -> Any:
    """The type that encodes a field of the state: a map as a list of pairs, because keys of maps in MessagePack are not
    typed.
    """
    if get_origin(kind) is Mapping:
        return list[tuple[*get_args(kind)]]  # type: ignore[misc]
    return list[get_args(kind)[0]] if get_origin(kind) is frozenset else kind  # type: ignore[misc]


_KINDS = get_type_hints(State)
_decoder = msgspec.msgpack.Decoder(
    msgspec.defstruct("EncodedState", [(name, _field_type(kind)) for name, kind in _KINDS.items()], frozen=True)
)


_COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    name: dict if get_origin(kind) is Mapping else frozenset
    for name, kind in _KINDS.items()
    if get_origin(kind) in (Mapping, frozenset)
}
"""Fields that are sent as lists, and the functions that restore them."""


def encode_state(state: State) -> bytes:
    """The bytes of a state; equal states give equal bytes."""
    fields = state._asdict()
    for name, kind in _COLLECTIONS.items():
        value = fields[name]
        fields[name] = sorted(value.items(), key=lambda entry: entry[0]) if kind is dict else sorted(value)
    return _VERSION + msgspec.msgpack.encode(fields)


def decode_state(data: bytes) -> State:
    """The state that the bytes hold.

    Raises:
        RendezvousStateError: they are not a state, or one of another version.
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
    fields = msgspec.structs.asdict(blob)
    found = State(**fields | {name: make(fields[name]) for name, make in _COLLECTIONS.items()})
    try:
        state = validated(found)  # it comes from another machine, as messages do
        for nodes in (found.participants, found.finished, found.wait_list, found.redundancy_list):
            for node, held in nodes.items():
                if not node.is_placeholder:
                    validated(held)
    except ValidationError as error:
        raise RendezvousStateError(f"the shared rendezvous state cannot be: {error}; use another --rdzv-id") from None
    if not all(_with_printable_names(each) for each in (*known_to(state), *state.finished)):
        raise RendezvousStateError("the shared rendezvous state names nodes by what is no text; use another --rdzv-id")
    return state


def _with_printable_names(node: NodeId) -> bool:
    return max(len(node.addr), len(node.host)) <= _MAX_NAME and node.addr.isprintable() and node.host.isprintable()
