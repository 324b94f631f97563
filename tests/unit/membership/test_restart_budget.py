"""A budget of restarts in a window of time: `--max-restarts=3/1h`."""

from __future__ import annotations

import pytest

from rallypoint.base.errors import UsageError
from rallypoint.base.restart_budget import read_budget
from rallypoint.cli.convert import choose_rendezvous, config_from_options
from rallypoint.cli.parse import parse
from rallypoint.control.coordinator.differences import differences
from rallypoint.control.membership.observer import StateObserver
from rallypoint.control.membership.rules import step
from rallypoint.control.membership.state import Fail, Join, Ledger, NodeId, NodeInfo, Outcome, Settings, State
from rallypoint.failures.cause import Cause, Restarts
from rallypoint.rendezvous.backends.options import settings_of
from rallypoint.rendezvous.params import RendezvousParameters

ME = NodeId("10.0.0.1", 7, 1, "a")
INFO = NodeInfo("default", 1, "10.0.0.1", 1, max_restarts=2)
SETTINGS = Settings("job", 1, 1, restart_window=3600.0, restarts_in_window=2)
CAUSE = Cause(0, 0, "a", 77, 1, "bang", "", 0.0, "")


class Failing:
    """A job whose only node fails repeatedly, on one observer's clock."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.settings, self.state, self.now = settings, State(), 0.0
        self.observer = StateObserver(settings)
        self._run()

    def _take(self, operation: Join | Fail) -> bool:
        self.observer.observe(self.state, self.now)
        after = step(operation, self.state, ME, self.observer.clock_view(self.now), self.settings)
        if isinstance(after, State):
            self.state = after
            self.observer.observe(after, self.now)
        return isinstance(after, State)

    def _run(self) -> None:
        while self._take(Join(INFO._replace(max_restarts=max(2, self.state.max_restarts)))) and not self.state.complete:
            pass

    def fails(self, at: float, most: int | None = None) -> Restarts:
        """Fail at this moment. Returns the restarts in the end of the round or of the job."""
        self.now = at
        most = self.state.max_restarts if most is None else most
        assert self._take(Fail(self.state.round, CAUSE._replace(message=f"bang at {at}"), most))
        if self.state.verdict is not None:
            assert self.state.verdict.outcome is Outcome.FAILED
            return self.state.verdict.restarts
        assert self.state.ended is not None
        restarts = self.state.ended.restarts
        self._run()
        return restarts

    @property
    def is_over(self) -> bool:
        return self.state.verdict is not None


WITHOUT_WINDOW = Settings("job", 1, 1)


@pytest.mark.parametrize(
    ("settings", "moments", "restarts"),
    [
        (SETTINGS, [10.0, 20.0, 3609.0], [(1, 2), (2, 2), (2, 2)]),
        (SETTINGS, [0.0, 3000.0, 3600.0, 6600.0, 7200.0, 7300.0], [(1, 2), (2, 2), (3, 3), (4, 4), (5, 5), (5, 5)]),
        (WITHOUT_WINDOW, [0.0, 1e6, 2e6], [(1, 2), (2, 2), (2, 2)]),
    ],
    ids=["too many in a window", "the window slides", "no window"],
)
def test_failures_beyond_the_budget_end_the_job(
    settings: Settings, moments: list[float], restarts: list[tuple[int, int]]
) -> None:
    job = Failing(settings)
    for at, shown in zip(moments, restarts, strict=True):
        assert not job.is_over
        assert job.fails(at) == shown
    assert job.is_over


def test_old_failures_use_up_nothing() -> None:
    job = Failing()
    assert [job.fails(3700.0 * number) for number in range(1, 9)] == [(number, number + 1) for number in range(1, 9)]
    assert not job.is_over
    assert job.state.max_restarts - job.state.ledger.failures == 1, "what everybody shows as left"


def test_a_node_without_restarts_ends_the_job() -> None:
    job = Failing()
    assert job.fails(10.0, most=0) == (0, 0)
    assert job.is_over


def test_a_new_observer_dates_known_failures_to_its_start() -> None:
    observer = StateObserver(SETTINGS)
    observer.observe(State(ledger=Ledger(failures=10**9)), 100.0)
    assert observer.clock_view(100.0).failures_at == (100.0, 100.0)
    observer.observe(State(), 200.0)
    assert observer.clock_view(200.0).failures_at == ()
    observer.observe(State(ledger=Ledger(failures=1)), 300.0)
    assert observer.clock_view(300.0).failures_at == (300.0,)


@pytest.mark.parametrize(
    ("text", "number", "window"),
    [("3/1h", 3, 3600.0), ("5/30m", 5, 1800.0), ("1/90s", 1, 90.0), ("2/1d", 2, 86400.0), ("2/0.5", 2, 0.5)],
)
def test_reading_a_budget(text: str, number: int, window: float) -> None:
    budget = read_budget(text)
    assert (budget, budget.window) == (number, window)
    config = config_from_options(parse([f"--max-restarts={text}", "s.py"], {}), {})[0]
    assert config.max_restarts == number
    settings = settings_of(RendezvousParameters("c10d", "h", "job", 1, 1, **config.rdzv_configs))
    assert (settings.restarts_in_window, settings.restart_window) == (number, window)
    assert parse(["s.py"], {"PET_MAX_RESTARTS": text}).max_restarts == number


@pytest.mark.parametrize("text", ["3/", "/1h", "3/1w", "0/1h", "3/0s", "3/2d", "10001/1h", "-1/1h", "3/1h/2", "3 /1h"])
def test_budgets_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="restarts"):
        read_budget(text)


def test_nodes_with_different_budgets_are_reported() -> None:
    grown = State(max_restarts=7)
    assert differences(INFO, SETTINGS, grown, SETTINGS) == ()
    (difference,) = differences(INFO, SETTINGS._replace(restarts_in_window=4), grown, SETTINGS)
    assert (difference.what, difference.own_value, difference.job_value) == ("--max-restarts=", "4/3600s", "2/3600s")
    (difference,) = differences(INFO, Settings("job", 1, 1), grown, SETTINGS)
    assert (difference.own_value, difference.job_value) == ("2", "2/3600s")


def test_a_backend_with_its_own_count_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--rdzv-backend=mine", "--rdzv-endpoint=h", "--max-restarts=3/1h", "s.py"]
    choose_rendezvous(parse(flags, {}), 1)
    (record,) = caplog.records
    assert record.getMessage() == "--max-restarts=3/3600: the backend mine ignores the period and counts all failures"
