from __future__ import annotations

import pytest

from rallypoint.base.errors import UserError
from rallypoint.cli.later import refuse_unfinished, unfinished_switches
from rallypoint.cli.parse import parse


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run-path"], "--run-path does"),
        (["--numa-binding=node"], "--numa-binding='node' does"),
        (["--logs-specs=mine"], "--logs-specs='mine' does"),
        (["--logs-specs="], "--logs-specs='' does"),
        (["--event-log-handler=console"], "--event-log-handler='console' does"),
        (["--duplicate-stdout-filters=a"], "--duplicate-stdout-filters="),
        (["--duplicate-stderr-filters=a"], "--duplicate-stderr-filters="),
        (["--virtual-local-rank"], "--virtual-local-rank does"),
        (["--rdzv-backend=etcd"], "--rdzv-backend=etcd does"),
        (["--rdzv-backend=etcd-v2"], "--rdzv-backend=etcd-v2 does"),
    ],
)
def test_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}"):
        refuse_unfinished(parse([*arguments, "s.py"], {}))


def test_refused_from_the_environment() -> None:
    with pytest.raises(UserError, match=r"^PET_RUN_PATH does not work"):
        refuse_unfinished(parse(["s.py"], {"PET_RUN_PATH": "1"}))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--logs-specs=default"],
        ["--event-log-handler=null"],
        ["--start-method=forkserver", "--monitor-interval=3"],
        ["--standalone", "--rdzv-backend=etcd"],
    ],
)
def test_accepted(arguments: list[str]) -> None:
    refuse_unfinished(parse([*arguments, "s.py"], {"PET_VIRTUAL_LOCAL_RANK": "0"}))


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("TORCHELASTIC_ENABLE_FILE_TIMER", ["1"], ["0", "", "true"]),
        ("TORCHELASTIC_HEALTH_CHECK_PORT", ["8080"], ["", "none"]),
        ("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", ["5", "0.5"], ["0", "-1", "x", "", "nan"]),
    ],
)
def test_switches_that_would_do_something(name: str, on: list[str], off: list[str]) -> None:
    assert unfinished_switches({}) == []
    for text in off:
        assert unfinished_switches({name: text}) == []
    for text in on:
        (sentence,) = unfinished_switches({name: text})
        assert sentence.startswith(f"{name}='{text}'")
