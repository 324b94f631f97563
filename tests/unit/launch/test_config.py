from __future__ import annotations

import pytest

from rallypoint.agent.launch import LaunchConfig, describe
from rallypoint.base.errors import UserError
from rallypoint.workers.logs.specs import DefaultLogsSpecs


@pytest.fixture(autouse=True)
def _no_timeout_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)


def test_defaults() -> None:
    config = LaunchConfig(1, 2, 3)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 2, 3)
    assert isinstance(config.logs_specs, DefaultLogsSpecs)
    assert config.rdzv_configs == {"timeout": 900}
    assert config.shutdown_timeout == 30
    assert config.node_rank is None


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


def test_shutdown_timeout_comes_from_the_field_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 7
    assert LaunchConfig(1, 1, 1, shutdown_timeout=0).shutdown_timeout == 0


@pytest.mark.parametrize("text", ["abc", "", "-1", "1.5"])
def test_bad_shutdown_timeout_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
    with pytest.raises(UserError, match=f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT='{text}'"):
        LaunchConfig(1, 1, 1)


def test_negative_shutdown_timeout() -> None:
    with pytest.raises(ValueError, match="shutdown_timeout=-1"):
        LaunchConfig(1, 1, 1, shutdown_timeout=-1)


def test_description_is_aligned() -> None:
    lines = describe(LaunchConfig(1, 2, 3, run_id="job", logs_specs=DefaultLogsSpecs("/logs")), "train.py").split("\n")
    assert len({line.index(" : ") for line in lines}) == 1
    rows = {name.strip(): value for name, _, value in (line.partition(" : ") for line in lines)}
    assert rows["entrypoint"] == "train.py"
    assert rows["run_id"] == "job"
    assert rows["max_nodes"] == "2"
    assert rows["log_dir"] == "/logs"
    assert list(rows)[-1] == "duplicate_stderr_filters"


def test_a_password_is_not_described() -> None:
    config = LaunchConfig(1, 1, 1, run_id="job", rdzv_configs={"user": "me", "password": "secret"})
    text = describe(config, "train.py")
    assert "secret" not in text
    assert "'user': 'me', 'password': '...'" in text
