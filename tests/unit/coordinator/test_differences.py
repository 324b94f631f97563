"""Nodes with different settings: both sides report them, and the first node's number applies."""

from __future__ import annotations

import pytest

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId, NodeInfo, Settings
from rallypoint.control.protocol.messages import (
    ConfigDifference,
    ConfigDiffers,
    JoinRequest,
    Notification,
    ResumeRequest,
)
from rallypoint.control.protocol.resume_state import (
    ResumeState,
    after_notification,
    after_request,
    requests_to_repeat,
)
from rallypoint.failures.cause import Cause

JOB = Settings("job", 2, 2)
A, B = (NodeId(f"10.0.0.{number}", 1, 0, f"n{number}") for number in (1, 2))
CAUSE = Cause(0, 0, "n1", 1, 1, "boom", "", 0.0, "")


def member(max_restarts: int = 1, program: str = "train.py", role: str = "trainer") -> NodeInfo:
    return NodeInfo(role, 1, "", 7000, None, max_restarts, program)


def meet(own: Settings, brings: NodeInfo) -> tuple[Coordinator, list[Notification]]:
    """The coordinator of two nodes, and the notifications to the second one."""
    coordinator = Coordinator(JOB)
    coordinator.open(1, SessionRecord(A, A.addr), 0.0)
    coordinator.open(2, SessionRecord(B, B.addr, settings=own), 0.0)
    coordinator.receive(1, JoinRequest(member(), 600.0), 0.0)
    return coordinator, [
        notice for session, notice in coordinator.receive(2, JoinRequest(brings, 600.0), 0.0).messages if session == 2
    ]


def differs(what: str, own: str, job: str, *, applies: bool = True) -> tuple[ConfigDifference, ...]:
    return (ConfigDifference(what, own, job, job_value_applies=applies),)


@pytest.mark.parametrize(
    ("own", "brings", "found"),
    [
        (JOB, member(), ()),
        (JOB._replace(join_timeout=5.0), member(), ()),
        (JOB._replace(min_nodes=3, max_nodes=3), member(), differs("--nnodes=", "3", "2")),
        (JOB._replace(max_nodes=4), member(), differs("--nnodes=", "2:4", "2")),
        (JOB._replace(lease=1.5), member(), differs("--rdzv-conf=lease=", "1.5", "3")),
        (JOB._replace(notice_timeout=9.0), member(), differs("--rdzv-conf=notice_timeout=", "9", "0", applies=False)),
        (JOB, member(max_restarts=5), differs("--max-restarts=", "5", "1")),
        (JOB, member(max_restarts=-1), ()),
        (JOB, member(program="eval.py"), differs("the program ", "eval.py", "train.py", applies=False)),
        (JOB, member(program="read.py", role="reader"), ()),
        (JOB, member(program=""), ()),
    ],
)
def test_nodes_with_other_settings_are_notified(
    own: Settings, brings: NodeInfo, found: tuple[ConfigDifference, ...]
) -> None:
    _, told = meet(own, brings)
    assert [notice for notice in told if isinstance(notice, ConfigDiffers)] == (
        [ConfigDiffers("n2", found)] if found else []
    )


def test_a_job_without_nodes_takes_new_settings() -> None:
    coordinator = Coordinator(JOB)
    coordinator.open(1, SessionRecord(A, A.addr), 0.0)
    coordinator.receive(1, JoinRequest(member(), 600.0), 0.0)
    coordinator.close(1, 1.0)
    coordinator.open(2, SessionRecord(B, B.addr), 1.0)
    assert coordinator.receive(2, JoinRequest(member(max_restarts=5, program="eval.py"), 600.0), 1.0).messages == []
    assert (coordinator.state.max_restarts, coordinator.state.programs) == (5, {"trainer": "eval.py"})


def test_a_new_control_plane_learns_the_jobs_number() -> None:
    _, told = meet(JOB, member(max_restarts=5))
    held = after_request(ResumeState(), JoinRequest(member(max_restarts=5), 600.0), 0.0)
    held = held._replace(opened="a")
    for notice in told:
        held = after_notification(held, notice, 0.0)
    (holding,) = [each for each in requests_to_repeat(held, 1.0) if isinstance(each, ResumeRequest)]
    new = Coordinator(JOB, "new")
    new.open(1, SessionRecord(B, B.addr), 2.0)
    new.receive(1, holding, 2.0)
    assert new.state.max_restarts == 1


def test_the_control_plane_logs_a_few_differences(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = Dispatcher(JOB._replace(min_nodes=20, max_nodes=20))
    other = JOB._replace(min_nodes=3, max_nodes=3)
    told: list[Notification] = []
    for number in range(10):
        node = NodeId("10.0.0.2", number, 0, f"n{number}")
        session = dispatcher.attach(told.append, SessionRecord(node, "10.0.0.2", settings=other))
        dispatcher.receive(session, JoinRequest(member(), 600.0))
    assert len(told) == 10
    lines = [line for line in caplog.messages if "was started with" in line]
    assert len(lines) == 4
    assert lines[0] == (
        "job 'job': n0 was started with --nnodes=3, but the job with --nnodes=20, which applies; use the same value on "
        "all nodes"
    )


def test_each_difference_is_reported_once_and_32_at_most() -> None:
    coordinator, told = meet(JOB._replace(min_nodes=3, max_nodes=3), member())

    def number_reported() -> int:
        return sum(isinstance(notice, ConfigDiffers) for notice in told)

    for program in ["train.py", *(f"{number}.py" for number in range(100))]:
        messages = coordinator.receive(2, JoinRequest(member(program=program), 600.0), 1.0).messages
        told += [notice for _, notice in messages]
        assert program != "train.py" or number_reported() == 1
    assert number_reported() == 32
