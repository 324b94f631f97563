"""Agents of one job on one machine: one of them says that OMP_NUM_THREADS is not set."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rallypoint.agent.launch import register_on_host
from rallypoint.rendezvous.params import RendezvousParameters

WARNING = "runs on this machine, and OMP_NUM_THREADS is not set"


@pytest.fixture
def agents() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


def job(run_id: str = "", endpoint: str = "localhost:29400") -> RendezvousParameters:
    return RendezvousParameters("c10d", endpoint, run_id or uuid.uuid4().hex, 1, 4)


def test_the_second_of_many_warns(agents: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    mine = job()
    agents.enter_context(register_on_host(mine, {}))
    assert not caplog.text
    # Elsewhere the endpoint has another name for the host.
    agents.enter_context(register_on_host(job(mine.run_id, "127.0.0.1:29400"), {}))
    assert f"another agent of job {mine.run_id!r} {WARNING}" in caplog.text
    assert "threads for all 8 processors" in caplog.text
    assert "OMP_NUM_THREADS=4" in caplog.text
    agents.enter_context(register_on_host(mine, {}))
    assert caplog.text.count(WARNING) == 1


def test_nobody_warns_where_there_is_no_need(
    agents: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = job()
    agents.enter_context(register_on_host(mine, {}))
    for other in (job(), job(mine.run_id, "localhost:29401")):
        agents.enter_context(register_on_host(other, {}))
    with register_on_host(mine, {"OMP_NUM_THREADS": "2"}):
        pass
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8, 16)))
    agents.enter_context(register_on_host(mine, {}))  # bound to processors of its own
    assert not caplog.text


def test_an_agent_that_has_ended_is_no_neighbor(caplog: pytest.LogCaptureFixture) -> None:
    mine = job()
    for _ in range(2):
        with register_on_host(mine, {}):
            pass
    assert not caplog.text
