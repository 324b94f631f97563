"""The progress of a job in the status of its TrainJob: contents and frequency; failures do no harm."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from rallypoint.features.trainjob import CA_CERT, TOKEN, URL, Position, Reporter, remaining, status_of
from rallypoint.metrics import Metrics
from tests.status_server import PATH, StatusServer, status_server
from tests.waiting import until

NOW = "2026-11-28T22:00:00Z"
HALF = Position(500, 150.0, 100, 50.0)
"""400 steps in 100 s."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    with status_server(tmp_path) as found:
        yield found


class Job:
    """A reporter, with a position and a clock that a test moves."""

    def __init__(self, server: StatusServer, metrics: Metrics = Metrics(1000, {"loss": 0.25})) -> None:  # noqa: B008
        self.now, self.leads, self.metrics = 0.0, True, metrics
        self.position: Position | None = HALF
        self.reporter = Reporter(
            lambda: self.position, lambda: self.leads, lambda: lambda: self.metrics, server.environ, self
        )

    def monotonic(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        """Let time pass, and wait for a request that is under way."""
        self.now += seconds
        self.reporter.step()
        assert self.reporter._thread.wait_idle(30)


def status(position: Position, metrics: Metrics, **done: bool) -> dict[str, Any]:
    (found,) = status_of(position, metrics, NOW, **done).values()
    assert isinstance(found, dict)
    return found


def test_the_status_has_percentage_time_left_and_metrics() -> None:
    assert status_of(HALF, Metrics(1000, {"loss": 0.2347, "lr": 1e-5}), NOW) == {
        "trainerStatus": {
            "lastUpdatedTime": NOW,
            "progressPercentage": 50,
            "estimatedRemainingSeconds": 125,
            "metrics": [
                {"name": "loss", "value": "0.2347"},
                {"name": "lr", "value": "1e-05"},
                {"name": "step", "value": "500"},
                {"name": "totalSteps", "value": "1000"},
            ],
        }
    }
    assert status(HALF, Metrics()) == {"lastUpdatedTime": NOW, "metrics": [{"name": "step", "value": "500"}]}
    first = status(Position(0, 50.0, 0, 50.0), Metrics(1000))
    assert first["progressPercentage"] == 0
    assert "estimatedRemainingSeconds" not in first
    assert status(Position(2000, 9.0, 0, 1.0), Metrics(1000))["progressPercentage"] == 99, "it has not succeeded yet"
    done = status(HALF, Metrics(1000), done=True)
    assert (done["progressPercentage"], done["estimatedRemainingSeconds"]) == (100, 0)


@pytest.mark.parametrize(
    ("position", "total", "seconds"),
    [
        (HALF, 1000, 125),
        (HALF, 500, 0),
        (HALF, 400, 0),
        (Position(500, 150.0, -1, 0.0), 1000, None),
        (Position(100, 150.0, 100, 50.0), 1000, None),
        (Position(500, 50.0, 100, 50.0), 1000, None),
        (Position(1, 1e9, 0, 0.0), 2**63 - 1, 2**31 - 1),
    ],
)
def test_remaining_time_by_the_pace_of_this_round(position: Position, total: int, seconds: int | None) -> None:
    assert remaining(position, total) == seconds


def test_changes_are_sent_with_the_current_token(server: StatusServer) -> None:
    job = Job(server)
    job.leads = False
    job.passes(10)
    job.leads = True
    job.position = None
    job.passes(10)
    job.reporter.finish(succeeded=True)
    assert server.requests == [], "another node reports, and there is no step yet"
    job = Job(server)
    job.passes(5)
    assert server.requests == []
    job.passes(5)
    ((path, token, _),) = server.requests
    assert (path, token) == (PATH, "Bearer one")
    job.passes(10)
    assert len(server.requests) == 1
    server.token.write_text("two")
    job.position = HALF._replace(step=600)
    job.passes(10)
    assert [token for _, token, _ in server.requests] == ["Bearer one", "Bearer two"]
    assert [status["progressPercentage"] for status in server.statuses] == [50, 60]


def test_the_last_report_has_the_outcome(server: StatusServer) -> None:
    failed, job = Job(server), Job(server)
    failed.passes(10)
    job.passes(10)
    failed.reporter.finish(succeeded=False)
    job.reporter.finish(succeeded=True)
    job.reporter.finish(succeeded=True)
    assert [status["progressPercentage"] for status in server.statuses] == [50, 50, 100]
    assert server.statuses[-1]["metrics"][0] == {"name": "loss", "value": "0.25"}
    assert job.reporter.wake_at() == float("inf")


def test_failures_are_logged_once_and_retried(server: StatusServer, caplog: pytest.LogCaptureFixture) -> None:
    server.answer = (403, b'{"kind": "Status", "message": "pod is not part of \\u001b[31m this TrainJob"}')
    job = Job(server)
    for number, seconds in enumerate((10, 20, 40, 80)):
        job.position = HALF._replace(step=501 + number)
        job.passes(seconds)
    assert len(server.requests) == 4
    (line,) = caplog.messages
    assert "127.0.0.1 answers 403: pod is not part of ?[31m this TrainJob; the job continues" in line
    server.answer = (200, b"")
    for step, seconds in ((700, 300), (710, 10)):
        job.position = HALF._replace(step=step)
        job.passes(seconds)
    assert len(server.requests) == 6


@pytest.mark.parametrize("answer", [(307, b""), (500, b"[" * 5000), (200, b"x" * (1 << 20))])
def test_any_answer(server: StatusServer, answer: tuple[int, bytes], caplog: pytest.LogCaptureFixture) -> None:
    server.answer = answer
    Job(server).passes(10)
    assert len(server.requests) == 1, "a redirection is not followed"
    assert len(caplog.messages) == (answer[0] != 200)


def test_untrusted_servers_get_no_token(server: StatusServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other"))
    (tmp_path / "empty").touch()
    good = server.environ
    for changed, words in (
        ({CA_CERT: f"{tmp_path}/other"}, "certificate verify failed"),
        ({CA_CERT: "/none"}, "No such file"),
        ({TOKEN: "/none"}, "No such file"),
        ({TOKEN: f"{tmp_path}/empty"}, "contains no token"),
        ({URL: good[URL].replace("https", "http")}, "is not an https address"),
        ({URL: "https://[::1"}, "is not an https address"),
        ({URL: "https://127.0.0.1:x/"}, "is not an https address"),
        ({URL: "https://127.0.0.1:1/"}, "Connection refused"),
    ):
        caplog.clear()
        server.environ = {**good, **changed}
        Job(server).passes(10)
        (line,) = caplog.messages
        assert words in line, changed
    assert server.requests == []


def test_a_server_that_hangs_delays_nothing(server: StatusServer) -> None:
    server.hangs = threading.Event()
    job = Job(server)
    job.now += 10
    job.reporter.step()
    until(lambda: bool(server.requests), "the request has arrived")
    began = time.monotonic()
    job.position = HALF._replace(step=600)
    job.now += 10
    job.reporter.step()
    assert len(server.requests) == 1
    job.reporter.finish(succeeded=True)
    assert time.monotonic() - began < 4
