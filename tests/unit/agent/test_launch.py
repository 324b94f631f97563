from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rallypoint.agent.launch import LaunchConfig, describe, register_on_host
from rallypoint.base.errors import UserError
from rallypoint.rendezvous.params import RendezvousParameters


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timeout in the environment; a machine with eight processors."""
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


@pytest.mark.parametrize(
    ("configs", "timeout", "after"),
    [
        ({}, -1, {"timeout": 900}),
        ({"timeout": 4}, -1, {"timeout": 4}),
        ({"timeout": 4, "rank": 1}, 5, {"timeout": 5, "rank": 1}),
        ({}, 0, {"timeout": 0}),
    ],
)
def test_rendezvous_timeout(configs: dict[str, object], timeout: int, after: dict[str, object]) -> None:
    before = dict(configs)
    assert LaunchConfig(1, 1, 1, rdzv_configs=configs, rdzv_timeout=timeout).rdzv_configs == after
    assert configs == before


def test_shutdown_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 7
    assert LaunchConfig(1, 1, 1, shutdown_timeout=0).shutdown_timeout == 0
    for text in ("abc", "", "-1", "1.5"):
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
        with pytest.raises(UserError, match=f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT='{text}'"):
            LaunchConfig(1, 1, 1)


def test_descriptions_hide_passwords() -> None:
    config = LaunchConfig(1, 1, 1, run_id="job", rdzv_configs={"user": "me", "password": "secret"})
    text = describe(config, "train.py")
    assert "secret" not in text
    assert "'user': 'me', 'password': '...'" in text


WARNING = "is running on this machine and OMP_NUM_THREADS is not set"


@pytest.fixture
def agents() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def job(run_id: str = "", endpoint: str = "localhost:29400") -> RendezvousParameters:
    return RendezvousParameters("c10d", endpoint, run_id or uuid.uuid4().hex, 1, 4)


def test_the_second_agent_of_a_host_warns(agents: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    mine = job()
    agents.enter_context(register_on_host(mine, {}))
    assert not caplog.text
    agents.enter_context(register_on_host(job(mine.run_id, "127.0.0.1:29400"), {}))  # the same endpoint
    assert f"another agent of job {mine.run_id!r} {WARNING}" in caplog.text
    assert "threads for all 8 processors" in caplog.text
    assert "OMP_NUM_THREADS=4" in caplog.text
    agents.enter_context(register_on_host(mine, {}))
    assert caplog.text.count(WARNING) == 1


def test_no_warning_without_need(
    agents: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = job()
    with register_on_host(mine, {}):
        pass
    agents.enter_context(register_on_host(mine, {}))  # the first one has ended
    for other in (job(), job(mine.run_id, "localhost:29401")):
        agents.enter_context(register_on_host(other, {}))
    with register_on_host(mine, {"OMP_NUM_THREADS": "2"}):
        pass
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8, 16)))
    agents.enter_context(register_on_host(mine, {}))  # bound to other processors
    assert not caplog.text
