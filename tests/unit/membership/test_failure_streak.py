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
    assert repeats(first, cause(-11, 100, first.message, rank=1)) == 0


def test_an_exception_is_known_by_its_last_line() -> None:
    first = cause(1, 100, traceback="Traceback ...\n  line 4\nValueError: 7")
    assert repeats(first, cause(1, 200, traceback="Traceback ...\n  line 9\nValueError: 7")) == 1
    assert repeats(first, cause(1, 200, traceback="Traceback ...\n  line 4\nValueError: 8")) == 0


# Progress that nodes tell of

ME, OTHER = NodeId("10.0.0.1", 1, 0), NodeId("10.0.0.2", 1, 0)
IN = Participant(NodeInfo("", 1, "", 0))
BOOM = cause(1, 100, traceback="ValueError: boom")


def running(round_: int, progress: JobProgress, failures: int = 0) -> State:
    streak = FailureStreak(failures, max(0, failures - 1), 0, "ValueError: boom")
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


def test_the_end_of_a_round_says_for_how_long_the_next_one_is_held_back() -> None:
    settings = SETTINGS._replace(restart_backoff=2.0)
    state = running(1, JobProgress(), 1)
    after = failed(state, ClockView(0.0), settings)
    assert after.ended is not None
    assert after.ended.held_back == after.restart_delay == 4.0
