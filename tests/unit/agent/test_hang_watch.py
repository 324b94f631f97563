"""When the workers of a node are quiet, compared with a model that keeps times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.agent.folder import Reached
from rallypoint.agent.policy import Phase, PolicyState, decide
from rallypoint.agent.steps import FailNode, LogLine
from rallypoint.control.protocol.messages import HangFound, HangReport
from rallypoint.features.hangs.activity import Activity
from rallypoint.features.hangs.rules import GRACE, HangRules, OnHang
from rallypoint.features.hangs.watch import RoundSigns, Seen
from tests.effort import examples
from tests.unit.clocks import HandClock

TIMEOUT = 10.0


class Workers:
    """The signs of two workers."""

    def __init__(self, visible: bool = True) -> None:
        self.clock = HandClock()
        self.output: int | None = 0 if visible else None
        self.calls: tuple[Reached | None, ...] = ()
        self.file: tuple[int, int, int] | None = None
        self.activity = Activity()
        self.signs = RoundSigns(0, lambda: Seen(self.output, self.calls, self.file, self.activity), TIMEOUT, 0.0)

    def at(self, now: float) -> bool:
        """Look at the workers; returns whether they are quiet."""
        self.clock.now = now
        self.signs.look(self.clock)
        return self.signs.is_quiet(now)

    def call(self, step: int) -> None:
        """One of them calls `notices.progress`."""
        self.calls = (Reached(step, self.clock.now + 1.0), None)


def test_workers_without_visible_signs() -> None:
    workers = Workers(visible=False)
    assert not workers.at(1000.0)
    workers.call(1)
    assert not workers.at(1001.0)
    assert workers.at(1001.0 + TIMEOUT)


def test_the_first_look_at_the_progress_file_is_no_progress() -> None:
    workers = Workers()
    workers.at(1.0)
    workers.file = (1, 1, 1)
    assert not workers.at(2.0)
    assert not workers.at(2.0 + TIMEOUT)
    workers.file = (1, 2, 1)
    workers.at(15.0)
    assert workers.at(15.0 + TIMEOUT)


def test_one_report_does_not_end_the_grace_of_the_first_steps() -> None:
    workers = Workers()
    workers.calls = (Reached(0, 1.0, 0, first_at=1.0), None)
    workers.at(1.0)
    assert not workers.at(GRACE * TIMEOUT - 0.1)
    assert workers.at(GRACE * TIMEOUT)
    workers.calls = (Reached(1, 31.0, 0, first_at=1.0), None)
    workers.at(31.0)
    assert workers.at(31.0 + TIMEOUT)


def test_growing_files_are_signs_and_busy_children_have_some_time() -> None:
    workers = Workers()
    workers.call(1)
    workers.at(0.0)
    for now in range(5, 100, 5):
        workers.activity = Activity(grown=now)
        assert not workers.at(now)
    assert workers.at(95.0 + TIMEOUT)
    workers.activity = Activity(grown=200)
    workers.at(200.0)
    for now in range(205, 230, 5):
        workers.activity = Activity(grown=200, is_busy=True)
        assert not workers.at(now)
    assert workers.at(200.0 + GRACE * TIMEOUT), "they may be the ranks of an inner launcher, which spin"


def test_a_look_that_hangs_has_found_nothing() -> None:
    workers = Workers()
    workers.at(1.0)
    assert not workers.signs.is_quiet(1000.0), "a sign may have come since"
    found: list[bool] = []

    def hang() -> Seen:
        found.extend(workers.signs.is_quiet(100.0 + later) for later in (1.0, TIMEOUT - 0.1, TIMEOUT))
        return Seen(0, (), None)

    workers.signs._look = hang
    workers.at(100.0)
    assert found == [False, False, True]
    assert workers.at(1000.0)


def test_time_without_looks_does_not_count() -> None:
    workers = Workers()
    workers.call(1)
    workers.at(1.0)
    workers.signs.skip(500.0, 505.0)
    assert not workers.at(505.0)
    assert workers.at(500.0 + 1.0 + TIMEOUT)
    workers.signs.skip(500.0, 520.0)
    assert not workers.at(529.9), "no moment is in the future"
    assert workers.at(530.0)


EVENTS = st.lists(st.tuples(st.floats(0.1, 15.0), st.sampled_from(["", "output", "call", "file", "exit"])), max_size=30)


@settings(max_examples=examples(300))
@given(EVENTS)
def test_a_node_is_quiet_after_the_timeout(events: list[tuple[float, str]]) -> None:
    workers = Workers()
    workers.file = (1, 0, 0)
    workers.at(0.0)
    now = sign = 0.0
    progressed, count = False, 0
    for pause, event in events:
        now, count = now + pause, count + 1
        if event:
            sign, progressed = now, progressed or event in ("call", "file")
        if event == "output":
            workers.output = count
        elif event == "call":
            workers.calls = (Reached(0, float(count)), None)
        elif event == "file":
            workers.file = (1, count, 0)
        elif event == "exit":
            workers.signs.sign(now)
        over = sign + TIMEOUT if progressed else max(sign + TIMEOUT, GRACE * TIMEOUT)
        assert workers.at(now) == (now >= over)


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.FINISHED])
@pytest.mark.parametrize("then", list(OnHang))
def test_workers_are_stopped_after_the_report(then: OnHang, phase: Phase) -> None:
    status, rules = PolicyState(phase, 3), [HangRules(600.0, then).rules()]
    after, steps = decide(status, HangFound(3, 2), rules)
    assert after == status
    (line,) = steps
    assert isinstance(line, LogLine)
    assert line.warning
    assert "its 2 nodes has written anything or reported progress for 600 s (--hang-timeout; " in line.text
    assert "it is 3 times that" in line.text
    after, steps = decide(status, HangReport(1, 3, "all sleep\n"), rules)
    assert after == status, "nothing is stopped before the round has ended for all"
    assert isinstance(steps[0], LogLine)
    assert steps[0].text.startswith("all sleep\n")
    failed = [step for step in steps[1:] if isinstance(step, FailNode)]
    assert len(steps) == 1 + len(failed)
    assert [(step.round, step.ends_job) for step in failed] == {
        OnHang.REPORT: [],
        OnHang.RESTART: [(3, False)],
        OnHang.FAIL: [(3, True)],
    }[then]


NOT_CONCERNED = [phase for phase in Phase if phase not in (Phase.RUNNING, Phase.FINISHED)]


@pytest.mark.parametrize(
    "status",
    [PolicyState(Phase.RUNNING, 2), *(PolicyState(phase, 3) for phase in NOT_CONCERNED)],
    ids=lambda status: f"{status.phase.name} {status.round}",
)
def test_events_of_another_round_change_nothing(status: PolicyState) -> None:
    for event in (HangFound(3, 2), HangReport(1, 3, "all sleep")):
        assert decide(status, event, [HangRules(600.0, OnHang.FAIL).rules()]) == (status, ())
