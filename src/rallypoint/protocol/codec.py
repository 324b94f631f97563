"""Encodes and decodes typed messages: MessagePack by `msgspec`, checked against the types of `messages`. No pickle.

Values that types allow but no message may hold are refused, or made harmless, by `protocol.validation`.

A message is the pair of its tag and its fields. Tags are the positions in the table below: append to it, never reorder.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from rallypoint.membership import operations
from rallypoint.protocol import handshake, messages, observation, operator_messages
from rallypoint.protocol.validation import validated

M = TypeVar("M")

_TYPES: tuple[type, ...] = (
    handshake.Hello,
    handshake.Challenge,
    handshake.Proof,
    handshake.Welcome,
    handshake.HandshakeRefused,
    messages.JoinRequest,
    messages.LeaveRequest,
    operations.Fail,
    operations.Succeed,
    operations.Drain,
    operations.Close,
    messages.Heartbeat,
    messages.ProgressRequest,
    messages.Placed,
    messages.RoundEnded,
    messages.NodesWaiting,
    messages.JobEnded,
    messages.JoinRefused,
    messages.Progress,
    operations.Preempt,
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
    operator_messages.CollectedPart,
    operator_messages.ReportRequested,
    operator_messages.NodeReport,
    operator_messages.CollectRequested,
    operator_messages.DrainRequested,
    operator_messages.OperatorAction,
    operations.RecordProgress,
    operations.PreemptJob,
    operations.ReportQuiet,
    operator_messages.HangFound,
    operator_messages.CollectionEnded,
    operator_messages.HangReport,
    messages.ConfirmRequest,
    messages.Confirmed,
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
    message = _decode(data)
    if isinstance(message, wanted):
        return message
    raise _unexpected_message(message)


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


def decode_request(data: bytes) -> messages.Request:
    """Decode a message of a node in a session. Raises CodecError if it is something else."""
    message = _decode(data)
    if isinstance(message, messages.Request):
        return message
    raise _unexpected_message(message)


def decode_notification(data: bytes) -> messages.Notification:
    """Decode a message of the server in a session. Raises CodecError if it is something else."""
    message = _decode(data)
    if isinstance(message, messages.Notification):
        return message
    raise _unexpected_message(message)


def decode_watcher_request(data: bytes) -> observation.WatcherRequest:
    """Decode a message of a watcher in a session. Raises CodecError if it is something else."""
    message = _decode(data)
    if isinstance(message, observation.WatcherRequest):
        return message
    raise _unexpected_message(message)


def decode_watcher_notification(data: bytes) -> observation.WatcherNotification | messages.SessionEnded:
    """Decode a message of the server in a watcher's session. Raises CodecError if it is something else."""
    message = _decode(data)
    if isinstance(message, observation.WatcherNotification | messages.SessionEnded):
        return message
    raise _unexpected_message(message)


def decode_answer(data: bytes) -> handshake.Challenge | handshake.Welcome | handshake.HandshakeRefused:
    """Decode a message of the server before the session. Raises CodecError if it is something else."""
    message = _decode(data)
    if isinstance(message, handshake.Challenge | handshake.Welcome | handshake.HandshakeRefused):
        return message
    raise _unexpected_message(message)


def _decode(data: bytes) -> object:
    try:
        tag, raw = _envelope.decode(data)
        if 0 <= tag < len(_TYPES):
            return validated(_decoders[tag].decode(raw))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # a bad string is a ValueError
        raise CodecError(str(error)) from None
    raise CodecError(f"message tag {tag} is unknown")


def _unexpected_message(message: object) -> CodecError:
    return CodecError(f"a {type(message).__name__} has no place here")
