"""Encodes and decodes typed messages: MessagePack by `msgspec`, checked against the types of `messages`. No pickle.

Values that types allow but no message may hold are refused, or made harmless, by `control.protocol.validation`.

A message is the pair of its tag and its fields. Tags are the positions in the table below: append to it, never reorder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from functools import cache, partial
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from rallypoint.control.membership import state as membership
from rallypoint.control.membership.state import NodeId, State, known_to
from rallypoint.control.protocol import handshake, messages, observation
from rallypoint.control.protocol.errors import FrameError, RendezvousStateError
from rallypoint.control.protocol.messages import SIGNATURE_SIZE
from rallypoint.control.protocol.validation import ValidationError, validated

# Frames: a four-byte length, big-endian, and that many bytes.

MAX_FRAME = 64 * 1024
"""Bytes that one message may have. The largest, a failure with its traceback, stays far below it."""

MAGIC = b"RALLYPT\n"
"""The first bytes from both sides, so that each knows at once whether its peer is one of ours."""

TLS_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection, in place of the magic (RFC 8446, section 5.1)."""


def frame(payload: bytes) -> bytes:
    """One message ready to send.

    Raises:
        FrameError: it is larger than a frame may be.
    """
    if len(payload) > MAX_FRAME:
        check_size(len(payload))
    return len(payload).to_bytes(4, "big") + payload


def check_size(size: int) -> None:
    """Raise FrameError if a message of `size` bytes, with its signature, is larger than a frame may be."""
    most = MAX_FRAME - SIGNATURE_SIZE
    if size > most:
        raise FrameError(f"a message of {size} bytes is larger than a frame may be ({most} bytes)")


class FrameReader:
    """Cuts a stream of bytes into frames, after the magic that must come first.

    It raises at the first invalid byte and never holds more than one frame and what arrived with it.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._greeted = False

    @property
    def has_partial_frame(self) -> bool:
        """Whether there are bytes of an incomplete frame."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the frames that are now complete.

        Raises:
            FrameError: the bytes are not ours. The reader cannot be used afterwards.
        """
        if self._buffer:
            data = self._buffer + data
        at, size = 0, len(data)
        if not self._greeted:
            seen = data[: len(MAGIC)]
            if not MAGIC.startswith(seen):
                raise FrameError(f"it starts with {data[:16]!r}, which is not Rallypoint's greeting")
            if len(seen) < len(MAGIC):
                self._buffer = data
                return []
            at = len(MAGIC)
            self._greeted = True
        frames = []
        while size - at >= 4:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end - at - 4 > MAX_FRAME:
                claimed = end - at - 4
                raise FrameError(f"a frame claims {claimed} bytes, more than the {MAX_FRAME} that a frame may have")
            if end > size:
                break
            frames.append(data[at + 4 : end])
            at = end
        self._buffer = data[at:]
        return frames


M = TypeVar("M")

_TYPES: tuple[type, ...] = (
    handshake.Hello,
    handshake.Challenge,
    handshake.Proof,
    handshake.Welcome,
    handshake.HandshakeRefused,
    messages.JoinRequest,
    messages.LeaveRequest,
    membership.Fail,
    membership.Succeed,
    membership.Drain,
    membership.Close,
    messages.Heartbeat,
    messages.ProgressRequest,
    messages.Placed,
    messages.RoundEnded,
    messages.NodesWaiting,
    messages.JobEnded,
    messages.JoinRefused,
    messages.Progress,
    membership.Preempt,
    messages.ResumeRequest,
    messages.Preempted,
    messages.LeaveReply,
    messages.ConfigDiffers,
    messages.SessionEnded,
    messages.StorePeers,
    observation.WatchRequest,
    observation.RestartCommand,
    observation.DrainCommand,
    observation.StopCommand,
    observation.ResizeCommand,
    observation.CollectCommand,
    observation.SnapshotPart,
    observation.JobList,
    observation.CommandReply,
    messages.CollectedPart,
    messages.ReportRequested,
    messages.NodeReport,
    messages.CollectRequested,
    messages.DrainRequested,
    messages.OperatorAction,
    membership.RecordProgress,
    membership.PreemptJob,
    membership.ReportQuiet,
    messages.HangFound,
    messages.CollectionEnded,
    messages.HangReport,
    messages.ConfirmRequest,
    messages.Confirmed,
    messages.Taken,
    messages.NextStore,
    messages.FaultRequested,
    observation.FaultCommand,
    observation.ListRequest,
)
_TAG = {kind: tag for tag, kind in enumerate(_TYPES)}
_envelope = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_decoders: list[msgspec.msgpack.Decoder[object]] = [msgspec.msgpack.Decoder(kind) for kind in _TYPES]
_fields = msgspec.msgpack.Decoder(list[msgspec.Raw])
_number = msgspec.msgpack.Decoder(int)
_encode = msgspec.msgpack.Encoder().encode


class CodecError(Exception):
    """These bytes are not a message of ours; the text says why."""


def encode(message: object) -> bytes:
    """The bytes of a message of the table."""
    return _encode((_TAG[type(message)], message))


def decode(data: bytes, wanted: type[M]) -> M:
    """The message in `data`, which must be `wanted`.

    Raises:
        CodecError: it is not, or the bytes do not match the type that they claim.
    """
    return _decode({wanted}, data)  # type: ignore[no-any-return]


def _decode(wanted: Collection[type], data: bytes) -> Any:
    try:
        tag, raw = _envelope.decode(data)
        if not 0 <= tag < len(_TYPES):
            raise CodecError(f"message tag {tag} is unknown")
        if _TYPES[tag] not in wanted:
            raise CodecError(f"a {_TYPES[tag].__name__} has no place here")
        return validated(_decoders[tag].decode(raw))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # a bad string is a ValueError
        raise CodecError(str(error)) from None


def _decoder(messages: Any) -> Any:
    return partial(_decode, frozenset(get_args(messages)))


decode_request: Callable[[bytes], messages.Request] = _decoder(messages.Request)
"""Decode a message of a node in a session. As `decode`, these raise CodecError if it is something else."""
decode_notification: Callable[[bytes], messages.Notification] = _decoder(messages.Notification)
"""Decode a message of the server in a session."""
_FromWatcher = observation.WatcherRequest | observation.ListRequest
decode_watcher_request: Callable[[bytes], _FromWatcher] = _decoder(_FromWatcher)
"""Decode a message of a watcher in a session."""
_ToWatcher = observation.WatcherNotification | messages.SessionEnded
decode_watcher_notification: Callable[[bytes], _ToWatcher] = _decoder(_ToWatcher)
"""Decode a message of the server in a watcher's session."""
_Answer = handshake.Challenge | handshake.Welcome | handshake.HandshakeRefused
decode_answer: Callable[[bytes], _Answer] = _decoder(_Answer)
"""Decode a message of the server before the session."""


def version_of(data: bytes) -> int:
    """The version that a `Hello` of any version begins with.

    Raises:
        CodecError: this is no `Hello`.
    """
    try:
        tag, fields = _envelope.decode(data)
        first = _fields.decode(fields)[:1] if tag == _TAG[handshake.Hello] else []
        return _number.decode(first[0])
    except (msgspec.DecodeError, IndexError, ValueError, RecursionError) as error:
        raise CodecError(f"it does not begin with a Hello ({error})") from None


# The state of a job, for shared backends and the journal: versioned and bounded besides.


_VERSION = b"rallypoint-state-14:"
MAX_STATE = 64 * 1024 * 1024
"""Bytes that an encoded state may have: a kilobyte for each node of the largest job."""
_MAX_NAME = 255


def _field_type(kind: Any) -> Any:
    """The type that encodes a field of the state: a map as a list of pairs, because keys of maps in MessagePack are not
    typed.
    """
    if get_origin(kind) is Mapping:
        return list[tuple[*get_args(kind)]]  # type: ignore[misc]
    return list[get_args(kind)[0]] if get_origin(kind) is AbstractSet else kind  # type: ignore[misc]


@cache
def _state_decoder() -> msgspec.msgpack.Decoder[Any]:
    fields = [(name, _field_type(kind)) for name, kind in get_type_hints(State).items()]
    return msgspec.msgpack.Decoder(msgspec.defstruct("EncodedState", fields, frozen=True))


@cache
def _collections() -> dict[str, Callable[[Any], Any]]:
    """Fields that are sent as lists, and the functions that restore them."""
    kinds = {name: get_origin(kind) for name, kind in get_type_hints(State).items()}
    return {
        name: dict if kind is Mapping else frozenset for name, kind in kinds.items() if kind in (Mapping, AbstractSet)
    }


def encode_state(state: State) -> bytes:
    """The bytes of a state; equal states give equal bytes."""
    fields = state._asdict()
    for name, kind in _collections().items():
        value = fields[name]
        fields[name] = sorted(value.items(), key=lambda entry: entry[0]) if kind is dict else sorted(value)
    return _VERSION + _encode(fields)


def decode_state(data: bytes) -> State:
    """The state that the bytes hold.

    Raises:
        RendezvousStateError: they are not a state, or one of another version.
    """
    if not data.startswith(_VERSION):
        raise RendezvousStateError(
            f"the shared rendezvous state starts with {data[:24]!r}, which this version of Rallypoint did not write; "
            "use the same version on all nodes, and for each job its own place and --rdzv-id"
        )
    if len(data) > MAX_STATE:
        raise RendezvousStateError(f"the shared rendezvous state has {len(data)} bytes, more than it may have")
    try:
        blob = _state_decoder().decode(data[len(_VERSION) :])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # a bad string is a ValueError
        raise RendezvousStateError(
            f"the shared rendezvous state is damaged ({error}); remove it, or use another --rdzv-id"
        ) from None
    fields = msgspec.structs.asdict(blob)
    found = State(**fields | {name: make(fields[name]) for name, make in _collections().items()})
    try:
        state = validated(found)  # it comes from another machine, as messages do
        for nodes in (found.participants, found.finished, found.wait_list, found.redundancy_list):
            for node, held in nodes.items():
                if not node.is_placeholder:
                    validated(held)
    except ValidationError as error:
        raise RendezvousStateError(f"the shared rendezvous state cannot be: {error}; use another --rdzv-id") from None
    if not all(_with_printable_names(each) for each in (*known_to(state), *state.finished)):
        raise RendezvousStateError(
            "the shared rendezvous state has node names that are not text; use another --rdzv-id"
        )
    return state


def _with_printable_names(node: NodeId) -> bool:
    return max(len(node.addr), len(node.host)) <= _MAX_NAME and node.addr.isprintable() and node.host.isprintable()
