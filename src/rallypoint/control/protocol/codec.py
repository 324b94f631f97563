"""Encodes and decodes typed messages: MessagePack by `msgspec`, checked against the types of `messages`. No pickle.

`control.protocol.validation` refuses or cleans values that the types permit but no message may contain.

A message is a pair of its tag and its fields. `observation` adds the watchers' messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from functools import cache, partial
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from rallypoint.control.membership import state as membership
from rallypoint.control.membership.state import NodeId, State, known_to
from rallypoint.control.protocol import handshake, messages
from rallypoint.control.protocol.errors import FrameError, RendezvousStateError
from rallypoint.control.protocol.messages import SIGNATURE_SIZE
from rallypoint.control.protocol.validation import ValidationError, validated

# Frames: a four-byte big-endian length, then that many bytes.

MAX_FRAME = 64 * 1024
"""Maximum size of a message in bytes. Even the largest kind, a failure with its traceback, stays far below it."""

MAX_GREETING = 10 * 1024
"""Maximum size from a peer that has proved nothing: a greeting contains the job's id twice (4 KiB each) and little
more."""

MAGIC = b"RALLYPT\n"
"""The first bytes from both sides, by which each recognizes a peer of ours at once."""

TLS_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection, in place of the magic (RFC 8446, section 5.1)."""


def frame(payload: bytes) -> bytes:
    """Turn one message into a frame.

    Raises:
        FrameError: the message is too large.
    """
    if len(payload) > MAX_FRAME:
        check_size(len(payload))
    return len(payload).to_bytes(4, "big") + payload


def check_size(size: int) -> None:
    """Raise FrameError if a message of `size` bytes plus its signature is too large for a frame."""
    most = MAX_FRAME - SIGNATURE_SIZE
    if size > most:
        raise FrameError(f"a message of {size} bytes is larger than the maximum frame of {most} bytes")


class FrameReader:
    """Cuts a byte stream, which must begin with the magic, into frames.

    Raises at the first invalid byte, and never buffers more than one frame and the bytes that arrived with it.
    """

    def __init__(self, most: int = MAX_FRAME) -> None:
        self.most = most
        """Maximum size of a frame from now on, in bytes."""
        self._buffer = b""
        self._greeted = False

    @property
    def has_partial_frame(self) -> bool:
        """Whether there are bytes of an incomplete frame."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes, and return the frames that are now complete.

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
            if end - at - 4 > self.most:
                claimed = end - at - 4
                raise FrameError(f"a frame claims {claimed} bytes, more than the maximum of {self.most}")
            if end > size:
                break
            frames.append(data[at + 4 : end])
            at = end
        self._buffer = data[at:]
        return frames


M = TypeVar("M")

_KINDS: dict[int, type] = {}
_TAGS: dict[type, int] = {}


def add_messages(first: int, *kinds: type) -> None:
    """Assign kinds of messages the tags from `first` on. A tag never changes its meaning; the next free tag is 57."""
    for tag, kind in enumerate(kinds, first):
        _KINDS[tag], _TAGS[kind] = kind, tag


add_messages(
    0,
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
)
# Tags 26 to 34, 52 and 53 belong to watchers (`observation`).
add_messages(
    35,
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
)
add_messages(54, messages.NodesSucceeded, messages.CauseSought, messages.CauseClues)

EXPENDABLE: tuple[type, ...] = (
    messages.NodeReport,
    messages.CollectedPart,
    messages.HangReport,
    messages.Taken,
    messages.CauseSought,
    messages.CauseClues,
    messages.ProgressRequest,
    membership.RecordProgress,
    membership.ReportQuiet,
    messages.HangFound,
    messages.CollectionEnded,
    messages.Progress,
    messages.NodesWaiting,
    messages.ConfigDiffers,
    messages.ReportRequested,
    messages.CollectRequested,
    messages.FaultRequested,
    messages.OperatorAction,
)
"""Messages that the job can continue without: one that cannot be sent is dropped and logged. If any other message
cannot be sent, the node or its session ends."""

_envelope = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_fields = msgspec.msgpack.Decoder(list[msgspec.Raw])
_number = msgspec.msgpack.Decoder(int)
_encode = msgspec.msgpack.Encoder().encode


@cache
def _decoder_of(kind: type) -> msgspec.msgpack.Decoder[object]:
    """Create a decoder on first use: most kinds never arrive at a node, and creating all takes milliseconds."""
    return msgspec.msgpack.Decoder(kind)


class CodecError(Exception):
    """The bytes are not a message of ours; the text says why.

    `kind` is the message type that they claim to be, if it is allowed here.
    """

    def __init__(self, text: str, kind: type | None = None) -> None:
        super().__init__(text)
        self.kind = kind


def encode(message: object) -> bytes:
    """Encode a message of the table."""
    return _encode((_TAGS[type(message)], message))


class NotSendable(ValueError):
    """The peer would not accept this message, or it is too large for a frame; the text says why."""


def sendable(message: object) -> bytes:
    """Encode a message with values of our own: the table used on receipt (`validation`) also cleans its texts and
    checks its numbers.

    Raises:
        NotSendable: a number is out of range, or the message is too large.
    """
    try:
        payload = encode(validated(message))
        check_size(len(payload))
    except (ValueError, OverflowError, FrameError) as error:
        raise NotSendable(str(error)) from None
    return payload


def decode(data: bytes, kind: type[M]) -> M:
    """Decode a message, which must be of that `kind`.

    Raises:
        CodecError: the message is of another kind, or the bytes do not match the type that they claim.
    """
    return _decode({kind}, data)  # type: ignore[no-any-return]


def _decode(kinds: Collection[type], data: bytes) -> Any:
    kind: type | None = None
    try:
        tag, raw = _envelope.decode(data)
        kind = _KINDS.get(tag)
        if kind is None:
            raise CodecError(f"message tag {tag} is unknown")
        if kind not in kinds:
            raise CodecError(f"a {kind.__name__} is not allowed here")
        return validated(_decoder_of(kind).decode(raw))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # a bad string is a ValueError
        raise CodecError(str(error), kind) from None


def decoder(union: Any) -> Any:
    """Return a function that decodes any message of a union; like `decode`, it raises CodecError for anything else."""
    return partial(_decode, frozenset(get_args(union)))


decode_request: Callable[[bytes], messages.Request] = decoder(messages.Request)
"""Decode a node's message in a session."""
decode_notification: Callable[[bytes], messages.Notification] = decoder(messages.Notification)
"""Decode the server's message in a session."""
_Answer = handshake.Challenge | handshake.Welcome | handshake.HandshakeRefused
decode_answer: Callable[[bytes], _Answer] = decoder(_Answer)
"""Decode the server's message before the session."""


def version_of(data: bytes) -> int:
    """Read the version, with which a `Hello` of any version begins.

    Raises:
        CodecError: the data is no `Hello`.
    """
    try:
        tag, fields = _envelope.decode(data)
        first = _fields.decode(fields)[:1] if _KINDS.get(tag) is handshake.Hello else []
        return _number.decode(first[0])
    except (msgspec.DecodeError, IndexError, ValueError, RecursionError) as error:
        raise CodecError(f"it does not begin with a Hello ({error})") from None


# The job's state, for shared backends and the journal: versioned and bounded.


_VERSION = b"rallypoint-state-14:"
MAX_STATE = 64 * 1024 * 1024
"""Maximum size of an encoded state in bytes: a kilobyte per node of the largest job."""
_MAX_NAME = 255


def _field_type(kind: Any) -> Any:
    """The type that encodes a field of the state: a map becomes a list of pairs, because MessagePack does not type map
    keys."""
    if get_origin(kind) is Mapping:
        return list[tuple[*get_args(kind)]]  # type: ignore[misc]
    return list[get_args(kind)[0]] if get_origin(kind) is AbstractSet else kind  # type: ignore[misc]


@cache
def _state_decoder() -> msgspec.msgpack.Decoder[Any]:
    fields = [(name, _field_type(kind)) for name, kind in get_type_hints(State).items()]
    return msgspec.msgpack.Decoder(msgspec.defstruct("EncodedState", fields, frozen=True))


@cache
def _collections() -> dict[str, Callable[[Any], Any]]:
    """Fields sent as lists, and the functions that restore them."""
    kinds = {name: get_origin(kind) for name, kind in get_type_hints(State).items()}
    return {
        name: dict if kind is Mapping else frozenset for name, kind in kinds.items() if kind in (Mapping, AbstractSet)
    }


def encode_state(state: State) -> bytes:
    """Encode a state; equal states give equal bytes."""
    fields = state._asdict()
    for name, kind in _collections().items():
        value = fields[name]
        fields[name] = sorted(value.items(), key=lambda entry: entry[0]) if kind is dict else sorted(value)
    return _VERSION + _encode(fields)


def decode_state(data: bytes) -> State:
    """Decode a state.

    Raises:
        RendezvousStateError: the bytes are no state, or a state of another version.
    """
    if not data.startswith(_VERSION):
        raise RendezvousStateError(
            f"the shared rendezvous state starts with {data[:24]!r}, which this version of Rallypoint did not write; "
            "use the same version on all nodes, and a separate location and --rdzv-id for each job"
        )
    if len(data) > MAX_STATE:
        raise RendezvousStateError(f"the shared rendezvous state has {len(data)} bytes, more than the maximum")
    try:
        blob = _state_decoder().decode(data[len(_VERSION) :])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # a bad string is a ValueError
        raise RendezvousStateError(
            f"the shared rendezvous state is damaged ({error}); remove it, or use another --rdzv-id"
        ) from None
    fields = msgspec.structs.asdict(blob)
    unchecked = State(**fields | {name: make(fields[name]) for name, make in _collections().items()})
    try:
        state = validated(unchecked)  # like messages, the state comes from another machine
        for nodes in (unchecked.participants, unchecked.finished, unchecked.wait_list, unchecked.redundancy_list):
            for node, value in nodes.items():
                if not node.is_placeholder:
                    validated(value)
    except ValidationError as error:
        raise RendezvousStateError(f"the shared rendezvous state is invalid: {error}; use another --rdzv-id") from None
    if not all(_with_printable_names(node) for node in (*known_to(state), *state.finished)):
        raise RendezvousStateError(
            "the shared rendezvous state has node names that are not text; use another --rdzv-id"
        )
    return state


def _with_printable_names(node: NodeId) -> bool:
    return max(len(node.addr), len(node.host)) <= _MAX_NAME and node.addr.isprintable() and node.host.isprintable()
