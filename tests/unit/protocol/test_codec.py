"""Frames, messages and the handshake: any split, any garbage, any secret."""

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


def _is_cut_or_refused(request: Request) -> bool:
    """Whether the validation changes what arrives: long texts are cut, a round beyond all counting is refused."""
    match request:
        case Fail(cause=cause):
            return len(cause.traceback) > 8192
        case JoinRequest(node_info=info):
            return len(info.program) > 1000
        case ResumeRequest(round=round_):
            return round_ >= 1 << 31
    return False


REQUESTS: list[Request] = [
    *(each for each in fuzzed.REQUESTS if isinstance(each, Request) and not _is_cut_or_refused(each)),
    JoinRequest(NodeInfo("", 1, "", 0, 5, 3, "train.py"), 0.5, 2.5),
    *(RecordProgress(7, 2**63 - 1), RecordProgress(0, made=False)),
    NodeReport(1, (7, 8), 3, steps=(2**63 - 1, -1)),
    ResumeRequest("5e", NodeInfo("", 1, "", 0, 5)),
]
NOTICES: list[Notification] = [
    *(each for each in fuzzed.NOTICES if isinstance(each, Notification)),
    *(RoundEnded(RoundEnd(1, Reason.LOST, "a_1_0")), JobEnded(Verdict(Outcome.SUCCEEDED))),
    *(LeaveReply(False, 0, Outcome.SUCCEEDED), HangReport(1, 3, "two\n\tlines")),
    *(CauseSought(3), CauseClues(3, (("still in f (w.py:1)", (0, 1)),))),
]


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 50)))
def test_any_split_gives_the_same_frames(payloads: list[bytes], cuts: list[int]) -> None:
    stream = MAGIC + b"".join(frame(payload) for payload in payloads)
    reader, seen = FrameReader(), []
    for cut in cuts:
        seen += reader.feed(stream[:cut])
        stream = stream[cut:]
    seen += reader.feed(stream)
    assert seen == payloads


def test_what_is_not_ours_is_refused_at_its_first_byte() -> None:
    with pytest.raises(FrameError, match=r"b.GET .{10}."):
        FrameReader().feed(b"GET / HTTP/1.1")
    with pytest.raises(FrameError, match="claims 4294967295 bytes"):
        FrameReader().feed(MAGIC + b"\xff\xff\xff\xff")
    with pytest.raises(FrameError, match="larger than the maximum frame"):
        frame(bytes(MAX_FRAME + 1))
    assert FrameReader().feed(MAGIC + frame(bytes(MAX_FRAME))) == [bytes(MAX_FRAME)]


@pytest.mark.parametrize("request_", REQUESTS, ids=repr)
def test_requests_go_there_and_back(request_: Request) -> None:
    assert codec.decode_request(codec.encode(request_)) == request_


@pytest.mark.parametrize("notice", NOTICES, ids=repr)
def test_notices_go_there_and_back(notice: Notification) -> None:
    assert codec.decode_notification(codec.encode(notice)) == notice


def test_a_message_out_of_place_is_refused() -> None:
    with pytest.raises(codec.CodecError, match="a LeaveRequest is not allowed here"):
        codec.decode_notification(codec.encode(LeaveRequest()))
    with pytest.raises(codec.CodecError, match="a Placed is not allowed here"):
        codec.decode_request(codec.encode(fuzzed.NOTICES[0]))
    with pytest.raises(codec.CodecError, match="a Heartbeat is not allowed here"):
        codec.decode(codec.encode(Heartbeat()), Hello)


SETTINGS = Settings("job", 1, 2)


def shake(server_key: bytes | None, client_key: bytes | None, job: str = "job") -> HandshakeRefused | None:
    server = ServerHandshake("job", None if server_key is None else lambda _job: (server_key,), b"server-nonce")
    client = ClientHandshake(job, client_key, b"client-nonce", SETTINGS)
    answer = server.hello(client.hello("10.0.0.1", NodeId("10.0.0.1", 42, 0)))
    if not isinstance(answer, Challenge):
        return answer
    return server.proof(client.prove(b"greeting"), b"greeting")


def test_those_who_share_a_secret_or_have_none_are_let_in() -> None:
    assert shake(None, None) is None
    assert shake(b"s", b"s") is None


def test_who_does_not_belong_is_told_why() -> None:
    assert "belongs to job 'job', not to 'other'" in str(shake(None, None, "other"))
    assert "this job has a secret" in str(shake(b"s", None))
    assert "the control plane has none" in str(shake(None, b"s"))
    assert "RALLYPOINT_SECRET is not the job's" in str(shake(b"s", b"t"))


def test_a_proof_serves_for_one_greeting() -> None:
    client = ClientHandshake("job", b"s", b"client-nonce", SETTINGS)
    client.hello("h", NodeId("h", 1, 0))
    server = ServerHandshake("job", lambda _job: (b"s",), b"nonce-2")
    server.hello(client.hello("h", NodeId("h", 1, 0)))
    proof = client.prove(b"the first greeting")
    assert isinstance(server.proof(proof, b"the second greeting"), HandshakeRefused)
    assert isinstance(server.proof(Proof(b""), b"the second greeting"), HandshakeRefused)
    assert server.proof(proof, b"the first greeting") is None
    assert server.signers is not None
    assert client.signers is not None
    assert server.signers.incoming.verify(client.signers.outgoing.sign(b"frame")) == b"frame"


def test_another_version_is_refused() -> None:
    server = ServerHandshake("job", None, b"n")
    refused = server.hello(Hello(99, "job", b"c", "h", NodeId("h", 1, 0), False, SETTINGS))
    assert isinstance(refused, HandshakeRefused)
    assert "the node uses 99" in refused.sentence
