"""What counts as the same failure again."""

from __future__ import annotations

from rallypoint.failures.cause import Cause
from rallypoint.membership.decisions import ClockView, failure_streak_after
from rallypoint.membership.state import Settings, State

SETTINGS = Settings("job", 1, 1, same_failure_limit=3)


def cause(exitcode: int, pid: int, message: str = "", traceback: str = "", rank: int = 0) -> Cause:
    return Cause(rank, rank, "host", pid, exitcode, message, traceback, 0.0, "")


def repeats(*causes: Cause) -> int:
    state = State()
    for each in causes:
        state = state._replace(failure_streak=failure_streak_after(state, each, ClockView(0.0), SETTINGS))
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
