from __future__ import annotations

import pytest

from rallypoint.agent.launch import LaunchConfig, describe
from rallypoint.base.errors import UserError


@pytest.fixture(autouse=True)
def _no_timeout_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)


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


def test_a_password_is_not_described() -> None:
    config = LaunchConfig(1, 1, 1, run_id="job", rdzv_configs={"user": "me", "password": "secret"})
    text = describe(config, "train.py")
    assert "secret" not in text
    assert "'user': 'me', 'password': '...'" in text
