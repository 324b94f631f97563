"""What counts as the same failure again."""

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
    for each in causes:
        state = state._replace(failure_streak=failure_streak_after(state, each, None, SETTINGS))
    return state.failure_streak.repeats


def test_a_silent_death_by_the_same_signal_is_the_same_whatever_its_process_was_called() -> None:
    first = cause(-11, 100, "Signal 11 (SIGSEGV) received by PID 100")
    assert repeats(first, cause(-11, 200, "Signal 11 (SIGSEGV) received by PID 200")) == 1
    assert repeats(first, cause(-9, 200, "Signal 9 (SIGKILL) received by PID 200")) == 0
    assert repeats(first, cause(-11, 100, first.message, rank=1)) == 1


def test_an_exception_is_known_by_its_last_line() -> None:
    first = cause(1, 100, traceback="Traceback ...\n  line 4\nValueError: 7")
    assert repeats(first, cause(1, 200, traceback="Traceback ...\n  line 9\nValueError: 7")) == 1
    assert repeats(first, cause(1, 200, traceback="Traceback ...\n  line 4\nValueError: 8")) == 0


ADDRESSES = (
    (
        "OSError: [Errno 98] Address already in use: port 29501",
        "OSError: [Errno 98] Address already in use: port 41877",
    ),
    ("RuntimeError: worker 3 (pid 4711) died", "RuntimeError: worker 1 (pid 99) died"),
    ("FileNotFoundError: '/tmp/tmpab12/x.pt'", "FileNotFoundError: '/tmp/tmpzz9_/x.pt'"),
    ("KeyError: 2f1e9f1c-8d0b-4f5e-9d1a-0123456789ab", "KeyError: 99999999-8d0b-4f5e-9d1a-0123456789ab"),
    ("RuntimeError: no answer from [10.0.0.7]:29500", "RuntimeError: no answer from [10.0.0.9]:41000"),
    ("TypeError: <Foo object at 0x7f01> is odd", "TypeError: <Foo object at 0x7f99> is odd"),
)


@pytest.mark.parametrize(("one", "other"), ADDRESSES)
def test_what_differs_from_process_to_process_makes_no_other_failure(one: str, other: str) -> None:
    assert repeats(cause(1, 1, traceback=one), cause(1, 2, traceback=other, rank=3)) == 1


CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:29671"


def test_a_consequence_neither_repeats_a_failure_nor_takes_its_place() -> None:
    boom, closed = cause(1, 1, traceback="ValueError: 7"), cause(1, 2, traceback=CLOSED, rank=1)
    assert repeats(closed, closed, closed) == 0
    assert repeats(boom, closed, boom) == 1


MISSING = cause(1, 1, traceback="Traceback (most recent call last):\nModuleNotFoundError: No module named 'apex'")
USAGE = cause(2, 1, "it exited with code 2", "usage: train.py [-h] --lr LR\ntrain.py: error: --lr is required")


@pytest.mark.parametrize("first", [MISSING, USAGE], ids=["module", "arguments"])
@pytest.mark.parametrize("retry_all", [False, True])
def test_what_no_restart_can_change_is_retried_once(first: Cause, retry_all: bool) -> None:
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


# Progress that nodes tell of

ME, OTHER = NodeId("10.0.0.1", 1, 0), NodeId("10.0.0.2", 1, 0)
IN = Participant(NodeInfo("", 1, "", 0))
BOOM = cause(1, 100, traceback="ValueError: boom")


def running(round_: int, progress: JobProgress, failures: int = 0) -> State:
    streak = FailureStreak(failures, max(0, failures - 1), "ValueError: boom")
    return State(round_, True, participants={ME: IN, OTHER: IN}, progress=progress, failure_streak=streak)


def told(state: State, *said: RecordProgress, node: NodeId = ME) -> State:
    for each in said:
        after = step(each, state, node, ClockView(0.0), SETTINGS)
        if isinstance(after, State):
            assert after == state._replace(progress=after.progress)
            state = after
        assert step(each, state, node, ClockView(0.0), SETTINGS) is NoChange.DONE
    return state


def failed(state: State, view: ClockView, settings: Settings = SETTINGS) -> State:
    after = step(Fail(state.round, BOOM, 99), state, ME, view, settings)
    assert isinstance(after, State)
    return after


@pytest.mark.parametrize(
    ("said", "after"),
    [
        (RecordProgress(3, 41), JobProgress(41, 3, True)),
        (RecordProgress(3, 40), JobProgress(40, 2, True)),
        (RecordProgress(3, 0), JobProgress(40, 2, True)),
        (RecordProgress(3), JobProgress(40, 3, True)),
        (RecordProgress(3, -1, made=False), JobProgress(40, 2, True)),
        (RecordProgress(3, 90, made=False), JobProgress(90, 2, True)),
        (RecordProgress(2, 55), JobProgress(55, 2, True)),
        (RecordProgress(4, 55), JobProgress(55, 2, True)),
    ],
    ids=[
        "further",
        "as far",
        "less",
        "no number",
        "there is a file",
        "what a file held",
        "an old round",
        "no such round",
    ],
)
def test_what_counts_as_progress_of_a_round(said: RecordProgress, after: JobProgress) -> None:
    assert told(running(3, JobProgress(40, 2, True)), said).progress == after


def test_who_has_no_place_makes_no_progress() -> None:
    outsider = NodeId("10.0.0.9", 1, 0)
    assert told(running(3, JobProgress()), RecordProgress(3, 5), node=outsider).progress == JobProgress(5, -1, True)
    closed = running(3, JobProgress())._replace(closed=True)
    assert told(closed, RecordProgress(3, 5)).progress == JobProgress()


@pytest.mark.parametrize(
    ("progress", "ran", "failures"),
    [
        (JobProgress(), 59.0, 3),
        (JobProgress(), 60.0, 0),
        (JobProgress(40, 2, True), 3600.0, 3),
        (JobProgress(41, 3, True), 1.0, 0),
        (JobProgress(-1, -1, True), 3600.0, 3),
    ],
    ids=["short", "long enough", "told, and none", "told, and some", "there is a file that nobody has written"],
)
def test_where_progress_is_told_nothing_else_counts_as_such(progress: JobProgress, ran: float, failures: int) -> None:
    state = running(3, progress, 2)
    view = ClockView(1000.0, running_at=1000.0 - ran)
    assert failed(state, view).failure_streak.failures == failures


def test_a_job_that_fails_at_the_same_step_again_and_again_is_ended() -> None:
    """It is restarted from what it had saved, does the same steps again, and fails where it failed before."""
    state = running(0, JobProgress())
    for round_ in range(5):
        state = told(state, RecordProgress(round_, 1000))
        ended = failed(state, ClockView(1e6, running_at=0.0))
        if ended.verdict is not None:
            break
        state = ended._replace(complete=True, participants=state.participants)
    assert round_ == 3
    assert ended.verdict is not None
    assert (ended.verdict.ending, "3 times" in ended.verdict.detail) == (Ending.REPEATED, True)
