"""Frames, messages and handshakes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.membership.state import (
    Fail,
    NodeId,
    NodeInfo,
    Outcome,
    Reason,
    RecordProgress,
    RoundEnd,
    Settings,
    Verdict,
)
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, MAX_FRAME, FrameReader, frame
from rallypoint.control.protocol.errors import FrameError
from rallypoint.control.protocol.handshake import (
    Challenge,
    ClientHandshake,
    HandshakeRefused,
    Hello,
    Proof,
    ServerHandshake,
)
from rallypoint.control.protocol.messages import (
    CauseClues,
    CauseSought,
    HangReport,
    Heartbeat,
    JobEnded,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    NodeReport,
    Notification,
    Request,
    ResumeRequest,
    RoundEnded,
)
from tests.fuzz import control as fuzzed


def _is_changed(request: Request) -> bool:
    """Whether validation cuts or refuses the request."""
    match request:
        case Fail(cause=cause):
            return len(cause.traceback) > 8192
        case JoinRequest(node_info=info):
            return len(info.program) > 1000
        case ResumeRequest(round=round_):
            return round_ >= 1 << 31
    return False


REQUESTS: list[Request] = [
    *(request for request in fuzzed.REQUESTS if isinstance(request, Request) and not _is_changed(request)),
    JoinRequest(NodeInfo("", 1, "", 0, 5, 3, "train.py"), 0.5, 2.5),
    *(RecordProgress(7, 2**63 - 1), RecordProgress(0, made=False)),
    NodeReport(1, (7, 8), 3, steps=(2**63 - 1, -1)),
    ResumeRequest("5e", NodeInfo("", 1, "", 0, 5)),
]
NOTICES: list[Notification] = [
    *(notice for notice in fuzzed.NOTICES if isinstance(notice, Notification)),
    *(RoundEnded(RoundEnd(1, Reason.LOST, "a_1_0")), JobEnded(Verdict(Outcome.SUCCEEDED))),
    *(LeaveReply(False, 0, Outcome.SUCCEEDED), HangReport(1, 3, "two\n\tlines")),
    *(CauseSought(3), CauseClues(3, (("still in f (w.py:1)", (0, 1)),))),
]


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 50)))
def test_frames_may_be_split_anywhere(payloads: list[bytes], cuts: list[int]) -> None:
    stream = MAGIC + b"".join(frame(payload) for payload in payloads)
    reader, seen = FrameReader(), []
    for cut in cuts:
        seen += reader.feed(stream[:cut])
        stream = stream[cut:]
    seen += reader.feed(stream)
    assert seen == payloads


def test_foreign_bytes_and_large_frames_are_refused() -> None:
    with pytest.raises(FrameError, match=r"b.GET .{10}."):
        FrameReader().feed(b"GET / HTTP/1.1")
    with pytest.raises(FrameError, match="claims 4294967295 bytes"):
        FrameReader().feed(MAGIC + b"\xff\xff\xff\xff")
    with pytest.raises(FrameError, match="larger than the maximum frame"):
        frame(bytes(MAX_FRAME + 1))
    assert FrameReader().feed(MAGIC + frame(bytes(MAX_FRAME))) == [bytes(MAX_FRAME)]


@pytest.mark.parametrize("request_", REQUESTS, ids=repr)
def test_requests_are_decoded_as_encoded(request_: Request) -> None:
    assert codec.decode_request(codec.encode(request_)) == request_


@pytest.mark.parametrize("notice", NOTICES, ids=repr)
def test_notifications_are_decoded_as_encoded(notice: Notification) -> None:
    assert codec.decode_notification(codec.encode(notice)) == notice


def test_misplaced_messages_are_refused() -> None:
    with pytest.raises(codec.CodecError, match="LeaveRequest is not allowed here"):
        codec.decode_notification(codec.encode(LeaveRequest()))
    with pytest.raises(codec.CodecError, match="Placed is not allowed here"):
        codec.decode_request(codec.encode(fuzzed.NOTICES[0]))
    with pytest.raises(codec.CodecError, match="a Heartbeat is not allowed here"):
        codec.decode(codec.encode(Heartbeat()), Hello)


SETTINGS = Settings("job", 1, 2)
NODE = NodeId("10.0.0.1", 42, 0)


def server(key: bytes | None = None, job: str | None = "job") -> ServerHandshake:
    return ServerHandshake(job, None if key is None else lambda _job: (key,), b"server-nonce")


def hello(key: bytes | None = None, job: str = "job", *, only_greets: bool = False) -> tuple[ClientHandshake, Hello]:
    client = ClientHandshake(job, key, b"client-nonce", SETTINGS, only_greets=only_greets)
    return client, codec.decode(codec.encode(client.hello("10.0.0.1", NODE)), Hello)


@pytest.mark.parametrize(
    ("server_key", "client_key", "serves", "job", "only_greets", "refusal"),
    [
        (None, None, "job", "job", False, ""),
        (b"s", b"s", "job", "job", False, ""),
        (None, None, "job", "other", False, "belongs to job 'job', not to 'other'"),
        (b"s", None, "job", "job", False, "this job has a secret"),
        (None, b"s", "job", "job", False, "the control plane has none"),
        (b"s", b"t", "job", "job", False, "RALLYPOINT_SECRET is not the job's"),
        (None, None, "job", "", False, "belongs to job 'job'"),
        (None, None, "job", "job", True, ""),
        (None, None, "job", "", True, ""),
        (None, None, None, "new", True, ""),
        (None, None, None, "", True, ""),
        (None, None, "job", "other", True, "belongs to job 'job'"),
        (b"s", None, "job", "job", True, "this job has a secret"),
        (b"s", b"t", "job", "job", True, "RALLYPOINT_SECRET is not the job's"),
    ],
)
def test_handshakes(
    server_key: bytes | None, client_key: bytes | None, serves: str | None, job: str, only_greets: bool, refusal: str
) -> None:
    client, greeting = hello(client_key, job, only_greets=only_greets)
    handshake = server(server_key, serves)
    answer = handshake.hello(greeting)
    if isinstance(answer, Challenge):
        answer = handshake.proof(client.prove(b"greeting"), b"greeting")
    if refusal:
        assert isinstance(answer, HandshakeRefused)
        assert refusal in answer.sentence
        assert handshake.signers is None
    else:
        assert answer is None


def test_a_proof_is_valid_for_one_greeting() -> None:
    client, greeting = hello(b"s")
    handshake = server(b"s")
    handshake.hello(greeting)
    proof = client.prove(b"the first greeting")
    assert isinstance(handshake.proof(proof, b"the second greeting"), HandshakeRefused)
    assert isinstance(handshake.proof(Proof(b""), b"the second greeting"), HandshakeRefused)
    assert handshake.proof(proof, b"the first greeting") is None
    assert handshake.signers is not None
    assert client.signers is not None
    assert handshake.signers.incoming.verify(client.signers.outgoing.sign(b"frame")) == b"frame"


def test_another_version_is_refused() -> None:
    refused = server().hello(Hello(99, "job", b"c", "h", NODE, False, SETTINGS))
    assert isinstance(refused, HandshakeRefused)
    assert "the node uses 99" in refused.sentence
