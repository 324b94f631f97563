"""Which failures count as repetitions, and what counts as progress."""

from __future__ import annotations

import pytest

from rallypoint.control.membership.endings import failure_streak_after
from rallypoint.control.membership.rules import ClockView, step
from rallypoint.control.membership.state import (
    Fail,
    FailureStreak,
    JobProgress,
    NoChange,
    NodeId,
    NodeInfo,
    Participant,
    RecordProgress,
    Settings,
    State,
)
from rallypoint.failures.cause import Cause, Ending

SETTINGS = Settings("job", 1, 1, same_failure_limit=3)


def cause(exitcode: int, pid: int, message: str = "", traceback: str = "", rank: int = 0) -> Cause:
    return Cause(rank, rank, "host", pid, exitcode, message, traceback, 0.0, "")


def repeats(*causes: Cause) -> int:
    state = State()
    for found in causes:
        state = state._replace(failure_streak=failure_streak_after(state, found, None, SETTINGS))
    return state.failure_streak.repeats


SEGV, KILL = "Signal 11 (SIGSEGV) received by PID {}", "Signal 9 (SIGKILL) received by PID {}"
FIRST, SECOND = "Traceback ...\n  line 4\nValueError: 7", "Traceback ...\n  line 9\nValueError: 7"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (cause(-11, 100, SEGV.format(100)), cause(-11, 200, SEGV.format(200)), True),
        (cause(-11, 100, SEGV.format(100)), cause(-11, 100, SEGV.format(100), rank=1), True),
        (cause(-11, 100, SEGV.format(100)), cause(-9, 200, KILL.format(200)), False),
        (cause(1, 100, traceback=FIRST), cause(1, 200, traceback=SECOND), True),
        (cause(1, 100, traceback=FIRST), cause(1, 200, traceback=FIRST.replace("7", "8")), False),
    ],
    ids=["pid", "rank", "another signal", "another line", "another value"],
)
def test_which_failures_are_the_same(first: Cause, second: Cause, same: bool) -> None:
    assert repeats(first, second) == same


VARIANTS = (
    ("OSError: [Errno 98] Address already in use: port {}", "29501", "41877"),
    ("RuntimeError: worker {} died", "3 (pid 4711)", "1 (pid 99)"),
    ("FileNotFoundError: '/tmp/tmp{}/x.pt'", "ab12", "zz9_"),
    ("KeyError: {}-8d0b-4f5e-9d1a-0123456789ab", "2f1e9f1c", "99999999"),
    ("RuntimeError: no answer from {}", "[10.0.0.7]:29500", "[10.0.0.9]:41000"),
    ("TypeError: <Foo object at 0x{}> is odd", "7f01", "7f99"),
)


@pytest.mark.parametrize(("text", "one", "other"), VARIANTS)
def test_details_of_a_process_do_not_make_another_failure(text: str, one: str, other: str) -> None:
    first, second = cause(1, 1, traceback=text.format(one)), cause(1, 2, traceback=text.format(other), rank=3)
    assert repeats(first, second) == 1


CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:29671"


def test_a_consequence_is_ignored() -> None:
    boom, closed = cause(1, 1, traceback="ValueError: 7"), cause(1, 2, traceback=CLOSED, rank=1)
    assert repeats(closed, closed, closed) == 0
    assert repeats(boom, closed, boom) == 1


MISSING = cause(1, 1, traceback="Traceback (most recent call last):\nModuleNotFoundError: No module named 'apex'")
USAGE = cause(2, 1, "it exited with code 2", "usage: train.py [-h] --lr LR\ntrain.py: error: --lr is required")


@pytest.mark.parametrize("first", [MISSING, USAGE], ids=["module", "arguments"])
@pytest.mark.parametrize("retry_all", [False, True])
def test_a_hopeless_failure_is_retried_once(first: Cause, retry_all: bool) -> None:
    state = State(0, True, participants={ME: IN})
    settings = Settings("job", 1, 1, retry_all=retry_all)
    rounds = 0
    while not state.closed:
        failed = step(Fail(state.round, first._replace(rank=rounds), 5), state, ME, ClockView(0.0), settings)
        assert isinstance(failed, State)
        state = failed._replace(complete=True, participants={ME: IN}, survivors={})
        rounds += 1
    assert state.verdict is not None
    assert (rounds, state.verdict.ending is Ending.REPEATED) == ((6, False) if retry_all else (2, True))
    assert ("a restart cannot fix it" in state.verdict.detail) is not retry_all


# Progress that nodes report

ME, OTHER = NodeId("10.0.0.1", 1, 0), NodeId("10.0.0.2", 1, 0)
IN = Participant(NodeInfo("", 1, "", 0))
BOOM = cause(1, 100, traceback="ValueError: boom")


def running(round_: int, progress: JobProgress, failures: int = 0) -> State:
    streak = FailureStreak(failures, max(0, failures - 1), "ValueError: boom")
    return State(round_, True, participants={ME: IN, OTHER: IN}, progress=progress, failure_streak=streak)


def reported(state: State, report: RecordProgress, node: NodeId = ME) -> State:
    after = step(report, state, node, ClockView(0.0), SETTINGS)
    if isinstance(after, State):
        assert after == state._replace(progress=after.progress)
        state = after
    assert step(report, state, node, ClockView(0.0), SETTINGS) is NoChange.DONE
    return state


def failed(state: State, view: ClockView, settings: Settings = SETTINGS) -> State:
    after = step(Fail(state.round, BOOM, 99), state, ME, view, settings)
    assert isinstance(after, State)
    return after


@pytest.mark.parametrize(
    ("report", "after"),
    [
        pytest.param(RecordProgress(3, 41), JobProgress(41, 3, True), id="further"),
        pytest.param(RecordProgress(3, 40), JobProgress(40, 2, True), id="as far"),
        pytest.param(RecordProgress(3, 0), JobProgress(40, 2, True), id="less"),
        pytest.param(RecordProgress(3), JobProgress(40, 3, True), id="no number"),
        pytest.param(RecordProgress(3, -1, made=False), JobProgress(40, 2, True), id="a file exists"),
        pytest.param(RecordProgress(3, 90, made=False), JobProgress(90, 2, True), id="loaded from a file"),
        pytest.param(RecordProgress(2, 55), JobProgress(55, 2, True), id="an old round"),
        pytest.param(RecordProgress(4, 55), JobProgress(55, 2, True), id="no such round"),
    ],
)
def test_progress_of_a_round(report: RecordProgress, after: JobProgress) -> None:
    assert reported(running(3, JobProgress(40, 2, True)), report).progress == after


def test_outsiders_and_ended_jobs_make_no_progress() -> None:
    outsider = NodeId("10.0.0.9", 1, 0)
    assert reported(running(3, JobProgress()), RecordProgress(3, 5), node=outsider).progress == JobProgress(5, -1, True)
    closed = running(3, JobProgress())._replace(closed=True)
    assert reported(closed, RecordProgress(3, 5)).progress == JobProgress()


@pytest.mark.parametrize(
    ("progress", "ran", "failures"),
    [
        (JobProgress(), 59.0, 3),
        (JobProgress(), 60.0, 0),
        (JobProgress(40, 2, True), 3600.0, 3),
        (JobProgress(41, 3, True), 1.0, 0),
        (JobProgress(-1, -1, True), 3600.0, 3),
    ],
    ids=["short", "long enough", "reported none", "reported some", "an old file"],
)
def test_reported_progress_replaces_running_time_as_progress(progress: JobProgress, ran: float, failures: int) -> None:
    state = running(3, progress, 2)
    view = ClockView(1000.0, running_at=1000.0 - ran)
    assert failed(state, view).failure_streak.failures == failures
