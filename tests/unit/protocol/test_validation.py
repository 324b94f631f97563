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
NODE = NodeId("10.0.0.1", 42, 0)
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
def test_what_is_in_order_passes_as_it_is(message: object) -> None:
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
def test_a_number_that_cannot_be_is_refused_with_its_name(message: object) -> None:
    with pytest.raises(ValidationError, match="is refused"):
        validated(message)


def test_terminal_escapes_become_question_marks_and_lines_stay() -> None:
    cause = CAUSE._replace(host="h\x1b[2J", traceback="a\n\tb\x1b]0;x\x07\r", message="m\u202e" * 20000)
    told = validated(Fail(1, cause, 3)).cause
    assert told.host == "h?[2J"
    assert told.traceback == "a\n\tb?]0;x??"
    assert set(told.message) == {"m", "?"}
    assert len(told.message) == 8 * 1024
    assert validated(JoinRequest(MEMBER._replace(role="a\nb"), 1.0)).node_info.role == "a?b"


def test_the_name_of_a_domain_is_short_and_printable() -> None:
    said = NodeInfo("default", 1, "10.0.0.1", 7000, domain="rack\x1b[31m" + 300 * "é")
    assert validated(said).domain == f"rack?[31m{123 * 'é'}"


def test_a_failure_of_any_text_fits_the_frame_by_which_others_are_told() -> None:
    endless = 70_000 * "\U0001f600"
    cause = CAUSE._replace(host=endless, traceback=endless, message=endless, error_file=endless)
    told = validated(Fail(1, cause, 3)).cause
    check_size(len(codec.encode(RoundEnded(RoundEnd(1, Reason.FAILURE, told.host, told, "d" * 8192)))))
    assert told.traceback == "\U0001f600" * 8192


@pytest.mark.parametrize(("shown", "told"), [(math.nan, 0.0), (-0.5, 0.0), (1.79e18, 253402214400.0), (5.5, 5.5)])
def test_a_clock_that_is_wrong_costs_no_failure_its_report(shown: float, told: float) -> None:
    assert validated(Fail(1, CAUSE._replace(timestamp=shown), 3)).cause.timestamp == told


@given(st.floats(), st.integers(), st.text())
def test_any_values_are_refused_or_made_harmless(number: float, whole: int, text: str) -> None:
    message = JoinRequest(NodeInfo(text, whole, text, whole, whole), number)
    try:
        told = validated(message)
    except ValidationError:
        return
    assert math.isfinite(told.timeout)
    assert 1 <= told.node_info.local_world_size <= 65536
    assert told.node_info.role.isprintable()
    assert validated(told) is told


def test_settings_that_were_in_order_once_are_not_looked_at_again_and_others_are() -> None:
    """All nodes of a job send the same; a rendezvous of thousands must not pay for each."""
    good = Settings("job", 1, 2)
    wave = JoinRequest(NodeInfo("default", 1, "", 7000), 60.0)
    for _ in range(3):
        assert validated(_hello(good)).settings == good
        with pytest.raises(ValidationError, match="lease"):
            validated(_hello(good._replace(lease=0.0)))
        with pytest.raises(ValidationError, match="lease"):
            validated(_hello(good._replace(lease=float("nan"))))
        assert validated(_hello(good._replace(run_id="a\x1bb"))).settings.run_id == "a?b"
        assert validated(wave) is wave


def _hello(settings: Settings) -> Hello:
    return Hello(1, "job", b"n", "127.0.0.1", NodeId("127.0.0.1", 1, 0), False, settings)
