from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.membership.state import (
    Close,
    Fail,
    NodeId,
    NodeInfo,
    NodeRanks,
    Preempt,
    Reason,
    RoundEnd,
    Settings,
)
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import check_size
from rallypoint.control.protocol.handshake import Hello
from rallypoint.control.protocol.messages import JoinRequest, Placed, Placement, ResumeRequest, RoundEnded
from rallypoint.control.protocol.validation import ValidationError, _same, validated
from rallypoint.failures.cause import Cause

MEMBER = NodeInfo("role", 2, "10.0.0.1", 7000, None)
CAUSE = Cause(3, 1, "host", 42, -11, "Signal 11", "Traceback ä\n\tat\n", 1.5, "/x/error.json")
HELLO = Hello(1, "job", b"n" * 16, "10.0.0.1", NodeId("10.0.0.1", 42, 0), False, Settings("job", 1, 2))
IN_ORDER = [
    JoinRequest(MEMBER, 600.0),
    Fail(1, CAUSE, 3),
    HELLO,
    ResumeRequest("5e", MEMBER),
    Placed(Placement(1, 0, 2, NodeRanks(0, 3, 0, 3), "host", 7000, 1)),
    Close(math.inf),
]


@pytest.mark.parametrize("message", IN_ORDER, ids=lambda each: type(each).__name__)
def test_valid_messages_are_not_changed(message: object) -> None:
    _same.cache_clear()  # of equal settings the first ones are kept, whoever has checked them
    assert validated(message) is message


@pytest.mark.parametrize(
    "message",
    [
        JoinRequest(MEMBER._replace(local_world_size=2**63 - 1), 600.0),
        JoinRequest(MEMBER._replace(local_world_size=0), 600.0),
        JoinRequest(MEMBER._replace(store_port=65536), 600.0),
        JoinRequest(MEMBER, math.nan),
        JoinRequest(MEMBER, math.inf),
        Preempt(0, -math.inf),
        ResumeRequest("5e", MEMBER, 3, 1, 3_000_000),
        ResumeRequest("5e", MEMBER, 2**40, 1, 2),
        ResumeRequest("5e", MEMBER, 2**31, 1, 2),
        ResumeRequest("5e", MEMBER, last_ended_round=2**31),
        ResumeRequest("5e", MEMBER, failures=2**40),
        HELLO._replace(settings=Settings("job", 1, 3_000_000)),
        HELLO._replace(settings=Settings("job", 1, 2, lease=0.0)),
        HELLO._replace(settings=Settings("job", 1, 2, lease=math.nan)),
        HELLO._replace(nonce=b"n" * 300),
        HELLO._replace(node=HELLO.node._replace(pid=-1)),
        Close(math.nan),
    ],
    ids=repr,
)
def test_impossible_numbers_are_refused(message: object) -> None:
    with pytest.raises(ValidationError, match="is refused"):
        validated(message)


def test_texts_are_cut_and_printable() -> None:
    cause = CAUSE._replace(host="h\x1b[2J", traceback="a\n\tb\x1b]0;x\x07\r", message="m\u202e" * 20000)
    told = validated(Fail(1, cause, 3)).cause
    assert (told.host, told.traceback) == ("h?[2J", "a\n\tb?]0;x??")
    assert told.message == "m?" * 4 * 1024
    info = validated(JoinRequest(MEMBER._replace(role="a\nb", domain="rack\x1b[31m" + 300 * "é"), 1.0)).node_info
    assert (info.role, info.domain) == ("a?b", f"rack?[31m{123 * 'é'}")


def test_any_failure_fits_into_a_frame() -> None:
    endless = 70_000 * "\U0001f600"
    cause = CAUSE._replace(host=endless, traceback=endless, message=endless, error_file=endless)
    told = validated(Fail(1, cause, 3)).cause
    check_size(len(codec.encode(RoundEnded(RoundEnd(1, Reason.FAILURE, told.host, told, "d" * 8192)))))
    assert told.traceback == "\U0001f600" * 8192


@pytest.mark.parametrize(("shown", "told"), [(math.nan, 0.0), (-0.5, 0.0), (1.79e18, 253402214400.0), (5.5, 5.5)])
def test_impossible_times_are_corrected(shown: float, told: float) -> None:
    assert validated(Fail(1, CAUSE._replace(timestamp=shown), 3)).cause.timestamp == told


@given(st.floats(), st.integers(), st.text())
def test_any_values_are_refused_or_cleaned(number: float, whole: int, text: str) -> None:
    message = JoinRequest(NodeInfo(text, whole, text, whole, whole), number)
    try:
        told = validated(message)
    except ValidationError:
        return
    assert math.isfinite(told.timeout)
    assert 1 <= told.node_info.local_world_size <= 65536
    assert told.node_info.role.isprintable()
    assert validated(told) is told


def test_valid_settings_are_validated_once_and_others_each_time() -> None:
    """All nodes of a job send the same settings, and a rendezvous of thousands must not pay for each."""
    good = HELLO.settings
    wave = JoinRequest(NodeInfo("default", 1, "", 7000), 60.0)
    for _ in range(3):
        assert validated(HELLO).settings == good
        for lease in (0.0, math.nan):
            with pytest.raises(ValidationError, match="lease"):
                validated(HELLO._replace(settings=good._replace(lease=lease)))
        assert validated(HELLO._replace(settings=good._replace(run_id="a\x1bb"))).settings.run_id == "a?b"
        assert validated(wave) is wave
